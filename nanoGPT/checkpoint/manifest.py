"""The files of a checkpoint: hash them while they are written, and find and verify the checkpoints of a run.

The manifest of a checkpoint has its metadata, the size and hash (SHA-256) of every file, and its own hash. Nothing is
repaired. If a checkpoint fails the verification, the reason is reported, and a resume skips the checkpoint.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, is_present, list_directory, read_document, sha256_of, size_of
from nanoGPT.train_config import StepChoice

Manifest = dict[str, Any]
STEP = re.compile("step-[0-9]{8,}")  # the name of a checkpoint's directory
PART_BYTES = 16 << 20  # a file is written and hashed in parts of this size
SYNC_BYTES = 1 << 30  # written between two fsyncs: a single fsync to slow network storage would count as a hang
INDEX = ".metadata"  # of the shards, if the payload is sharded (`nanoGPT.checkpoint.shards`)
NO_LOSS = 1e9  # the best validation loss before an evaluation, as in nanoGPT: JSON has no infinity


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete, or was changed after its save. The message is the reason: "payload is missing"."""


@dataclass(frozen=True)
class Checkpoint:
    """The path and the manifest of a complete, verified checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def step_directories(out_dir: Path) -> list[Path]:
    """Return all directories of a run that have the name of a checkpoint, newest first.

    Raises:
        ConfigError: `out_dir/checkpoints` exists, but could not be listed.
    """
    root = out_dir / "checkpoints"
    steps = sorted((name for name in list_directory(root) if STEP.fullmatch(name)), key=lambda name: -int(name[5:]))
    return [root / name for name in steps]


def choose_step(out_dir: Path, step: StepChoice) -> Path:
    """Return the path of the checkpoint after `step` updates, or of the one with the best validation loss.

    Raises:
        ConfigError: the run has no such checkpoint.
    """
    paths, number = step_directories(out_dir), step
    if step == "best":
        number = next((manifest.get("best_step") for _, manifest in read_manifests(out_dir)), None)
    path = next((path for path in paths if int(path.name[5:]) == number), None)
    if path is None:
        names = ", ".join(path.name for path in paths)
        remedy = f"choose one of {names}" if names else "give the directory of a run, which contains checkpoints/"
        choice = f"{step}, which is step {number}," if step == "best" and number else step
        raise ConfigError(f"there is no checkpoint with --resume_step={choice} under {out_dir}: {remedy}")
    return path


def find_newest_run(directories: Iterable[Path]) -> Path | None:
    """Return the directory whose newest checkpoint was saved last; None if no directory has a checkpoint.

    The manifest has the time, because a copy of a directory is newer than the run.
    """
    times = {}
    for directory in directories:
        if paths := step_directories(directory):
            manifest = next((each for _, each in read_manifests(directory)), {})
            times[directory] = manifest.get("saved_at", paths[0].stat().st_mtime)
    return max(times, key=times.__getitem__, default=None)


def read_manifests(out_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the path and manifest of every checkpoint with a valid manifest, newest first. Files are not verified.

    The directory of a checkpoint contains only this one.

    Raises:
        ConfigError: a manifest exists, but could not be read.
    """
    for path in [out_dir] if is_present(out_dir / "manifest.json") else step_directories(out_dir):
        with contextlib.suppress(DamagedCheckpoint):
            yield path, read_manifest(path)


def serialize_manifest(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a field `sha256` that is computed from all other fields."""
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        DamagedCheckpoint: the manifest is missing, incomplete, or was changed after it was written.
        ConfigError: the manifest exists, but could not be read. The checkpoint may still be intact.
    """
    try:
        text = read_document(path / "manifest.json")
        manifest = json.loads(text)
        if serialize_manifest(manifest) != text:
            raise ValueError("it was changed after it was written")
    except ABSENT:
        raise DamagedCheckpoint("it has no manifest.json, so its save was not completed") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"its manifest.json is damaged: {error}") from None
    if STEP.fullmatch(path.name) and int(path.name[5:]) != manifest["step"]:
        raise DamagedCheckpoint("its manifest.json belongs to a checkpoint of another step")
    return manifest


def verify_files(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Verify the files of a checkpoint. Rank r of N verifies files r, r + N, r + 2N, ...; by default, verify all files.

    Raises:
        DamagedCheckpoint: a file is missing, or its size or hash differs.
        ConfigError: a file exists, but could not be read. The checkpoint may still be intact.
    """
    for file in manifest["files"][rank::world_size]:
        target = path / file["name"]
        if (size := size_of(target)) is None:
            raise DamagedCheckpoint(f"{file['name']} is missing")
        if size != file["size"]:
            raise DamagedCheckpoint(f"{file['name']} has {size:,} bytes instead of {file['size']:,}")
        try:
            digest = sha256_of(target)
        except ABSENT:
            raise DamagedCheckpoint(f"{file['name']} is missing") from None
        if digest != file["sha256"]:
            raise DamagedCheckpoint(f"the hash of {file['name']} differs from the one in the manifest")


def find_checkpoint(
    source: Path,
    run: Runtime | None = None,
    step: StepChoice = None,
    skip: Callable[[Path, str], None] | None = None,
) -> Checkpoint:
    """Return a complete checkpoint: the newest one, or the one of `step`. Collective.

    Args:
        source: directory of a run; or of one checkpoint, which is then the only choice.
        run: this rank's Runtime. Rank 0 lists the checkpoints. None: a single process.
        step: number of updates of the checkpoint, or "best"; None: the newest one that is complete.
        skip: called with a damaged checkpoint and the reason, before an older one is tried; None: print both.

    Raises:
        ConfigError: there is no complete checkpoint, or one could not be read.
    """
    run, manifest = run or Runtime(), dict[str, Any]()

    def list_paths() -> list[Path]:
        if step is not None:
            return [choose_step(source, step)]
        return [source] if is_present(source / "manifest.json") else step_directories(source)

    def find_damage() -> str:
        """Return what is damaged in this rank's part of the files; "" if nothing is."""
        nonlocal manifest
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest, run.rank, run.world_size)
        except DamagedCheckpoint as error:
            return str(error)
        return ""

    for path in run.call_on_rank0(list_paths):
        if not (reason := next(filter(None, run.call_on_all(find_damage)), "")):
            return Checkpoint(path, manifest)
        if step is not None or path == source:
            raise ConfigError(f"{path} is damaged ({reason}): choose another checkpoint")
        if skip:
            skip(path, reason)
        elif run.is_main:
            print(f"skipping {path.name}: {reason}", file=sys.stderr)
    raise ConfigError(f"there is no complete checkpoint under {source}: use the --out_dir of another run")


# ---- the files of a new checkpoint


class HashedFile(io.BufferedWriter):
    """A new file that is hashed while it is written, and flushed to the disk when it is closed.

    Args:
        path: the new file; it must not exist.
        report_progress: called for every part that is written.
    """

    def __init__(self, path: Path, report_progress: Callable[[], None]) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self.digest, self.report_progress, self.size, self.synced_size = hashlib.sha256(), report_progress, 0, 0
        self.hasher = ThreadPoolExecutor(1)  # hashing takes as long as writing, and both release the GIL

    def write(self, data: Any) -> int:
        """Append bytes, and return their number. No reference to `data` remains after the call."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            if self.size - self.synced_size >= SYNC_BYTES:
                self._sync()
            self.report_progress()
            part = view[start : start + PART_BYTES]
            if len(part) < 2**16:  # torch writes thousands of small parts, for which a thread takes longer
                self.digest.update(part)
                self.size += super().write(part)
                continue
            hashing = self.hasher.submit(self.digest.update, part)
            try:
                self.size += super().write(part)
                if len(part) == PART_BYTES and hasattr(os, "posix_fadvise"):
                    self.flush()  # the kernel starts to write to the disk, so the fsync in `close` takes less time
                    os.posix_fadvise(self.fileno(), self.size - PART_BYTES, PART_BYTES, os.POSIX_FADV_DONTNEED)
            finally:
                hashing.result()
        return len(view)

    def close(self) -> None:
        """Close the file, after an fsync."""
        try:
            if not self.closed:
                self._sync()
        finally:
            self.hasher.shutdown()
            super().close()

    def _sync(self) -> None:
        self.flush()
        os.fsync(self.fileno())
        self.synced_size = self.size


@dataclass
class NewFiles:
    """The files that this rank writes into a new checkpoint.

    Attributes:
        folder: a new directory, the same on every rank.
        group: a process group with a CPU backend, of the ranks that write; None: the default group.
        report_progress: called for every part that is written.
    """

    folder: Path
    group: dist.ProcessGroup | None = None
    report_progress: Callable[[], None] = lambda: None
    files: dict[str, HashedFile] = field(default_factory=dict)

    def open(self, name: str) -> HashedFile:
        """Open a new file of this checkpoint. The caller must close it."""
        self.files[name] = HashedFile(self.folder / name, self.report_progress)
        return self.files[name]

    def records(self) -> list[dict[str, Any]]:
        """Return the entry of each file in the manifest: name, size in bytes, and hash."""
        return [{"name": name, "size": f.size, "sha256": f.digest.hexdigest()} for name, f in self.files.items()]


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
