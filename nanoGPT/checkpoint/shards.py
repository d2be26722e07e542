"""Read sharded checkpoints, which any number of ranks have written (`nanoGPT.checkpoint.dcp_writer`).

PyTorch's distributed checkpoint (DCP) writes one file per rank, and an index with the file and position of every slice
of every tensor. These files are the payload of `nanoGPT.checkpoint.directory`, which adds what DCP lacks: hashes, and
atomic checkpoints. The payload contains only tensors; everything else is in the manifest. The index is a pickle, which
is read with a list of allowed types, because an arbitrary pickle could run code.
"""

import contextlib
import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from nanoGPT.checkpoint.manifest import DELETED
from nanoGPT.errors import LOST_PEER_MESSAGES, ConfigError, PeerFailed, is_out_of_memory
from nanoGPT.files import ABSENT, open_regular, retry_reads, size_of

INDEX = ".metadata"
# The exceptions that torch raises if an index or a shard is damaged.
READ_ERRORS = (
    AssertionError,
    AttributeError,
    EOFError,
    KeyError,
    IndexError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def read_shards(source: "Path | SafeReader", tensors: Mapping[str, Tensor], no_dist: bool = False) -> None:
    """Fill tensors and shards in place from a checkpoint that any number of ranks wrote. Collective, unless `no_dist`.

    Args:
        source: the directory, or a reader of it, which reads the index once for many calls.
        tensors: the tensors to fill, by their names in the checkpoint.
        no_dist: read in this process only, without communication.

    Raises:
        ConfigError: the shards are damaged or were deleted, or do not match `tensors`.
        PeerFailed: only other ranks failed.
    """
    reader = source if isinstance(source, SafeReader) else SafeReader(source)
    # The filter stays: `catch_warnings` would restore the filters of all threads, also while another thread saves.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    try:
        with raise_own_error(no_dist):
            dcp.load(dict(tensors), storage_reader=reader, planner=TensorOnlyPlanner(), no_dist=no_dist)
    except PeerFailed:
        raise
    except ABSENT:
        raise ConfigError(f"{reader.path} {DELETED}", on_one_rank=True) from None
    except READ_ERRORS as error:
        if (
            is_out_of_memory(error)
            or isinstance(error, dist.DistError)
            or any(w in str(error) for w in LOST_PEER_MESSAGES)
        ):
            raise  # these errors do not mean that the shards are damaged
        raise ConfigError(
            f"the shards in {reader.path} do not match their index or the model ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason'}): use another checkpoint",
            on_one_rank=True,
        ) from None


def read_index(source: "Path | SafeReader") -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the full shape and the dtype of every tensor in a directory of shards, by name."""
    reader = source if isinstance(source, SafeReader) else SafeReader(source)
    metadata = reader.read_metadata().state_dict_metadata
    return {key: (tensor.size, tensor.properties.dtype) for key, tensor in metadata.items()}


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


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints, which here reads the pickle in `.metadata` with a RestrictedUnpickler.

    Args:
        path: the directory.
        is_shared: rank 0 reads and checks the index, and broadcasts it. The first call of a method is then collective.
            With many ranks, N reads of a large file would burden the file system, and every rank would check it.
    """

    def __init__(self, path: Path, is_shared: bool = False) -> None:
        super().__init__(path)
        self.index: Any = None
        self.is_shared = is_shared and dist.is_initialized() and dist.get_world_size() > 1

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.index is None:
            self.index = self._share_index() if self.is_shared else self._read_index()[0]
            self.index.storage_meta = self.index.storage_meta or StorageMeta()
            self.index.storage_meta.load_id = self.load_id
        return self.index

    def _read_index(self) -> tuple[Any, bytes]:
        """Return the index, and the content of its file."""
        path = Path(self.path) / INDEX
        try:
            with io.BufferedReader(retry_reads(path, partial(open_regular, path))) as file:
                index = RestrictedUnpickler(file).load()
                end = file.tell()
                file.seek(0)
                content = file.read(end)  # without what may follow the pickle
            check_index(Path(self.path), index)
        except ABSENT:
            raise ConfigError(f"{self.path} {DELETED}") from None
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{path} was not read, because {error}: use another checkpoint") from None
        except READ_ERRORS as error:
            raise ConfigError(f"{path} is not a valid index of shards ({error}): use another checkpoint") from None
        return index, content

    def _share_index(self) -> Any:
        """Return the index, which only rank 0 reads. If this fails on rank 0, raise on all ranks. Collective."""
        index, failure = None, None
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                index, message[0] = self._read_index()
            except Exception as error:
                failure = error
        dist.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        if failure:
            raise failure
        if message[0] is None:
            raise PeerFailed("rank 0 failed to read the index")
        return index or RestrictedUnpickler(io.BytesIO(message[0])).load()


def check_index(folder: Path, index: Metadata) -> None:
    """Check that an index describes only tensors, and that they fit into its files, which are in the same directory.

    Raises:
        AttributeError, TypeError, ValueError: the index is not valid.
    """
    names = {entry.relative_path for entry in (index.storage_data or {}).values()}
    if any(Path(name).name != name for name in names):
        raise ValueError("it names a file in another directory")
    needed, stored = 0, sum(size_of(folder / name) or 0 for name in names)
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or any(length < 0 for length in tensor.size):
            raise ValueError(f"{name} is not a tensor")
        needed += math.prod(tensor.size) * tensor.properties.dtype.itemsize
    if needed > stored:
        raise ValueError(f"its tensors have {needed:,} bytes, but its files have {stored:,}")


ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that allows only the types with which torch describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        is_record = module == "torch.distributed.checkpoint.metadata" and "." not in name
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_record or is_dtype or (module, name) in ALLOWED:
            value = super().find_class(module, name)
            if not is_record or isinstance(value, type):
                return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


class TensorOnlyPlanner(DefaultLoadPlanner):
    """A load planner that refuses everything but tensors, because DCP would unpickle it."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ConfigError(f"{read_item.dest_index.fqn} is not a tensor: use another checkpoint")
