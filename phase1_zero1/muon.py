"""Sharded Muon: each matrix belongs to one rank; all other parameters are sharded as in `zero1.py`.

Muon orthogonalizes the update of a matrix by multiplying the full matrix with itself, so a part of it is not enough.
Each rank therefore owns full matrices and stores the momentum of these only. A gradient is reduced to its owner, and
the owner broadcasts the updated matrix. The total is again 2P(N-1)/N elements. The multiplications are the expensive
part, so matrices are assigned to ranks by their number of multiplications and not by their size.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn, optim

from nanoGPT.options.muon import assign_owners, count_multiplications, muon_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.buckets import Bucket, Options, Shard
from phase1_zero1.zero1 import Zero1Optimizer
from phase1_zero1.zero2 import Zero2Bucket


class OwnedMatrix(Bucket):
    """A bucket with one matrix that is not split: its owner has the only shard, the full matrix."""

    def __init__(self, param: nn.Parameter, owner: int, options: Options, group: dist.ProcessGroup | None) -> None:
        self.owner = owner
        super().__init__([param], options, optim.Muon, group)

    def _partition(self, numel: int) -> tuple[int, slice]:
        return numel, slice(0, numel if self.rank == self.owner else 0)

    def _create_shards(self) -> list[Shard]:
        shape = self.params[0].shape
        return [s._replace(tensor=s.tensor.view(shape), grad=s.grad.view(shape)) for s in super()._create_shards()]

    def _reduce(self) -> dist.Work | None:
        self.flat_grads /= self.world_size  # gloo's reduce does not support AVG
        return dist.reduce(self.flat_grads, group=self.group, group_dst=self.owner, async_op=True)

    def _gather(self) -> dist.Work | None:
        return dist.broadcast(self.flat_params, group=self.group, group_src=self.owner, async_op=True)


class Zero2Matrix(Zero2Bucket, OwnedMatrix):
    """A matrix of Muon with ZeRO-2. Only its owner stores the averaged gradient."""


class Zero1Muon(Zero1Optimizer):
    """A `Zero1Optimizer` that assigns each matrix of a group with `has_owners` to one rank, for Muon."""

    def _make_buckets(self, group: Options) -> Iterator[Bucket]:
        if not group.get("has_owners"):
            yield from super()._make_buckets(group)
            return
        owner = assign_owners(group["params"], self.world_size, count_multiplications)
        matrix_class = Zero2Matrix if self.shards_gradients else OwnedMatrix
        for param in reversed(group["params"]):
            yield matrix_class(param, owner[param], group, self.process_group)


def sharded_muon_groups(model: nn.Module, config: TrainConfig) -> list[Options]:
    """Return the groups of `configure_muon` for `Zero1Muon`, which shards all other parameters with AdamW."""
    matrices, others = muon_groups(model, config)
    return [{**optim.Muon([torch.zeros(1, 1)]).defaults, **matrices, "has_owners": True}, *others]
