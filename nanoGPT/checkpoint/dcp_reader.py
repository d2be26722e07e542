"""Read sharded checkpoints, which any number of ranks have written (`nanoGPT.checkpoint.dcp_writer`).

PyTorch's distributed checkpoint (DCP) writes one file per rank, and an index with the file and position of every slice
of every tensor. These files are the payload of `nanoGPT.checkpoint.directory`, which adds what DCP lacks: hashes, and
atomic checkpoints. The payload contains only tensors; everything else is in the manifest. The index is a pickle, which
is read with a list of allowed types, because an arbitrary pickle could run code.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nanoGPT.errors import ConfigError, PeerFailed, blames_peer, quote_cause, ran_out_of_memory, unreadable_checkpoint
from nanoGPT.files import open_regular, retry_reads

INDEX = ".metadata"
ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


def find_member(members: Any, name: str) -> Enum:
    """Return a member of an enum. The first releases of Python 3.11 pickle it as a call of getattr."""
    if not isinstance(members, EnumMeta):
        raise pickle.UnpicklingError("it calls getattr, which could run code")
    return members[name]


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that allows only the types with which torch describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return find_member
        is_record = module == "torch.distributed.checkpoint.metadata" and "." not in name
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_record or is_dtype or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints, which here reads the index once, and with a RestrictedUnpickler."""

    @cached_property
    def index(self) -> Any:
        """The metadata of all tensors, and the places of their slices.

        Raises:
            ConfigError: the file is missing, damaged or not safe.
        """
        path = Path(self.path) / INDEX
        try:
            with io.BufferedReader(retry_reads(path, partial(open_regular, path))) as file:
                index = RestrictedUnpickler(file).load()
            for name, tensor in index.state_dict_metadata.items():
                if not isinstance(tensor, TensorStorageMetadata):  # DCP would unpickle it
                    raise ValueError(f"{name} is not a tensor")
            return index
        except ConfigError:
            raise
        except Exception as error:  # of many kinds, if the content is arbitrary
            message = f"{path} is not a valid index of shards ({quote_cause(error)}): use another checkpoint"
            raise unreadable_checkpoint(path, message) from None

    @property
    def sizes(self) -> dict[str, torch.Size]:
        """The full size of each tensor."""
        return {key: tensor.size for key, tensor in self.index.state_dict_metadata.items()}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.index


def read_shards(reader: SafeReader, tensors: Mapping[str, Tensor], no_dist: bool = False) -> None:
    """Fill tensors and shards in place from a checkpoint that any number of ranks wrote. Collective, unless `no_dist`.

    Args:
        reader: of the directory.
        tensors: the tensors to fill, by their names in the checkpoint.
        no_dist: read in this process only, without communication.

    Raises:
        ConfigError: the shards are damaged or were deleted, or do not match `tensors`.
        PeerFailed: only other ranks failed.
    """
    # The filter stays: `catch_warnings` would restore the filters of all threads, also while another thread saves.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    try:
        with raise_own_error(no_dist):
            dcp.load(dict(tensors), storage_reader=reader, no_dist=no_dist)
    except (ConfigError, PeerFailed, dist.DistError):
        raise
    except Exception as error:  # torch raises many kinds if a shard is damaged
        if ran_out_of_memory(error) or blames_peer(error):
            raise
        message = f"the shards in {reader.path} do not match their index or the model ({type(error).__name__}: "
        message += f"{quote_cause(error)}): use another checkpoint"
        raise unreadable_checkpoint(Path(reader.path), message, on_one_rank=True) from None


@contextlib.contextmanager
def raise_own_error(no_dist: bool = False) -> Iterator[None]:
    """Raise this rank's own error in place of DCP's CheckpointException, which has the errors of all ranks.

    A CheckpointException is not a subclass of Exception, so `except Exception` would miss it.

    Args:
        no_dist: whether DCP runs in this process only; it then calls this process rank 0.

    Raises:
        PeerFailed: only other ranks have failed.
    """
    try:
        yield
    except CheckpointException as error:
        rank = 0 if no_dist else dist.get_rank()
        if rank not in error.failures:
            raise PeerFailed(f"ranks {sorted(error.failures)} failed") from None
        raise error.failures[rank][0] from None
