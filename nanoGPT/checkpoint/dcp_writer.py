"""Write sharded checkpoints: every rank writes its shards into one file, and rank 0 writes the index.

PyTorch's distributed checkpoint (DCP) plans a save: rank 0 gathers a plan from every rank, decides who writes what, and
gathers from every rank where its shards are. DCP caches the plans, and a save of the same tensors reuses them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from nanoGPT.checkpoint.dcp_reader import raise_own_error
from nanoGPT.checkpoint.manifest import NewFiles


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
