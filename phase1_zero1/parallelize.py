"""The functions that train.py calls: create the configured optimizer, and make the model data-parallel.

Muon, the other implementations of ZeRO-1 and the kernels of phase 2 are separate modules, which are imported only if a
flag needs them. The other implementations extend `DataParallelOptimizer` (`protocol.py`), which has the methods of
`Zero1Optimizer` that the trainer calls.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, import_optional
from nanoGPT.model import GPT
from nanoGPT.optim import param_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.zero1 import Zero1Optimizer

BACKENDS = "phase1_zero1.backends"
KERNELS = "phase2_triton.apply"
MUON = "phase1_zero1.muon"


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
            import_optional(KERNELS, f"--kernels={self.kernels}").check_kernels(self)
        if self.zero_stage not in (1, 2):
            raise ConfigError(
                f"--zero_stage={self.zero_stage} is out of range: use 1 or 2, or `make phase3` for stage 3"
            )
        if self.zero1_backend != "flat" and (self.zero_stage == 2 or self.optimizer == "muon"):
            option = "--zero_stage=2" if self.zero_stage == 2 else "--optimizer=muon"
            raise ConfigError(f"{option} needs flat buckets: use --zero1_backend=flat, not {self.zero1_backend}")


def shard_optimizer(model: GPT, config: Zero1Config) -> Zero1Optimizer:
    """Return the configured optimizer for a model that is on its device and has its weights. Collective."""
    groups, optimizer_class = param_groups(model, config.weight_decay), Zero1Optimizer
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": True}
    if config.zero1_backend != "flat":
        backends = import_optional(BACKENDS, f"--zero1_backend={config.zero1_backend}")
        return backends.create_optimizer(groups, config, **adamw)
    if config.optimizer == "muon":
        muon = import_optional(MUON, "--optimizer=muon")
        groups, optimizer_class = muon.sharded_muon_groups(model, config), muon.Zero1Muon
    return optimizer_class(groups, AdamW, bucket_mb=config.zero1_bucket_mb, stage=config.zero_stage, **adamw)


def parallelize(model: GPT, optimizer: Zero1Optimizer, config: Zero1Config, run: Runtime) -> nn.Module:
    """Return the module to call: the model with its kernels, compiled if `config.compile` is set; in DDP for torch."""
    has_kernels = config.kernels.lower() != "none" and import_optional(
        KERNELS, f"--kernels={config.kernels}"
    ).apply_configured_kernels(model, config, run)
    if config.zero1_backend != "flat":
        backends = import_optional(BACKENDS, f"--zero1_backend={config.zero1_backend}")
        return backends.parallelize(model, config, run)
    # All blocks share the code of the first one, which may need parameters at addresses that are multiples of 16 bytes.
    if config.compile and run.world_size > 1 and not any(p.data_ptr() % 16 for p in model.parameters()):
        model.compile_by_block()
    elif config.compile:
        return torch.compile(model)  # type: ignore[return-value]
    elif not has_kernels:  # compiled code cannot wait for a collective, and kernels read parameters of other modules
        optimizer.gather_during_forward(model)
    return model


def set_gradient_sync(parallel_model: Any, optimizer: Zero1Optimizer, last: bool) -> None:
    """Average gradients only in the last micro-batch of a step, or in every one with ZeRO-2. Else only accumulate them.

    DDP reads the attribute of the module; all other implementations read that of the optimizer.
    """
    optimizer.require_backward_grad_sync = parallel_model.require_backward_grad_sync = (
        last or optimizer.shards_gradients
    )
