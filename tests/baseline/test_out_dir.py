"""The directory of a run: its lock, what happens when it is moved or deleted, and file systems without locks."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import read_manifest
from nanoGPT.errors import ConfigError, SaveError
from nanoGPT.job.out_dir import DirectoryLock, check_out_dir
from tests.helpers.checkpoints import CPU, OneRank, names, write_bytes
from tests.helpers.training import tiny
from workshop.ranks import losses, run_on_ranks


def start_run(out: Path) -> CheckpointDirectory:
    """Start a run of one rank that holds the lock of its directory, as `nanoGPT.distributed.runtime.start` does."""
    out.mkdir(exist_ok=True)
    return CheckpointDirectory(str(out), OneRank(0, 0, 1, 1, CPU, torch.float32, lock=DirectoryLock(out)), 3)


def save(run: CheckpointDirectory, *steps: int) -> None:
    for step in steps:
        run.save(step, write_bytes(b"x"), {})
    run.drain()


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_directory_that_another_run_has_taken_is_not_written(how, tmp_path):
    """After a run's directory was moved or deleted and another run has started there, the first run's next save stops
    with a sentence; the second run's checkpoints and temporary files are untouched."""
    first = start_run(tmp_path / "out")
    save(first, 1, 2, 3, 4)
    (tmp_path / "out").rename(tmp_path / "out.old") if how == "moved" else shutil.rmtree(tmp_path / "out")
    second = start_run(tmp_path / "out")
    save(second, 1)
    (tmp_path / "out" / "checkpoints" / ".tmp-step-00000002").mkdir()  # the second run's next save
    for step in (1, 5):
        with pytest.raises(SaveError, match="another run has started there"):
            first.save(step, write_bytes(b"first"), {})
    first._retain()
    assert names(tmp_path / "out") == [".tmp-step-00000002", "LATEST", "step-00000001"]
    assert (tmp_path / "out" / "checkpoints" / "step-00000001" / "payload").read_bytes() == b"x"


def test_a_directory_that_is_gone_is_created_again(tmp_path, capsys):
    """If nobody has taken the place of a directory that was deleted, the next save creates it again, says so, and locks
    it."""
    run = start_run(tmp_path / "out")
    save(run, 1)
    shutil.rmtree(tmp_path / "out")
    save(run, 2)
    assert names(tmp_path / "out") == ["LATEST", "step-00000002"]
    assert "was moved or deleted during the run" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="another run is writing"):
        DirectoryLock(tmp_path / "out")


def delete_while_training(out: str) -> None:
    """Train, and delete the run's directory as soon as step 3 is logged."""
    from nanoGPT import train
    from nanoGPT.metrics.telemetry import Telemetry

    log = Telemetry.log

    def log_and_delete(self: Telemetry, step: int, *args: object, **kwargs: object) -> None:
        log(self, step, *args, **kwargs)  # type: ignore[arg-type]
        if step == 3:
            shutil.rmtree(out)

    Telemetry.log = log_and_delete  # type: ignore[method-assign, assignment]
    train.train(tiny("nanoGPT", Path(out), max_iters=8, always_save_checkpoint=True))


def test_a_run_survives_the_deletion_of_its_directory(tmp_path):
    """A run whose directory is deleted in the middle goes on: its next checkpoints and metrics are in a new one."""
    (tmp_path / "out").mkdir()
    run_on_ranks(delete_while_training, 1, str(tmp_path / "out"), show=False)
    assert names(tmp_path / "out") == ["LATEST", "step-00000005", "step-00000008"]
    assert list(losses(tmp_path / "out")) == [5, 6, 7]


def test_a_step_of_another_run_is_never_taken_for_ones_own(tmp_path):
    """A checkpoint of the same step that another run wrote, or that is damaged, stops the save; one's own, or that of
    the run which is resumed, is left as it is."""
    first = start_run(tmp_path)
    save(first, 1, 2)
    first.run.lock.close()
    second = start_run(tmp_path)
    with pytest.raises(SaveError, match="step-00000002 is there already, written by another run"):
        second.save(2, write_bytes(b"new"), {})
    second.newest()
    second.save(2, write_bytes(b"new"), {})
    path = second.save(3, write_bytes(b"new"), {})
    assert read_manifest(tmp_path / "checkpoints" / "step-00000002")["run"] == first.run.token
    assert read_manifest(path)["run"] == second.run.token
    (path / "manifest.json").write_text("{")
    with pytest.raises(SaveError, match="step-00000003 is there already, and its manifest.json is not JSON"):
        second.save(3, write_bytes(b"new"), {})


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_no_other_run(error, tmp_path, monkeypatch):
    """Only EWOULDBLOCK means that another run holds the lock; any other error is a warning, and the run goes on."""

    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", fail)
    lock = DirectoryLock(tmp_path)
    assert "has no file locks" in lock.warning and os.strerror(error) in lock.warning
    assert lock.is_ours() and lock.keep() is None


def test_a_lock_that_cannot_be_opened_is_one_sentence(tmp_path):
    """A lock file that this user must not open, or that is a directory, is refused in one sentence."""
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be opened .*ask the owner"):
        DirectoryLock(tmp_path)


def probe(out: str) -> None:
    os.getpid = lambda: 7  # type: ignore[assignment]  # as in containers, where every process may have the same id
    for _ in range(200):
        check_out_dir(Path(out), resume=False)


def test_ranks_with_equal_process_ids_do_not_meet_in_the_probe(tmp_path):
    """Whether a directory can be written is tried with a name that no rank of another container uses at that time."""
    run_on_ranks(probe, 4, str(tmp_path), show=False)
    assert list(tmp_path.iterdir()) == []
