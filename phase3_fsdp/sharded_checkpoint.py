"""Sharded checkpoints: every rank writes its shards, and any number of ranks can read them.

The keys contain parameter names, and the values are DTensors. torch's Distributed Checkpoint (DCP) asks a DTensor which
part of the full tensor it stores. `nanoGPT.checkpoint.dcp_writer` writes the files, and
`nanoGPT.checkpoint.dcp_reader` reads them.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanoGPT.checkpoint.dcp_reader import read_shards
from nanoGPT.checkpoint.dcp_writer import write_shards
from nanoGPT.checkpoint.manifest import NewFiles
from nanoGPT.checkpoint.training_state import FullState, check_shapes, read_full_state, shapes_of
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.optim import allocate_state
from phase3_fsdp.fsdp import copy_own_rows


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a training state as `model.<param>` and `optimizer.<param>.<item>`.

    A tied parameter appears under one name. After a forward without a backward, as in an evaluation, the root's
    parameters are still unsharded, and the optimizer has no state for these tensors. So all units are resharded first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if param in optimizer.state:
            state |= {f"optimizer.{name}.{item}": value for item, value in optimizer.state[param].items()}
    return state


def make_dtensor_like(value: Tensor, shard: Tensor) -> Tensor:
    """Return `shard` as a DTensor with the layout of `value`, or unchanged if `value` is no DTensor.

    The shard may be on another device than the mesh.
    """
    return DTensor(shard, value._spec, requires_grad=False) if isinstance(value, DTensor) else shard


class ShardWriter:
    """A writer of this rank's shards of a model and its optimizer, for synchronous and asynchronous saves.

    For an asynchronous save, `copy` copies the shards to CPU memory, and `write` then writes the copy while training
    continues. All saves use the same CPU memory, which is pinned if the shards are on a GPU. Do not call `copy` while
    `write` is still writing the previous copy.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.buffers: dict[str, Tensor] = {}
        self.cpu_state: dict[str, Tensor] | None = None

    def copy(self) -> None:
        """Copy this rank's shards to CPU memory."""
        cpu_state, devices = {}, set()
        for key, value in training_state(self.model, self.optimizer).items():
            shard = local_shard(value)
            devices.add(shard.device.type)
            if key not in self.buffers:
                self.buffers[key] = torch.empty_like(shard, device="cpu", pin_memory=shard.device.type != "cpu")
            self.buffers[key].copy_(shard, non_blocking=True)
            cpu_state[key] = make_dtensor_like(value, self.buffers[key])
        if devices - {"cpu"}:  # copies from a GPU are asynchronous
            torch.accelerator.synchronize()
        self.cpu_state = cpu_state

    def write(self, files: NewFiles) -> None:
        """Write the copy if there is one, else this rank's current shards; rank 0 writes the index. Collective."""
        cpu_state, self.cpu_state = self.cpu_state, None
        write_shards(files, cpu_state or training_state(self.model, self.optimizer))


def load_shards(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint of any phase and any number of ranks into a sharded model and its optimizer. Collective.

    Raises:
        ConfigError: the parameters in the checkpoint are not those of the model.
    """
    allocate_state(optimizer)
    state, full = training_state(model, optimizer), read_full_state(path)
    check_shapes(path, full.shapes, shapes_of(dict(model.named_parameters())))
    if full.reader and full.reader.sizes == shapes_of(state):
        read_shards(full.reader, state)
        return
    copy_full_state(full, state)
    for name, param in model.named_parameters():
        if name not in full.optimizer:  # a float16 run that has skipped all its steps saves no optimizer state
            optimizer.state[param].clear()


def copy_full_state(full: FullState, target: dict[str, Tensor]) -> None:
    """Copy this rank's shard of every full tensor, one tensor at a time."""
    for key, value in target.items():
        kind, name = key.split(".", 1)
        if kind == "model":
            copy_own_rows(value, full.model[name])
        else:
            name, item = name.rsplit(".", 1)
            if name in full.optimizer:
                copy_own_rows(value, full.optimizer[name][item])
