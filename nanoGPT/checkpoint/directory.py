"""The checkpoint directory: a checkpoint is there whole, or not at all.

    out_dir/checkpoints/
        step-00000100/        after 100 updates
            <payload>         the phase's: ckpt.pt, or one file a rank
            manifest.json     written last: step, configuration, identities, every file's size and sha256
        LATEST                the newest one's name, for people and scripts
        .tmp-step-00000150/   a save in progress, or what a kill left of one
        .bad-step-00000120/   a checkpoint that a resume refused

A save writes into `.tmp-*`; each rank hashes and fsyncs its files; rank 0 writes the manifest, fsyncs, renames, fsyncs
the parent. So a kill at any moment leaves either the new directory whole or the ones before it untouched. What is too
old is then deleted in another thread, beside the training; so may the whole save be, and the training then only waits
where one is still under way.
"""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nanoGPT.checkpoint.manifest import (
    Checkpoint,
    Damaged,
    Manifest,
    read_manifest,
    seal,
    step_directories,
    verify_files,
    versions,
)
from nanoGPT.checkpoint.writer import NewFiles, sync, write_and_sync
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, PeerFailed, SaveError
from nanoGPT.files import is_present, remove, size_of, unique_name


class CheckpointDirectory:
    """`out_dir/checkpoints` of one run. Every method is collective: all ranks call it, in the same order.

    Args:
        out_dir: the run's directory, on a file system that every rank sees.
        run: this rank's Runtime.
        keep: how many of the newest checkpoints stay.

    Raises:
        ConfigError: some rank does not see what rank 0 writes.
    """

    def __init__(self, out_dir: str, run: Runtime, keep: int) -> None:
        self.root, self.keep = Path(out_dir) / "checkpoints", keep
        self.run = run.with_own_group()  # a save in the background must not meet the training's collectives
        self.saving: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.runs: set[str | None] = {
            run.token
        }  # whose checkpoints are this run's: its own, and those of the one that it resumes
        run.at_end.append(self.drain)
        self._on_main(lambda: self.root.mkdir(exist_ok=True))
        self._check_shared()

    def _check_shared(self) -> None:
        probe = self.root / self.run.gather(unique_name("shared"))[0]
        self._on_main(probe.touch)
        blind = [rank for rank, seen in enumerate(self._on_all(lambda: is_present(probe))) if not seen]
        self._on_main(probe.unlink)
        if blind:
            raise ConfigError(
                f"ranks {blind} do not see the file that rank 0 wrote into {self.root}: "
                "give an --out_dir on a file system that all nodes share"
            )

    def newest(self) -> Checkpoint:
        """Return the newest checkpoint that is complete. Each one passed over is renamed, and named with the reason.

        Raises:
            ConfigError: there is none; or one could not be read, and then nothing was renamed.
        """
        for name in self._on_all(lambda: [path.name for path in step_directories(self.root.parent)])[0]:
            path = self.root / name
            damage = [reason for reason in self._on_all(partial(self._damage, path)) if reason]
            if not damage:
                manifest = read_manifest(path)
                self.runs.add(manifest.get("run"))
                return Checkpoint(path, manifest)
            aside = self._free_name(f".bad-{name}")
            self.run.print0(f"skipping {name}: {damage[0]} (kept as {aside.name})")
            self._on_main(partial(path.rename, aside))
        raise ConfigError(f"no checkpoint under {self.root} can be used: start again with another --out_dir")

    def _damage(self, path: Path) -> str | None:
        """Return why a checkpoint must not be used, from this rank's share of its files; None if they hold."""
        try:
            verify_files(path, read_manifest(path), self.run.rank, self.run.world_size)
            return None
        except Damaged as reason:
            return str(reason)

    def _free_name(self, name: str) -> Path:
        taken = [p.name for p in self.root.iterdir()]
        names = [name, *(f"{name}.{i}" for i in range(2, len(taken) + 3))]
        return self.root / next(n for n in names if n not in taken)

    def save(
        self,
        step: int,
        write: Callable[[NewFiles], None],
        about: Manifest,
        copy: Callable[[], None] | None = None,
    ) -> Path:
        """Save a checkpoint; if this run has saved that step already, it stays as it is.

        Args:
            step: updates done.
            write: called on every rank; writes this rank's files.
            about: what the manifest says besides step, world size, versions and files.
            copy: called when no other save is under way, to copy what `write` will write; the writing then goes on in
                another thread, and what goes wrong there is raised by the next `save` or `drain`.

        Returns:
            Where the checkpoint is, or will be.

        Raises:
            SaveError: some rank could not write, now or in the background before, or the directory belongs to another
                run by now; nothing of that step is left, all earlier checkpoints are.
        """
        self.drain()
        final = self.root / f"step-{step:08d}"
        if self._on_all(lambda: self.run.is_main and self._is_saved(final), final)[0]:
            return final
        if copy:
            self._on_all(copy, self.root / f".tmp-{final.name}")
            self._beside(lambda: self._save(final, step, write, about), self._retain)
        else:
            self._save(final, step, write, about)
            self._beside(self._retain)
        return final

    def _is_saved(self, final: Path) -> bool:
        """Return whether this run has saved the step already.

        Raises:
            ConfigError: the directory, or the checkpoint of this step, is another run's.
        """
        self._keep_directory()
        if not is_present(final):
            return False
        try:
            whose = read_manifest(final).get("run")
        except Damaged as reason:
            raise ConfigError(f"{final.name} is there already, and {reason}: move it away") from None
        if whose not in self.runs:
            raise ConfigError(f"{final.name} is there already, written by another run: choose another --out_dir")
        return True

    def _keep_directory(self) -> None:
        """Check that the directory is still this run's.

        Raises:
            ConfigError: it is another run's.
        """
        if self.run.lock and (warning := self.run.lock.keep()):
            self.run.print0(warning)
        self.root.mkdir(exist_ok=True)

    def drain(self) -> None:
        """Wait for a save in the background, and for what is too old to be deleted. Collective.

        Raises:
            SaveError: the save failed.
        """
        if self.saving:
            self.saving.join()
        failure, self.saving, self.failure = self.failure, None, None
        if failure:
            raise failure

    def _beside(self, *works: Callable[[], None]) -> None:
        """Do works in another thread, beside the training; `drain` waits for them, and raises their failure."""

        def keep_failure() -> None:
            try:
                for work in works:
                    work()
            except BaseException as failure:
                self.failure = failure

        self.saving = threading.Thread(target=keep_failure)
        self.saving.start()

    def _save(self, final: Path, step: int, write: Callable[[NewFiles], None], about: Manifest) -> None:
        temporary = self.root / f".tmp-{final.name}"
        self._on_main(lambda: self._begin(temporary), temporary)
        mine = NewFiles(temporary, self.run.group, self.run.report_progress)
        written = self._on_all(lambda: (write(mine), mine.records())[1], temporary)  # type: ignore[func-returns-value]
        files = sorted((file for each in written for file in each), key=lambda file: file["name"])
        whose = {"run": self.run.token, "world_size": self.run.world_size, "versions": versions()}
        manifest = {**about, **whose, "step": step, "files": files}
        self._on_main(lambda: self._publish(temporary, final, manifest), temporary)
        self.run.print0(f"saved {final}")

    def _begin(self, temporary: Path) -> None:
        for stale in self.root.glob(".tmp-*"):
            with contextlib.suppress(OSError):  # a reader may hold a file open on a network file system
                remove(stale)
        temporary.mkdir()

    def _publish(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        write_and_sync(temporary / "manifest.json", seal(manifest))
        sync(temporary)
        temporary.rename(final)
        sync(self.root)
        with contextlib.suppress(OSError):  # the checkpoint is there, whatever becomes of its signpost
            write_and_sync(self.root / ".tmp-LATEST", final.name + "\n")
            os.replace(self.root / ".tmp-LATEST", self.root / "LATEST")

    def _retain(self) -> None:
        """Delete what is older than the `keep` newest checkpoints whose manifest and sizes hold.

        A checkpoint that cannot be read or deleted now is kept, and looked at again after the next save.
        """
        if not self.run.is_main:
            return
        whole = 0
        with contextlib.suppress(ConfigError):
            for path in step_directories(self.root.parent):
                if whole >= self.keep:
                    self._delete(path)
                    continue
                with contextlib.suppress(Damaged):
                    manifest = read_manifest(path)
                    whole += all(size_of(path / f["name"]) == f["size"] for f in manifest["files"])

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint, unless the directory has become another run's; never leave half of one behind."""
        with contextlib.suppress(OSError):
            if not self.run.lock or self.run.lock.is_ours():
                remove(path.rename(self.root / f".tmp-old-{path.name}"))

    def _on_main(self, work: Callable[[], Any], saving: Path | None = None) -> None:
        self._on_all(lambda: work() if self.run.is_main else None, saving)

    def _on_all(self, work: Callable[[], Any], saving: Path | None = None) -> list[Any]:
        """Do work on every rank; if it fails on any, raise on all.

        Args:
            work: returns a small picklable value.
            saving: within a save, the directory that it writes; a temporary one is deleted after a failure.

        Returns:
            What each rank returned, in rank order.

        Raises:
            SaveError: within a save.
            ConfigError: outside of one.
        """
        result, failure = None, None
        try:
            result = work()
        except PeerFailed:
            pass
        except Exception as error:
            failure = describe(error, self.root)
        outcomes = self.run.gather((result, failure))
        failures = [(rank, why) for rank, (_, why) in enumerate(outcomes) if why]
        if failures:
            rank, why = failures[0]
            if saving is None:
                raise ConfigError(why)
            if self.run.is_main and saving.name.startswith(".tmp-"):
                shutil.rmtree(saving, ignore_errors=True)
            what = saving.name.removeprefix(".tmp-")
            raise SaveError(f"{what} was not saved: rank {rank}: {why}; earlier checkpoints stand, resume from them")
        return [result for result, _ in outcomes]


def describe(error: Exception, folder: Path) -> str:
    """Return why a read or a write below `folder` failed; torch's writer hides a full disk behind a RuntimeError."""
    if isinstance(error, ConfigError):
        return str(error)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    with contextlib.suppress(OSError):
        full = full or shutil.disk_usage(folder).free < 1 << 20
    if full:
        return f"the disk of {folder} is full: free some space"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{folder} cannot be used ({type(error).__name__}: {reason}): fix it, or choose another --out_dir"
