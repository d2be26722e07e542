"""Helpers of the checks: compare and draw numbers, count collectives, and share a directory between ranks."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Return whether two tensors or numbers have the same shape and differ by at most `tolerance`.

    The difference is relative to the largest expected value, or to 1 if this value is smaller. NaN is never close.
    """
    a, e = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (actual, expected))
    if a.shape != e.shape:
        return False
    limit = tolerance * max(1.0, e.abs().max().item() if e.numel() else 0.0)
    return bool(((a - e).abs() <= limit).all())


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed fp32 numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def collect_traffic(rows: dict[tuple[str, int], dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the calls and the bytes of full tensors of each collective that a `CollectiveCounter` has counted."""
    return {kind: (row["calls"], row["tensor_bytes"]) for (kind, _), row in rows.items()}


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a temporary directory that all ranks use, and delete it when all ranks are done. Collective.

    After an error on this rank, other ranks may still write there, which must not replace the error.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        folders: list[str] = [folder]
        dist.broadcast_object_list(folders)  # the folder of rank 0
        yield Path(folders[0])
        dist.barrier()
