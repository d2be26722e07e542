"""The checkpoint directory of a run. Every checkpoint is written atomically.

    out_dir/checkpoints/
        step-00000100/        the checkpoint after 100 updates
            <payload>         depends on the phase: ckpt.pt, or one file per rank
            manifest.json     written last: step, configuration, data, and the size and hash of every file
        LATEST                the name of the newest checkpoint, for people and scripts
        .tmp-step-00000150/   a save in progress, or the files of a save that was killed
        .bad-step-00000120/   a damaged checkpoint that a resume has skipped

A save writes into `.tmp-*`. Each rank hashes and fsyncs its files. Rank 0 then writes the manifest, fsyncs, renames the
directory, and fsyncs the parent directory. A kill at any moment therefore leaves either a complete new checkpoint, or
the previous checkpoints unchanged. Old checkpoints are then deleted in another thread, while training continues. With
an asynchronous save, this thread also writes the checkpoint; training waits only if the previous save is not complete.
"""

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoGPT.checkpoint.hashed_files import NewFiles, fsync_path, write_and_sync
from nanoGPT.checkpoint.manifest import (
    Checkpoint,
    DamagedCheckpoint,
    Manifest,
    choose_step,
    find_best,
    read_manifest,
    serialize_manifest,
    step_directories,
    verify_files,
)
from nanoGPT.distributed.environment import collect_versions
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, PeerFailed, SaveError
from nanoGPT.files import is_present, remove, size_of, unique_name
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
        self.run = run.with_own_group()  # an asynchronous save must not interfere with collectives of the training
        self.save_thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.newer: list[Path] = []  # the checkpoints that are newer than --resume_step
        self.last_save = time.monotonic()  # or the start of the run
        self.own_tokens: set[str | None] = {run.token}  # of this run, and of the run that it resumes
        run.end_callbacks.append(self.drain)
        self._run_on_main(lambda: self.root.mkdir(exist_ok=True))
        self._check_shared()

    def _check_shared(self) -> None:
        probe = self.root / self.run.gather(unique_name("shared"))[0]
        self._run_on_main(probe.touch)
        is_visible = self._run_on_all(lambda: is_present(probe))
        missing = [rank for rank in range(self.run.world_size) if not is_visible[rank]]
        self._run_on_main(probe.unlink)
        if missing:
            raise ConfigError(
                f"ranks {missing} do not see the file that rank 0 wrote into {self.root}: "
                "use an --out_dir on a file system that all nodes share"
            )

    def find_newest(self, step: StepChoice = None) -> Checkpoint:
        """Return the newest complete checkpoint. Rename newer, damaged ones to `.bad-*`, and print the reasons.

        Args:
            step: return the checkpoint of this step, or the best one, instead. The first `save` renames newer ones to
                `.newer-*`.

        Raises:
            ConfigError: there is no complete checkpoint, or one could not be read. An unreadable one is not renamed.
        """
        paths = self._run_on_all(lambda: step_directories(self.root.parent))[0]
        if step is not None:
            return self._open_step(self._run_on_all(lambda: choose_step(self.root.parent, step))[0], paths)
        for path in paths:
            if not (reason := self._find_damage_on_all(path)):
                return self._open(path)
            self._set_aside(path, f".bad-{path.name}", f"skipping {path.name}: {reason}")
        raise ConfigError(f"no checkpoint under {self.root} can be used: start a new run with another --out_dir")

    def _open_step(self, wanted: Path, paths: list[Path]) -> Checkpoint:
        """Return the checkpoint of one step. The first save sets all newer ones aside, to save their steps again."""
        if reason := self._find_damage_on_all(wanted):
            raise ConfigError(f"{wanted} is damaged ({reason}): choose another --resume_step")
        self.newer = paths[: paths.index(wanted)]
        return self._open(wanted)

    def _open(self, path: Path) -> Checkpoint:
        """Return a verified checkpoint, which this run continues."""
        manifest = read_manifest(path)
        self.own_tokens.add(manifest.get("run"))
        return Checkpoint(path, manifest)

    def _set_aside(self, path: Path, new_name: str, reason: str) -> None:
        """Rename a checkpoint that this run does not use, and print the reason. Collective."""

        def rename() -> None:
            new_path = self._find_free_path(new_name)
            path.rename(new_path)
            self.run.print0(f"{reason} (kept as {new_path.name})")

        if self.reads_only:
            self.run.print0(reason)
        else:
            self._run_on_main(rename)

    def _find_damage_on_all(self, path: Path) -> str | None:
        """Return what is damaged in a checkpoint, whose files are divided among the ranks; None if nothing is."""
        return next((reason for reason in self._run_on_all(partial(self._find_damage, path)) if reason), None)

    def _find_damage(self, path: Path) -> str | None:
        """Verify this rank's part of a checkpoint's files.

        Returns:
            What is damaged; None if nothing is.
        """
        try:
            verify_files(path, read_manifest(path), self.run.rank, self.run.world_size)
            return None
        except DamagedCheckpoint as reason:
            return str(reason)

    def _find_free_path(self, name: str) -> Path:
        existing = [p.name for p in self.root.iterdir()]
        names = [name, *(f"{name}.{i}" for i in range(2, len(existing) + 3))]
        return self.root / next(n for n in names if n not in existing)

    def is_save_due(self, minutes: float) -> bool:
        """Return whether this rank requests a save. On rank 0, a save is due `minutes` after the last one.

        A rank whose asynchronous save has failed also requests one: `save` then raises the failure on all ranks, before
        more work is lost.

        Args:
            minutes: time between two saves; 0 turns these saves off.
        """
        if self.failure:
            return True
        return self.run.is_main and minutes > 0 and time.monotonic() - self.last_save >= 60 * minutes

    def save(
        self,
        step: int,
        write: Callable[[NewFiles], None],
        fields: Manifest,
        copy: Callable[[], None] | None = None,
    ) -> Path:
        """Save a checkpoint. If this run has already saved this step, only update its best validation loss.

        Args:
            step: number of completed updates.
            write: called on every rank; writes this rank's files.
            fields: the fields of the manifest other than step, world size, versions and files.
            copy: None for a synchronous save. For an asynchronous save, copies the data that `write` will write; it is
                called when the previous save is complete. Another thread then calls `write`, and the next `save` or
                `drain` raises the errors of this thread.

        Returns:
            The path of the checkpoint, which an asynchronous save creates later.

        Raises:
            SaveError: a rank could not write, in this save or in an asynchronous save before it, or the directory now
                belongs to another run. Nothing of the failed step remains; all earlier checkpoints do.
        """
        self.drain()
        self.last_save = time.monotonic()
        for path in self.newer:
            self._set_aside(path, f".newer-{path.name}", f"{path.name} is newer than --resume_step")
        self.newer = []
        final = self.root / f"step-{step:08d}"
        if self._run_on_all(lambda: self.run.is_main and self._update_if_saved(final, fields), final)[0]:
            return final
        if copy:
            self._run_on_all(copy, self.root / f".tmp-{final.name}")
            self._run_in_background(lambda: self._save(final, step, write, fields), self._delete_old)
        else:
            self._save(final, step, write, fields)
            self._run_in_background(self._delete_old)
        return final

    def _update_if_saved(self, final: Path, fields: Manifest) -> bool:
        """Return whether this run has already saved the step. If so, update its best validation loss.

        A signal may have saved the step before its evaluation.

        Raises:
            ConfigError: the directory, or the checkpoint of this step, belongs to another run.
        """
        self._ensure_directory()
        if not is_present(final):
            return False
        try:
            manifest = read_manifest(final)
        except DamagedCheckpoint as reason:
            raise ConfigError(f"{final.name} already exists, and {reason}: move it away") from None
        if manifest.get("run") not in self.own_tokens:
            raise ConfigError(f"{final.name} already exists, written by another run: choose another --out_dir")
        best = {"best_val_loss": fields["best_val_loss"]} if "best_val_loss" in fields else {}
        if manifest != (updated := {**manifest, **best}):
            write_and_sync(self.root / ".tmp-manifest", serialize_manifest(updated))
            os.replace(self.root / ".tmp-manifest", final / "manifest.json")
            fsync_path(final)
        return True

    def _ensure_directory(self) -> None:
        """Check that the directory still belongs to this run. Create it again if it was deleted or moved away.

        Raises:
            ConfigError: it belongs to another run.
        """
        if self.run.lock and (warning := self.run.lock.ensure_directory()):
            self.run.print0(warning)
        self.root.mkdir(exist_ok=True)

    def drain(self) -> None:
        """Wait until an asynchronous save is complete and old checkpoints are deleted. Collective.

        Raises:
            SaveError: the save failed.
        """
        if self.save_thread:
            self.save_thread.join()
        failure, self.save_thread, self.failure = self.failure, None, None
        if failure:
            raise failure

    def _run_in_background(self, *tasks: Callable[[], None]) -> None:
        """Run tasks in another thread, while training continues. `drain` waits for them, and raises their failure."""

        def store_failure() -> None:
            try:
                if self.run.device.type == "cuda":  # a new thread would use GPU 0, and create a context on it
                    torch.cuda.set_device(self.run.device)
                for task in tasks:
                    task()
            except BaseException as failure:
                self.failure = failure

        self.save_thread = threading.Thread(target=store_failure)
        self.save_thread.start()

    def _save(self, final: Path, step: int, write: Callable[[NewFiles], None], fields: Manifest) -> None:
        temporary = self.root / f".tmp-{final.name}"
        self._run_on_main(lambda: self._create_temporary(temporary), temporary)
        new_files = NewFiles(temporary, self.run.group, self.run.report_progress)

        def write_files() -> list[dict[str, Any]]:
            write(new_files)
            return new_files.records()

        records = self._run_on_all(write_files, temporary)
        files = sorted((file for each in records for file in each), key=lambda file: file["name"])
        environment = {"run": self.run.token, "world_size": self.run.world_size, "versions": collect_versions()}
        manifest = {**fields, **environment, "step": step, "files": files}
        self._run_on_main(lambda: self._publish(temporary, final, manifest), temporary)
        self.run.print0(f"saved {final}")

    def _create_temporary(self, temporary: Path) -> None:
        """Create the directory of a save, and delete those of earlier saves that were killed."""
        for stale in self.root.glob(".tmp-*"):
            with contextlib.suppress(OSError):  # on a network file system, a reader may still have a file open
                remove(stale)
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        """Write the manifest, and rename the directory to its final name."""
        write_and_sync(temporary / "manifest.json", serialize_manifest(manifest))
        fsync_path(temporary)
        temporary.rename(final)
        fsync_path(self.root)
        with contextlib.suppress(OSError):  # the checkpoint is complete, and a resume does not need LATEST
            write_and_sync(self.root / ".tmp-LATEST", final.name + "\n")
            os.replace(self.root / ".tmp-LATEST", self.root / "LATEST")

    def _delete_old(self) -> None:
        """Delete every checkpoint that is older than the `keep_checkpoints` newest complete ones, except the best one.

        The manifest and the sizes of the files are checked. The hashes were computed when the files were written, and
        are not compared: reading a checkpoint again takes as long as a save. A checkpoint that cannot be read or
        deleted now is kept, and checked again after the next save.
        """
        if not self.run.is_main:
            return
        complete: list[Manifest] = []
        old = []
        with contextlib.suppress(ConfigError):
            for path in step_directories(self.root.parent):
                if len(complete) >= self.keep_checkpoints:
                    old.append(path)
                    continue
                with contextlib.suppress(DamagedCheckpoint):
                    manifest = read_manifest(path)
                    if all(size_of(path / f["name"]) == f["size"] for f in manifest["files"]):
                        complete.append(manifest)
            best = find_best(old, complete[0].get("best_val_loss")) if old else None
            for path in old:
                if path != best:
                    self._delete(path)

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint, unless the directory now belongs to another run. Rename it first: a kill during the
        deletion must not leave an incomplete `step-*` directory."""
        with contextlib.suppress(OSError):
            if not self.run.lock or self.run.lock.is_ours():
                remove(path.rename(self.root / f".tmp-old-{path.name}"))

    def _run_on_main(self, task: Callable[[], Any], save_path: Path | None = None) -> None:
        """Run a task on rank 0; if it fails, raise on all ranks."""
        self._run_on_all(lambda: task() if self.run.is_main else None, save_path)

    def _run_on_all(self, task: Callable[[], Any], save_path: Path | None = None) -> list[Any]:
        """Run a task on every rank; if it fails on any rank, raise on all.

        Args:
            task: returns a small picklable value.
            save_path: in a save, the directory that it writes. A temporary directory is deleted after a failure.

        Returns:
            The result of each rank, in rank order.

        Raises:
            SaveError: the task failed in a save.
            ConfigError: the task failed elsewhere.
        """
        result, failure = None, None
        try:
            result = task()
        except PeerFailed:
            pass
        except Exception as error:
            failure = describe_failure(error, self.root)
        outcomes = self.run.gather((result, failure))
        failures = [(rank, reason) for rank, (_, reason) in enumerate(outcomes) if reason]
        if failures:
            rank, reason = failures[0]
            if save_path is None:
                raise ConfigError(reason)
            if self.run.is_main and save_path.name.startswith(".tmp-"):
                shutil.rmtree(save_path, ignore_errors=True)
            name = save_path.name.removeprefix(".tmp-")
            raise SaveError(
                f"{name} was not saved: rank {rank}: {reason}; earlier checkpoints are unchanged, resume from them"
            )
        return [result for result, _ in outcomes]


def describe_failure(error: Exception, folder: Path) -> str:
    """Return why a read or a write below `folder` failed.

    torch's writer reports a full disk as a RuntimeError, so the free space is checked too.
    """
    if isinstance(error, ConfigError):
        return str(error)
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    with contextlib.suppress(OSError):
        is_full = is_full or shutil.disk_usage(folder).free < 1 << 20
    if is_full:
        return f"the disk of {folder} is full: free some space"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{folder} cannot be used ({type(error).__name__}: {reason}): fix this, or choose another --out_dir"
