"""Cut a node with a `NodeMonitor` off from another one and from the store: `unshare --net ... python cut_nodes.py`."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

from operate import node_monitor
from operate.partitions import Network

PORT = 29400
node_monitor.BEAT_SECONDS, node_monitor.LEASE_SECONDS, node_monitor.LOST_SECONDS = 0.1, 4.0, 10.0


def start_in_namespace(network: Network, number: int, task: Callable[[], None]) -> int:
    """Run a function in a fork of this process in a network namespace. Return its process id."""
    if pid := os.fork():
        return pid
    namespace = os.open(f"/proc/{network.holders[number].pid}/ns/net", os.O_RDONLY)
    assert ctypes.CDLL(None).setns(namespace, 0) == 0
    task()
    os._exit(0)


def serve() -> None:
    """Serve the store."""
    store = dist.TCPStore("0.0.0.0", PORT, None, is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def run_node(position: int, ready: int) -> None:
    """Run a monitor, and a process in place of the ranks, until it is killed.

    Args:
        position: of this node; the first one is cut off.
        ready: a pipe, into which a byte is written when the beats of both nodes are in the store.
    """
    while not node_monitor.is_served("10.77.0.1", PORT):
        time.sleep(0.05)
    rank = subprocess.Popen(["sleep", "100"])
    monitor = node_monitor.NodeMonitor("10.77.0.1", PORT, "job", lambda nodes: nodes, lambda: None)
    monitor.round = node_monitor.Round("round", position, 2)
    store = node_monitor.connect("10.77.0.1", PORT)
    while len(store.get(f"job {node_monitor.NODES_KEY}").split()) < 2:
        time.sleep(0.05)
    print(f"node {position} runs", flush=True)
    os.write(ready, b"1")
    code = rank.wait(300)
    print(f"node {position}: its rank ended with {code}", flush=True)
    if position == 0:
        signal.pause()  # the monitor ends this process
    beats = store.add(f"job {node_monitor.BEATS_KEY}", 0)
    while store.add(f"job {node_monitor.BEATS_KEY}", 0) < beats + 3:  # this node stays in the job
        time.sleep(0.05)


def main() -> None:
    """Start the store and two nodes, cut the first one off, and print the exit codes of both."""
    network = Network()
    try:
        network.add_namespaces(3)
        store = start_in_namespace(network, 0, serve)
        is_ready, ready = os.pipe()
        nodes = [start_in_namespace(network, 1 + i, functools.partial(run_node, i, ready)) for i in range(2)]
        for _ in nodes:
            os.read(is_ready, 1)
        network.cut(1, sys.argv[1])
        for position, pid in enumerate(nodes):
            print(f"node {position}: exit code {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
        os.kill(store, signal.SIGKILL)
    finally:
        network.close()


if __name__ == "__main__":
    main()
