"""Detect in an elastic job that a node was cut off the network, on that node and on the others.

A node that dies closes its connections, so the ranks of the other nodes fail at once. A node that is cut off closes
nothing: the ranks on both sides wait for each other. Each node therefore writes a beat into the store every second.

    LEASE_SECONDS without an answer of the store: this node kills its ranks, and exits
    LOST_SECONDS without a beat of a node: the other nodes kill their ranks, and their agents start them again

The first time is shorter. So the ranks of the node that was cut off have ended before the others resume, and two groups
of ranks never write into one run. Each node measures both times with its own clock, so the clocks need not agree.
"""

import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from nanoGPT.errors import ConfigError
from operate.launch import list_rank_processes
from operate.restart import STOP_KEY
from operate.store import is_served
from operate.watchdog import send_signal

LEASE_SECONDS, LOST_SECONDS = 15.0, 20.0
BEAT_SECONDS = 1.0  # between two beats
NODES_KEY = "nodes"  # in the store: the names of all nodes that have taken part in the job
TIMEOUT = datetime.timedelta(seconds=30)  # of a request to the store


def connect_to_job_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the store.

    Raises:
        ConfigError: no process serves it.
    """
    if not is_served(host, port):
        raise ConfigError(
            f"STORE={host}:{port} does not answer: start the store on {host} first, with "
            f"`.venv/bin/python -m operate.elastic serve --port={port}`"
        )
    return dist.TCPStore(host, port, None, is_master=False, timeout=TIMEOUT)


class Beats:
    """The last beat of each node, and the time at which it changed, on the clock of this node."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[str, float]] = {}

    def record(self, values: dict[str, str], now: float) -> None:
        """Store the beats that were read now."""
        self.last |= {node: (beat, now) for node, beat in values.items() if self.last.get(node, ("",))[0] != beat}

    def is_silent(self, node: str, now: float) -> bool:
        """Return whether a node is known and has been silent for LOST_SECONDS."""
        return now - self.last.get(node, ("", now))[1] > LOST_SECONDS

    def count_alive(self, now: float) -> int:
        """Return the number of nodes that are not silent."""
        return sum(not self.is_silent(node, now) for node in self.last)


class NodeMonitor:
    """Threads that write the beats of this node, and end its ranks if the job was stopped or the network failed.

    Args:
        host, port: of the store.
        job: the name of the job.
        clean_up: called when the monitor ends this node.
    """

    def __init__(self, host: str, port: int, job: str, clean_up: Callable[[], None]) -> None:
        self.host, self.port, self.job, self.clean_up = host, port, job, clean_up
        self.nodes = 0  # with which the ranks of this node train; 0 while it has no ranks
        self.start = self.last_answer = time.monotonic()
        for task in (self._write_beats, self._watch_lease):
            threading.Thread(target=task, daemon=True).start()

    def enter_round(self, nodes: int) -> None:
        """Record that the ranks of this node start now, as a part of a job on this number of nodes."""
        self.nodes, self.start = nodes, time.monotonic()

    def _write_beats(self) -> None:
        """Write a beat and read the beats of the other nodes every second."""
        beats, name, count = Beats(), os.urandom(4).hex(), 0
        try:
            store = connect_to_job_store(self.host, self.port)
            while not store.check([f"{self.job} {STOP_KEY}"]):
                begin, nodes, count = time.monotonic(), self.nodes, count + 1
                store.set(f"{self.job} node {name}", str(count))
                if count == 1:
                    store.append(f"{self.job} {NODES_KEY}", f"{name} ")  # type: ignore[attr-defined]
                names = store.get(f"{self.job} {NODES_KEY}").decode().split()
                names = [each for each in names if not beats.is_silent(each, begin)]
                values = store.multi_get([f"{self.job} node {each}" for each in names])
                self.last_answer = begin
                beats.record(dict(zip(names, map(bytes.decode, values), strict=True)), begin)
                self._check_nodes(nodes - beats.count_alive(time.monotonic()))
                time.sleep(BEAT_SECONDS)
            code, _, reason = store.get(f"{self.job} {STOP_KEY}").decode().partition(" ")
            self._end(int(code), f"the job was stopped: {reason}")
        except (dist.DistError, ConfigError):
            self._end_without_store()

    def _check_nodes(self, missing: int) -> None:
        """Kill the ranks if nodes are missing. The agent then starts them again, without these nodes."""
        if missing > 0 and self.nodes and time.monotonic() - self.start > LOST_SECONDS:
            self.nodes = 0
            message = f"{missing} node(s) sent no heartbeat to the store for {LOST_SECONDS:g} s"
            print(f"{message}: the job continues without them", flush=True)
            send_signal(list_rank_processes(), signal.SIGKILL)

    def _watch_lease(self) -> None:
        """Wait until the store has not answered for LEASE_SECONDS. A request itself may wait much longer."""
        while time.monotonic() - self.last_answer < LEASE_SECONDS:
            time.sleep(BEAT_SECONDS / 2)
        self._end_without_store()

    def _end_without_store(self) -> None:
        """End this node, because the store has died, or this node was cut off from it."""
        self._end(
            1,
            f"the store at {self.host}:{self.port} is lost: check the network of this node, and start the node again; "
            "if the store has ended, start it again, and the nodes with --init_from=resume",
        )

    def _end(self, code: int, message: str) -> None:
        """Kill the ranks of this node, and exit."""
        self.nodes = 0
        send_signal(list_rank_processes(), signal.SIGKILL)
        print(f"error: {message}", file=sys.stderr, flush=True)
        send_signal(list_rank_processes(), signal.SIGKILL)  # the agent may have started new ones
        self.clean_up()
        os._exit(code)
