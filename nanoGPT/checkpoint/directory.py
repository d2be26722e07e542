"""The checkpoint directory of a run. Every checkpoint is written atomically.

    out_dir/checkpoints/
        step-00000100/        the checkpoint after 100 updates
            <payload>         depends on the phase: ckpt.pt, or one file per rank
            manifest.json     written last: step, configuration, data, and the size and hash of every file
        LATEST                the name of the newest checkpoint, for people and scripts
        .tmp-step-00000150/   a save in progress, or the files of a save that was killed
        .bad-step-00000120/   a damaged checkpoint that a resume has skipped
        .newer-step-00000140/ a checkpoint after the one that --resume_step has chosen

A save writes into `.tmp-*`. Each rank hashes and fsyncs its files. Rank 0 then writes the manifest, fsyncs, renames the
directory, and fsyncs the parent directory. A kill at any moment therefore leaves either a complete new checkpoint, or
the previous checkpoints unchanged. At the end of a save, rank 0 deletes old checkpoints.
"""

import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanoGPT.checkpoint.manifest import (
    Checkpoint,
    DamagedCheckpoint,
    Manifest,
    NewFiles,
    find_checkpoint,
    fsync_path,
    read_manifest,
    serialize_manifest,
    step_directories,
)
from nanoGPT.distributed.environment import collect_versions
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, RunError, SaveError
from nanoGPT.files import (
    ensure_locked_directory,
    is_in_place,
    is_present,
    remove,
    size_of,
    unique_name,
    write_atomically,
)
from nanoGPT.train_config import StepChoice


class CheckpointDirectory:
    """The checkpoints of one run. All methods are collective: all ranks call them in the same order.

    Args:
        out_dir: the run's directory, on a file system that all ranks share.
        run: this rank's Runtime.
        keep_checkpoints: number of newest checkpoints to keep; the one with the best validation loss is kept too.
        reads_only: rename no checkpoint; `save` is not called.

    Raises:
        ConfigError: a rank cannot see a file that rank 0 writes.
    """

    def __init__(self, out_dir: str, run: Runtime, keep_checkpoints: int, reads_only: bool = False) -> None:
        self.root, self.keep_checkpoints, self.reads_only = Path(out_dir) / "checkpoints", keep_checkpoints, reads_only
        self.run = run.with_own_group()  # a save in another thread must not interfere with collectives of the training
        self.chosen_step: float = math.inf  # by --resume_step, until the first save
        self.saved_or_resumed_steps: set[int] = set()
        self.last_save = time.monotonic()  # or the start of the run
        self.run.call_on_rank0(lambda: self.root.mkdir(exist_ok=True))
        self._check_shared()

    def _check_shared(self) -> None:
        probe = self.root / self.run.gather(unique_name("shared"))[0]
        self.run.call_on_rank0(probe.touch)
        missing = [rank for rank, is_seen in enumerate(self.run.call_on_all(lambda: is_present(probe))) if not is_seen]
        self.run.call_on_rank0(probe.unlink)
        if missing:
            raise ConfigError(
                f"ranks {missing} do not see the file that rank 0 wrote into {self.root}: "
                "use an --out_dir on a file system that all nodes share"
            )

    def find(self, step: StepChoice = None) -> Checkpoint:
        """Return the newest complete checkpoint. Rename newer, damaged ones to `.bad-*`, and print the reasons.

        Args:
            step: return the checkpoint of this step, or the best one, instead. The first `save` renames newer ones to
                `.newer-*`.

        Raises:
            ConfigError: there is no complete checkpoint, or one could not be read. An unreadable one is not renamed.
        """
        checkpoint = find_checkpoint(
            self.root.parent, self.run, step, None if self.reads_only else self._set_damaged_aside
        )
        self.saved_or_resumed_steps.add(checkpoint.step)
        self.chosen_step = math.inf if step is None else checkpoint.step
        return checkpoint

    def _set_damaged_aside(self, path: Path, reason: str) -> None:
        """Rename a damaged checkpoint, so that its step can be saved again. Collective."""
        self.run.call_on_rank0(lambda: self._set_aside(path, ".bad", f"skipping {path.name}: {reason}"))

    def _set_aside(self, path: Path, prefix: str, reason: str) -> None:
        """Rename a checkpoint that this run does not use, and print the reason."""
        names = (f"{prefix}-{path.name}" + (f".{i}" if i > 1 else "") for i in itertools.count(1))
        new_path = next(self.root / name for name in names if not is_present(self.root / name))
        path.rename(new_path)
        self.run.print0(f"{reason} (kept as {new_path.name})")

    def is_save_due(self, minutes: float) -> bool:
        """Return whether this rank requests a save. On rank 0, a save is due `minutes` after the last one; 0: never."""
        return self.run.is_main and minutes > 0 and time.monotonic() - self.last_save >= 60 * minutes

    def save(self, step: int, write: Callable[[NewFiles], None], fields: Manifest) -> Path:
        """Save a checkpoint, and return its path. If this run has already saved this step, only update its manifest.

        Args:
            step: number of completed updates.
            write: called on every rank; writes this rank's files.
            fields: the fields of the manifest other than step, world size, versions and files.

        Raises:
            SaveError: a rank could not write, or the directory now belongs to another run. Nothing of the failed step
                remains; all earlier checkpoints do.
        """
        final, is_saved = self.prepare_save(step, fields)
        if not is_saved:
            self.write_checkpoint(final, step, write, fields)
        return final

    def prepare_save(self, step: int, fields: Manifest) -> tuple[Path, bool]:
        """Prepare a save: set aside what is newer than --resume_step, or update the manifest if the step is saved.

        Returns:
            The path of the checkpoint, and whether this run has already saved this step.

        Raises:
            SaveError: as `save`.
        """
        self.last_save = time.monotonic()
        final = self.root / f"step-{step:08d}"
        with self.raise_save_error(final):
            is_saved = self.run.call_on_rank0(lambda: self._prepare_directory(step, final, fields))
        self.chosen_step = math.inf
        self.saved_or_resumed_steps.add(step)
        return final, is_saved

    def _prepare_directory(self, step: int, final: Path, fields: Manifest) -> bool:
        """Set checkpoints aside that are newer than --resume_step. Return whether this run has already saved this step.

        A signal may have saved the step before its evaluation, so the best validation loss in its manifest is updated.
        The directory is created again if it was deleted or moved away.

        Raises:
            ConfigError: the directory, or the checkpoint of this step, belongs to another run.
            DamagedCheckpoint: the manifest of this step is damaged.
        """
        if self.run.lock:
            self.run.lock = ensure_locked_directory(self.run.lock)
        self.root.mkdir(exist_ok=True)
        for path in step_directories(self.root.parent):
            if int(path.name[5:]) > self.chosen_step:
                self._set_aside(path, ".newer", f"{path.name} is newer than --resume_step")
        if not is_present(final):
            return False
        if step not in self.saved_or_resumed_steps:
            raise ConfigError(f"{final.name} already exists, written by another run: choose another --out_dir")
        manifest = read_manifest(final)
        updated = manifest | {name: fields[name] for name in ("best_val_loss", "best_step") if name in fields}
        if updated != manifest:
            write_atomically(final / "manifest.json", serialize_manifest(updated).encode())
            fsync_path(final)
        return True

    def write_checkpoint(self, final: Path, step: int, write: Callable[[NewFiles], None], fields: Manifest) -> None:
        """Write a new checkpoint at `final`, the path from `prepare_save`. All ranks may call it in another thread.

        Raises:
            SaveError: as `save`.
        """
        temporary = self.root / f".tmp-{final.name}"
        new_files = NewFiles(temporary, self.run.group, self.run.report_progress)

        def write_files() -> list[dict[str, Any]]:
            try:
                write(new_files)
            except Exception:  # torch's writer reports a full disk as a RuntimeError without this reason
                if shutil.disk_usage(self.root).free < 1 << 20:
                    raise ConfigError(f"the disk of {self.root} is full: free some space") from None
                raise
            return new_files.records()

        with self.raise_save_error(final, temporary):
            self.run.call_on_rank0(lambda: self._create_temporary(temporary))
            records = self.run.call_on_all(write_files)
            files = sorted((file for each in records for file in each), key=lambda file: file["name"])
            manifest = {**fields, "step": step, "files": files, "versions": collect_versions()}
            manifest |= {"run": self.run.token, "world_size": self.run.world_size, "saved_at": time.time()}
            self.run.call_on_rank0(lambda: self._publish(temporary, final, manifest))
        self.run.print0(f"saved {final}")
        if self.run.is_main:
            self._delete_old()

    @contextlib.contextmanager
    def raise_save_error(self, final: Path, temporary: Path | None = None) -> Iterator[None]:
        """Convert an error in a part of a save to a SaveError.

        Args:
            final: the checkpoint.
            temporary: the directory that this part writes, to be deleted after a failure.
        """
        try:
            yield
        except RunError as error:
            if temporary and self.run.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise SaveError(
                f"{final.name} was not saved: {error}; earlier checkpoints are unchanged, resume from them"
            ) from None

    def _create_temporary(self, temporary: Path) -> None:
        """Create the directory of a save, and delete those of earlier saves that were killed."""
        for stale in self.root.glob(".tmp-*"):
            with contextlib.suppress(OSError):  # on a network file system, a reader may still have a file open
                remove(stale)
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        """Write the manifest, and rename the directory to its final name."""
        write_atomically(temporary / "manifest.json", serialize_manifest(manifest).encode())
        fsync_path(temporary)
        temporary.rename(final)
        fsync_path(self.root)
        with contextlib.suppress(OSError):  # the checkpoint is complete, and a resume does not need LATEST
            write_atomically(self.root / "LATEST", f"{final.name}\n".encode())

    def _delete_old(self) -> None:
        """Delete every checkpoint that is older than the `keep_checkpoints` newest complete ones, except the best one.

        The manifest and the sizes of the files are checked. The hashes were computed when the files were written, and
        are not compared: reading a checkpoint again takes as long as a save. A checkpoint that cannot be read or
        deleted now is kept, and checked again after the next save. Nothing is deleted in the directory of another run.
        """
        complete: list[Manifest] = []
        old = []
        with contextlib.suppress(ConfigError, OSError):
            for path in step_directories(self.root.parent):
                if len(complete) >= self.keep_checkpoints:
                    old.append(path)
                    continue
                with contextlib.suppress(DamagedCheckpoint):
                    manifest = read_manifest(path)
                    if all(size_of(path / file["name"]) == file["size"] for file in manifest["files"]):
                        complete.append(manifest)
            for path in old:
                is_best = int(path.name[5:]) == complete[0].get("best_step")
                if not is_best and (not self.run.lock or is_in_place(self.run.lock)):
                    # A kill during the deletion must not leave an incomplete `step-*` directory.
                    remove(path.rename(self.root / f".tmp-old-{path.name}"))
