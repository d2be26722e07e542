"""Run a function on real ranks, from a program of this repository, a notebook or a test.

    from operate.ranks import run_on_ranks

    def total(x):
        t = torch.tensor(x + dist.get_rank()); dist.all_reduce(t); return t.item()

    run_on_ranks(total, 4, 1.0)        # [10.0, 10.0, 10.0, 10.0]

Each rank is a process. The ranks form a new process group: gloo, and also NCCL if `device="cuda"`. They are forked from
a server process that has already imported torch, so that eight ranks start in a fraction of a second.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

import phase2_triton  # noqa: F401  selects interpreted or compiled kernels; must run before Triton is imported
from nanoGPT.errors import blames_peer

# Modules that the server process imports before it forks ranks. Without torch._dynamo in this list, every rank would
# import it at the first optimizer or the first random number on the meta device. That takes 0.8 s.
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "operate.ranks"]
PRELOADED += ["nanoGPT.train", "phase1_zero1.train", "phase2_triton.train", "phase3_fsdp.train"]
MAIN_LOCK = threading.Lock()  # two threads may start ranks at the same time
DEFAULT_TIMEOUT = 60.0  # seconds; the tests raise it for busy machines


class RankFailed(Exception):
    """A rank raised an exception, exited or exceeded the timeout. The message contains its traceback, if it has one."""


class LineSender(io.TextIOBase):
    """The standard output of a rank. It sends every line to the parent process."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.unfinished_line = connection, ""

    def write(self, text: str) -> int:
        *lines, self.unfinished_line = (self.unfinished_line + text).split("\n")
        for line in lines:
            self.connection.send(("line", line))
        return len(text)

    def finish(self) -> None:
        """Send a last line that has no line break."""
        if self.unfinished_line:
            self.write("\n")


def run_on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float | None = None,
    show: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """Call `function(*args)` on every rank of a new process group.

    Args:
        function: any picklable function, also one that a notebook defines. It can call `dist.get_rank()`.
        ranks: number of ranks.
        args: arguments of the function, the same on every rank.
        timeout: seconds until all ranks must have returned. The default is `DEFAULT_TIMEOUT`.
        show: print each line of the ranks' output immediately, after `[rank]`.
        device: "cpu", or "cuda" for NCCL with one GPU per rank.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        RankFailed: a rank failed; the message contains the traceback of the rank that failed first. All ranks are
            stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = start_ranks(function, ranks, *args, folder=folder, device=device)
        try:
            return collect(started, DEFAULT_TIMEOUT if timeout is None else timeout, show)
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def start_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, folder: str | Path, device: str = "cpu"
) -> list[tuple[Any, Connection]]:
    """Start ranks and return immediately.

    Args:
        folder: an empty directory for the rendezvous of the ranks; it must exist until they have exited.

    Returns:
        For each rank, its process and the connection on which it sends its output and its result.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    payload = cloudpickle.dumps((function, args))
    started = []
    with without_main_module():
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            rank_args = (payload, rank, ranks, str(folder), sender, device, dict(os.environ))
            process = context.Process(target=run_rank, args=rank_args, daemon=True)
            process.start()
            sender.close()
            started.append((process, receiver))
    return started


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Hide `__main__`, so that each rank does not import the program that starts it (pytest, a notebook's kernel)."""
    with MAIN_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def run_rank(
    payload: bytes, rank: int, ranks: int, folder: str, connection: Connection, device: str, environment: dict[str, str]
) -> None:
    """Join the process group, call the function, and send its result or the traceback. Runs in the rank's process."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # garbage collections then leave the objects of the server alone, whose memory all ranks share
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    sys.stdout = output = LineSender(connection)
    torch.set_num_threads(1)
    try:
        backend, gpu = "gloo", None
        if device == "cuda":
            backend, gpu = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
            torch.cuda.set_device(gpu)
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, device_id=gpu)
        function, args = cloudpickle.loads(payload)
        result = function(*args)
        dist.barrier()
        output.finish()
        connection.send(("result", cloudpickle.dumps(result)))
    except BaseException:
        output.finish()
        connection.send(("failure", traceback.format_exc()))
    os._exit(0)


def collect(started: list[tuple[Any, Connection]], timeout: float, show: bool) -> list[Any]:
    """Receive the output and the results of all ranks, and return the results in rank order.

    Args:
        timeout: seconds until all results must have arrived.
        show: print the output of the ranks.

    Raises:
        RankFailed: a rank failed, or its result did not arrive in time.
    """
    ranks = {connection: rank for rank, (_, connection) in enumerate(started)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    open_connections = list(ranks)
    while open_connections and (seconds_left := deadline - time.monotonic()) > 0:
        for connection in wait(open_connections, seconds_left):
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                kind, content = connection.recv()
            except EOFError:
                open_connections.remove(connection)
                if rank not in results and rank not in failures:
                    started[rank][0].join(5)
                    failures[rank] = f"the process exited with code {started[rank][0].exitcode}"
                    deadline = min(deadline, time.monotonic() + 2)
                continue
            if kind == "line" and show:
                print(f"[{rank}] {content}", flush=True)
            elif kind == "result":
                results[rank] = cloudpickle.loads(content)
            elif kind == "failure":
                failures[rank] = content
                deadline = min(deadline, time.monotonic() + 2)  # other failures may arrive, and one may be the cause
    if failures:
        rank = min(failures, key=lambda each: blames_peer(failures[each]))
        raise RankFailed(f"rank {rank} failed:\n{failures[rank]}")
    if len(results) < len(started):
        late = [rank for rank in range(len(started)) if rank not in results]
        raise RankFailed(f"ranks {late} did not finish within {timeout:g} seconds")
    return [results[rank] for rank in range(len(started))]


def losses(out_dir: str | Path) -> dict[int, float]:
    """Return the logged losses of a run, by step. The run may be writing its next line."""
    import json

    lines, _, _ = (Path(out_dir) / "metrics.jsonl").read_text().rpartition("\n")
    return {line["step"]: line["loss"] for line in map(json.loads, lines.splitlines()) if line["loss"] is not None}
