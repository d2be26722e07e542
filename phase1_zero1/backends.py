"""Other implementations of ZeRO-1, to compare with `zero1.py`: `--zero1_backend=naive` or `torch` loads this module.

Both train with the same losses as `zero1.py`. Their communication volume per rank is 1.5 times as large.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from nanoGPT.distributed.ddp import data_parallel
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.shared_optimizer import run_closure
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.protocol import DataParallelOptimizer


class DdpOptimizer(DataParallelOptimizer):
    """A wrapper of a torch optimizer. DDP averages the gradients of its model.

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


def create_optimizer(groups: list[dict[str, Any]], config: Zero1Config, **options: Any) -> DataParallelOptimizer:
    """Return the optimizer of `config.zero1_backend`, with AdamW's options. Collective."""
    if config.zero1_backend == "naive":
        return NaiveZero1Optimizer(groups, AdamW, **options)
    return DdpOptimizer(ZeroRedundancyOptimizer(groups, AdamW, **options))


def parallelize(model: nn.Module, config: Zero1Config, run: Runtime) -> nn.Module:
    """Return the module to call: for torch the model in DDP, else the model; compiled if `config.compile` is set."""
    if config.zero1_backend == "torch":
        return data_parallel(model, config, run)
    return torch.compile(model) if config.compile else model  # type: ignore[return-value]
