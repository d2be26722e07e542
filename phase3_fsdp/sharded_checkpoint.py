"""Sharded checkpoints: every rank writes its own shards, and any number of ranks reads them
(`nanoGPT.checkpoint.shards`).

The keys are parameter names, and an entry is a DTensor: DCP asks it which slice of the whole this rank holds.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanoGPT.checkpoint.manifest import file_names
from nanoGPT.checkpoint.shards import read_index, read_shards, write_shards
from nanoGPT.checkpoint.state import FullState, allocate_state, optimizer_by_name, read_full_state
from nanoGPT.checkpoint.writer import NewFiles
from phase3_fsdp.fsdp import copy_slice


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a training state by name, `model.<param>` and `optimizer.<param>.<item>`; tied names once.

    A forward without a backward, as in an evaluation, leaves the root's parameters gathered, and the optimizer does
    not know those: they are given back first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for name, items in optimizer_by_name(model, optimizer).items():
        state |= {f"optimizer.{name}.{item}": value for item, value in items.items()}
    return state


def like(value: Tensor, shard: Tensor) -> Tensor:
    """A DTensor of another shard, which may lie on another device than the mesh's; or that by itself."""
    return DTensor(shard, value._spec, requires_grad=False) if isinstance(value, DTensor) else shard


class ShardWriter:
    """Writes this rank's shards of a model and its optimizer into new checkpoints, as they are or as they were.

    `copy` takes a copy, in CPU memory that is kept from save to save, and pinned where the shards are on a GPU; `write`
    then writes that, beside the training. It must not be called while a `write` of the copy before goes on.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.kept: dict[str, Tensor] = {}
        self.copied: dict[str, Tensor] | None = None

    def copy(self) -> None:
        """Copy this rank's shards."""
        copied = {}
        for key, value in training_state(self.model, self.optimizer).items():
            shard = value.to_local() if isinstance(value, DTensor) else value
            if key not in self.kept:
                self.kept[key] = torch.empty_like(shard, device="cpu", pin_memory=shard.device.type != "cpu")
            self.kept[key].copy_(shard, non_blocking=True)
            copied[key] = like(value, self.kept[key])
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.copied = copied

    def write(self, to: NewFiles) -> None:
        """Write this rank's shards, rank 0 also the index; the copy, if one was taken for this write. Collective."""
        copied, self.copied = self.copied, None
        write_shards(to, copied or training_state(self.model, self.optimizer))


def load_shards(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a sharded model, written by any number of ranks, or in any other phase. Collective."""
    allocate_state(optimizer)
    state = training_state(model, optimizer)
    if "ckpt.pt" in file_names(path) or {key: value[0] for key, value in read_index(path).items()} != shapes(state):
        copy_slices(read_full_state(path), state)
    else:
        read_shards(path, state)


def shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {key: value.size() for key, value in state.items()}


def copy_slices(full: FullState, target: dict[str, Tensor]) -> None:
    """Copy this rank's slice of every whole tensor, one after another."""
    for key, value in target.items():
        kind, name = key.split(".", 1)
        if kind == "model":
            copy_slice(value, full.model[name])
        else:
            name, item = name.rsplit(".", 1)
            copy_slice(value, full.optimizer[name][item])
