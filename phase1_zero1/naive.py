"""Naive ZeRO-1: all-reduce the gradients, update the parameters that this rank owns, and broadcast them.

This first version is correct, shards the optimizer state, and fits on one page. It has three costs, which `zero1.py`
avoids:

- The all-reduce gives every rank the full mean gradient, but a rank uses only 1/N of it. With the broadcast, the
  communication volume per rank is three times P(N-1)/N elements, where two would be enough.
- Communication does not overlap with the backward pass or with other communication, because a rank waits for each
  collective before it starts the next.
- Each rank owns full parameters, so one large parameter can make the partition uneven.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from nanoGPT.distributed.sharding import assign_owners
from phase1_zero1.protocol import DataParallelOptimizer


class NaiveZero1Optimizer(DataParallelOptimizer):
    """ZeRO-1 without buckets. All ranks must have gradients for the same parameters.

    Args:
        params: parameters or parameter groups, the same on every rank and with the same values.
        optimizer_class: any optimizer that updates each parameter independently of the others.
        defaults: the arguments of `optimizer_class`.
    """

    averages_gradients = True
    collectives = ("all-reduce", "broadcast")

    def __init__(self, params: Iterable[Any], optimizer_class: type[Optimizer], **defaults: Any) -> None:
        super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.trainable_params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self.owner = assign_owners(self.trainable_params, self.world_size, Tensor.numel)
        local_groups = [
            {**group, "params": [p for p in group["params"] if self.owner.get(p) == self.rank]}
            for group in self.param_groups
        ]
        self.local_optimizer = optimizer_class(local_groups, **defaults)  # has state for this rank's parameters only
        self.state = self.local_optimizer.state
        self.is_reduced = False

    @torch.no_grad()
    def reduce_gradients(self) -> list[Tensor]:
        """Average every gradient over the ranks and return all of them. Collective."""
        grads = [p.grad for p in self.trainable_params if p.grad is not None]
        if not self.is_reduced:
            for grad in grads:
                dist.all_reduce(grad, dist.ReduceOp.AVG)
            self.is_reduced = True
        return grads

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters and receive the others from their owners. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for local_group, group in zip(self.local_optimizer.param_groups, self.param_groups, strict=True):
            local_group.update({name: value for name, value in group.items() if name != "params"})
        self.local_optimizer.step()
        for param in self.trainable_params:
            dist.broadcast(param, src=self.owner[param])
        self.is_reduced = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that `reduce_gradients` averaged and no `step` used."""
        super().zero_grad(set_to_none)
        self.is_reduced = False

    def inner_optimizers(self) -> list[Optimizer]:
        """Return the optimizer of the parameters that this rank owns."""
        return [self.local_optimizer]
