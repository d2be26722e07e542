"""Sharded Muon: each matrix belongs to one rank; all other parameters are sharded as in `zero1.py`.

Muon orthogonalizes the update of a matrix by multiplying the full matrix with itself, so a part of it is not enough.
Each rank therefore owns full matrices and stores the momentum of these only. A gradient is reduced to its owner, and
the owner broadcasts the updated matrix. The total is again 2P(N-1)/N elements. The multiplications are the expensive
part, so matrices are assigned to ranks by their number of multiplications and not by their size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from nanoGPT.distributed.sharding import assign_owners
from nanoGPT.optim import count_multiplications, muon_bytes, muon_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.buckets import Bucket, Options, Shard
from phase1_zero1.zero1 import Zero1Optimizer


class OwnedMatrix(Bucket):
    """A bucket with one matrix that is not split: its owner has the only shard, the full matrix."""

    COLLECTIVES = ("reduce", "broadcast")

    def __init__(self, param: nn.Parameter, owner: int, options: Options, group: dist.ProcessGroup | None) -> None:
        self.owner = owner
        super().__init__([param], options, create_muon, group)

    def expected_state_bytes(self) -> int:
        return muon_bytes(shard.tensor for shard in self.shards)

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


def create_muon(matrices: list[Tensor], options: Options) -> optim.Muon:
    """Return a Muon over `matrices`, with those of its arguments that `options` has."""
    arguments = optim.Muon([torch.zeros(1, 1)]).defaults
    return optim.Muon([{"params": matrices, **{name: options[name] for name in arguments}}])


class Zero1Muon(Zero1Optimizer):
    """`nanoGPT.optim.configure_muon` with sharded state: one owner per matrix, AdamW's parameters in flat buckets.

    Args:
        model: on its device, with its weights.
        config: provides the learning rate, the weight decay and AdamW's betas.
        defaults: further arguments of `Zero1Optimizer`.
    """

    matrix_class = OwnedMatrix

    def __init__(self, model: nn.Module, config: TrainConfig, **defaults: Any) -> None:
        matrices, others = muon_groups(model, config)
        arguments = optim.Muon([torch.zeros(1, 1)]).defaults
        betas = (config.beta1, config.beta2)
        groups = [{**arguments, **matrices, "has_owners": True}, *others]
        super().__init__(groups, optim.AdamW, lr=config.learning_rate, betas=betas, **defaults)

    def _make_buckets(self, group: Options) -> Iterator[Bucket]:
        if not group.get("has_owners"):
            yield from super()._make_buckets(group)
            return
        owner = assign_owners(group["params"], self.world_size, count_multiplications)
        for param in reversed(group["params"]):
            yield self.matrix_class(param, owner[param], group, self.process_group)
