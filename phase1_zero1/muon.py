"""Muon, sharded: a matrix belongs to one rank as a whole, the rest is cut into slices.

Muon orthogonalises the update of a matrix by multiplying the matrix with itself, so a slice of it is of no use. Each
rank is given whole matrices instead, and holds their momentum only: a gradient is reduced to its owner, and the new
matrix broadcast from there, which is again 2P(N-1)/N elements. What costs is the multiplications, so matrices are
shared out by their number, not by size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from nanoGPT.optim import muon_bytes, muon_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.buckets import Bucket, Options, Shard, assign_owners
from phase1_zero1.zero1 import Zero1Optimizer


class OwnedMatrix(Bucket):
    """A bucket of one matrix, which is not cut: its owner holds all of it, the other ranks nothing."""

    COLLECTIVES = ("reduce", "broadcast")

    def __init__(self, param: nn.Parameter, owner: int, options: Options, group: dist.ProcessGroup | None) -> None:
        self.owner = owner
        super().__init__([param], options, make_muon, group)

    def expected_state_bytes(self) -> int:
        return muon_bytes(shard.tensor for shard in self.shards)

    def _cut(self, numel: int) -> tuple[int, slice]:
        return numel, slice(0, numel if self.rank == self.owner else 0)

    def _own(self) -> list[Shard]:
        shape = self.params[0].shape
        return [s._replace(tensor=s.tensor.view(shape), grad=s.grad.view(shape)) for s in super()._own()]

    def _reduce(self) -> dist.Work | None:
        self.flat_grads /= self.world_size  # gloo cannot average on the way to one rank
        return dist.reduce(self.flat_grads, group=self.group, group_dst=self.owner, async_op=True)

    def _gather(self) -> dist.Work | None:
        return dist.broadcast(self.flat_params, group=self.group, group_src=self.owner, async_op=True)


def make_muon(matrices: list[Tensor], options: Options) -> optim.Muon:
    known = optim.Muon([torch.zeros(1, 1)]).defaults
    return optim.Muon([{"params": matrices, **{name: options[name] for name in known}}])


class Zero1Muon(Zero1Optimizer):
    """`nanoGPT.optim.configure_muon` with its state sharded: matrices by owner, AdamW's parameters by slice.

    Args:
        model: on its device, with its weights.
        config: learning rate, weight decay and AdamW's betas are used.
        defaults: what else `Zero1Optimizer` takes.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, **defaults: Any) -> None:
        matrices, others = muon_groups(model, config)
        known = optim.Muon([torch.zeros(1, 1)]).defaults
        betas = (config.beta1, config.beta2)
        groups = [{**known, **matrices, "whole": True}, *others]
        super().__init__(groups, optim.AdamW, lr=config.learning_rate, betas=betas, **defaults)

    def _make_buckets(self, group: Options) -> Iterator[Bucket]:
        if not group.get("whole"):
            yield from super()._make_buckets(group)
            return
        owner = assign_owners(group["params"], self.world_size, cost)
        for param in reversed(group["params"]):
            yield OwnedMatrix(param, owner[param], group, self.process_group)


def cost(matrix: Tensor) -> int:
    """Multiplications in one step of the Newton-Schulz iteration: of (m, n) with m <= n, X X', its square, and B X."""
    m, n = sorted(matrix.shape)
    return 2 * m * m * n + m * m * m
