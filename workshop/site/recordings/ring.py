"""Record which chunk every rank sends in each step of a collective on a ring or a tree, and what its chunks contain.

The runs are real: `workshop/collectives.py` runs on every rank of a ring, and a dispatch mode sees every send. In rank
r, every element of the tensor is 2^r. The sum of some ranks is therefore a number whose binary digits name these ranks,
so that each recorded value shows which ranks it contains.

A tree needs fewer steps than a ring, but each of its sends contains the full tensor. The functions for a tree are here,
because only this page needs them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.plan.speed import GPUS, HOP_SECONDS, LINK_EFFICIENCY
from bench.tables.records import read_results
from workshop.collectives import all_gather, all_reduce, broadcast, predict_costs, reduce_scatter
from workshop.ranks import run_on_ranks

WORLD_SIZES = (2, 3, 4, 8)
CHUNK_ELEMENTS = 1024
COLLECTIVES = ("reduce-scatter", "all-gather", "all-reduce", "broadcast")
TREE_COLLECTIVES = ("all-reduce", "broadcast")
ALL_CHUNKS = -1  # the number of the chunk if a rank sends its full tensor
SOURCE = 0  # rank that broadcasts, and root of the tree
GPU = "h100"  # whose link the page assumes at first
Send = dict[str, Any]


class SendRecorder(TorchDispatchMode):
    """A dispatch mode that records every send of this rank.

    A tensor that is sent is the full tensor or one chunk of it. Its offset in the memory of that tensor gives the
    number of the chunk.

    Attributes:
        sends: for each send: to (rank), chunk, bytes, and chunks: the first value of every chunk before the send.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[Send] = []
        self.newest: Tensor | None = None  # the memory of the tensor whose chunk was sent last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith("send"):
            (chunk,), receiver = args[0], args[2]
            self.newest = chunk.new_empty(0).set_(chunk.untyped_storage())
            is_full = len(chunk) == len(self.newest)
            self.sends.append(
                {
                    "to": receiver,
                    "chunk": ALL_CHUNKS if is_full else chunk.storage_offset() // CHUNK_ELEMENTS,
                    "bytes": chunk.nbytes,
                    "chunks": read_chunks(self.newest),
                }
            )
        return func(*args, **(kwargs or {}))


def read_chunks(values: Tensor) -> list[int | None]:
    """Return the first value of every chunk of a tensor; None if it is not written yet."""
    firsts = values[::CHUNK_ELEMENTS].tolist()
    return [None if value != value else int(value) for value in firsts]


def reduce_on_tree(values: Tensor) -> Iterator[None]:
    """Add the values of all ranks to those of rank SOURCE, on a binomial tree. Collective.

    Yields:
        None before each step. In the first step every second rank sends to its neighbour and is done, and so on.
    """
    rank, ranks, distance = dist.get_rank(), dist.get_world_size(), 1
    received = torch.empty_like(values)
    while distance < ranks:
        yield
        if rank % (2 * distance) == distance:
            dist.send(values, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            dist.recv(received, rank + distance)
            values += received
        distance *= 2


def broadcast_on_tree(values: Tensor) -> Iterator[None]:
    """Replace values by those of rank SOURCE, on a binomial tree. Collective.

    Yields:
        None before each step. Every rank that has the values sends them, so their number doubles with each step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    distance = 2 ** ((ranks - 1).bit_length() - 1)
    while distance:
        yield
        if rank % (2 * distance) == 0 and rank + distance < ranks:
            dist.send(values, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(values, rank - distance)
        distance //= 2


def run_ring(kind: str) -> dict[str, Any]:
    """Run a collective on a ring, and return its sends and the chunks of this rank at the end. Collective.

    Args:
        kind: one of COLLECTIVES.

    Returns:
        steps: for each step, the send of this rank, or only its chunks if it sends nothing; and end.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that an unwritten chunk is visible
    length = CHUNK_ELEMENTS if kind == "all-gather" else ranks * CHUNK_ELEMENTS
    values = torch.full((length,), float(2**rank))
    begin = read_chunks(values)
    functions: dict[str, Callable[[Tensor], Any]] = {
        "reduce-scatter": reduce_scatter,
        "all-gather": all_gather,
        "all-reduce": all_reduce,
        "broadcast": lambda tensor: broadcast(tensor, SOURCE),
    }
    with SendRecorder() as recorder:
        functions[kind](values)
    if kind != "broadcast":
        assert recorder.newest is not None
        return {"steps": recorder.sends, "end": read_chunks(recorder.newest)}
    end = read_chunks(values)  # a rank receives in the step before it sends, and only then do its chunks change
    steps = [{"chunks": begin if step < rank else end} for step in range(ranks - 1)]
    if recorder.sends:
        steps[rank] = recorder.sends[0]
    return {"steps": steps, "end": end}


def run_tree(kind: str) -> dict[str, Any]:
    """Run a collective of TREE_COLLECTIVES on a tree, and return the same as `run_ring`. Collective."""
    ranks = dist.get_world_size()
    values = torch.full((ranks * CHUNK_ELEMENTS,), float(2 ** dist.get_rank()))
    parts = [reduce_on_tree, broadcast_on_tree] if kind == "all-reduce" else [broadcast_on_tree]
    steps: list[Send] = []
    for part in parts:
        generator = part(values)
        next(generator)
        is_running = True
        while is_running:
            chunks = read_chunks(values)
            with SendRecorder() as recorder:
                is_running = next(generator, True) is None
            steps.append(recorder.sends[0] if recorder.sends else {"chunks": chunks})
    return {"steps": steps, "end": read_chunks(values)}


def record_collective(kind: str, ranks: int, algorithm: str = "ring") -> dict[str, Any]:
    """Run a collective on `ranks` processes, and return the recorded steps.

    Returns:
        ranks, collective, algorithm, tensor_bytes, predicted_steps and predicted_bytes: the largest number of bytes
        that a rank sends; steps: for each step, the sends of all ranks in rank order, with the contents of their
        chunks before the step (a rank that sends nothing has only these); and end: the contents at the end, by rank.
    """
    runs = run_on_ranks(run_ring if algorithm == "ring" else run_tree, ranks, kind, show=False)
    tensor_bytes = 4 * ranks * CHUNK_ELEMENTS
    predict = predict_costs if algorithm == "ring" else predict_tree_costs
    predicted_steps, predicted_bytes = predict(kind, tensor_bytes, ranks)
    return {
        "collective": kind,
        "ranks": ranks,
        "algorithm": algorithm,
        "tensor_bytes": tensor_bytes,
        "predicted_steps": predicted_steps,
        "predicted_bytes": predicted_bytes,
        "steps": [list(sends) for sends in zip(*(run["steps"] for run in runs), strict=True)],
        "end": [run["end"] for run in runs],
    }


def predict_tree_costs(collective: str, tensor_bytes: int, ranks: int) -> tuple[int, float]:
    """Return the number of steps on a tree, and the largest number of bytes that a rank sends: those of the root.

    The arguments are those of `workshop.collectives.predict_costs`.
    """
    levels = (ranks - 1).bit_length()
    return (2 if collective == "all-reduce" else 1) * levels, float(levels * tensor_bytes)


def predict_seconds(run: dict[str, Any], tensor_bytes: float, latency: float, bandwidth: float) -> float:
    """Return the time of a recorded collective in the latency-bandwidth model (Hockney 1994), for another tensor.

    In each step, a message of m bytes needs latency + m / bandwidth. The next step begins when the largest message has
    arrived.

    Args:
        run: from `record_collective`.
        tensor_bytes: of the other tensor.
        latency: seconds per message.
        bandwidth: bytes per second of one link in one direction.
    """
    largest = [max(send.get("bytes", 0) for send in sends) for sends in run["steps"]]
    return sum(latency + size / run["tensor_bytes"] * tensor_bytes / bandwidth for size in largest)


def read_gloo_bytes() -> list[dict[str, Any]]:
    """Return what gloo sends, from bench/results/wire-*.json: hardware, ranks, kind, sent_per_tensor_byte, ring."""
    return [
        {"hardware": result["hardware"], **row} for result in read_results("wire") for row in result["samples"]["rows"]
    ]


def record() -> dict[str, Any]:
    """Return the recording.

    Returns:
        runs by collective, algorithm and number of ranks; gloo: see `read_gloo_bytes`; and link: the latency (s) and
        the bandwidth (bytes/s) that the planner assumes between two GPUs of a node.
    """
    runs = [record_collective(kind, ranks) for kind in COLLECTIVES for ranks in WORLD_SIZES]
    runs += [record_collective(kind, ranks, "tree") for kind in TREE_COLLECTIVES for ranks in WORLD_SIZES]
    link = {"gpu": GPU, "latency": HOP_SECONDS, "bandwidth": LINK_EFFICIENCY * GPUS[GPU].link}
    return {"runs": runs, "gloo": read_gloo_bytes(), "link": link}
