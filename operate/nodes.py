"""Rendezvous of the launchers of several nodes, before any rank starts.

Each launcher checks its command. It then publishes through a store on node 0 whether its node can start. If a node
cannot start, the launchers of all nodes print its error and exit, and no launcher waits for it. A config file is
executed on node 0 only; the other nodes use the values that it set.
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

from nanoGPT.errors import ConfigError
from nanoGPT.job.start import handle_stop_signals
from operate.store import connect, is_served, port_number

ERROR_SECONDS = 20.0  # how long a node that cannot start waits for the other nodes, to share its error
STARTED = "started"  # a key in the store: all nodes have connected, and the ranks start
FAILED = "failed"  # a key in the store: why a rank has failed before the ranks have met
REMINDER_SECONDS = 30.0  # time between two lines that list the missing nodes


@dataclass
class NodeConfig:
    """The number of nodes, the ranks on each of them, and the position of this node."""

    gpus: int = 1
    """number of ranks on this node: one per GPU, or this number of processes on the CPU"""
    nnodes: int = 1
    """number of nodes"""
    node_rank: int = 0
    """index of this node, from 0"""
    master_addr: str = "127.0.0.1"
    """host name or IP address of node 0"""

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.gpus * self.nnodes


def master_port() -> int:
    """Return the port of the store on node 0.

    Raises:
        ConfigError: MASTER_PORT is not a valid port.
    """
    return port_number(os.environ.get("MASTER_PORT", "29500"))


def check_node_config(node: NodeConfig) -> None:
    """Check the numbers of ranks and nodes, the address of node 0 and its port.

    Raises:
        ConfigError: one of them cannot be used; the message says what to do.
    """
    if node.gpus < 1 or node.nnodes < 1 or not 0 <= node.node_rank < node.nnodes:
        raise ConfigError(
            f"GPUS={node.gpus} NNODES={node.nnodes} NODE_RANK={node.node_rank} is out of range: "
            "use GPUS and NNODES of at least 1, and NODE_RANK from 0 to NNODES - 1"
        )
    if node.nnodes > 1:
        try:
            socket.getaddrinfo(node.master_addr or "?", master_port())
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={node.master_addr} cannot be resolved to an address ({error.strerror}): use the host "
                "name or IP address of node 0"
            ) from None
    if node.nnodes > 1 and node.node_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", master_port()))
            except OSError:
                raise ConfigError(
                    f"port {master_port()} is in use on this machine: set MASTER_PORT to a free one"
                ) from None


class Rendezvous:
    """A key-value store through which the launchers of all nodes exchange values. A single node needs no store.

    Args:
        node: the configuration of this node.
    """

    def __init__(self, node: NodeConfig) -> None:
        self.node = node
        self.store: dist.Store | None = None
        self.name = os.urandom(4).hex()  # distinguishes this launcher from another one with the same NODE_RANK
        self.deadline = time.monotonic()

    def open(self, timeout: datetime.timedelta) -> None:
        """Start the store on node 0; on other nodes, wait for it and connect.

        Args:
            timeout: how long this and later calls wait for a missing node, counted from now.

        Raises:
            ConfigError: node 0 did not start its store in time.
        """
        if self.node.nnodes == 1:
            return
        self.deadline = time.monotonic() + timeout.total_seconds()
        endpoint = f"{self.node.master_addr}:{master_port()}"
        print(f"node {self.node.node_rank} of {self.node.nnodes}: rendezvous at {endpoint}", flush=True)
        self._connect()

    def _connect(self) -> None:
        """Start the store on node 0; on other nodes, wait for it until the deadline and connect."""
        address, port, is_host = self.node.master_addr, master_port(), self.node.node_rank == 0
        self._wait_for_nodes(lambda: [] if is_host or is_served(address, port) else [0])
        seconds_left = max(self.deadline - time.monotonic(), 1.0)
        self.store = connect(address, port, is_host, datetime.timedelta(seconds=seconds_left))
        if self.store.check([STARTED]):
            raise ConfigError(
                f"the job at {address}:{port} has started with another node {self.node.node_rank}: give each node its "
                "own NODE_RANK, or wait until the job has ended"
            )
        self.publish("name", self.name)
        self.publish("GPUS", self.node.gpus)

    def compare_gpus(self) -> None:
        """Check that every node starts equally many ranks.

        Raises:
            ConfigError: they do not, or a node is missing at the deadline.
        """
        gpus = self.fetch("GPUS", list(range(self.node.nnodes))) if self.node.nnodes > 1 else []
        if len(set(gpus)) > 1:
            raise ConfigError(f"the nodes have GPUS={gpus}: start the same number of ranks on every node")

    def publish(self, topic: str, value: Any) -> None:
        """Write a value, which must be JSON-serializable, for the other nodes."""
        if self.store:
            self.store.set(f"{topic} of node {self.node.node_rank}", json.dumps(value))

    def fetch(self, topic: str, nodes: list[int]) -> list[Any]:
        """Wait until each of `nodes` has published a value, and return the values.

        Raises:
            ConfigError: a node is missing at the deadline, or node 0 has exited.
        """
        store, keys = self.store, {node: f"{topic} of node {node}" for node in nodes}
        assert store is not None
        try:
            self._wait_for_nodes(lambda: [node for node, key in keys.items() if not store.check([key])])
            return [json.loads(store.get(key)) for key in keys.values()]
        except dist.DistError:
            raise ConfigError("node 0 exited before all nodes had connected: read the output of node 0") from None

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        """Share an error of this node's checks, which run in the context; an error on any node stops all nodes.

        Raises:
            ConfigError: another node failed; the message has its number. With one node, its own error.
            SystemExit: this node failed, and has printed its error.
        """
        try:
            yield
        except (ConfigError, OSError, dist.DistError) as error:
            if self.node.nnodes == 1:
                raise
            message = str(error).splitlines()[0]
            print(f"error: {message}", file=sys.stderr, flush=True)
            self._publish_error(message)
            raise SystemExit(2) from None
        if self.node.nnodes > 1:
            self.publish("error", None)
            for node, message in enumerate(self.fetch("error", list(range(self.node.nnodes)))):
                if message:
                    self._acknowledge_error()
                    raise ConfigError(f"node {node} cannot start: {message}")
            if self.store and self.node.node_rank == 0:
                self.store.set(STARTED, "")

    def report_failure(self, reason: str) -> None:
        """Report to the other nodes that a rank of this node has failed before the ranks have met."""
        if self.store:
            with contextlib.suppress(dist.DistError):
                self.store.set(FAILED, json.dumps(f"node {self.node.node_rank} has failed: {reason}"))
                self._acknowledge_error()

    def read_failure(self) -> str | None:
        """Return why a rank of another node has failed before the ranks have met, and acknowledge it; None if none has.

        Raises:
            DistError: node 0 has exited.
        """
        assert self.store is not None
        if not self.store.check([FAILED]):
            return None
        self.publish("acknowledgement", None)
        return str(json.loads(self.store.get(FAILED)))

    def _publish_error(self, message: str) -> None:
        """Publish why this node cannot start, to all nodes that connect within ERROR_SECONDS."""
        with contextlib.suppress(dist.DistError, ConfigError):
            self.deadline = time.monotonic() + ERROR_SECONDS
            if not self.store:
                self._connect()
            self.publish("error", message)
            if self.node.node_rank == 0:  # the other nodes may wait for the config files before they read the error
                self.publish("config files", None)
            self._acknowledge_error()

    def _acknowledge_error(self) -> None:
        """Report that this node knows the error. Node 0 waits for all nodes, because the store exits with it."""
        self.publish("acknowledgement", None)
        if self.node.node_rank == 0:
            self.deadline = time.monotonic() + ERROR_SECONDS
            with contextlib.suppress(dist.DistError, ConfigError):
                self.fetch("acknowledgement", list(range(1, self.node.nnodes)))

    def _wait_for_nodes(self, find_missing: Callable[[], list[int]]) -> None:
        """Wait until no node is missing, and print the missing nodes every REMINDER_SECONDS.

        Raises:
            ConfigError: nodes are still missing at the deadline.
        """
        next_reminder = time.monotonic() + REMINDER_SECONDS
        with exit_on_signals():
            while nodes := find_missing():
                now = time.monotonic()
                if self.store and json.loads(self.store.get(f"name of node {self.node.node_rank}")) != self.name:
                    raise ConfigError(f"another node has NODE_RANK={self.node.node_rank}: give each node its own")
                names = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
                if now > self.deadline:
                    raise ConfigError(f"{names} did not connect: start the same command there")
                if now > next_reminder:
                    print(f"still waiting for {names}", flush=True)
                    next_reminder = now + REMINDER_SECONDS
                time.sleep(0.2)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with one message on a signal. Training has not started, so there is nothing to save."""

    def exit_process(number: int, _frame: object) -> None:
        print("error: stopped by a signal before all nodes had connected", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    handlers = handle_stop_signals(exit_process)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
