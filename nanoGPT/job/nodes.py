"""How the launchers of several nodes meet before any rank starts.

Each launcher checks its command and tells the others whether its node can start, through a store on node 0. So a node
that cannot start is named on all of them, and nobody waits for it in silence. A config file is executed on node 0 only;
the others take what it set.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nanoGPT.distributed.environment import port_number
from nanoGPT.distributed.process_group import connect, is_served
from nanoGPT.errors import ConfigError

LAST_WORDS = 20.0  # seconds for a node that cannot start to tell the others
REMIND_AFTER = 30.0  # seconds between lines that say who is still missing


@dataclass
class Place:
    """Which ranks this machine runs."""

    gpus: int = 1
    """ranks on this machine: one a GPU, or that many processes on a CPU"""
    nnodes: int = 1
    """machines"""
    node_rank: int = 0
    """this machine, from 0"""
    master_addr: str = "127.0.0.1"
    """address of machine 0"""

    @property
    def world_size(self) -> int:
        return self.gpus * self.nnodes


def master_port() -> int:
    """Return the port of node 0 at which nodes meet.

    Raises:
        ConfigError: MASTER_PORT is no port.
    """
    return port_number(os.environ.get("MASTER_PORT", "29500"))


def check_place(place: Place) -> None:
    """Refuse numbers of ranks and nodes, addresses and ports that cannot work.

    Raises:
        ConfigError: one sentence that says what to do.
    """
    if place.gpus < 1 or place.nnodes < 1 or not 0 <= place.node_rank < place.nnodes:
        raise ConfigError(
            f"GPUS={place.gpus} NNODES={place.nnodes} NODE_RANK={place.node_rank} cannot be: "
            "GPUS and NNODES are at least 1, NODE_RANK from 0 to NNODES - 1"
        )
    if place.nnodes > 1:
        try:
            socket.getaddrinfo(place.master_addr or "?", master_port())
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={place.master_addr} is no host that this machine knows ({error.strerror}): give the "
                "name or address of node 0"
            ) from None
    if place.nnodes > 1 and place.node_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", master_port()))
            except OSError:
                raise ConfigError(
                    f"port {master_port()} is in use on this machine: set MASTER_PORT to a free one"
                ) from None


class Meeting:
    """The launchers of a job's nodes, and what each tells the others; with one node there is nobody to meet.

    Args:
        place: of this node.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.store: dist.Store | None = None
        self.deadline = time.monotonic()

    def open(self, minutes: float) -> None:
        """Serve the store on node 0; elsewhere wait until it is there.

        Args:
            minutes: after which a node that has not come is given up, here and in what follows.

        Raises:
            ConfigError: node 0 did not come.
        """
        if self.place.nnodes == 1:
            return
        self.deadline = time.monotonic() + 60 * minutes
        where = f"{self.place.master_addr}:{master_port()}"
        print(f"node {self.place.node_rank} of {self.place.nnodes}: meeting at {where}", flush=True)
        self._connect()

    def _connect(self) -> None:
        """Serve the store on node 0; elsewhere wait for it until the deadline."""
        address, port, serves = self.place.master_addr, master_port(), self.place.node_rank == 0
        self._await(lambda: [] if serves or is_served(address, port) else [0])
        seconds_left = max(self.deadline - time.monotonic(), 1.0)
        self.store = connect(address, port, serves, datetime.timedelta(seconds=seconds_left))

    def tell(self, topic: str, value: Any) -> None:
        """Tell the other nodes a value of JSON's types."""
        if self.store:
            self.store.set(f"{topic} of node {self.place.node_rank}", json.dumps(value))

    def ask(self, topic: str, nodes: list[int]) -> list[Any]:
        """Wait for what other nodes tell, and return it.

        Raises:
            ConfigError: one of them did not come, or node 0 has gone.
        """
        store, keys = self.store, {node: f"{topic} of node {node}" for node in nodes}
        assert store is not None
        try:
            self._await(lambda: [node for node, key in keys.items() if not store.check([key])])
            return [json.loads(store.get(key)) for key in keys.values()]
        except dist.DistError:
            raise ConfigError("node 0 ended before all nodes had met: look at what it printed") from None

    @contextlib.contextmanager
    def shared_refusal(self) -> Iterator[None]:
        """Run this node's checks, which go inside; a refusal of one node ends all nodes.

        Raises:
            ConfigError: another node's, with its number; with one node, its own.
            SystemExit: this node's own, which it has printed.
        """
        try:
            yield
        except (ConfigError, OSError, dist.DistError) as error:
            if self.place.nnodes == 1:
                raise
            refusal = str(error).splitlines()[0]
            print(f"error: {refusal}", file=sys.stderr, flush=True)
            self._tell_refusal(refusal)
            raise SystemExit(2) from None
        if self.place.nnodes > 1:
            self.tell("refusal", None)
            for node, refusal in enumerate(self.ask("refusal", list(range(self.place.nnodes)))):
                if refusal:
                    self.tell("acknowledgement", None)
                    raise ConfigError(f"node {node} cannot start: {refusal}")

    def _tell_refusal(self, refusal: str) -> None:
        """Tell the other nodes that this one cannot start, as far as they come within LAST_WORDS seconds."""
        others = [node for node in range(self.place.nnodes) if node != self.place.node_rank]
        with contextlib.suppress(dist.DistError, ConfigError):
            self.deadline = time.monotonic() + LAST_WORDS
            if not self.store:
                self._connect()
            self.tell("refusal", refusal)
            self.tell("acknowledgement", None)
            if self.place.node_rank == 0:  # with which the store ends
                self.tell("config files", None)
                self.ask("acknowledgement", others)

    def _await(self, missing: Callable[[], list[int]]) -> None:
        """Wait until no node is missing, and print now and then which ones are."""
        remind_at = time.monotonic() + REMIND_AFTER
        with ended_by_signals():
            while nodes := missing():
                now = time.monotonic()
                who = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
                if now > self.deadline:
                    raise ConfigError(f"{who} did not come: start the same command there, or raise --timeout_minutes")
                if now > remind_at:
                    print(f"still waiting for {who}", flush=True)
                    remind_at = now + REMIND_AFTER
                time.sleep(0.2)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """End this process with one sentence at a signal: nothing has started that could be saved."""

    def end(number: int, _frame: object) -> None:
        print("error: stopped by a signal before all nodes had met", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
