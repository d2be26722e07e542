"""Run a function on n real ranks, from a notebook or a test.

    from workshop.ranks import run_on_ranks

    def total(x):
        t = torch.tensor(x + dist.get_rank()); dist.all_reduce(t); return t.item()

    run_on_ranks(total, 4, 1.0)        # [10.0, 10.0, 10.0, 10.0]

Ranks are processes with a process group of their own: gloo, and NCCL too where `device="cuda"`. They are forked from
a server that has imported torch already, so that eight of them are up in a fraction of a second.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

import phase2_triton  # noqa: F401  it decides whether kernels are interpreted, before anything imports Triton
from nanoGPT.errors import LOST_PEER

# Also what torch imports by itself at the first optimizer or the first random number on the meta device: 0.8 s a rank.
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "workshop.ranks"]
PRELOADED += ["nanoGPT.train", "phase1_zero1.train", "phase2_triton.train", "phase3_fsdp.train"]


class RankFailed(Exception):
    """A rank raised, died or ran out of time; the message holds its traceback."""


class Lines(io.TextIOBase):
    """A rank's standard output, sent to the parent line by line."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.rest = connection, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.connection.send(("line", line))
        return len(text)


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0, show: bool = True, device: str = "cpu"
) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh process group.

    Args:
        function: any picklable function; one that a notebook defines will do.
        ranks: how many.
        args: the same on every rank, which tells itself apart by `dist.get_rank()`.
        timeout: seconds for all of it.
        show: print the ranks' lines as they come, after `[rank]`.
        device: "cpu", or "cuda" for NCCL with one GPU a rank.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailed: with the traceback of the rank that failed first. No rank is left running.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = start_ranks(function, ranks, *args, folder=folder, device=device)
        try:
            return collect(started, timeout, show)
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def start_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, folder: str | Path, device: str = "cpu"
) -> list[tuple[Any, Connection]]:
    """Start ranks and return at once: each one's process, and the connection on which it sends lines and its result.

    Args:
        folder: an empty directory, in which the ranks find each other; it must outlive them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    payload = cloudpickle.dumps((function, args))
    started = []
    with without_main_module():
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            words = (payload, rank, ranks, str(folder), theirs, device, dict(os.environ))
            process = context.Process(target=be_rank, args=words, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
    return started


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Keep ranks from importing the program that starts them (pytest, a notebook's kernel) once more each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def be_rank(
    payload: bytes, rank: int, ranks: int, folder: str, connection: Connection, device: str, environment: dict[str, str]
) -> None:
    """What a rank's process does: join, call, send the result or the traceback."""
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    sys.stdout = Lines(connection)
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
        function, args = cloudpickle.loads(payload)
        result = function(*args)
        dist.barrier()
        connection.send(("result", cloudpickle.dumps(result)))
    except BaseException:
        connection.send(("failure", traceback.format_exc()))
    os._exit(0)


def collect(started: list[tuple[Any, Connection]], timeout: float, show: bool) -> list[Any]:
    """Take what the ranks send until each has sent a result; a failure of one ends it for all."""
    ranks = {connection: rank for rank, (_, connection) in enumerate(started)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    open_connections = list(ranks)
    while open_connections and (left := deadline - time.monotonic()) > 0:
        for connection in wait(open_connections, left):
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                kind, content = connection.recv()
            except EOFError:
                open_connections.remove(connection)
                if rank not in results and rank not in failures:
                    started[rank][0].join(5)
                    failures[rank] = f"the process ended with exit code {started[rank][0].exitcode}"
                    deadline = min(deadline, time.monotonic() + 2)
                continue
            if kind == "line" and show:
                print(f"[{rank}] {content}", flush=True)
            elif kind == "result":
                results[rank] = cloudpickle.loads(content)
            elif kind == "failure":
                failures[rank] = content
                deadline = min(deadline, time.monotonic() + 2)  # let others tell theirs: this one may only follow
    if failures:
        rank = min(failures, key=lambda r: any(words in failures[r] for words in LOST_PEER))
        raise RankFailed(f"rank {rank} failed:\n{failures[rank]}")
    if len(results) < len(started):
        late = [rank for rank in range(len(started)) if rank not in results]
        raise RankFailed(f"ranks {late} had not ended after {timeout:g} seconds")
    return [results[rank] for rank in range(len(started))]


def losses(out_dir: str | Path) -> dict[int, float]:
    """The logged losses of a run, by step."""
    import json

    lines = (Path(out_dir) / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if line["loss"] is not None}
