"""Write the files of a new checkpoint: each is hashed while it is written, not read again for it."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

LARGE = 1 << 20  # bytes from which it pays to hash in another thread


AHEAD = 16 << 20  # bytes after which the disk is told to begin, so that little is left for the flush at the end


class HashedFile:
    """A new file, written from its beginning to its end, hashed beside the writing, on the disk once it is closed.

    Args:
        path: must not exist.
        progress: called at every write.
    """

    def __init__(self, path: Path, progress: Callable[[], None] = lambda: None) -> None:
        self.file, self.progress = open(path, "xb"), progress
        self.digest, self.hasher, self.begun = hashlib.sha256(), ThreadPoolExecutor(1), 0

    def write(self, data: Any) -> int:
        """Append bytes, of which nothing is kept after the call."""
        self.progress()
        view = memoryview(data).cast("B")
        if len(view) < LARGE:
            self.digest.update(view)
            return self.file.write(view)
        for start in range(0, len(view), AHEAD):
            part = view[start : start + AHEAD]
            hashing = self.hasher.submit(self.digest.update, part)
            try:
                self.file.write(part)
                self._begin_flush()
            finally:
                hashing.result()
        return len(view)

    def _begin_flush(self) -> None:
        """Have the kernel write what it holds to the disk, without waiting for it."""
        if (end := self.file.tell()) - self.begun >= AHEAD and hasattr(os, "posix_fadvise"):
            self.file.flush()
            os.posix_fadvise(self.file.fileno(), self.begun, end - self.begun, os.POSIX_FADV_DONTNEED)
            self.begun = end

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Flush to the disk."""
        self.hasher.shutdown()
        if not self.file.closed:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            finally:
                self.file.close()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class NewFiles:
    """The files that this rank writes into a checkpoint which is not there yet.

    Attributes:
        folder: the same, fresh directory on every rank.
        group: the ranks that write together, talking over the CPU; None: all of the job.
        progress: called as bytes are written.
    """

    folder: Path
    group: dist.ProcessGroup | None = None
    progress: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._files: dict[str, HashedFile] = {}

    def open(self, name: str) -> HashedFile:
        """A new file of this checkpoint; close it."""
        self._files[name] = HashedFile(self.folder / name, self.progress)
        return self._files[name]

    def rename(self, name: str, to: str) -> None:
        """Rename a closed file."""
        (self.folder / name).rename(self.folder / to)
        self._files[to] = self._files.pop(name)

    def records(self) -> list[dict[str, Any]]:
        """What the manifest says of each file: name, size in bytes, sha256."""
        return [
            {"name": name, "size": (self.folder / name).stat().st_size, "sha256": file.digest.hexdigest()}
            for name, file in self._files.items()
        ]


def write_and_sync(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
