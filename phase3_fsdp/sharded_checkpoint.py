"""Sharded checkpoints: every rank writes its own shards, and any number of ranks reads them (`nanoGPT.shards`).

The keys are parameter names, and an entry is a DTensor: DCP asks it which slice of the whole this rank holds.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nanoGPT.shards import read_shards, stored, write_shards
from nanoGPT.state import FullState, materialise, optimizer_by_name, read_payload


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


def save_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Path]:
    """Write this rank's shards into a fresh directory; rank 0 also writes the index. Collective.

    Returns:
        The files that this rank wrote.
    """
    return write_shards(folder, training_state(model, optimizer))


def load_shards(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a sharded model, written by any number of ranks, or in any other phase. Collective."""
    materialise(optimizer)
    state = training_state(model, optimizer)
    if (path / "ckpt.pt").is_file() or {key: value[0] for key, value in stored(path).items()} != shapes(state):
        copy_slices(read_payload(path), state)
    else:
        read_shards(path, state)


def shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {key: value.size() for key, value in state.items()}


@torch.no_grad()
def copy_slices(full: FullState, target: dict[str, Tensor]) -> None:
    """Copy this rank's slice of every whole tensor."""
    source = {f"model.{name}": value for name, value in full.model.items()}
    for name, items in full.optimizer.items():
        source |= {f"optimizer.{name}.{item}": value for item, value in items.items()}
    for key, value in target.items():
        if isinstance(value, DTensor):
            whole = source[key].to(value.device, value.dtype)
            sliced = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
            value.to_local().copy_(sliced.to_local())
        else:
            value.copy_(source[key])
