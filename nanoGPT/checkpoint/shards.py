"""Shards on disk: every rank writes what it holds, and any number of ranks reads it.

torch's distributed checkpoint (DCP) writes one file a rank and one index of which slice of which tensor lies where.
It is the payload of `nanoGPT.checkpoint.directory`, whose protocol adds what DCP lacks: hashes, and that a checkpoint
is there whole or not at all. Only tensors go in; the rest is in the manifest. Nothing in it is unpickled freely.
"""

import contextlib
import io
import math
import pickle
import pickletools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.serialization import get_crc32_options, set_crc32_options

from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.errors import LOST_PEER, ConfigError, PeerFailed, is_out_of_memory
from nanoGPT.files import open_regular, size_of

CHECKED_BYTES = 64 << 20  # of an index's pickle
# What torch raises where an index or a shard is not as it wrote it.
UNREADABLE = (
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


def write_shards(to: NewFiles, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's tensors and shards into a new checkpoint; rank 0 also writes the index. Collective.

    A tensor that several ranks hold whole is written once.
    """
    writer = dcp.FileSystemWriter(to.folder, sync_files=False, overwrite=False)
    writer.fs = HashingFileSystem(to)
    with warnings.catch_warnings(), raise_own_error(), without_crc32():
        warnings.simplefilter("ignore")  # DCP's advice for writers that overwrite
        dcp.save(dict(tensors), storage_writer=writer, process_group=to.group)


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """The checksum that `torch.save` computes and nothing reads costs a third of a sha256: leave it out."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class HashingFileSystem(FileSystem):
    """Where torch's writer opens its files: as those of a new checkpoint, which are hashed and flushed to the disk."""

    def __init__(self, to: NewFiles) -> None:
        self.to = to

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self.to.open(Path(path).name) as file:
            yield file

    def rename(self, path: Any, new_path: Any) -> None:
        self.to.rename(Path(path).name, Path(new_path).name)


def read_shards(source: "Path | SafeReader", tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Fill tensors and shards in place from what any number of ranks wrote. Collective, unless `alone`.

    Args:
        source: the directory; or its reader, which reads the index once for many calls.
    """
    reader = source if isinstance(source, SafeReader) else SafeReader(source)
    try:
        with warnings.catch_warnings(), raise_own_error(alone):
            warnings.simplefilter("ignore")  # that a process alone has no ranks to talk to is what is wanted
            dcp.load(dict(tensors), storage_reader=reader, planner=TensorsOnly(), no_dist=alone)
    except PeerFailed:
        raise
    except UNREADABLE as error:
        if is_out_of_memory(error) or isinstance(error, dist.DistError) or any(w in str(error) for w in LOST_PEER):
            raise  # which says nothing of the shards
        raise ConfigError(
            f"the shards in {reader.path} do not fit their index or the model ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason'}): give another checkpoint"
        ) from None


def read_index(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The whole shape, and the dtype, of every tensor in a directory of shards."""
    described = SafeReader(path).read_metadata().state_dict_metadata
    return {key: (tensor.size, tensor.properties.dtype) for key, tensor in described.items()}


@contextlib.contextmanager
def raise_own_error(alone: bool = False) -> Iterator[None]:
    """DCP collects all ranks' failures into an exception that is no `Exception`: raise this rank's own instead.

    Raises:
        PeerFailed: this rank has none.
    """
    try:
        yield
    except CheckpointException as error:
        rank = 0 if alone else dist.get_rank()  # who is alone is rank 0 to DCP
        if rank not in error.failures:
            raise PeerFailed(f"ranks {sorted(error.failures)} failed") from None
        raise error.failures[rank][0] from None


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints; the pickle in `.metadata` may name torch's own records only."""

    index: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.index is not None:
            return self.index
        path = Path(self.path) / ".metadata"
        try:
            with io.BufferedReader(open_regular(path)) as file:
                check_memo(file)
                file.seek(0)
                index = OnlyRecords(file).load()
            check_index(Path(self.path), index)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{path} is not opened: {error}") from None
        except UNREADABLE as error:
            raise ConfigError(f"{path} is no index of shards ({error}): give another checkpoint") from None
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        self.index = index
        return index


def check_memo(file: IO[bytes]) -> None:
    """Check that a pickle numbers the objects that it remembers from 0 on: for number 10**9 Python allocates gigabytes.

    Only the first 64 MiB are checked, which takes seconds: the index of 70B parameters on 1,024 ranks has 293 MB.

    Raises:
        ValueError: it does not, or it is no pickle.
    """
    for count, (operation, number, position) in enumerate(pickletools.genops(file)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(number or 0) <= count:
            raise ValueError(f"it remembers an object as number {number:,}")
        if (position or 0) > CHECKED_BYTES:
            return


def check_index(folder: Path, index: Metadata) -> None:
    """Check that an index describes tensors of numbers that can lie in the files which it names, in its directory.

    Raises:
        AttributeError, TypeError, ValueError: it does not.
    """
    places = list((index.storage_data or {}).values())
    names = {place.relative_path for place in places}
    if any(Path(name).name != name for name in names):
        raise ValueError("it names a file in another directory")
    sizes = {name: size_of(folder / name) or 0 for name in names}
    if any(place.offset < 0 or not 0 <= place.length <= sizes[place.relative_path] - place.offset for place in places):
        raise ValueError("it names bytes beyond the end of a file")
    needed = 0
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or any(length < 0 for length in tensor.size):
            raise ValueError(f"{name} is no tensor")
        needed += math.prod(tensor.size) * tensor.properties.dtype.itemsize
    if needed > sum(sizes.values()):
        raise ValueError(f"its tensors have {needed:,} bytes, and the files {sum(sizes.values()):,}")


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
