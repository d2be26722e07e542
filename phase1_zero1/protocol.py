"""The optimizer interface that train.py uses with every backend, and its implementation for DDP's optimizers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.optim import SharedOptimizer, run_closure


class DataParallelOptimizer(SharedOptimizer):
    """An optimizer on every rank of a data-parallel job. By default every rank has all gradients in full.

    Attributes:
        averages_gradients: True if the optimizer averages gradients over the ranks, so that the model needs no DDP.
        require_backward_grad_sync: True if the next backward pass is the last one of a step. The passes before it only
            accumulate gradients.
        inner_optimizers: the optimizers that store this rank's state.
    """

    averages_gradients = False
    require_backward_grad_sync = True
    inner_optimizers: Sequence[Optimizer] = ()

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradient shards make up the full gradient; None if this rank has the full gradient."""
        return None

    def reduce_gradients(self) -> list[Tensor]:
        """Return this rank's averaged gradients: those of its shards, or of all parameters. Collective."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def wait_for_params(self) -> None:
        """Wait until every parameter is complete on this rank; return at once if `step` already waited."""

    def local_state(self) -> Iterator[tuple[nn.Parameter, int, dict[str, Any]]]:
        """Yield this rank's state: a parameter, the offset of the state in the flattened parameter, and the state."""
        for param, items in self.state.items():
            yield param, 0, items  # type: ignore[misc]


class DdpOptimizer(DataParallelOptimizer):
    """An optimizer for a model in DDP, which averages the gradients.

    Args:
        inner: a torch optimizer over all parameters, or a ZeroRedundancyOptimizer. The latter steps an inner optimizer
            over this rank's parameters and broadcasts them.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})  # the same group objects, so that both see a new learning rate
        self.inner_optimizers = [getattr(inner, "optim", inner)]
        self.state = self.inner_optimizers[0].state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer; `closure` computes the loss first."""
        loss = run_closure(closure)
        self.inner.step()
        return loss
