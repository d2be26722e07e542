"""Detect in an elastic job that a node was cut off the network, on that node and on the others.

A node that dies closes its connections, so the ranks of the other nodes fail at once. A node that is cut off closes
nothing: the ranks on both sides wait for each other. Each node therefore writes a beat into the store every second.

    LEASE_SECONDS without an answer of the store: this node kills its ranks, and exits
    LOST_SECONDS without a beat of a node: the other nodes kill their ranks, and their agents start them again

The first time is shorter. So the ranks of the node that was cut off have ended before the others resume, and two groups
of ranks never write into one run. Each node measures both times with its own clock, so the clocks need not agree.
"""

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo

from nanoGPT.distributed.process_group import is_served
from nanoGPT.errors import ConfigError
from nanoGPT.job.elastic import STOP_KEY
from nanoGPT.launch import list_rank_processes

LEASE_SECONDS, LOST_SECONDS = 15.0, 20.0
BEAT_SECONDS = 1.0  # between two beats
BEATS_KEY = "beats"  # in the store: each node of the job adds 1 every second
NODES_KEY = "nodes"  # in the store: the names of all nodes that have taken part in the job
TIMEOUT = datetime.timedelta(seconds=30)  # of a request to the store


def connect(host: str, port: int) -> dist.TCPStore:
    """Connect to the store.

    Raises:
        ConfigError: no process serves it.
    """
    if not is_served(host, port):
        raise ConfigError(f"STORE={host}:{port} does not answer: start `make rendezvous PORT={port}` on {host} first")
    return dist.TCPStore(host, port, None, is_master=False, timeout=TIMEOUT)


def describe_lost_store(host: str, port: int) -> str:
    """Return the message for a store that has died, or from which this node was cut off."""
    return (
        f"the store at {host}:{port} is lost: check the network of this node, and start the node again; if the store "
        "has ended, start `make rendezvous` again, and the nodes with --init_from=resume"
    )


def kill_processes(pids: list[int], number: int) -> None:
    """Send a signal to processes, of which some may have exited already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Round(NamedTuple):
    """A start of the job, on a fixed group of nodes.

    Attributes:
        name: address and port that its ranks use; they differ between rounds.
        position: of this node in the group, from 0.
        training_nodes: the number of nodes with ranks that train. The nodes after them have spare ranks only.
    """

    name: str
    position: int
    training_nodes: int


class Beats:
    """The beats of all nodes, as this node sees them.

    Attributes:
        values: the last beat of each node: a number that grows, the name of the node's round, and its position.
        times: when each node's beat last changed, on the clock of this node.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.times: dict[str, float] = {}

    def record(self, values: dict[str, str], now: float) -> None:
        """Store the beats that were read now."""
        for node, value in values.items():
            if self.values.get(node) != value:
                self.values[node], self.times[node] = value, now

    def is_silent(self, node: str, now: float) -> bool:
        """Return whether a node is known and has been silent for LOST_SECONDS."""
        return now - self.times.get(node, now) > LOST_SECONDS

    def count_missing(self, current: Round, now: float) -> int:
        """Return how many nodes with ranks that train in this round send no heartbeat."""
        beats = [value.split() for node, value in self.values.items() if not self.is_silent(node, now)]
        positions = {int(position) for _, name, position in beats if name == current.name}
        return sum(position not in positions for position in range(current.training_nodes))


class NodeMonitor:
    """Threads that write the beats of this node, and end its ranks if the job was stopped or the network failed.

    Args:
        host, port: of the store.
        job: the name of the job.
        count_training_nodes: returns the number of nodes with ranks that train, for a number of nodes.
        clean_up: called when the monitor ends this node.
    """

    def __init__(
        self,
        host: str,
        port: int,
        job: str,
        count_training_nodes: Callable[[int], int],
        clean_up: Callable[[], None],
    ) -> None:
        self.host, self.port, self.job = host, port, job
        self.count_training_nodes, self.clean_up = count_training_nodes, clean_up
        self.round: Round | None = None
        self.round_begin = self.last_answer = time.monotonic()
        for task in (self._write_beats, self._watch_lease):
            threading.Thread(target=task, daemon=True).start()

    def enter_round(self, info: RendezvousInfo) -> None:
        """Record the group of nodes with which the ranks of this node start."""
        place = info.bootstrap_store_info
        assert place is not None
        self.round_begin = time.monotonic()
        nodes = self.count_training_nodes(info.world_size)
        self.round = Round(f"{place.master_addr}:{place.master_port}", info.rank, nodes)

    def leave_round(self) -> None:
        """Record that this node has no ranks."""
        self.round = None

    def _write_beats(self) -> None:
        """Write a beat and read the beats of the other nodes every second."""
        beats, name, count = Beats(), os.urandom(4).hex(), 0
        try:
            store = connect(self.host, self.port)
            while not store.check([f"{self.job} {STOP_KEY}"]):
                begin, current, count = time.monotonic(), self.round, count + 1
                store.add(f"{self.job} {BEATS_KEY}", 1)
                text = f"{count} {current.name} {current.position}" if current else f"{count} - -1"
                store.set(f"{self.job} node {name}", text)
                if count == 1:
                    store.append(f"{self.job} {NODES_KEY}", f"{name} ")  # type: ignore[attr-defined]
                names = store.get(f"{self.job} {NODES_KEY}").decode().split()
                names = [each for each in names if not beats.is_silent(each, begin)]
                values = store.multi_get([f"{self.job} node {each}" for each in names])
                self.last_answer = begin
                beats.record(dict(zip(names, map(bytes.decode, values), strict=True)), begin)
                self._check_round(beats, current, time.monotonic())
                time.sleep(BEAT_SECONDS)
            code, _, reason = store.get(f"{self.job} {STOP_KEY}").decode().partition(" ")
            self._end(int(code), f"the job was stopped: {reason}")
        except (dist.DistError, ConfigError):
            self._end(1, describe_lost_store(self.host, self.port))

    def _check_round(self, beats: Beats, current: Round | None, now: float) -> None:
        """Kill the ranks if a node of their round is lost. The agent then starts them again, without this node."""
        if current is None or current is not self.round or now - self.round_begin < LOST_SECONDS:
            return
        if missing := beats.count_missing(current, now):
            self.round = None
            message = f"{missing} node(s) sent no heartbeat to the store for {LOST_SECONDS:g} s"
            print(f"{message}: the job continues without them", flush=True)
            kill_processes(list_rank_processes(), signal.SIGKILL)

    def _watch_lease(self) -> None:
        """Wait until the store has not answered for LEASE_SECONDS. A request itself may wait much longer."""
        while time.monotonic() - self.last_answer < LEASE_SECONDS:
            time.sleep(BEAT_SECONDS / 2)
        self._end(1, describe_lost_store(self.host, self.port))

    def _end(self, code: int, message: str) -> None:
        """Kill the ranks of this node, and exit."""
        kill_processes(list_rank_processes(), signal.SIGKILL)
        print(f"error: {message}", file=sys.stderr, flush=True)
        kill_processes(list_rank_processes(), signal.SIGKILL)  # the agent may have started new ones
        self.clean_up()
        os._exit(code)
