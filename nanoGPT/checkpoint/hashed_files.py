"""Write the files of a new checkpoint. Each file is hashed while it is written, so it is not read again."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

LARGE_BYTES = 1 << 20  # from this size, hashing in another thread is faster


FLUSH_BYTES = 16 << 20  # write to the disk after so many bytes, so that the fsync at the end has little left to write


class HashedFile:
    """A new file that is written sequentially, hashed while it is written, and flushed to the disk when it is closed.

    Args:
        path: the new file; it must not exist.
        report_progress: called at every write.
    """

    def __init__(self, path: Path, report_progress: Callable[[], None] = lambda: None) -> None:
        self.file, self.report_progress = open(path, "xb"), report_progress
        self.digest, self.hasher, self.flushed_bytes = hashlib.sha256(), ThreadPoolExecutor(1), 0

    def write(self, data: Any) -> int:
        """Append bytes, and return their number. No reference to `data` remains after the call."""
        self.report_progress()
        view = memoryview(data).cast("B")
        if len(view) < LARGE_BYTES:
            self.digest.update(view)
            return self.file.write(view)
        for start in range(0, len(view), FLUSH_BYTES):
            part = view[start : start + FLUSH_BYTES]
            hashing = self.hasher.submit(self.digest.update, part)
            try:
                self.file.write(part)
                self._begin_flush()
            finally:
                hashing.result()
        return len(view)

    def _begin_flush(self) -> None:
        """Let the kernel start to write its buffers to the disk, without waiting for it."""
        if (end := self.file.tell()) - self.flushed_bytes >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            self.file.flush()
            os.posix_fadvise(self.file.fileno(), self.flushed_bytes, end - self.flushed_bytes, os.POSIX_FADV_DONTNEED)
            self.flushed_bytes = end

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Close the file, after an fsync."""
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
    """The files that this rank writes into a new checkpoint.

    Attributes:
        folder: a new directory, the same on every rank.
        group: a process group with a CPU backend, of the ranks that write; None: the default group.
        report_progress: called at every write.
    """

    folder: Path
    group: dist.ProcessGroup | None = None
    report_progress: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._files: dict[str, HashedFile] = {}

    def open(self, name: str) -> HashedFile:
        """Open a new file of this checkpoint. The caller must close it."""
        self._files[name] = HashedFile(self.folder / name, self.report_progress)
        return self._files[name]

    def rename(self, name: str, new_name: str) -> None:
        """Rename a closed file."""
        (self.folder / name).rename(self.folder / new_name)
        self._files[new_name] = self._files.pop(name)

    def records(self) -> list[dict[str, Any]]:
        """Return the entry of each file in the manifest: name, size in bytes, and hash."""
        return [
            {"name": name, "size": (self.folder / name).stat().st_size, "sha256": file.digest.hexdigest()}
            for name, file in self._files.items()
        ]


def write_and_sync(path: Path, text: str) -> None:
    """Write a text file, and flush it to the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
