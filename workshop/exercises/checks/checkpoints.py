"""Checks of the exercises on checkpoints."""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from nanoGPT.checkpoint import directory as directories
from nanoGPT.checkpoint.manifest import DamagedCheckpoint
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError, RunError
from nanoGPT.files import sha256_of
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import shared_folder

NEW = b"new " * 1000


@contextlib.contextmanager
def record_calls(*names: str) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Record the calls of functions of `os`, in order."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    originals = {name: getattr(os, name) for name in names}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def check_atomic_write(answer: ModuleType, _: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        path.write_bytes(b"old")
        with record_calls("fsync", "replace", "rename", "unlink", "remove") as calls:
            contents: list[bytes] = []
            sizes: list[int] = []
            sync = os.fsync

            def read_and_sync(file: int) -> None:
                contents.append(path.read_bytes() if path.exists() else b"")
                sizes.append(os.fstat(file).st_size)
                sync(file)

            with mock.patch.object(os, "fsync", read_and_sync):
                answer.write_atomically(path, NEW)
        names = [name for name, _ in calls]
        expect(path.read_bytes() == NEW, "The file does not have the new content.")
        names = ["replace" if name == "rename" else name for name in names]
        renames = [args for name, args in calls if name in ("replace", "rename")]
        expect(
            bool(renames) and (contents[:1] != [NEW] or names.index("replace") < names.index("fsync")),
            "The content is written into the file itself. A kill in the middle leaves half a file, and the old "
            "content is lost: write into a temporary file, and rename it.",
        )
        expect(
            Path(renames[0][0]).parent == path.parent,
            "The temporary file is in another directory, which may be another file system: a rename is atomic only "
            "within one.",
        )
        expect(
            "fsync" in names and names.index("fsync") < names.index("replace"),
            "There is no fsync before the rename. After a power failure the new name could point to a file without "
            "content: flush the file, and call os.fsync on it before the rename.",
        )
        expect(
            sizes[0] == len(NEW),
            "os.fsync runs while the content is still in Python's buffer: call file.flush() before.",
        )
        deleted = [Path(args[0]) for name, args in calls if name in ("unlink", "remove")]
        expect(
            path not in deleted,
            "The old file is deleted before the rename. In between, a reader finds no file: os.replace replaces it.",
        )
        check_failed_write(answer, path)


def check_failed_write(answer: ModuleType, path: Path) -> None:
    """Check that a write to a full disk leaves the old file and nothing else."""
    error = OSError(errno.ENOSPC, "No space left on device")
    has_failed = False
    with mock.patch.object(os, "fsync", side_effect=error):
        try:
            answer.write_atomically(path, b"newer")
        except OSError:
            has_failed = True
    expect(has_failed, "A write to a full disk is reported as a success: let the OSError reach the caller.")
    expect(path.read_bytes() == NEW, "After a write that failed, the old content is lost.")
    left = [each.name for each in path.parent.iterdir()]
    expect(
        left == [path.name],
        f"After a write that failed, {left} are left: delete the temporary file in a finally block, or a full disk "
        "stays full.",
    )


def write_checkpoint(folder: Path) -> dict[str, Any]:
    """Write three files, and return their entries in a manifest."""
    files = []
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(name.encode() * 100)
        files.append({"name": name, "size": 100, "sha256": sha256_of(folder / name)})
    return {"files": files}


def find_damage(answer: ModuleType, folder: Path, manifest: dict[str, Any], *ranks: int) -> str:
    try:
        answer.verify_files(folder, manifest, *ranks)
    except DamagedCheckpoint as damage:
        return str(damage)
    return ""


def check_verification(answer: ModuleType, _: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write_checkpoint(folder)
        expect(find_damage(answer, folder, manifest) == "", "An undamaged checkpoint is rejected.")
        (folder / "b").write_bytes(b"b" * 50 + b"x" + b"b" * 49)
        damage = find_damage(answer, folder, manifest)
        expect(
            damage != "",
            "A flipped byte is not detected, because the size is still right: compare the hash of each file with "
            "the manifest's. Otherwise a run resumes with wrong weights and no error.",
        )
        expect(bool(re.search(r"\bb\b", damage)), f"The message {damage!r} does not name the damaged file: b.")
        found = [rank for rank in range(3) if find_damage(answer, folder, manifest, rank, 3)]
        expect(
            found == [1],
            f"Ranks {found} of 3 read the damaged file, but only rank 1 needs to. Every rank would read the full "
            "checkpoint: rank r verifies the files r, r + N, r + 2N, ...",
        )
        (folder / "b").write_bytes(b"b" * 99)
        expect(find_damage(answer, folder, manifest) != "", "A truncated file is not detected.")
        (folder / "b").unlink()
        try:
            damage = find_damage(answer, folder, manifest)
        except Exception:
            damage = ""
        expect(damage != "", "A missing file must raise DamagedCheckpoint, so that a resume tries an older checkpoint.")


@contextlib.contextmanager
def open_directory() -> Iterator[Any]:
    """Open a checkpoint directory of all ranks in a folder of rank 0."""
    run = create_runtime("cpu", "float32")
    with shared_folder() as folder:
        yield directories.CheckpointDirectory(str(folder), run, 3)


def check_publication(answer: ModuleType, _: Any) -> None:
    events: list[str] = []
    latest_is_writable = True
    with open_directory() as checkpoints:
        root: Path = checkpoints.root
        temporary, final = root / ".tmp-step-00000007", root / "step-00000007"
        temporary.mkdir()
        original_fsync = directories.fsync_path

        def write_atomically(path: Path, content: bytes) -> None:
            events.append(f"write {path.name}")
            if path.name == "LATEST" and not latest_is_writable:
                raise OSError(errno.ENOSPC, "No space left on device")
            path.write_bytes(content)

        def fsync_path(path: Path) -> None:
            events.append(f"fsync {path.name}")
            original_fsync(path)

        rename = os.rename

        def record_rename(source: Any, target: Any) -> None:
            events.append(f"rename {Path(source).name}")
            rename(source, target)

        replaced = {"write_atomically": write_atomically, "fsync_path": fsync_path}
        for name, function in replaced.items():
            setattr(directories, name, function)
            setattr(answer, name, function)
        with mock.patch.object(os, "rename", record_rename), mock.patch.object(os, "replace", record_rename):
            checkpoints._publish(temporary, final, {"step": 7})
        check_events(events, root)
        expect((final / "manifest.json").is_file(), "The final directory has no manifest.json.")
        latest = root / "LATEST"
        expect(
            latest.is_file() and latest.read_text().strip() == final.name, "LATEST does not name the new checkpoint."
        )
        temporary.mkdir()
        latest_is_writable, has_failed = False, False
        try:
            checkpoints._publish(temporary, root / "step-00000008", {"step": 8})
        except OSError:
            has_failed = True
        expect(
            not has_failed,
            "The save fails if LATEST cannot be written, although its checkpoint is complete: suppress this OSError.",
        )


def check_events(events: list[str], root: Path) -> None:
    """Check the order of the writes, renames and fsyncs of a publication."""
    order = ", then ".join(events)
    expect("rename .tmp-step-00000007" in events, f"The directory is not renamed. Your code did: {order}.")
    expect("write manifest.json" in events, f"The manifest is not written with write_atomically: {order}.")
    manifest, rename = (events.index(each) for each in ("write manifest.json", "rename .tmp-step-00000007"))
    expect(
        manifest < rename,
        f"The directory is renamed before its manifest is written: {order}. A kill between the two leaves a "
        "directory with the name of a complete checkpoint. The rename must be the last step.",
    )
    expect(
        "fsync .tmp-step-00000007" in events[manifest:rename],
        f"The temporary directory is not flushed between the manifest and the rename: {order}. After a power failure "
        "its files could be missing.",
    )
    expect(
        f"fsync {root.name}" in events[rename:],
        f"The parent directory is not flushed after the rename: {order}. After a power failure the checkpoint could "
        "have its old name.",
    )
    latest = next((i for i, event in enumerate(events) if "LATEST" in event), len(events))
    expect(latest > rename, f"LATEST names a checkpoint that does not exist yet: {order}.")


def check_shared_errors(answer: ModuleType, _: Any) -> None:
    run = create_runtime("cpu", "float32")
    results = run.call_on_all(lambda: dist.get_rank() * 10)
    expect(results == [0, 10], f"The results of the ranks are {results} instead of [0, 10], on every rank.")

    def fail_on_rank_1() -> None:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    message, gather = "", mock.Mock(wraps=run.gather)
    try:
        with mock.patch.object(run, "gather", gather):
            try:
                run.call_on_all(fail_on_rank_1)
            finally:
                expect(
                    gather.called,
                    f"Rank {dist.get_rank()} raises its error before it reaches self.gather, where the other rank "
                    "waits. Catch the error, exchange it with all ranks, and then raise it on every rank.",
                )
    except ConfigError as error:
        message = str(error)
    except RunError:
        expect(False, "Every rank raises a RunError for an OSError: convert it to a ConfigError.")
    except OSError:
        expect(
            False,
            "Rank 1 leaves with its own OSError, and rank 0 waits for it in the next collective. Catch the error, "
            "exchange it with all ranks, and then raise a ConfigError on every rank.",
        )
    expect(
        message != "",
        f"Rank {dist.get_rank()} continues after the failure of rank 1. All ranks must raise ConfigError, or the "
        "others wait in the next collective.",
    )
    expect("No space left" in message, f"The message {message!r} has no reason: quote_cause(error) returns it.")
    expect("rank 1" in message, f"The message {message!r} does not name the rank that failed.")
    for planted in (ValueError("wrong"), ConfigError("use another disk")):

        def fail(planted: Exception = planted) -> None:
            raise planted

        failure: Exception = Exception("no error")
        try:
            run.call_on_all(fail)
        except RunError as raised:
            failure = raised
        is_config = isinstance(planted, ConfigError)
        expect(
            isinstance(failure, ConfigError) == is_config,
            f"A {type(planted).__name__} on both ranks becomes a {type(failure).__name__}. Only an OSError and a "
            "ConfigError become a ConfigError.",
        )
        words = str(planted) if is_config else "rank 0"
        expect(
            words in str(failure) and (not is_config or "rank" not in str(failure)),
            f"A {type(planted).__name__} on both ranks has the message {str(failure)!r}. Pass on the message of a "
            "ConfigError. The message of another error names the first rank that failed.",
        )
