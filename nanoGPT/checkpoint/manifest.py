"""What a checkpoint says of itself, and the proof that it holds: sizes and sha256 of every file, sealed by its own.

    make verify-checkpoint ARGS=--out_dir=out/my-run                  # every checkpoint of a run, read to the last byte

A file is hashed while it is written, not read again for it. Nothing is repaired: a checkpoint that does not verify is
named, and a resume passes it over.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT import schemas
from nanoGPT.cli.command_line import command_line
from nanoGPT.errors import ConfigError, one_sentence
from nanoGPT.files import (
    ABSENT,
    NotAFile,
    is_directory,
    is_present,
    list_directory,
    read_document,
    sha256_of,
    size_of,
)
from nanoGPT.schemas import Malformed, check, check_tokenizer

Manifest = dict[str, Any]
STEP = re.compile("step-[0-9]{8,}")  # how a checkpoint's directory is named
LARGE = 1 << 20  # bytes from which it pays to hash in another thread
AHEAD = 16 << 20  # bytes after which the disk is told to begin, so that little is left for the flush at the end


class Damaged(Exception):
    """Why a checkpoint must not be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole, verified checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def step_directories(out_dir: Path) -> list[Path]:
    """Return all directories of a run that are named as a checkpoint is, newest first; other names are left alone.

    Raises:
        ConfigError: the directory is there, but could not be listed.
    """
    root = out_dir / "checkpoints"
    steps = sorted((name for name in list_directory(root) if STEP.fullmatch(name)), key=lambda name: -int(name[5:]))
    return [root / name for name in steps if is_directory(root / name)]


def manifests(out_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield every checkpoint whose manifest holds, newest first; its files are not verified.

    Raises:
        ConfigError: a manifest is there, but could not be read.
    """
    for path in step_directories(out_dir):
        with contextlib.suppress(Damaged):
            yield path, read_manifest(path)


def seal(manifest: Manifest) -> str:
    """The manifest as text that carries its own sha256."""
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        Damaged: it is absent, incomplete, or not exactly as it was written.
        ConfigError: it is there, but could not be read: that says nothing of the checkpoint.
    """
    try:
        text = read_document(path / "manifest.json")
        manifest = json.loads(text)
    except ABSENT:
        raise Damaged("it has no manifest.json, so its save never ended") from None
    except NotAFile as error:
        raise Damaged(f"its {error}") from None
    except (ValueError, RecursionError):
        raise Damaged("its manifest.json is not JSON") from None
    try:
        if not isinstance(manifest, dict) or seal(manifest) != text:
            raise Damaged("its manifest.json was changed after it was written")
        step = check(manifest, schemas.Manifest)["step"]
    except (Malformed, RecursionError) as error:
        raise Damaged(f"its manifest.json is not that of a checkpoint ({error})") from None
    if STEP.fullmatch(path.name) and int(path.name[5:]) != step:
        raise Damaged("its manifest.json is not that of a checkpoint of this step")
    return manifest


def check_training(path: Path, manifest: Manifest) -> None:
    """Check that a checkpoint is that of a training run, whose model and data its manifest describes.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = check(manifest, schemas.TrainingManifest)
        check_tokenizer(found["data"]["tokenizer"])
        if found["model_args"]["n_embd"] % found["model_args"]["n_head"]:
            raise Malformed("its n_embd is not divisible by its n_head")
    except Malformed as error:
        raise ConfigError(
            f"{path / 'manifest.json'} is not that of a training run ({error}): give another run or checkpoint"
        ) from None


def file_names(path: Path) -> list[str]:
    """The files of a checkpoint by its manifest, for what else lies there is none of it; without one, all."""
    if not is_present(path / "manifest.json"):
        return list_directory(path)
    return [file["name"] for file in read_manifest(path)["files"]]


def verify_files(path: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Hash every `shares`-th file of a checkpoint, so that ranks can divide the work.

    Raises:
        Damaged: a file is missing, or its size or sha256 differs.
        ConfigError: a file is there, but could not be read: that says nothing of the checkpoint.
    """
    for file in manifest["files"][share::shares]:
        target = path / file["name"]
        if (size := size_of(target)) is None:
            raise Damaged(f"{file['name']} is missing")
        if size != file["size"]:
            raise Damaged(f"{file['name']} has {size:,} bytes where {file['size']:,} were written")
        try:
            digest = sha256_of(target)
        except ABSENT:
            raise Damaged(f"{file['name']} is missing") from None
        if digest != file["sha256"]:
            raise Damaged(f"the sha256 of {file['name']} differs from the manifest's")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


# ---- writing


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


# ---- the command


def main(out_dir: str) -> None:
    """Read every checkpoint of a run to the last byte, and report whether each one holds.

    Args:
        out_dir: the run; it may be training.
    """
    found = step_directories(Path(out_dir))
    if not found:
        raise ConfigError(f"there is no checkpoint under {out_dir}: give the --out_dir of a run")
    damaged = 0
    for path in found:
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest)
            size = sum(file["size"] for file in manifest["files"])
            print(f"{path.name}: whole, {len(manifest['files'])} file(s), {size:,} bytes, {manifest.get('phase', '')}")
        except Damaged as reason:
            if not is_present(path):
                print(f"{path.name}: deleted while it was read, as the run keeps its newest checkpoints only")
                continue
            damaged += 1
            print(f"{path.name}: damaged, {reason}")
    if damaged:
        raise ConfigError(f"{damaged} of {len(found)} checkpoints are damaged: a resume takes the newest whole one")


if __name__ == "__main__":
    with one_sentence():
        command_line(main, sys.argv[1:])
