"""Measure what heartbeats cost on many ranks: CPU time, and operations on the file system that all nodes share.

    python -m bench.sharding.heartbeats             # two minutes on 2 cores
    python -m bench.sharding.heartbeats --write     # also write bench/results/heartbeats-<hardware>.json

Each rank is a small process, and a node has 8 ranks. Three designs write one heartbeat per rank and second:

    one file per rank   every rank writes a file of the shared directory; in a stall, every rank reads all files
    one file per node   `nanoGPT.job.heartbeat_files`: in a stall, one rank per node reads one file per node
    store               every rank sets a key of a TCPStore; in a stall, one rank per node reads all keys

`write` is one heartbeat of a healthy job, and `check` is one comparison of all ranks in a stall. Both report the CPU
time of the rank with the highest median, which is also that of the process that serves the store. The number of
operations (open, rename, create a directory, list) on the shared directory is the sum over all ranks.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.job.heartbeat_files import HeartbeatFiles
from workshop.ranks import run_on_ranks

RANKS = (8, 32, 64)
RANKS_PER_NODE = 8
ROUNDS = 20
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.listdir", "os.scandir")  # names of Python's audit events
DESIGNS = ("one file per rank", "one file per node", "store")
HEARTBEAT = {
    "step": 100,
    "stage": "micro-batch 3",
    "stages_entered": 3000,
    "progress_reports": 0,
}
HEARTBEAT |= {"waits": False, "waits_for_device": False, "line": "nanoGPT/train.py:132, train", "run": "01234567"}
HEARTBEAT |= {"host": "node", "pid": 12345, "parent": 1234, "beats": 500, "waiting_beats": 80, "trainer": "phase3_fsdp"}
HEARTBEAT |= {"device_stages": 2999, "backend": "nccl", "device": "cuda", "ended": False}


class OperationCounter:
    """Counts the operations of this process on files below a directory, with Python's audit events."""

    def __init__(self, folder: str) -> None:
        self.folder, self.count = folder, 0
        sys.addaudithook(self._handle)

    def _handle(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS and str(arguments[0]).startswith(self.folder):
            self.count += 1


def use_files(files: HeartbeatFiles, rank: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the functions with which a rank writes a heartbeat and compares all ranks, through files."""

    def write() -> None:
        files.write(rank, {**HEARTBEAT, "time": time.time()})
        if not files.is_one_node and files.is_watcher(rank):
            files.publish(rank, files.read_node())

    def check() -> None:
        files.read_node()
        if not files.is_one_node and files.is_watcher(rank):
            files.read_other_nodes()

    return write, check


def use_store(folder: str, rank: int, ranks: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the functions with which a rank writes a heartbeat and compares all ranks, through rank 0's TCPStore."""
    address = Path(folder) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        address.write_text(str(store.port))
    dist.barrier()
    if rank:
        store = dist.TCPStore("127.0.0.1", int(address.read_text()), wait_for_workers=False)
    keys = [f"heartbeat/{other}" for other in range(ranks)]

    def check() -> None:
        if rank % RANKS_PER_NODE == 0:
            for value in store.multi_get(keys):
                json.loads(value)

    return lambda: store.set(keys[rank], json.dumps({**HEARTBEAT, "time": time.time()})), check


def measure_rounds(task: Callable[[], Any], counter: OperationCounter) -> dict[str, float]:
    """Return the median CPU seconds of a round of `task` in this process, and the operations of a round."""
    seconds = []
    before = counter.count
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.process_time()
        task()
        dist.barrier()  # so that the process that serves the store is charged for all ranks
        seconds.append(time.process_time() - begin)
    return {"seconds": statistics.median(seconds), "operations": (counter.count - before) / ROUNDS}


def measure(folder: str) -> dict[str, dict[str, float]]:
    """Return the measurements of this rank, by design and operation; those of empty rounds are under "barrier"."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    node = range(rank // RANKS_PER_NODE * RANKS_PER_NODE, (rank // RANKS_PER_NODE + 1) * RANKS_PER_NODE)
    counter = OperationCounter(folder)
    results = {"barrier": measure_rounds(lambda: None, counter)}
    for design in DESIGNS:
        if design == "store":
            write, check = use_store(folder, rank, ranks)
        else:
            out_dir = Path(folder) / design.replace(" ", "-")
            out_dir.mkdir(exist_ok=True)
            # A job on one node has one file per rank. A node that is listed as two forces one file per node.
            local_ranks = range(ranks) if design == DESIGNS[0] else node
            files = HeartbeatFiles(out_dir, max(ranks, len(local_ranks) + (design == DESIGNS[1])), local_ranks)
            write, check = use_files(files, rank)
        dist.barrier()
        results[f"{design}, write"] = measure_rounds(write, counter)
        results[f"{design}, check"] = measure_rounds(check, counter)
        if design == DESIGNS[1]:
            files.delete_node_folder()
    return results


def summarize(results: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the maximum of the CPU seconds over all ranks, without the two barriers, and the sum of the operations."""
    barrier = max(each["barrier"]["seconds"] for each in results)
    return {
        name: {
            "seconds": max(0.0, max(each[name]["seconds"] for each in results) - barrier),
            "operations": sum(each[name]["operations"] for each in results),
        }
        for name in results[0]
        if name != "barrier"
    }


def main(write: bool = False) -> None:
    """Measure heartbeats on 8, 32 and 64 ranks.

    Args:
        write: also write bench/results/heartbeats-<hardware>.json.
    """
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            designs = summarize(run_on_ranks(measure, ranks, folder, timeout=600, show=False))
        rows.append({"ranks": ranks, "designs": designs})
        for name, row in designs.items():
            print(f"{ranks} ranks: {name}: {1000 * row['seconds']:.2f} ms, {row['operations']:.0f} operations")
    if write:
        settings = {"command": "python -m bench.sharding.heartbeats --write", "ranks_per_node": RANKS_PER_NODE}
        print(f"wrote {write_result('heartbeats', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
