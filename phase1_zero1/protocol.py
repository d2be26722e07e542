"""What `train.py` and checkpoints need of an optimizer, for the implementations of ZeRO-1 other than `zero1.py`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.shared_optimizer import SharedOptimizer


class DataParallelOptimizer(SharedOptimizer):
    """An optimizer on every rank of a data-parallel job. By default every rank has all gradients in full.

    Attributes:
        shards_gradients: False: only `Zero1Optimizer` implements ZeRO-2.
        require_backward_grad_sync: True if the next backward pass averages the gradients; False if it only accumulates
            them.
        inner_optimizers: the optimizers that store this rank's state.
    """

    shards_gradients = False
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
