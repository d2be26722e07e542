"""Which rank stores which part: the shard of a tensor, the rows of a shard, and the owners of full parameters."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Param = TypeVar("Param", bound=Tensor)

# torch 2.13 renamed both functions and warns about the old names; torch 2.11 has only the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which may be empty. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def row_range(rows: int, num_shards: int, index: int) -> tuple[int, int]:
    """Return the range [begin, end) of the rows of shard `index`.

    `fully_shard` gives each shard ceil(rows / num_shards) rows; the last shards have fewer, or none.
    """
    size = -(-rows // num_shards)
    return min(index * size, rows), min((index + 1) * size, rows)


def assign_owners(params: Sequence[Param], world_size: int, cost: Callable[[Tensor], int]) -> dict[Param, int]:
    """Return one owner rank per parameter. The largest costs go first, each to the least loaded rank (Graham 1969)."""
    load = [0] * world_size
    owner = {}
    for param in sorted(params, key=cost, reverse=True):
        owner[param] = load.index(min(load))
        load[owner[param]] += cost(param)
    return owner


def count_multiplications(matrix: Tensor) -> int:
    """Return the multiplications in one Newton-Schulz iteration of Muon on an (m, n) matrix X with m <= n.

    The iteration computes A = X X', the square of A, and B X.
    """
    m, n = sorted(matrix.shape)
    return 2 * m * m * n + m * m * m
