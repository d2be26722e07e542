"""What train.py asks of an optimizer, whichever backend shards its state; and DDP's optimizers, in the same form."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.memory.costs import optimizer_bytes


class DataParallelOptimizer(Optimizer):
    """An optimizer on every rank of a data-parallel job. As it stands, every rank has all gradients in full.

    Attributes:
        averages_gradients: True if it averages gradients over the ranks itself, and the model goes without DDP.
        require_backward_grad_sync: whether the next backward pass is the last of a step; the others add up gradients.
        collectives: of a step over all parameters, as the ledger names them.
    """

    averages_gradients = False
    require_backward_grad_sync = True
    collectives: tuple[str, ...] = ("all-reduce",)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradient shards make up the full gradient; None if this rank has all of it."""
        return None

    def inner_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that hold this rank's state."""
        raise NotImplementedError

    def expected_state_bytes(self) -> int:
        """Return the bytes of state on this rank after a step."""
        return sum(optimizer_bytes(inner) for inner in self.inner_optimizers())

    def reduce_gradients(self) -> list[Tensor]:
        """Return the averaged gradients that this rank has: of its shards, or of all parameters. Collective."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def wait_for_params(self) -> None:
        """Wait until every parameter is complete on this rank: at once, if `step` has waited."""

    def local_state(self) -> Iterator[tuple[nn.Parameter, int, dict[str, Any]]]:
        """Yield this rank's optimizer state: a parameter, the element at which the state begins, and the state."""
        for param, items in self.state.items():
            yield param, 0, items  # type: ignore[misc]


class DdpOptimizer(DataParallelOptimizer):
    """An optimizer on a model in DDP, which averages the gradients.

    Args:
        inner: a torch optimizer over all parameters; or ZeroRedundancyOptimizer, whose own inner optimizer has the
            parameters of this rank and which broadcasts them.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        if hasattr(inner, "optim"):
            self.collectives = ("all-reduce", "broadcast")
        super().__init__(inner.param_groups, {})  # the same groups, so that a learning rate reaches both
        self.state = self.inner_optimizers()[0].state

    def inner_optimizers(self) -> list[Optimizer]:
        """Return the optimizer that holds this rank's state."""
        return [getattr(self.inner, "optim", self.inner)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer; `closure` computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.inner.step()
        return loss
