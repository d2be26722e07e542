"""Write sharded checkpoints: every rank writes its shards into one file, and rank 0 writes the index.

PyTorch's distributed checkpoint (DCP) plans a save: rank 0 gathers a plan from every rank, decides who writes what, and
gathers from every rank where its shards are. DCP caches the plans, and a save of the same tensors reuses them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from nanoGPT.checkpoint.hashed_files import NewFiles
from nanoGPT.checkpoint.shards import raise_own_error

# A bound for the planning of a save. For GPT-2 124M, rank 0 needs 0.03 s per rank (commit 1278287, bench/sharding).
PLANNING_SECONDS_PER_RANK = 1.0
REPORT_PERIOD = 1.0  # seconds, as long as the period of the heartbeats


def write_shards(files: NewFiles, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's tensors and shards into a new checkpoint; rank 0 also writes the index. Collective.

    A tensor that is replicated on several ranks is written once.
    """
    writer = dcp.FileSystemWriter(files.folder, sync_files=False, overwrite=False)
    writer.fs = HashingFileSystem(files)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    seconds = PLANNING_SECONDS_PER_RANK * dist.get_world_size(files.group)
    with disable_crc32(), raise_own_error(), keep_reporting(files.report_progress, seconds):
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=files.group)


@contextlib.contextmanager
def keep_reporting(report_progress: Callable[[], None], max_seconds: float) -> Iterator[None]:
    """Report progress from another thread until the block ends, for at most `max_seconds`.

    Rank 0 collects and merges the plans of all ranks, for minutes with 1,000 ranks, and the others wait for it. The
    watchdog would take this for a hang. After `max_seconds`, it finds a rank that really hangs.
    """
    has_ended, end = threading.Event(), time.monotonic() + max_seconds

    def report() -> None:
        while not has_ended.wait(REPORT_PERIOD) and time.monotonic() < end:
            report_progress()

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


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
