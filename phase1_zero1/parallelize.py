"""The functions that train.py calls: create the configured optimizer, and make the model data-parallel.

`zero1_backend` is flat (`zero1.py`), naive (`naive.py`) or torch (ZeroRedundancyOptimizer with DDP). All three train
with the same losses as the baseline.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW

from nanoGPT.distributed.ddp import data_parallel
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, import_optional
from nanoGPT.model import GPT
from nanoGPT.optim import param_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.muon import sharded_muon_groups
from phase1_zero1.protocol import DataParallelOptimizer, DdpOptimizer
from phase1_zero1.zero1 import Zero1Optimizer

KERNELS = "phase2_triton.apply"  # loaded only if --kernels asks for kernels


@dataclass
class Zero1Config(TrainConfig):
    """GPT-2 training with ZeRO-1. The defaults are the baseline's, so that the loss curves can be compared."""

    zero_stage: int = 1
    """1: shard the optimizer state; 2: also shard the gradients, and reduce those of every micro-batch"""
    zero1_backend: Literal["flat", "naive", "torch"] = "flat"
    """flat: zero1.py; naive: naive.py; torch: ZeroRedundancyOptimizer with DDP"""
    zero1_bucket_mb: float = 25.0
    """maximum bucket size of the flat backend, in 2^20 bytes"""
    kernels: str = "none"
    """kernels of phase 2: none | triton (all) | auto | some of attention,embedding,gelu,layernorm,loss. On a
    GPU, auto selects loss with --compile=True, else all; on a CPU it selects none"""

    def check(self, world_size: int) -> None:
        if not self.zero1_bucket_mb > 0:
            raise ConfigError(f"--zero1_bucket_mb={self.zero1_bucket_mb} is out of range: use a number above 0")
        if self.kernels.lower() != "none":
            import_optional(KERNELS, f"--kernels={self.kernels}").resolve_kernels(self, self.kernels, "cuda")
        if self.zero_stage not in (1, 2):
            raise ConfigError(
                f"--zero_stage={self.zero_stage} is out of range: use 1 or 2, or `make phase3` for stage 3"
            )
        if self.zero1_backend != "flat" and (self.zero_stage == 2 or self.optimizer == "muon"):
            option = "--zero_stage=2" if self.zero_stage == 2 else "--optimizer=muon"
            raise ConfigError(f"{option} needs flat buckets: use --zero1_backend=flat, not {self.zero1_backend}")


def shard_optimizer(model: GPT, config: Zero1Config) -> DataParallelOptimizer:
    """Return the configured optimizer for a model that is on its device and has its weights. Collective."""
    groups = param_groups(model, config.weight_decay)
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": True}
    if config.zero1_backend == "naive":
        naive = import_optional("phase1_zero1.naive", "--zero1_backend=naive")
        return naive.NaiveZero1Optimizer(groups, AdamW, **adamw)
    if config.zero1_backend == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imported here, because the import takes 0.25 s

        return DdpOptimizer(ZeroRedundancyOptimizer(groups, AdamW, **adamw))
    if config.optimizer == "muon":
        groups = sharded_muon_groups(model, config)
    return Zero1Optimizer(groups, AdamW, bucket_mb=config.zero1_bucket_mb, stage=config.zero_stage, **adamw)


def parallelize(model: GPT, optimizer: DataParallelOptimizer, config: Zero1Config, run: Runtime) -> nn.Module:
    """Return the module to call: the model with its kernels, in DDP if the optimizer does not average gradients."""
    kernels = "none"
    if config.kernels.lower() != "none":
        kernels = import_optional(KERNELS, f"--kernels={config.kernels}").apply_resolved_kernels(
            model, config, config.kernels, run
        )
    if not optimizer.averages_gradients:
        return data_parallel(model, config, run)
    if isinstance(optimizer, Zero1Optimizer):
        # Compiled code cannot wait for a collective in its middle. Kernels read the parameters of other modules.
        if not config.compile and kernels == "none":
            optimizer.gather_during_forward(model)
        elif config.compile and run.world_size > 1:
            model.compile_by_block()
            return model
    return torch.compile(model) if config.compile else model  # type: ignore[return-value]


def set_gradient_sync(parallel_model: nn.Module, optimizer: DataParallelOptimizer, last: bool) -> None:
    """Average gradients only in the last micro-batch of a step; with ZeRO-2 in every one. Else a rank accumulates."""
    averager: Any = optimizer if optimizer.averages_gradients else parallel_model
    averager.require_backward_grad_sync = last or getattr(optimizer, "shards_gradients", False)
