"""Sharded checkpoints: every rank writes its own shards, and any number of ranks reads them.

torch's distributed checkpoint (DCP) writes one file a rank and one index of which slice of which tensor lies where.
It is the payload of `nanoGPT.checkpoint`, whose protocol adds what DCP lacks: hashes, and that a checkpoint is there
whole or not at all. Only tensors go in; the rest is in the manifest.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nanoGPT.state import FullState, SafeReader, TensorsOnly, materialise, optimizer_by_name, read_payload


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
    rank = dist.get_rank()
    with warnings.catch_warnings(), first_failure():
        warnings.simplefilter("ignore")  # DCP's advice for writers that overwrite
        dcp.save(
            training_state(model, optimizer),
            storage_writer=dcp.FileSystemWriter(folder, sync_files=False, overwrite=False),
        )
    mine = sorted(folder.glob(f"__{rank}_*.distcp"))
    return [*mine, folder / ".metadata"] if rank == 0 else mine


def load_shards(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a sharded model, written by any number of ranks, or whole by the baseline. Collective."""
    materialise(optimizer)
    if (path / "ckpt.pt").is_file():
        copy_slices(read_payload(path), model, optimizer)
        return
    with first_failure():
        dcp.load(training_state(model, optimizer), storage_reader=SafeReader(path), planner=TensorsOnly())


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """DCP collects all ranks' failures into an exception that is no `Exception`: raise the first of them instead."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


@torch.no_grad()
def copy_slices(full: FullState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copy this rank's slice of every whole tensor."""
    target = training_state(model, optimizer)
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
