"""Write sharded checkpoints: every rank writes its shards into one file, and rank 0 writes the index.

PyTorch's distributed checkpoint (DCP) plans a save: rank 0 gathers a plan from every rank, decides who writes what, and
gathers from every rank where its shards are. This costs rank 0 time in proportion to the number of ranks. Each rank
therefore keeps the layout of its last save (`SavedLayout`). If no rank's tensors have changed, the next save writes the
same shards to the same places, and rank 0 writes the same index again.
"""

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from nanoGPT.checkpoint.shards import INDEX, raise_own_error
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.errors import PeerFailed

# A bound for the planning of a save. For GPT-2 124M, rank 0 needs 0.03 s per rank (bench/sharding/scale.py).
PLANNING_SECONDS_PER_RANK = 1.0
REPORT_PERIOD = 1.0  # seconds, as long as the period of the heartbeats


@dataclass
class SavedLayout:
    """What a rank remembers of a save.

    Attributes:
        local_plan: the tensors and shards of this rank.
        final_plan: those that it wrote: a tensor that is replicated on several ranks is written once.
        results: where each of them is in this rank's file.
        index: the content of the index; only on rank 0.
    """

    local_plan: SavePlan
    final_plan: SavePlan
    results: list[WriteResult]
    index: bytes


def write_shards(files: NewFiles, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's tensors and shards into a new checkpoint; rank 0 also writes the index. Collective.

    A tensor that is replicated on several ranks is written once.
    """
    planner, writer = DefaultSavePlanner(), LayoutWriter(files)
    local_plan: list[SavePlan] = []

    def is_unchanged() -> bool:
        planner.set_up_planner(dict(tensors), writer.storage_meta(), dist.get_rank(files.group) == 0)
        local_plan.append(planner.create_local_plan())
        return files.layout is not None and files.layout.local_plan == local_plan[0]

    with disable_crc32():
        if run_on_all_ranks(files.group, is_unchanged) and files.layout:
            rewrite_shards(files, files.layout, planner, writer)
            return
        with raise_own_error(), ReportingPlanner(files.report_progress, dist.get_world_size(files.group)) as reporting:
            dcp.save(dict(tensors), storage_writer=writer, planner=reporting, process_group=files.group)
    is_main = dist.get_rank(files.group) == 0
    index = (files.folder / INDEX).read_bytes() if is_main else b""
    files.layout = SavedLayout(local_plan[0], writer.final_plan, writer.results, index)


def rewrite_shards(files: NewFiles, layout: SavedLayout, planner: DefaultSavePlanner, writer: "LayoutWriter") -> None:
    """Write the shards of a layout with their current values, and the index. Collective; all ranks have this layout.

    Args:
        planner: set up with the current tensors.
    """
    is_main = dist.get_rank(files.group) == 0

    def write() -> bool:
        writer.set_up_storage_writer(is_main)
        writer.prepare_local_plan(layout.local_plan)
        writer.write_data(planner.finish_plan(layout.final_plan), planner)
        return writer.results == layout.results

    def write_index() -> bool:
        if is_main:
            with files.open(INDEX) as file:
                file.write(layout.index)
        return True

    if not run_on_all_ranks(files.group, write):
        gathered: list[Any] = [None] * dist.get_world_size(files.group)
        dist.all_gather_object(gathered, writer.results, group=files.group)
        layout.results, layout.index = writer.results, replace_places(layout.index, gathered) if is_main else b""
    run_on_all_ranks(files.group, write_index)


def replace_places(index: bytes, results: list[list[WriteResult]]) -> bytes:
    """Return an index of this process whose shards are at new places in the files."""
    metadata: Metadata = pickle.loads(index)
    metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
    return pickle.dumps(metadata)


def run_on_all_ranks(group: dist.ProcessGroup | None, task: Callable[[], bool]) -> bool:
    """Run a task on every rank, and return whether it has returned True on all of them. Collective.

    Raises:
        Exception: the task's own error.
        PeerFailed: the task has failed only on other ranks.
    """
    result, failure = False, None
    try:
        result = task()
    except Exception as error:
        failure = error
    flags = torch.tensor([not result, failure is not None], dtype=torch.int64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    if failure:
        raise failure
    if flags[1]:
        raise PeerFailed("another rank failed")
    return not flags[0]


class LayoutWriter(dcp.FileSystemWriter):
    """torch's writer, which here hashes its files and remembers what it has written.

    Attributes:
        final_plan, results: see `SavedLayout`.
    """

    final_plan: SavePlan
    results: list[WriteResult]

    def __init__(self, files: NewFiles) -> None:
        super().__init__(files.folder, sync_files=False, overwrite=False)
        self.fs = HashingFileSystem(files)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        self.final_plan, self.results = plan, future.value()
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the name of the checkpoint, so that several checkpoints can have one index


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
        super().__init__()
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
