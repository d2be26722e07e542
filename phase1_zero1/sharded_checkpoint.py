"""Checkpoints of a sharded optimizer: every rank writes its shards, and any number of ranks reads them.

Buckets are never saved, because their layout depends on the number of ranks. For each moment of each parameter, a rank
saves its shard: a range of the flattened tensor, and the offset of that range. torch's Distributed Checkpoint (DCP)
finds in its index the ranges that overlap with those of the reading rank. No rank stores another rank's shard.
Only the checkpoint of another phase is read as full tensors.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanoGPT.checkpoint import shards
from nanoGPT.checkpoint.manifest import Checkpoint, NewFiles
from nanoGPT.optim import allocate_state
from phase1_zero1.zero1 import Zero1Optimizer


class FlatShard(Tensor):
    """A range of a flattened tensor that gives DCP its offset and the full size. It is a view; no memory is copied."""

    offset: int
    full_size: torch.Size

    @staticmethod
    def wrap(part: Tensor, offset: int, numel: int) -> "FlatShard":
        """Return `part` as the range that begins at `offset` of a flattened tensor with `numel` elements."""
        shard = part.detach().view(-1).as_subclass(FlatShard)
        shard.offset, shard.full_size = offset, torch.Size([numel])
        return shard

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the full tensor, which DCP compares with the stored size. `shape` is the range's."""
        return self.full_size if dim is None else self.full_size[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.offset]), torch.Size([self.numel()]))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        chunk, properties = self.__create_chunk_list__()[0], TensorProperties.create_from_tensor(self)
        data = TensorWriteData(chunk, properties, self.full_size)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)


def training_state(model: nn.Module, optimizer: Zero1Optimizer) -> dict[str, Tensor]:
    """Return full parameters as `model.<param>` and this rank's shards as `optimizer.<param>.<item>`.

    A tied parameter appears under one name.
    """
    optimizer.wait_for_params()  # the all-gathers of the last step may still be in flight
    names = {param: name for name, param in model.named_parameters()}
    state = {f"model.{name}": param.detach() for param, name in names.items()}
    for param, offset, items in optimizer.local_state():
        for item, value in items.items():
            if isinstance(value, Tensor):
                part = FlatShard.wrap(value, offset, param.numel()) if value.dim() else value
                state[f"optimizer.{names[param]}.{item}"] = part
    return state


def save_shards(files: NewFiles, model: nn.Module, optimizer: Zero1Optimizer) -> None:
    """Write this rank's shards and a part of the full parameters into a new checkpoint, without buffers. Collective."""
    shards.write_shards(files, training_state(model, optimizer))


def load_shards(checkpoint: Checkpoint, model: nn.Module, optimizer: Zero1Optimizer) -> None:
    """Load a checkpoint of any phase, written by any number of ranks. Collective.

    Raises:
        ConfigError: the parameters in the checkpoint are not those of the model.
    """
    for inner in optimizer.inner_optimizers:
        allocate_state(inner)
    state = training_state(model, optimizer)
    loaded = shards.load_shards(checkpoint, "zero1", state, copy_part)
    names = {param: name for name, param in model.named_parameters()}
    for param, _, items in list(optimizer.local_state()):
        keys = {item: f"optimizer.{names[param]}.{item}" for item in items}
        master = keys.pop("master", None)
        if master and master not in loaded:
            copy_part(state[master], param.detach())
        if loaded.isdisjoint(keys.values()):  # a parameter that has never had a gradient has no state
            optimizer.state[param].clear()


@torch.no_grad()
def copy_part(target: Tensor, full: Tensor) -> None:
    """Copy to a shard its range of a full tensor, or all of it if `target` is not a shard."""
    if isinstance(target, FlatShard):
        full = full.flatten()[target.offset : target.offset + target.numel()]
    target.copy_(full)
