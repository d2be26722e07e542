"""The functions that train.py calls: create the configured optimizer, and make the model data-parallel.

`zero1_backend` is flat (`zero1.py`), naive (`naive.py`) or torch (ZeroRedundancyOptimizer with DDP). `use_zero1=False`
is the baseline's DDP, where nothing is sharded. All four train with the same losses.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from nanoGPT.distributed.ddp import fix_bucket_order
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT
from nanoGPT.optim import configure_optimizer, param_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.muon import Zero1Muon
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.protocol import DataParallelOptimizer, DdpOptimizer
from phase1_zero1.zero1 import Zero1Optimizer


@dataclass
class Zero1Config(TrainConfig):
    """GPT-2 training with ZeRO-1. The defaults are the baseline's, so that the loss curves can be compared."""

    use_zero1: bool = True
    """False: the baseline's DDP, without sharding"""
    zero1_backend: Literal["flat", "naive", "torch"] = "flat"
    """flat: zero1.py; naive: naive.py; torch: ZeroRedundancyOptimizer with DDP"""
    zero1_bucket_mb: float = 25.0
    """maximum bucket size of the flat backend, in 2^20 bytes"""

    def check(self, world_size: int) -> None:
        if not self.zero1_bucket_mb > 0:
            raise ConfigError(f"--zero1_bucket_mb={self.zero1_bucket_mb} is out of range: use a number above 0")
        if self.use_zero1 and self.optimizer == "muon" and self.zero1_backend != "flat":
            raise ConfigError(
                f"--zero1_backend={self.zero1_backend} does not shard Muon: use --zero1_backend=flat, or "
                "--use_zero1=False"
            )


def shard_optimizer(model: GPT, config: Zero1Config, run: Runtime) -> DataParallelOptimizer:
    """Return the configured optimizer for a model that is on its device and has its weights. Collective."""
    if not config.use_zero1:
        return DdpOptimizer(configure_optimizer(model, config))
    groups = param_groups(model, config.weight_decay)
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": True}
    if config.zero1_backend == "naive":
        return NaiveZero1Optimizer(groups, AdamW, **adamw)
    if config.zero1_backend == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imported here, because the import takes 0.25 s

        return DdpOptimizer(ZeroRedundancyOptimizer(groups, AdamW, **adamw))
    if config.optimizer == "muon":
        return Zero1Muon(model, config, bucket_mb=config.zero1_bucket_mb, fused=True)
    return Zero1Optimizer(groups, AdamW, bucket_mb=config.zero1_bucket_mb, **adamw)


def data_parallel(model: GPT, optimizer: DataParallelOptimizer, config: Zero1Config, run: Runtime) -> nn.Module:
    """Return the module to call: the model, in DDP if the optimizer does not average gradients."""
    if isinstance(optimizer, Zero1Optimizer):
        if not config.compile:  # compiled code cannot wait for a collective in its middle
            optimizer.gather_during_forward(model)
        elif run.world_size > 1:
            model.compile_by_block(config.compile_mode)
            return model
    parallel_model: Any = torch.compile(model, mode=config.compile_mode) if config.compile else model
    if run.world_size > 1 and not optimizer.averages_gradients:
        parallel_model = DDP(parallel_model, gradient_as_bucket_view=True)
        fix_bucket_order(parallel_model, config.batch_size, config.block_size, run)
    return parallel_model


def set_gradient_sync(parallel_model: nn.Module, optimizer: DataParallelOptimizer, last: bool) -> None:
    """Average gradients only in the last micro-batch of a step. Before it, each rank accumulates its gradients."""
    averager: Any = optimizer if optimizer.averages_gradients else parallel_model
    averager.require_backward_grad_sync = last
