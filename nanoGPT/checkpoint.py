"""The checkpoint directory: a checkpoint is there whole, or not at all.

    out_dir/checkpoints/
        step-00000100/        after 100 updates
            <payload>         the phase's: ckpt.pt, or one file a rank
            manifest.json     written last: step, configuration, identities, every file's size and sha256
        LATEST                the newest one's name, for people and scripts
        .tmp-step-00000150/   a save in progress, or what a kill left of one
        .bad-step-00000120/   a checkpoint that a resume refused

A save writes into `.tmp-*`; each rank hashes and fsyncs its files; rank 0 writes the manifest, fsyncs, renames, fsyncs
the parent. So a kill at any moment leaves either the new directory whole or the ones before it untouched.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoGPT.data import sha256_of
from nanoGPT.exits import ConfigError, SaveError

if TYPE_CHECKING:
    from nanoGPT.runtime import Runtime

Manifest = dict[str, Any]


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
    """All `step-*` directories of a run, newest first."""
    return sorted((p for p in (out_dir / "checkpoints").glob("step-*") if p.is_dir()), reverse=True)


def manifests(out_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Every checkpoint whose manifest can be read, newest first; its files are not verified."""
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
        Damaged: it is absent, incomplete or not as it was written, to the byte.
    """
    try:
        text = (path / "manifest.json").read_text()
        manifest = json.loads(text)
    except OSError:
        raise Damaged("it has no manifest.json, so its save never ended") from None
    except ValueError:
        raise Damaged("its manifest.json is not JSON") from None
    if not isinstance(manifest, dict) or seal(manifest) != text:
        raise Damaged("its manifest.json was changed after it was written")
    return manifest


def verify_files(path: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Hash every `shares`-th file of a checkpoint, so that ranks can divide the work.

    Raises:
        Damaged: a file is missing, or its size or sha256 differs.
    """
    for file in manifest["files"][share::shares]:
        target = path / file["name"]
        if not target.is_file():
            raise Damaged(f"{file['name']} is missing")
        if (size := target.stat().st_size) != file["size"]:
            raise Damaged(f"{file['name']} has {size:,} bytes where {file['size']:,} were written")
        if sha256_of(target) != file["sha256"]:
            raise Damaged(f"the sha256 of {file['name']} differs from the manifest's")


def check_out_dir(out_dir: Path, resume: bool) -> None:
    """Refuse an out_dir that cannot be written, that has nothing to resume, or whose checkpoints are in the way."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        probe = out_dir / f".tmp-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--out_dir={out_dir} cannot be written ({error.strerror}): choose a directory of yours"
        ) from None
    there = step_directories(out_dir)
    if resume and not there:
        raise ConfigError(f"there is no checkpoint under {out_dir} to resume: give the --out_dir of an earlier run")
    if there and not resume:
        raise ConfigError(
            f"{out_dir} holds checkpoints up to {there[0].name}: continue with --init_from=resume, "
            "or choose another --out_dir"
        )


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


class CheckpointDirectory:
    """`out_dir/checkpoints` of one run. Every method is collective: all ranks call it, in the same order.

    Args:
        out_dir: the run's directory, on a file system that every rank sees.
        run: this rank's Runtime.
        keep: how many of the newest checkpoints stay.

    Raises:
        ConfigError: some rank does not see what rank 0 writes.
    """

    def __init__(self, out_dir: str, run: "Runtime", keep: int) -> None:
        self.root, self.run, self.keep = Path(out_dir) / "checkpoints", run, keep
        self._on_main(lambda: self.root.mkdir(exist_ok=True))
        self._check_shared()

    def _check_shared(self) -> None:
        token = self.run.gather(os.urandom(8).hex())[0]
        probe = self.root / ".tmp-shared"
        self._on_main(lambda: probe.write_text(token))
        sees = probe.is_file() and probe.read_text() == token
        blind = [rank for rank, seen in enumerate(self.run.gather(sees)) if not seen]
        self._on_main(probe.unlink)
        if blind:
            raise ConfigError(
                f"ranks {blind} do not see the file that rank 0 wrote into {self.root}: "
                "give an --out_dir on a file system that all nodes share"
            )

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is whole. Each one passed over is named with the reason and set aside.

        Raises:
            ConfigError: there is none.
        """
        names = self.run.gather([p.name for p in step_directories(self.root.parent)])[0]
        for name in names:
            path = self.root / name
            try:
                manifest = read_manifest(path)
                verify_files(path, manifest, self.run.rank, self.run.world_size)
                damage = None
            except Damaged as reason:
                damage = str(reason)
            found = [d for d in self.run.gather(damage) if d]
            if not found:
                return Checkpoint(path, manifest)
            aside = self._free_name(f".bad-{name}")
            self.run.say(f"skipping {name}: {found[0]} (kept as {aside.name})")
            self._on_main(lambda path=path, aside=aside: path.rename(aside))  # type: ignore[misc]
        raise ConfigError(f"no checkpoint under {self.root} can be used: start again with another --out_dir")

    def _free_name(self, name: str) -> Path:
        taken = [p.name for p in self.root.iterdir()]
        names = [name, *(f"{name}.{i}" for i in range(2, len(taken) + 3))]
        return self.root / next(n for n in names if n not in taken)

    def save(self, step: int, write: Callable[[Path], list[Path]], about: Manifest) -> Path:
        """Save a checkpoint; one of the same step that is there already stays as it is.

        Args:
            step: updates done.
            write: called on every rank with the directory to write into; returns the files that this rank wrote.
            about: what the manifest says besides step, world size, versions and files.

        Raises:
            SaveError: some rank could not write; nothing of this step is left, all earlier checkpoints are.
        """
        final = self.root / f"step-{step:08d}"
        if self.run.gather(final.exists())[0]:
            return final
        temporary = self.root / f".tmp-{final.name}"
        self._on_main(lambda: self._begin(temporary), temporary)
        records = self._on_all(lambda: [record(path, temporary) for path in write(temporary)], temporary)
        files = sorted((file for each in records for file in each), key=lambda file: file["name"])
        manifest = {**about, "step": step, "world_size": self.run.world_size, "versions": versions(), "files": files}
        self._on_main(lambda: self._publish(temporary, final, manifest), temporary)
        self.run.say(f"saved {final}")
        return final

    def _begin(self, temporary: Path) -> None:
        for stale in self.root.glob(".tmp-*"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        write_and_sync(temporary / "manifest.json", seal(manifest))
        sync(temporary)
        temporary.rename(final)
        sync(self.root)
        with contextlib.suppress(OSError):  # the checkpoint is there, whatever becomes of its signpost
            write_and_sync(self.root / ".tmp-LATEST", final.name + "\n")
            os.replace(self.root / ".tmp-LATEST", self.root / "LATEST")
        self._retain()

    def _retain(self) -> None:
        """Delete what is older than the `keep` newest checkpoints whose manifest and sizes hold."""
        whole = 0
        for path in step_directories(self.root.parent):
            if whole >= self.keep:
                with contextlib.suppress(OSError):
                    gone = path.rename(self.root / f".tmp-old-{path.name}")  # never a half-deleted step-*
                    shutil.rmtree(gone)
                continue
            with contextlib.suppress(Damaged, OSError):
                manifest = read_manifest(path)
                whole += all((path / f["name"]).stat().st_size == f["size"] for f in manifest["files"])

    def _on_main(self, work: Callable[[], Any], temporary: Path | None = None) -> None:
        self._on_all(lambda: work() if self.run.is_main else None, temporary)

    def _on_all(self, work: Callable[[], Any], temporary: Path | None = None) -> list[Any]:
        """Do work on every rank; if it fails on any, raise on all.

        Raises:
            SaveError: within a save; its temporary directory is gone.
            ConfigError: outside of one.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = describe(error, self.root)
        outcomes = self.run.gather((result, failure))
        failures = [(rank, why) for rank, (_, why) in enumerate(outcomes) if why]
        if failures:
            if temporary and self.run.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            rank, why = failures[0]
            if temporary is None:
                raise ConfigError(f"{self.root} cannot be used ({why}): mend it, or choose another --out_dir")
            what = temporary.name.removeprefix(".tmp-")
            raise SaveError(f"{what} was not saved: rank {rank}: {why}; earlier checkpoints stand, resume from them")
        return [result for result, _ in outcomes]


def describe(error: Exception, folder: Path) -> str:
    """Why a write failed; torch's writer hides a full disk behind a RuntimeError."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    with contextlib.suppress(OSError):
        full = full or shutil.disk_usage(folder).free < 1 << 20
    if full:
        return f"the disk of {folder} is full: free some space"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def record(path: Path, folder: Path) -> dict[str, Any]:
    """Flush a written file to the disk; its entry in the manifest."""
    sync(path)
    return {"name": str(path.relative_to(folder)), "size": path.stat().st_size, "sha256": sha256_of(path)}


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
