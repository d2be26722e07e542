"""Sharded checkpoints: every rank writes its shards, and any number of ranks can read them.

PyTorch's distributed checkpoint (DCP) writes one file per rank, and an index with the file and position of every slice
of every tensor. These files are the payload of `nanoGPT.checkpoint.directory`, which adds what DCP lacks: hashes, and
atomic checkpoints. The payload contains only tensors; everything else is in the manifest. The index is a pickle, which
is read with a list of allowed types, because an arbitrary pickle could run code.
"""

import contextlib
import io
import math
import pickle
import pickletools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.serialization import get_crc32_options, set_crc32_options

from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.errors import LOST_PEER_MESSAGES, ConfigError, PeerFailed, is_out_of_memory
from nanoGPT.files import open_regular, retry_reads, size_of

MAX_CHECKED_BYTES = 64 << 20  # of the pickle in an index
# A bound for the planning of a save. For GPT-2 124M, rank 0 needs 0.03 s per rank (bench/sharding/scale.py).
PLANNING_SECONDS_PER_RANK = 1.0
REPORT_PERIOD = 1.0  # seconds, as long as the period of the heartbeats
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


def write_shards(files: NewFiles, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's tensors and shards into a new checkpoint; rank 0 also writes the index. Collective.

    A tensor that is replicated on several ranks is written once. DCP keeps the plan of a save: which rank writes what.
    The next save of the same tensors uses it again, so that rank 0 does not collect the plans of all ranks each time.
    In return, rank 0 keeps all plans in memory.
    """
    writer = dcp.FileSystemWriter(files.folder, sync_files=False, overwrite=False)
    writer.fs = HashingFileSystem(files)
    with raise_own_error(), disable_crc32():
        with ReportingPlanner(files.report_progress, dist.get_world_size(files.group)) as planner:
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=files.group)


class ReportingPlanner(DefaultSavePlanner):
    """A planner of a save that reports progress until the plan is complete. Leaving its `with` block ends the reports.

    Rank 0 collects and merges the plans of all ranks, for minutes with 1,000 ranks, and the others wait for it. The
    watchdog would take this for a hang. Another thread of every rank therefore reports progress during the planning,
    for at most `PLANNING_SECONDS_PER_RANK` times the number of ranks. After this time, the watchdog finds a rank that
    really hangs.

    Args:
        report_progress: called every `REPORT_PERIOD`.
        world_size: number of ranks that save.
    """

    def __init__(self, report_progress: Callable[[], None], world_size: int) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = f"{world_size} ranks"  # plans of other groups do not fit
        self.report_progress, self.max_seconds = report_progress, PLANNING_SECONDS_PER_RANK * world_size
        self.is_planned = threading.Event()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        threading.Thread(target=self._report, daemon=True).start()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.is_planned.set()
        return super().finish_plan(new_plan)

    def _report(self) -> None:
        end = time.monotonic() + self.max_seconds
        while not self.is_planned.wait(REPORT_PERIOD) and time.monotonic() < end:
            self.report_progress()

    def __enter__(self) -> "ReportingPlanner":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_planned.set()


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
        self.files.rename(Path(path).name, Path(new_path).name)


def read_shards(source: "Path | SafeReader", tensors: Mapping[str, Tensor], no_dist: bool = False) -> None:
    """Fill tensors and shards in place from a checkpoint that any number of ranks wrote. Collective, unless `no_dist`.

    Args:
        source: the directory, or a reader of it, which reads the index once for many calls.
        tensors: the tensors to fill, by their names in the checkpoint.
        no_dist: read in this process only, without communication.

    Raises:
        ConfigError: the shards are damaged, or do not match `tensors`.
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
    """torch's reader of sharded checkpoints, which here reads the pickle in `.metadata` with a RestrictedUnpickler."""

    index: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.index is not None:
            return self.index
        path = Path(self.path) / ".metadata"
        try:
            with io.BufferedReader(retry_reads(path, partial(open_regular, path))) as file:
                check_memo(file)
                file.seek(0)
                index = RestrictedUnpickler(file).load()
            check_index(Path(self.path), index)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{path} was not read, because {error}: use another checkpoint") from None
        except READ_ERRORS as error:
            raise ConfigError(f"{path} is not a valid index of shards ({error}): use another checkpoint") from None
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        self.index = index
        return index


def check_memo(file: IO[bytes]) -> None:
    """Check that a pickle numbers its memo entries from 0: for a memo index of 10**9, Python allocates gigabytes.

    Only the first 64 MiB are checked, which takes seconds. The index of 70B parameters on 1,024 ranks has 293 MB.

    Raises:
        ValueError: a memo index is too large, or the file is not a pickle.
    """
    for count, (operation, memo_index, position) in enumerate(pickletools.genops(file)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(memo_index or 0) <= count:
            raise ValueError(f"its pickle has the memo index {memo_index:,}")
        if (position or 0) > MAX_CHECKED_BYTES:
            return


def check_index(folder: Path, index: Metadata) -> None:
    """Check that an index describes only tensors, and that they fit into its files, which are in the same directory.

    Raises:
        AttributeError, TypeError, ValueError: the index is not valid.
    """
    entries = list((index.storage_data or {}).values())
    names = {entry.relative_path for entry in entries}
    if any(Path(name).name != name for name in names):
        raise ValueError("it names a file in another directory")
    sizes = {name: size_of(folder / name) or 0 for name in names}
    if any(entry.offset < 0 or not 0 <= entry.length <= sizes[entry.relative_path] - entry.offset for entry in entries):
        raise ValueError("it names bytes beyond the end of a file")
    needed = 0
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or any(length < 0 for length in tensor.size):
            raise ValueError(f"{name} is not a tensor")
        needed += math.prod(tensor.size) * tensor.properties.dtype.itemsize
    if needed > sum(sizes.values()):
        raise ValueError(f"its tensors have {needed:,} bytes, but its files have {sum(sizes.values()):,}")


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that allows only the types with which torch describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        records = "torch.distributed.checkpoint.metadata"
        is_allowed = module == records and "." not in name and isinstance(super().find_class(module, name), type)
        is_allowed |= (module, name) in {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
        is_allowed |= module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return super().find_class(module, name)


class TensorOnlyPlanner(DefaultLoadPlanner):
    """A load planner that refuses everything but tensors, because DCP would unpickle it."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ConfigError(f"{read_item.dest_index.fqn} is not a tensor: use another checkpoint")
