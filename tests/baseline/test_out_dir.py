"""The output directory of a run: its lock, a move or a deletion during the run, and file systems without locks."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import read_manifest
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, SaveError
from nanoGPT.files import ensure_locked_directory, lock_directory
from tests.helpers.checkpoints import list_names, write_bytes
from tests.helpers.training import tiny
from workshop.ranks import losses, run_on_ranks


def start_run(out: Path) -> CheckpointDirectory:
    """Start a run of one rank that has the lock of its directory, as `nanoGPT.distributed.runtime.start` does."""
    out.mkdir(exist_ok=True)
    return CheckpointDirectory(str(out), Runtime(lock=lock_directory(out)), 3)


def save(run: CheckpointDirectory, *steps: int) -> None:
    for step in steps:
        run.save(step, write_bytes(b"x"), {})


@pytest.mark.parametrize("change", ["moved", "deleted"])
def test_a_run_never_writes_into_the_directory_of_another_run(change, tmp_path):
    """If a run's directory is moved or deleted and another run starts there, the next save of the first run fails. The
    checkpoints and temporary files of the second run are unchanged."""
    first = start_run(tmp_path / "out")
    save(first, 1, 2, 3, 4)
    (tmp_path / "out").rename(tmp_path / "out.old") if change == "moved" else shutil.rmtree(tmp_path / "out")
    second = start_run(tmp_path / "out")
    save(second, 1)
    (tmp_path / "out" / "checkpoints" / ".tmp-step-00000002").mkdir()  # the second run's next save
    for step in (1, 5):
        with pytest.raises(SaveError, match="another run has started there"):
            first.save(step, write_bytes(b"first"), {})
    first._delete_old()
    assert list_names(tmp_path / "out") == [".tmp-step-00000002", "LATEST", "step-00000001"]
    assert (tmp_path / "out" / "checkpoints" / "step-00000001" / "payload").read_bytes() == b"x"


def delete_while_training(out: str) -> None:
    """Train, and delete the run's directory as soon as step 3 is logged."""
    from nanoGPT import train
    from nanoGPT.job.log import Log

    real_log = Log._write_metrics

    def log_and_delete(self: Log, line: dict[str, Any]) -> None:
        real_log(self, line)
        if line["step"] == 3:
            shutil.rmtree(out)

    Log._write_metrics = log_and_delete  # type: ignore[method-assign]
    train.train(tiny("nanoGPT", Path(out), max_iters=8, always_save_checkpoint=True))


def test_a_run_survives_the_deletion_of_its_directory(tmp_path):
    """A run continues if its directory is deleted. It writes its next checkpoints and metrics into a new directory."""
    (tmp_path / "out").mkdir()
    run_on_ranks(delete_while_training, 1, str(tmp_path / "out"), show=False)
    assert list_names(tmp_path / "out") == ["LATEST", "step-00000005", "step-00000008"]
    assert list(losses(tmp_path / "out")) == [5, 6, 7]


def test_a_save_fails_if_another_run_has_saved_the_same_step(tmp_path, monkeypatch):
    """A save fails if the step already has a checkpoint of another run, or a damaged one. A checkpoint of this run, or
    of the run that it resumes, is kept as it is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))  # a full disk is not the reason
    first = start_run(tmp_path)
    save(first, 1, 2)
    first.run.lock.close()
    second = start_run(tmp_path)
    with pytest.raises(SaveError, match="step-00000002 already exists, written by another run"):
        second.save(2, write_bytes(b"new"), {})
    second.find()
    second.save(2, write_bytes(b"new"), {})
    path = second.save(3, write_bytes(b"new"), {})
    assert read_manifest(tmp_path / "checkpoints" / "step-00000002")["run"] == first.run.token
    assert read_manifest(path)["run"] == second.run.token
    (path / "manifest.json").write_text("{")
    with pytest.raises(SaveError, match="step-00000003 was not saved: .*its manifest.json is damaged"):
        second.save(3, write_bytes(b"new"), {})


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_only_a_warning(error, tmp_path, monkeypatch, capsys):
    """Only EWOULDBLOCK means that another run has the lock. Any other error becomes a warning, and the run
    continues."""

    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", fail)
    lock = lock_directory(tmp_path)
    warning = capsys.readouterr().out
    assert "does not support file locks" in warning and os.strerror(error) in warning
    assert ensure_locked_directory(lock) is lock


def test_a_lock_that_cannot_be_opened_is_refused(tmp_path):
    """If the lock file is a directory or belongs to another user, the run is refused with one error."""
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be opened .*ask its owner"):
        lock_directory(tmp_path)
