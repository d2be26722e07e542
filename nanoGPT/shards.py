"""Shards on disk: every rank writes what it holds, and any number of ranks reads it.

torch's distributed checkpoint (DCP) writes one file a rank and one index of which slice of which tensor lies where.
It is the payload of `nanoGPT.checkpoint`, whose protocol adds what DCP lacks: hashes, and that a checkpoint is there
whole or not at all. Only tensors go in; the rest is in the manifest. Nothing in it is unpickled freely.
"""

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader

from nanoGPT.exits import ConfigError


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write this rank's tensors and shards into a fresh directory; rank 0 also writes the index. Collective.

    A tensor that several ranks hold whole is written once.

    Returns:
        The files that this rank wrote.
    """
    rank = dist.get_rank()
    with warnings.catch_warnings(), first_failure():
        warnings.simplefilter("ignore")  # DCP's advice for writers that overwrite
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, sync_files=False, overwrite=False))
    mine = sorted(folder.glob(f"__{rank}_*.distcp"))
    return [*mine, folder / ".metadata"] if rank == 0 else mine


def read_shards(path: Path, tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Fill tensors and shards in place from what any number of ranks wrote. Collective, unless `alone`."""
    with warnings.catch_warnings(), first_failure():
        warnings.simplefilter("ignore")  # that a process alone has no ranks to talk to is what is wanted
        dcp.load(dict(tensors), storage_reader=SafeReader(path), planner=TensorsOnly(), no_dist=alone)


def stored(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The whole shape, and the dtype, of every tensor in a directory of shards."""
    described = SafeReader(path).read_metadata().state_dict_metadata
    return {key: (tensor.size, tensor.properties.dtype) for key, tensor in described.items()}


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """DCP collects all ranks' failures into an exception that is no `Exception`: raise the first of them instead."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints; the pickle in `.metadata` may name torch's own records only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                OnlyRecords(file).load()
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{self.path}/.metadata is not opened: {error}") from None
        return super().read_metadata(*args, **kwargs)


class OnlyRecords(pickle.Unpickler):
    """Refuses every global but those that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        records = "torch.distributed.checkpoint.metadata"
        known = module == records and "." not in name and isinstance(super().find_class(module, name), type)
        known |= (module, name) in {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
        known |= module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return super().find_class(module, name)


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors; anything else would be unpickled, and is refused."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ConfigError(f"{read_item.dest_index.fqn} is no tensor: this checkpoint is not opened")
