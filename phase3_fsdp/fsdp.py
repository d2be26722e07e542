"""FSDP: every rank holds a slice of each parameter, its gradient and its optimizer state.

`shard_model` changes an untouched `GPT` from outside (torch's `fully_shard`, FSDP2). Each block is a unit: before its
forward and its backward its parameters are all-gathered, after each they are freed again; after its backward its
gradients are reduce-scattered. What a rank keeps between steps is 1/N of 16 bytes a parameter (ZeRO stage 3,
Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nanoGPT.config import TrainConfig
from nanoGPT.exits import ConfigError
from nanoGPT.model import GPT
from nanoGPT.runtime import Runtime


@dataclass
class FsdpConfig(TrainConfig):
    """GPT-2 training with FSDP. The defaults are the baseline's, so that their loss curves can be laid together."""

    def check(self) -> None:
        if self.optimizer != "adamw":
            raise ConfigError(f"--optimizer={self.optimizer} needs whole matrices, and FSDP has none: use phase 1")


def shard_model(model: GPT, config: FsdpConfig, run: Runtime) -> GPT:
    """Shard a model that every rank holds whole, with the same values.

    The order matters: each block is compiled before it is sharded, so that no graph holds a collective; the blocks
    are sharded before the root, which takes what is left: embeddings, the final LayerNorm, and the head, which is the
    token embedding under another name and must not be in another unit.

    Args:
        model: on this rank's device.
        config: dtype and compile are used.
        run: this rank's Runtime.

    Returns:
        The same object; its parameters are DTensors, sharded in their first dimension over all ranks.

    Raises:
        ConfigError: float16, whose loss scaling does not know shards.
    """
    if run.dtype == torch.float16:
        raise ConfigError("--dtype=float16 is not for FSDP: use bfloat16 or float32, or train the baseline")
    mesh = init_device_mesh(run.device.type, (run.world_size,), mesh_dim_names=("shard",))
    precision = MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        if config.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def set_gradient_sync(model: torch.nn.Module, last: bool) -> None:
    """Reduce-scatter gradients in the last micro-batch of a step only; until then each rank adds up whole ones."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)


def local_grads(params: list[torch.nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients. A rank may hold nothing of a small parameter: an empty shard."""
    return [p.grad.to_local() for p in params if isinstance(p.grad, DTensor)]


def shard_group(params: list[torch.nn.Parameter]) -> dist.ProcessGroup:
    """The ranks whose shards together are the model."""
    assert isinstance(params[0], DTensor)
    mesh: DeviceMesh = params[0].device_mesh
    return mesh.get_group()
