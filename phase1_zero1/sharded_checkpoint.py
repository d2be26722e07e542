"""Checkpoints of a sharded optimizer: every rank writes its shards, and any number of ranks reads them.

A bucket is never saved: where things lie in it depends on the number of ranks. What is saved is, for each parameter
and each of its moments, a slice of the flattened whole and where that slice begins. DCP's index puts slices together
again, of whatever length the reader's are; no rank ever holds another's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanoGPT.checkpoint.manifest import file_names
from nanoGPT.checkpoint.shards import read_index, read_shards, write_shards
from nanoGPT.checkpoint.state import FullState, allocate_state, load_weights, read_full_state
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.errors import ConfigError
from phase1_zero1.protocol import DataParallelOptimizer


class Slice(Tensor):
    """A slice of a flattened tensor, which tells DCP what whole it belongs to; it shares the slice's memory."""

    offset: int
    whole: torch.Size

    @staticmethod
    def of(part: Tensor, offset: int, numel: int) -> "Slice":
        """`part` is elements `offset` and up of a whole of `numel`."""
        made = part.detach().view(-1).as_subclass(Slice)
        made.offset, made.whole = offset, torch.Size([numel])
        return made

    def size(self, dim: int | None = None) -> Any:
        """The whole's, which DCP compares with what is stored; `shape` is the slice's."""
        return self.whole if dim is None else self.whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.offset]), torch.Size([self.numel()]))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        chunk, properties = self.__create_chunk_list__()[0], TensorProperties.create_from_tensor(self)
        data = TensorWriteData(chunk, properties, self.whole)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)


def training_state(model: nn.Module, optimizer: DataParallelOptimizer) -> dict[str, Tensor]:
    """`model.<param>`, whole, and this rank's slices as `optimizer.<param>.<item>`; tied names once."""
    optimizer.wait_for_params()  # the last step's may still be on their way
    names = {param: name for name, param in model.named_parameters()}
    state = {f"model.{name}": param.detach() for param, name in names.items()}
    for param, offset, items in optimizer.local_state():
        for item, value in items.items():
            if isinstance(value, Tensor):
                part = Slice.of(value, offset, param.numel()) if value.dim() else value
                state[f"optimizer.{names[param]}.{item}"] = part
    return state


def save_shards(to: NewFiles, model: nn.Module, optimizer: DataParallelOptimizer) -> None:
    """Write this rank's shards, and its share of the parameters, into a new checkpoint; no buffers. Collective."""
    write_shards(to, training_state(model, optimizer))


def load_shards(path: Path, model: nn.Module, optimizer: DataParallelOptimizer) -> None:
    """Read a checkpoint that any number of ranks wrote, of this phase or of another. Collective.

    Raises:
        ConfigError: it has other parameters than the model.
    """
    for inner in optimizer.inner_optimizers():
        allocate_state(inner)
    there = {} if "ckpt.pt" in file_names(path) else {key: size for key, (size, _) in read_index(path).items()}
    # Whichever way, it must be the same on every rank, so the index alone decides; phase 3 stores matrices.
    if there and all(len(size) < 2 for key, size in there.items() if key.startswith("optimizer.")):
        state = training_state(model, optimizer)
        if differ := sorted(key for key in there.keys() ^ state.keys() if key.startswith("model.")):
            raise ConfigError(f"{path} and the model differ in {len(differ)} parameters, such as {differ[0]}")
        read_shards(path, {key: value for key, value in state.items() if key in there})
    else:
        full = read_full_state(path)
        load_weights(model, full.model)
        there = copy_slices(full, model, optimizer)
    clear_missing_state(there, model, optimizer)


def copy_slices(full: FullState, model: nn.Module, optimizer: DataParallelOptimizer) -> dict[str, Any]:
    """Copy this rank's slices out of whole tensors; the keys that there were."""
    names = {param: name for name, param in model.named_parameters()}
    for param, offset, items in optimizer.local_state():
        for item, value in items.items():
            if (whole := full.optimizer.get(names[param], {}).get(item)) is not None:
                part = whole.flatten()[offset : offset + value.numel()]
                value.copy_(part.view_as(value) if value.dim() else whole)
    return {f"optimizer.{name}.{item}": None for name, items in full.optimizer.items() for item in items}


@torch.no_grad()
def clear_missing_state(there: Mapping[str, Any], model: nn.Module, optimizer: DataParallelOptimizer) -> None:
    """A parameter that had no state when it was saved has none again; a master that was not, follows its parameter."""
    names = {param: name for name, param in model.named_parameters()}
    for param, offset, items in list(optimizer.local_state()):
        found = {item for item in items if f"optimizer.{names[param]}.{item}" in there}
        if "master" in items and "master" not in found:
            master = items["master"]
            master.copy_(param.detach().flatten()[offset : offset + master.numel()].view_as(master))
        if not found - {"master"}:
            optimizer.state[param].clear()
