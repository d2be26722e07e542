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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoGPT.exits import ConfigError, PeerFailed, SaveError
from nanoGPT.manifest import (
    Checkpoint,
    Damaged,
    Manifest,
    NewFiles,
    read_manifest,
    seal,
    step_directories,
    sync,
    verify_files,
    versions,
    write_and_sync,
)

if TYPE_CHECKING:
    from nanoGPT.runtime import Runtime


def check_out_dir(out_dir: Path, resume: bool) -> None:
    """Refuse an out_dir that cannot be written, that has nothing to resume, or whose checkpoints are in the way."""
    there = step_directories(out_dir)
    if resume and not there:
        raise ConfigError(f"there is no checkpoint under {out_dir} to resume: give the --out_dir of an earlier run")
    if there and not resume:
        raise ConfigError(
            f"{out_dir} holds checkpoints up to {there[0].name}: continue with --init_from=resume, "
            "or choose another --out_dir"
        )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        probe = out_dir / f".tmp-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--out_dir={out_dir} cannot be written ({error.strerror}): choose a directory of yours"
        ) from None


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
        self.root, self.keep = Path(out_dir) / "checkpoints", keep
        self.run = run.apart()  # a save in the background must not meet the training's collectives
        self.saving: threading.Thread | None = None
        self.failure: BaseException | None = None
        run.at_end.append(self.drain)
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

    def save(
        self,
        step: int,
        write: Callable[[NewFiles], None],
        about: Manifest,
        copy: Callable[[], None] | None = None,
    ) -> Path:
        """Save a checkpoint; one of the same step that is there already stays as it is.

        Args:
            step: updates done.
            write: called on every rank; writes this rank's files.
            about: what the manifest says besides step, world size, versions and files.
            copy: called when no other save is under way, to copy what `write` will write; the writing then goes on in
                another thread, and what goes wrong there is raised by the next `save` or `drain`.

        Returns:
            Where the checkpoint is, or will be.

        Raises:
            SaveError: some rank could not write, now or in the background before; nothing of that step is left, all
                earlier checkpoints are.
        """
        self.drain()
        final = self.root / f"step-{step:08d}"
        if self.run.gather(final.exists())[0]:
            return final
        if copy:
            self._on_all(copy, self.root / f".tmp-{final.name}")
            self._beside(lambda: self._save(final, step, write, about), self._retain)
        else:
            self._save(final, step, write, about)
            self._beside(self._retain)
        return final

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
        mine = NewFiles(temporary, self.run.group, self.run.mark)
        written = self._on_all(lambda: (write(mine), mine.records())[1], temporary)  # type: ignore[func-returns-value]
        files = sorted((file for each in written for file in each), key=lambda file: file["name"])
        manifest = {**about, "step": step, "world_size": self.run.world_size, "versions": versions(), "files": files}
        self._on_main(lambda: self._publish(temporary, final, manifest), temporary)
        self.run.say(f"saved {final}")

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

    def _retain(self) -> None:
        """Delete what is older than the `keep` newest checkpoints whose manifest and sizes hold."""
        if not self.run.is_main:
            return
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
        except PeerFailed:
            pass
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
