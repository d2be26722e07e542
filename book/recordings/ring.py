"""Record which chunk every rank of a ring sends in each step of a collective, and what its chunks contain.

The run is real: `workshop/collectives.py` runs on every rank, and a dispatch mode sees every send. In rank r, every
element of the tensor is 2^r. The sum of some ranks is therefore a number whose binary digits name these ranks, so that
each recorded value shows which ranks it contains.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workshop.collectives import all_gather, all_reduce, predict_costs, reduce_scatter
from workshop.ranks import run_on_ranks

WORLD_SIZES = (2, 3, 4, 8)
CHUNK_ELEMENTS = 1024
COLLECTIVES = ("reduce-scatter", "all-gather", "all-reduce")


class SendRecorder(TorchDispatchMode):
    """A dispatch mode that records every send of this rank.

    A tensor that is sent is one chunk of a longer tensor. Its offset in the memory of that tensor gives the number of
    the chunk.

    Attributes:
        sends: for each send: to (rank), chunk, bytes, and chunks: the first value of every chunk before the send.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[dict[str, Any]] = []
        self.newest: Tensor | None = None  # the memory of the tensor whose chunk was sent last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith("send"):
            (chunk,), receiver = args[0], args[2]
            self.newest = chunk.new_empty(0).set_(chunk.untyped_storage())
            self.sends.append(
                {
                    "to": receiver,
                    "chunk": chunk.storage_offset() // CHUNK_ELEMENTS,
                    "bytes": chunk.nbytes,
                    "chunks": self.read_chunks(),
                }
            )
        return func(*args, **(kwargs or {}))

    def read_chunks(self) -> list[int | None]:
        """Return the first value of every chunk of the tensor that is being sent; None if it is not written yet."""
        assert self.newest is not None
        values = self.newest[::CHUNK_ELEMENTS].tolist()
        return [None if value != value else int(value) for value in values]


def run_collective(kind: str) -> dict[str, Any]:
    """Run a collective on this rank, and return its sends and the values of the chunks at the end. Collective.

    Args:
        kind: one of COLLECTIVES.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that an unwritten chunk is visible
    length = CHUNK_ELEMENTS if kind == "all-gather" else ranks * CHUNK_ELEMENTS
    values = torch.full((length,), float(2**rank))
    function: Callable[[Tensor], Any] = {
        "reduce-scatter": reduce_scatter,
        "all-gather": all_gather,
        "all-reduce": all_reduce,
    }[kind]
    with SendRecorder() as recorder:
        function(values)
    return {"sends": recorder.sends, "end": recorder.read_chunks()}


def record_collective(kind: str, ranks: int) -> dict[str, Any]:
    """Run a collective on `ranks` processes, and return the recorded steps.

    Returns:
        ranks, collective, tensor_bytes, predicted_steps and predicted_bytes per rank (`predict_costs`), steps: for each
        step, the sends of all ranks in rank order, with the contents of their chunks before the send; and end: the
        contents at the end, by rank.
    """
    runs = run_on_ranks(run_collective, ranks, kind, show=False)
    tensor_bytes = 4 * ranks * CHUNK_ELEMENTS
    predicted_steps, predicted_bytes = predict_costs(kind, tensor_bytes, ranks)
    return {
        "collective": kind,
        "ranks": ranks,
        "tensor_bytes": tensor_bytes,
        "predicted_steps": predicted_steps,
        "predicted_bytes": predicted_bytes,
        "steps": [list(sends) for sends in zip(*(run["sends"] for run in runs), strict=True)],
        "end": [run["end"] for run in runs],
    }


def record() -> dict[str, Any]:
    """Return the recording: one run for each collective and each number of ranks."""
    return {"runs": [record_collective(kind, ranks) for kind in COLLECTIVES for ranks in WORLD_SIZES]}
