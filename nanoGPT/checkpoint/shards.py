"""Sharded checkpoints, the payload of phases 1 and 3: every rank writes its shards, and any number of ranks reads them.

PyTorch's distributed checkpoint (DCP) writes one file per rank, and an index with the file and position of every slice
of every tensor. These files are the payload of `nanoGPT.checkpoint.directory`, which adds what DCP lacks: hashes, and
atomic checkpoints. The payload contains only tensors; everything else is in the manifest. The index is a pickle, which
is read with a list of allowed types, because an arbitrary pickle could run code.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, EnumMeta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.serialization import get_crc32_options, set_crc32_options

from nanoGPT.checkpoint.manifest import INDEX, Checkpoint, NewFiles
from nanoGPT.checkpoint.starting_point import check_sizes, load_sources, sizes_of
from nanoGPT.errors import ConfigError, PeerFailed, blames_peer, quote_cause, ran_out_of_memory, unreadable_checkpoint
from nanoGPT.files import open_regular, retry_reads

ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


# ---- read


def load_shards(
    checkpoint: Checkpoint, phase: str, state: Mapping[str, Tensor], copy: Callable[[Tensor, Tensor], object]
) -> set[str]:
    """Load a checkpoint of any phase, written by any number of ranks, into this rank's tensors and shards. Collective.

    A rank reads only its own slices of a checkpoint of its phase. Of any other one it reads full tensors, one at a
    time, and copies its part.

    Args:
        checkpoint: of any phase.
        phase: this phase, as in the manifest of its checkpoints.
        state: the tensors to fill, as `model.<param>` and `optimizer.<param>.<item>`.
        copy: called as `copy(target, full)`; copies this rank's part of a full tensor, which has the shape of the
            parameter, to a tensor of `state`.

    Returns:
        The names of the tensors that have been loaded, or that the checkpoint has for other ranks.

    Raises:
        ConfigError: the parameters in the checkpoint are not those of the model.
    """
    path = checkpoint.path
    if checkpoint.manifest["phase"] != phase:
        return load_sources("--init_from=resume with a checkpoint of another phase").copy_full_state(path, state, copy)
    reader = SafeReader(path)
    check_sizes(path, select_param_sizes(reader.sizes), select_param_sizes(sizes_of(state)))
    read_shards(reader, {key: value for key, value in state.items() if key in reader.sizes})
    return {*reader.sizes}


def select_param_sizes(sizes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Return the sizes of the parameters by their names in the model."""
    return {key.removeprefix("model."): size for key, size in sizes.items() if key.startswith("model.")}


def find_member(members: Any, name: str) -> Enum:
    """Return a member of an enum. The first releases of Python 3.11 pickle it as a call of getattr."""
    if not isinstance(members, EnumMeta):
        raise pickle.UnpicklingError("it calls getattr, which could run code")
    return members[name]


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that allows only the types with which torch describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr":
            return find_member
        if name == "PosixPath":  # of pathlib, which Python 3.13 writes as pathlib._local
            return Path
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


# ---- write


def write_shards(files: NewFiles, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's tensors and shards into a new checkpoint; rank 0 also writes the index. Collective.

    A tensor that is replicated on several ranks is written once.
    """
    # With copies ahead, the writer would synchronize with the training on a GPU every 10 MB, although an asynchronous
    # save has already copied the tensors to the CPU.
    writer = dcp.FileSystemWriter(files.folder, sync_files=False, overwrite=False, per_thread_copy_ahead=0)
    writer.fs = HashingFileSystem(files)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with disable_crc32(), raise_own_error():
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=files.group)


@contextlib.contextmanager
def disable_crc32() -> Iterator[None]:
    """Disable the checksum of `torch.save`: it costs a third of the time of SHA-256, and no reader checks it."""
    previous = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(previous)


class HashingFileSystem(FileSystem):
    """A file system for torch's writer, whose files are `HashedFile`s of a new checkpoint."""

    def __init__(self, files: NewFiles) -> None:
        self.files = files

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self.files.open(Path(path).name) as file:
            yield file

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files.files[Path(new_path).name] = self.files.files.pop(Path(path).name)
