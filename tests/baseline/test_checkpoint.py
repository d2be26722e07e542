"""The checkpoint directory: saves are atomic, reads are verified, and the newest complete checkpoint is never lost."""

import errno
import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nanoGPT import files
from nanoGPT.checkpoint import manifest
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import DamagedCheckpoint, NewFiles, read_manifest, verify_files
from nanoGPT.checkpoint.shards import write_shards
from nanoGPT.checkpoint.sources import read_full_state
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, SaveError
from nanoGPT.job.start import check_out_dir
from nanoGPT.train_config import TrainConfig
from tests.helpers.checkpoints import CPU, list_names, make_directory, write_bytes
from tests.helpers.programs import assert_refused, run_program, wait_until
from tests.helpers.training import call_train, tiny, train, train_all
from workshop.ranks import losses, run_on_ranks, start_ranks


def test_a_saved_checkpoint_is_the_newest(tmp_path):
    """A saved checkpoint is the newest one. Its manifest has its step, and the name and size of each file; LATEST has
    its name. The temporary directory of a save that was killed is deleted."""
    directory = make_directory(tmp_path)
    (tmp_path / "checkpoints" / ".tmp-step-00000004").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000004" / "part").write_bytes(b"x")
    directory.save(5, write_bytes(b"five"), {"phase": "test"})
    checkpoint = directory.find()
    assert checkpoint.step == 5 and (checkpoint.path / "payload").read_bytes() == b"five"
    assert [(f["name"], f["size"]) for f in checkpoint.manifest["files"]] == [("payload", 4)]
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step-00000005\n"
    assert list_names(tmp_path) == ["LATEST", "step-00000005"]


def test_retention_keeps_the_newest_complete_checkpoints(tmp_path):
    """An old checkpoint is deleted when `keep` newer complete ones exist. A damaged checkpoint does not count."""
    directory = make_directory(tmp_path)
    for step in range(1, 5):
        directory.save(step, write_bytes(b"x"), {})
    assert list_names(tmp_path) == ["LATEST", "step-00000002", "step-00000003", "step-00000004"]
    (tmp_path / "checkpoints" / "step-00000004" / "payload").unlink()
    directory.save(5, write_bytes(b"x"), {})
    assert "step-00000002" in list_names(tmp_path)


def test_retention_keeps_the_best_checkpoint(tmp_path):
    """The checkpoint at which the best validation loss was measured is kept until a better one exists.

    If a signal saves a step before its evaluation, the save after the evaluation records the best validation loss and
    changes nothing else. A resume verifies the checkpoint.
    """
    directory = make_directory(tmp_path)
    for step, best in ((1, (3.0, 1)), (2, (3.0, 1)), (2, (2.0, 2))):
        directory.save(step, write_bytes(str(best[0]).encode()), {"best_val_loss": best[0], "best_step": best[1]})
    newest = directory.find()
    assert newest.manifest["best_val_loss"] == 2.0 and (newest.path / "payload").read_bytes() == b"3.0"
    for step in (3, 4, 5, 6):
        directory.save(step, write_bytes(b"x"), {"best_step": 2})
    assert list_names(tmp_path)[1:] == [f"step-{step:08d}" for step in (2, 4, 5, 6)]
    for step in (7, 8, 9):
        directory.save(step, write_bytes(b"x"), {"best_step": 7})
    assert list_names(tmp_path)[1:] == [f"step-{step:08d}" for step in (7, 8, 9)]


def test_every_flipped_bit_is_detected(tmp_path, capsys):
    """A flipped bit in any byte of any file is detected. A resume names the damaged file, renames the checkpoint, and
    uses the previous one."""
    directory = make_directory(tmp_path)
    directory.save(1, write_bytes(b"one"), {"note": "a b"})
    directory.save(2, write_bytes(os.urandom(40)), {"note": "a b"})
    newest = tmp_path / "checkpoints" / "step-00000002"
    contents = {path.name: path.read_bytes() for path in newest.iterdir()}
    for name, content in contents.items():
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << random.randrange(8)
            (newest / name).write_bytes(damaged)
            with pytest.raises(DamagedCheckpoint):
                verify_files(newest, read_manifest(newest))
        (newest / name).write_bytes(content)
    payload = contents["payload"]
    (newest / "payload").write_bytes(bytes([payload[0] ^ 1]) + payload[1:])
    assert directory.find().step == 1
    assert "skipping step-00000002: the hash of payload differs" in capsys.readouterr().out
    assert ".bad-step-00000002" in list_names(tmp_path)


@pytest.mark.parametrize("damage", ["no manifest", "missing file", "FIFO"])
def test_an_incomplete_checkpoint_is_skipped(damage, tmp_path):
    """If the manifest or a file is missing, or a file is a FIFO, the previous checkpoint is used."""
    directory = make_directory(tmp_path)
    directory.save(1, write_bytes(b"one"), {})
    path = directory.save(2, write_bytes(b"second"), {})
    (path / ("manifest.json" if damage == "no manifest" else "payload")).unlink()
    if damage == "FIFO":
        os.mkfifo(path / "payload")  # reading it would hang
    assert directory.find().step == 1


def test_directories_that_no_save_wrote_are_not_checkpoints(tmp_path):
    """A user's copies next to the checkpoints, or a manifest in the directory of another step, are never resumed from.
    Retention neither counts nor deletes the copies."""
    directory = make_directory(tmp_path)
    for step in (1, 2, 3):
        path = directory.save(step, write_bytes(b"x"), {})
    for name in ("step-a", "step-zz", "step-00000003.bak"):
        shutil.copytree(path, path.parent / name)
    shutil.copytree(path, path.parent / "step-00000009")
    assert directory.find().step == 3
    directory.save(4, write_bytes(b"x"), {})
    remaining = ["step-00000002", "step-00000003", "step-00000003.bak", "step-00000004", "step-a", "step-zz"]
    assert list_names(tmp_path) == [".bad-step-00000009", "LATEST", *remaining]


def test_a_stray_file_is_not_part_of_a_checkpoint(tmp_path):
    """A ckpt.pt that a user put next to verified shards is not opened instead of them."""
    train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path, max_iters=1, gradient_accumulation_steps=2))
    path = make_directory(tmp_path).find().path
    (path / "ckpt.pt").write_bytes(b"garbage")
    assert read_full_state(path).model["transformer.wpe.weight"].shape == (16, 32)
    options = {"max_iters": 2, "init_from": "resume", "gradient_accumulation_steps": 2}
    curve = train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **options))
    assert [*curve] == [0, 1]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the name of a flushed file is read from /proc")
def test_a_checkpoint_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """A save flushes its files, the manifest and their directory, in this order, and then renames the directory. It
    flushes the rename before it writes LATEST."""
    calls, fsync, rename = [], os.fsync, Path.rename

    def record_name(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        calls.append(re.sub("^[.]tmp-[0-9a-f]{16}-", "", name))  # of `write_atomically`
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_name)
    monkeypatch.setattr(Path, "rename", lambda path, to: (calls.append("rename"), rename(path, to))[1])
    make_directory(tmp_path).save(1, write_bytes(b"x"), {})
    assert calls == ["payload", "manifest.json", ".tmp-step-00000001", "rename", "checkpoints", "LATEST"]


def test_verify_checkpoint_reports_complete_and_damaged_checkpoints(tmp_path):
    """`nanoGPT.checkpoint.verify` prints the state of each checkpoint. It fails if one is damaged or none exists."""
    directory = make_directory(tmp_path)
    first, _ = (directory.save(step, write_bytes(b"one"), {"phase": "test"}) for step in (1, 2))
    words = ("nanoGPT.checkpoint.verify", f"--out_dir={tmp_path}")
    outcome = run_program(*words)
    assert outcome.code == 0 and outcome.output.count(": complete, 1 file(s), 3 bytes, test") == 2, outcome
    (first / "payload").write_bytes(b"two")
    outcome = run_program(*words)
    assert_refused(outcome, "1 of 2 checkpoints are damaged")
    assert (
        "step-00000002: complete" in outcome.output and "step-00000001: damaged, the hash of payload" in outcome.output
    )
    assert_refused(run_program(words[0], f"--out_dir={tmp_path}/none"), "no checkpoint under")


def test_a_damaged_step_can_be_saved_again(tmp_path):
    """A resumed run can save a step again whose checkpoint was damaged, even if this happens twice."""
    directory = make_directory(tmp_path)
    directory.save(1, write_bytes(b"one"), {})
    for _ in range(2):
        path = directory.save(2, write_bytes(b"two"), {})
        (path / "payload").write_bytes(b"2wo")
        assert directory.find().step == 1
    directory.save(2, write_bytes(b"two"), {})
    assert directory.find().step == 2
    assert {".bad-step-00000002", ".bad-step-00000002.2"} <= set(list_names(tmp_path))


def test_a_file_system_that_ranks_do_not_share_is_refused(tmp_path):
    """A rank that does not see the files of rank 0 is named before training starts."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with pytest.raises(Exception, match=r"ranks \[1\] do not see the file"):
        run_on_ranks(open_directory_per_rank, 2, str(tmp_path), show=False)


def open_directory_per_rank(root: str) -> None:
    """Open a checkpoint directory that only this rank sees."""
    rank = dist.get_rank()
    CheckpointDirectory(f"{root}/{rank}", Runtime(rank, rank, 2, 2, CPU, torch.float32), 3)


@pytest.mark.parametrize(
    ("phase", "ranks", "extra_fields"),
    [("nanoGPT", 1, {}), ("phase3_fsdp", 2, {"async_save": True, "dtype": "float16"})],
)
def test_a_killed_run_resumes_with_identical_losses(phase, ranks, extra_fields, tmp_path):
    """A run that saves at every step is killed at random moments and resumed each time. Its losses are identical to
    those of an uninterrupted run, and no kill loses a saved step."""
    steps = {"lr_decay_iters": 60, "eval_interval": 1, "block_size": 8, **extra_fields}
    steps |= {"gradient_accumulation_steps": 2}
    out, chance, saved = tmp_path / "resumed", random.Random(0), 0
    for kill in range(3):
        config = tiny(phase, out, init_from="resume" if saved else "scratch", max_iters=100_000, **steps)
        (rendezvous := tmp_path / f"rendezvous{kill}").mkdir()
        started_ranks = start_ranks(call_train, ranks, phase, config, folder=rendezvous)
        processes = [process for process, _ in started_ranks]
        wait_for_new_checkpoint(out, saved, processes)
        time.sleep(chance.random() * 0.15)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        newest = max(int(p.name[5:]) for p in (out / "checkpoints").glob("step-*"))
        assert newest >= saved
        for path in (out / "checkpoints").glob("step-*"):
            verify_files(path, read_manifest(path))
        saved = newest
    steps |= {"max_iters": saved + 3, "always_save_checkpoint": False}
    uninterrupted = tiny(phase, tmp_path / "uninterrupted", **steps)
    resumed, expected = train_all(
        ranks, [(phase, tiny(phase, out, init_from="resume", **steps)), (phase, uninterrupted)]
    )
    assert resumed == expected


def train_with_held_saves(phase: str, config: TrainConfig, gate: Path) -> None:
    """Train on this rank. Every save after the first one waits until a file exists."""
    records, saves = NewFiles.records, itertools.count()

    def wait_for_gate(files: NewFiles) -> list[dict]:
        if next(saves):
            wait_until(gate.exists)
        return records(files)

    NewFiles.records = wait_for_gate
    call_train(phase, config)


@pytest.mark.parametrize(("phase", "extra_fields"), [("nanoGPT", {}), ("phase3_fsdp", {"async_save": True})])
def test_a_notice_during_a_save_loses_no_checkpoint(phase, extra_fields, tmp_path):
    """After SIGTERM during a save, the ranks complete it, save once more, and exit in the time that
    operate/deploy/kubernetes.yaml gives them."""
    out, fields = tmp_path / "run", {**extra_fields, "gradient_accumulation_steps": 2, "eval_interval": 1}
    config = tiny(phase, out, max_iters=100_000, **fields)
    ranks = start_ranks(train_with_held_saves, 2, phase, config, tmp_path / "gate", folder=tmp_path)
    processes = [process for process, _ in ranks]
    wait_for_new_checkpoint(out, 0, processes)
    wait_until(lambda: list((out / "checkpoints").glob(".tmp-step-*")))
    begin = time.monotonic()
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    (tmp_path / "gate").touch()
    for process in processes:
        process.join(120)
    assert time.monotonic() - begin < 120 and all(process.exitcode is not None for process in processes)
    names = sorted(path.name for path in (out / "checkpoints").glob("*step-*"))
    path = out / "checkpoints" / names[-1]
    verify_files(path, read_manifest(path))
    assert not names[0].startswith(".tmp-") and int(path.name[5:]) >= 3, names  # the held save and the one after it


def wait_for_new_checkpoint(out: Path, saved: int, processes: list) -> None:
    """Wait until the ranks have saved a checkpoint of a later step than `saved`."""

    def has_saved() -> bool:
        if any(int(p.name[5:]) > saved for p in (out / "checkpoints").glob("step-*")):
            return True
        assert all(process.is_alive() for process in processes), "a rank exited before the test killed it"
        return False

    wait_until(has_saved)


def test_a_resume_rewrites_the_log_from_its_step(tmp_path):
    """A resume removes an incomplete last line of metrics.jsonl and every line from the resumed step on, and writes
    them again."""
    fields = {"gradient_accumulation_steps": 2}
    expected = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "uninterrupted", **fields))
    out = shutil.copytree(tmp_path / "uninterrupted", tmp_path / "resumed")
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "lo')
    assert train("nanoGPT", 1, tiny("nanoGPT", out, init_from="resume", **fields)) == expected == losses(out)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """torch reports a full disk as an error of its file format. The message names the disk, and nothing is left."""
    directory = make_directory(tmp_path)

    def fail(_files: NewFiles) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(SaveError, match="was not saved: the disk of .* is full: free some space; earlier"):
        directory.save(1, fail, {})
    assert list_names(tmp_path) == []


def fail_reads(monkeypatch, name: str, times: int, number: int) -> None:
    """Let the next `times` reads of files called `name` fail with the error `number`, as on a network file system."""
    real_open, failures_left = os.open, [times]

    def open_or_fail(path, *args, **kwargs):
        if Path(str(path)).name == name and failures_left[0] > 0:
            failures_left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_or_fail)
    monkeypatch.setattr(files, "RETRY_DELAYS", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("name", "number"), [("manifest.json", errno.ESTALE), ("payload", errno.EACCES)])
def test_a_read_error_does_not_mark_a_checkpoint_as_damaged(name, number, tmp_path, monkeypatch):
    """If a read fails three times, the fourth one is used. If a manifest or a payload cannot be read, the resume stops
    with one error. No checkpoint is renamed."""
    directory = make_directory(tmp_path)
    directory.save(1, write_bytes(b"one"), {})
    directory.save(2, write_bytes(b"two"), {})
    fail_reads(monkeypatch, name, 2, number)
    if number == errno.ESTALE:  # a transient error
        assert directory.find().step == 2
    fail_reads(monkeypatch, name, 100, number)
    with pytest.raises(ConfigError, match=f"{name} cannot be read .*nothing was changed"):
        directory.find()
    assert list_names(tmp_path) == ["LATEST", "step-00000001", "step-00000002"]


def find_newest_with_damage(out: str) -> tuple[int, str]:
    """Save two checkpoints, damage a file of the second one, and find the newest. Then let rank 1 fail to read.

    Returns:
        The step that this rank has found, and its error message when rank 1 cannot read the manifest.
    """
    run = Runtime(dist.get_rank(), 0, 2, 2, CPU, torch.float32)
    directory = CheckpointDirectory(out, run, 3)

    def write(to: NewFiles) -> None:
        with to.open(f"rank{run.rank}") as file:
            file.write(b"x")

    for step in (1, 2):
        directory.save(step, write, {})
    dist.barrier()
    if run.is_main:
        (Path(out) / "checkpoints" / "step-00000002" / "rank1").write_bytes(b"y")  # rank 1 verifies it
    dist.barrier()
    step = directory.find().step
    if not run.is_main:
        os.open = lambda path, *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))  # type: ignore
        files.RETRY_DELAYS = ()  # type: ignore[assignment]
    try:
        directory.find()
    except ConfigError as error:
        return step, str(error)
    return step, ""


def test_all_ranks_find_the_same_checkpoint_or_raise(tmp_path):
    """If one rank finds damage, all ranks use the previous checkpoint. If one cannot read the manifest, no rank waits
    for it: all raise the same error."""
    first, second = run_on_ranks(find_newest_with_damage, 2, str(tmp_path), show=False)
    assert first == second and first[0] == 1 and "cannot be read (Input/output error)" in first[1]


def read_and_delete(folder: str) -> list[str]:
    """Save, read one tensor, delete the checkpoint, and read again. Return the errors."""
    path = Path(folder) / "0"
    write_step(folder, "0", {"model.a": torch.ones(2)})
    state = read_full_state(path)
    assert state.model["a"].sum() == 2
    shutil.rmtree(path)
    errors = []
    for read in (lambda: state.model["a"], lambda: read_full_state(path)):
        with pytest.raises(ConfigError) as failure:
            read()
        errors.append(str(failure.value))
    return errors


def test_a_checkpoint_deleted_while_it_is_read_is_one_error(tmp_path):
    """If a training run deletes a checkpoint whose tensors another process reads, this process ends with one error."""
    (errors,) = run_on_ranks(read_and_delete, 1, str(tmp_path))
    assert all("was deleted while it was read" in error or "cannot be read" in error for error in errors), errors


def test_a_large_file_is_flushed_in_parts(tmp_path, monkeypatch):
    """A save to slow storage reports progress between fsyncs, of which each flushes a bounded number of bytes."""
    unflushed = []
    monkeypatch.setattr(manifest, "SYNC_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", lambda _: unflushed.clear())
    with NewFiles(tmp_path, report_progress=lambda: unflushed.append(1)).open("payload") as file:
        for _ in range(100):
            file.write(bytes(100))
            assert len(unflushed) <= 10
    assert not unflushed and file.digest.hexdigest() == hashlib.sha256(bytes(10_000)).hexdigest()


def write_step(folder: str, name: str, tensors: dict[str, torch.Tensor]) -> None:
    path = Path(folder) / name
    path.mkdir(exist_ok=True)
    dist.barrier()
    write_shards(NewFiles(path), tensors)


def test_a_run_does_not_start_if_the_checkpoints_cannot_be_listed(tmp_path, monkeypatch):
    """If the checkpoint directory cannot be listed, no new run starts in it: there may be checkpoints."""

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    make_directory(tmp_path).save(1, write_bytes(b"one"), {})
    monkeypatch.setattr(files, "RETRY_DELAYS", ())
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_out_dir(tmp_path, resume=False)
