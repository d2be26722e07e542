"""Which rank stores which part of a tensor, and the two collectives of sharded training."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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
