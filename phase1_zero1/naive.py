"""ZeRO-1 as one would first write it: all-reduce the gradients, update one's own parameters, broadcast them.

It is right, it shards the optimizer's state, and it fits on a page. What it costs, and what `zero1.py` does about it:

- the all-reduce gives every rank the whole mean gradient, of which it uses 1/N: with the broadcast, three times
  P(N-1)/N elements are sent where two would do;
- nothing is sent while the backward pass computes, nor two parameters at once: each collective is waited for;
- parameters are owned whole, so that the largest decides how even the shares are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from phase1_zero1.buckets import assign_owners
from phase1_zero1.protocol import DataParallelOptimizer


class NaiveZero1Optimizer(DataParallelOptimizer):
    """The lesson's first draft. All ranks must have gradients of the same parameters.

    Args:
        params: parameters or groups of them, the same on every rank and with the same values.
        optimizer_class: any optimizer that treats every parameter by itself.
        defaults: its arguments.
    """

    averages_gradients = True
    collectives = ("all-reduce", "broadcast")

    def __init__(self, params: Iterable[Any], optimizer_class: type[Optimizer], **defaults: Any) -> None:
        super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self.owner = assign_owners(self.trained, self.world_size, Tensor.numel)
        mine = [
            {**group, "params": [p for p in group["params"] if self.owner.get(p) == self.rank]}
            for group in self.param_groups
        ]
        self.optim = optimizer_class(mine, **defaults)  # its state exists for this rank's parameters only
        self.state = self.optim.state
        self.reduced = False

    @torch.no_grad()
    def reduce_gradients(self) -> list[Tensor]:
        """Average every gradient over the ranks; all of them, on every rank. Collective."""
        grads = [p.grad for p in self.trained if p.grad is not None]
        if not self.reduced:
            for grad in grads:
                dist.all_reduce(grad, dist.ReduceOp.AVG)
            self.reduced = True
        return grads

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters and receive all others from their owners. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for ours, outer in zip(self.optim.param_groups, self.param_groups, strict=True):
            ours.update({name: value for name, value in outer.items() if name != "params"})
        self.optim.step()
        for param in self.trained:
            dist.broadcast(param, src=self.owner[param])
        self.reduced = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those of a step that was not taken."""
        super().zero_grad(set_to_none)
        self.reduced = False

    def inner_optimizers(self) -> list[Optimizer]:
        """Return the optimizer of the parameters that this rank owns."""
        return [self.optim]
