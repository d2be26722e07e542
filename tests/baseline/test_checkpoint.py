"""The checkpoint directory: whole or not at all, verified when read, and never the only copy lost."""

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanoGPT import files
from nanoGPT.checkpoint import directory as checkpoint_module
from nanoGPT.checkpoint import verify as verify_module
from nanoGPT.checkpoint import weights as weights_module
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import Damaged, read_manifest, seal, verify_files
from nanoGPT.checkpoint.state import read_full_state
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, SaveError
from nanoGPT.job.out_dir import check_out_dir
from nanoGPT.train_config import TrainConfig
from tests.helpers.checkpoints import CPU, FACTS, directory, names, write_bytes
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import call_train, tiny, train
from workshop.ranks import losses, run_on_ranks, start_ranks


def test_a_saved_checkpoint_is_found_whole(tmp_path):
    """What was saved is the newest, with its step, size and hash in the manifest and its name in LATEST."""
    box = directory(tmp_path)
    box.save(5, write_bytes(b"five"), {"phase": "test"})
    found = box.newest()
    assert found.step == 5 and (found.path / "payload").read_bytes() == b"five"
    assert [(f["name"], f["size"]) for f in found.manifest["files"]] == [("payload", 4)]
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step-00000005\n"


def test_retention_keeps_the_newest(tmp_path):
    """Older checkpoints go once `keep` newer whole ones are there; a damaged one does not count as one of them."""
    box = directory(tmp_path)
    for step in range(1, 5):
        box.save(step, write_bytes(b"x"), {})
    box.drain()
    assert names(tmp_path) == ["LATEST", "step-00000002", "step-00000003", "step-00000004"]
    (tmp_path / "checkpoints" / "step-00000004" / "payload").unlink()
    box.save(5, write_bytes(b"x"), {})
    box.drain()
    assert "step-00000002" in names(tmp_path)


def test_every_flipped_byte_is_refused(tmp_path, capsys):
    """One flipped byte, anywhere in any file of a checkpoint: it is named, set aside, and the one before taken."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {"note": "a b"})
    box.save(2, write_bytes(os.urandom(40)), {"note": "a b"})
    newest = tmp_path / "checkpoints" / "step-00000002"
    whole = {path.name: path.read_bytes() for path in newest.iterdir()}
    for name, content in whole.items():
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << random.randrange(8)
            (newest / name).write_bytes(damaged)
            with pytest.raises(Damaged):
                verify_files(newest, read_manifest(newest))
        (newest / name).write_bytes(content)
    (newest / "payload").write_bytes(b"\0" + whole["payload"][1:])
    assert box.newest().step == 1
    assert "skipping step-00000002: the sha256 of payload differs" in capsys.readouterr().out
    assert ".bad-step-00000002" in names(tmp_path)


@pytest.mark.parametrize("harm", ["no manifest", "torn manifest", "missing file", "short file", "other step"])
def test_a_half_written_checkpoint_is_passed_over(harm, tmp_path):
    """Without a manifest, with a torn or edited one, with a file missing or short: the one before is taken."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})
    path = box.save(2, write_bytes(b"second"), {})
    manifest = path / "manifest.json"
    if harm == "no manifest":
        manifest.unlink()
    elif harm == "torn manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif harm == "missing file":
        (path / "payload").unlink()
    elif harm == "short file":
        os.truncate(path / "payload", 3)
    else:
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    assert box.newest().step == 1


def test_only_what_a_save_names_is_a_checkpoint(tmp_path):
    """One's own copies beside the checkpoints, or a manifest under another step's name, are never resumed from, and
    retention neither counts nor deletes the copies."""
    box = directory(tmp_path)
    for step in (1, 2, 3):
        path = box.save(step, write_bytes(b"x"), {})
    for name in ("step-a", "step-zz", "step-00000003.bak"):
        shutil.copytree(path, path.parent / name)
    shutil.copytree(path, path.parent / "step-00000009")
    assert box.newest().step == 3
    box.save(4, write_bytes(b"x"), {})
    box.drain()
    assert names(tmp_path) == [".bad-step-00000009", "LATEST", "step-00000002", "step-00000003", "step-00000003.bak",
                               "step-00000004", "step-a", "step-zz"]  # fmt: skip


def test_a_stray_file_is_no_part_of_a_checkpoint(tmp_path):
    """A ckpt.pt that somebody laid beside verified shards is not opened in their place."""
    train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path, max_iters=2))
    path = directory(tmp_path).newest().path
    (path / "ckpt.pt").write_bytes(b"garbage")
    assert read_full_state(path).model["transformer.wpe.weight"].shape == (16, 32)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="which file is flushed is looked up in /proc")
def test_the_disk_has_a_checkpoint_before_its_name(tmp_path, monkeypatch):
    """A save flushes its files, then the manifest, then their directory, and renames only then; the rename is flushed
    before LATEST names the checkpoint."""
    done, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append("rename"), rename(path, to))[1])
    directory(tmp_path).save(1, write_bytes(b"x"), {})
    assert done == ["payload", "manifest.json", ".tmp-step-00000001", "rename", "checkpoints", ".tmp-LATEST"]


def test_ranks_divide_the_hashing_and_leave_nothing_out(tmp_path):
    """Of a checkpoint of five files each is verified by exactly one of two ranks."""

    def write(to: NewFiles) -> None:
        for i in range(5):
            with to.open(f"part{i}") as file:
                file.write(b"x")

    path = directory(tmp_path).save(1, write, {})
    manifest = read_manifest(path)
    for i in range(5):
        (path / f"part{i}").write_bytes(b"y")
        with pytest.raises(Damaged, match=f"sha256 of part{i} differs"):
            verify_files(path, manifest, i % 2, 2)
        verify_files(path, manifest, 1 - i % 2, 2)
        (path / f"part{i}").write_bytes(b"x")


def test_the_command_that_verifies_tells_whole_from_damaged(tmp_path):
    """`make verify-checkpoint` names each checkpoint's state, and fails when one is damaged or there is none."""
    box = directory(tmp_path)
    first, _ = (box.save(step, write_bytes(b"one"), {"phase": "test"}) for step in (1, 2))
    box.drain()
    words = ("nanoGPT.checkpoint.verify", f"--out_dir={tmp_path}")
    ended = run_program(*words)
    assert ended.code == 0 and ended.output.count(": whole, 1 file(s), 3 bytes, test") == 2, ended
    (first / "payload").write_bytes(b"two")
    ended = run_program(*words)
    assert_refused(ended, "1 of 2 checkpoints are damaged")
    assert "step-00000002: whole" in ended.output and "step-00000001: damaged, the sha256 of payload" in ended.output
    assert_refused(run_program(words[0], f"--out_dir={tmp_path}/none"), "no checkpoint under")


def test_no_usable_checkpoint_is_one_sentence(tmp_path):
    """When every checkpoint is damaged, the error says so."""
    box = directory(tmp_path)
    path = box.save(1, write_bytes(b"one"), {})
    (path / "payload").write_bytes(b"two")
    with pytest.raises(ConfigError, match="no checkpoint under .* can be used"):
        box.newest()


def test_a_refused_step_can_be_saved_again(tmp_path):
    """A step whose checkpoint was refused is saved again by the resumed run, also when it is refused twice."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})
    for _ in range(2):
        path = box.save(2, write_bytes(b"two"), {})
        (path / "payload").write_bytes(b"2wo")
        assert box.newest().step == 1
    box.save(2, write_bytes(b"two"), {})
    assert box.newest().step == 2
    assert {".bad-step-00000002", ".bad-step-00000002.2"} <= set(names(tmp_path))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("writing failed")])
def test_a_failed_save_leaves_what_was_there(error, tmp_path):
    """A write that fails, as on a full disk, is a SaveError; nothing of the new step is left, the old one stands."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})

    def fail(to: NewFiles) -> None:
        (to.folder / "part").write_bytes(b"half")
        raise error

    with pytest.raises(SaveError, match="step-00000002 was not saved"):
        box.save(2, fail, {})
    assert names(tmp_path) == ["LATEST", "step-00000001"]
    assert box.newest().step == 1


def full_disk(phase: str, config: TrainConfig) -> str:
    try:
        call_train(phase, config)
    except SaveError as error:
        return str(error)
    return "saved"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_a_disk_that_fills_during_a_save(phase, tmp_path):
    """On a file system too small for a second checkpoint, the run ends with one sentence and the first one resumes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=650k tmpfs {disk} 2>/dev/null"):
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        config = tiny(phase, disk / "run", max_iters=9, keep_checkpoints=50, eval_interval=1)
        said = run_on_ranks(full_disk, 2, phase, config, show=False)
        assert all("was not saved" in line and "is full" in line for line in said), said
        saved = sorted((disk / "run" / "checkpoints").glob("step-*"))
        assert saved and not list((disk / "run" / "checkpoints").glob(".tmp-step*"))
        verify_files(saved[-1], read_manifest(saved[-1]))
    finally:
        os.system(f"umount {disk}")


def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path):
    """When one rank of four cannot write, all four raise SaveError and the directory is as before."""
    (tmp_path / "run").mkdir()
    assert run_on_ranks(save_with_a_bad_rank, 4, str(tmp_path / "run"), show=False) == [True] * 4
    assert names(tmp_path / "run") == []


def save_with_a_bad_rank(out: str) -> bool:
    import torch.distributed as dist

    rank = dist.get_rank()
    box = CheckpointDirectory(out, Runtime(rank, rank, 4, 4, CPU, torch.float32), 3)

    def write(to: NewFiles) -> None:
        if rank == 2:
            raise OSError(errno.EIO, "planted")
        with to.open(f"rank{rank}") as file:
            file.write(b"x")

    try:
        box.save(1, write, {})
    except SaveError as error:
        return "rank 2" in str(error)
    return False


def test_an_unshared_file_system_is_found_at_the_start(tmp_path):
    """A rank that does not see what rank 0 writes is named before training begins."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    with pytest.raises(Exception, match=r"ranks \[1\] do not see the file"):
        run_on_ranks(open_own_directory, 2, str(tmp_path), show=False)


def open_own_directory(root: str) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    CheckpointDirectory(f"{root}/{rank}", Runtime(rank, rank, 2, 2, CPU, torch.float32), 3)


def minimal(step: int) -> dict[str, object]:
    """Return the least that a manifest says."""
    return {
        "step": step,
        "world_size": 1,
        "versions": {},
        "files": [{"name": "payload", "size": 1, "sha256": ""}],
        "sha256": "",
    }


def test_a_manifest_that_was_edited_is_refused(tmp_path):
    """A manifest with another number in it, or other white space, is not the one that was written."""
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    path, whole = folder / "manifest.json", seal(minimal(3))
    path.write_text(whole)
    assert read_manifest(folder)["step"] == 3
    edited = (whole.replace("3", "4", 1), whole + "\n", "[]", "{}")
    other = [seal({**minimal(3), "files": []}), seal(minimal(4)), seal({**minimal(3), "step": None})]
    for changed in (*edited, *other):
        path.write_text(changed)
        with pytest.raises(Damaged):
            read_manifest(folder)


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_training_goes_on_past_a_flipped_byte(phase, tmp_path):
    """A byte flipped in the largest file of the newest checkpoint: resume takes the one before, losses are the same."""
    whole = train(phase, 2, tiny(phase, tmp_path / "whole"))
    cut = tmp_path / "cut"
    train(phase, 2, tiny(phase, cut, max_iters=10, lr_decay_iters=12))
    newest = sorted((cut / "checkpoints").glob("step-*"))[-1]
    target = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    resumed = train(phase, 2, tiny(phase, cut, init_from="resume", lr_decay_iters=12))
    assert (cut / "checkpoints" / f".bad-{newest.name}").is_dir()
    assert resumed == whole


@pytest.mark.parametrize(("phase", "ranks", "more"), [("nanoGPT", 1, {}), ("phase3_fsdp", 2, {"async_save": True})])
def test_kills_lose_nothing(phase, ranks, more, tmp_path):
    """Killed 4 times at random moments of a run that saves at every step, and resumed each time, a run ends with the
    uninterrupted run's losses to the last digit, and no kill loses a saved step."""
    steps = {
        "max_iters": 60,
        "eval_interval": 1,
        "eval_iters": 1,
        "block_size": 8,
        "gradient_accumulation_steps": 2,
        **more,
    }
    whole = train(phase, ranks, tiny(phase, tmp_path / "whole", **{**steps, "always_save_checkpoint": False}))
    out, chance, kills, saved = tmp_path / "cut", random.Random(0), 0, 0
    while kills < 4:
        config = tiny(phase, out, init_from="resume" if saved else "scratch", **steps)
        (rendezvous := tmp_path / f"rendezvous{kills}").mkdir()
        started = start_ranks(call_train, ranks, phase, config, folder=rendezvous)
        processes = [process for process, _ in started]
        await_progress(out, saved, processes)
        time.sleep(chance.random() * 0.15)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        kills += 1
        newest = max(int(p.name[5:]) for p in (out / "checkpoints").glob("step-*"))
        assert newest >= saved
        for path in (out / "checkpoints").glob("step-*"):
            verify_files(path, read_manifest(path))
        saved = newest
    assert saved < 60, "the run ended before the kills did"
    config = tiny(phase, out, init_from="resume", **{**steps, "always_save_checkpoint": False})
    assert train(phase, ranks, config) == whole


def await_progress(out: Path, saved: int, processes: list) -> None:
    """Wait until the ranks have saved a step beyond `saved`."""
    for _ in range(600):
        if any(int(p.name[5:]) > saved for p in (out / "checkpoints").glob("step-*")):
            return
        assert all(process.is_alive() for process in processes), "a rank ended by itself"
        time.sleep(0.02)
    raise AssertionError("no checkpoint within 12 seconds")


def test_stale_temporary_directories_go(tmp_path):
    """What a killed save left behind is deleted by the next one."""
    box = directory(tmp_path)
    (tmp_path / "checkpoints" / ".tmp-step-00000007").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000007" / "part").write_bytes(b"x")
    box.save(8, write_bytes(b"x"), {})
    assert names(tmp_path) == ["LATEST", "step-00000008"]


def test_the_manifest_says_what_it_is(tmp_path):
    """Phase, world size, configuration, model, data, tokenizer and versions are in the manifest."""
    train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path, max_iters=1))
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000001" / "manifest.json").read_text())
    assert manifest["phase"] == "fsdp" and manifest["world_size"] == 2 and manifest["step"] == 1
    assert manifest["config"]["n_embd"] == manifest["model_args"]["n_embd"] == 32
    assert manifest["data"]["tokenizer"]["name"] == "char" and "train.bin" in manifest["data"]["files"]
    assert manifest["versions"]["torch"] == torch.__version__
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == {file["name"] for file in manifest["files"]}


def test_a_finished_save_is_not_written_again(tmp_path):
    """Saving a step that is there leaves it as it is."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})
    box.save(1, write_bytes(b"other"), {})
    assert (tmp_path / "checkpoints" / "step-00000001" / "payload").read_bytes() == b"one"


def test_resume_after_all_checkpoints_but_a_torn_log(tmp_path):
    """A torn last line of metrics.jsonl, and every line from the resumed step on, are written anew."""
    whole = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "whole"))
    cut = tmp_path / "cut"
    train("nanoGPT", 1, tiny("nanoGPT", cut))
    shutil.rmtree(cut / "checkpoints" / "step-00000012")
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "lo')
    assert train("nanoGPT", 1, tiny("nanoGPT", cut, init_from="resume")) == whole == losses(cut)


def test_no_write_goes_around_the_protocol():
    """Nothing in nanoGPT/checkpoint/directory.py overwrites a published directory: it renames onto fresh names only."""
    source = Path(checkpoint_module.__file__).read_text()
    assert source.count("temporary.rename(final)") == 1 and "rmtree(final" not in source


def fail_reads(monkeypatch, name: str, times: int, number: int) -> None:
    """Let the next reads of files called `name` fail with an error of a network file system."""
    real, left = os.open, [times]

    def opened(path, *args, **kwargs):
        if Path(str(path)).name == name and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(files, "WAITS", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["manifest.json", "payload"])
def test_a_read_error_is_no_verdict(name, number, tmp_path, monkeypatch):
    """A manifest or a file that cannot be read ends the resume with one sentence; no checkpoint is renamed."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})
    box.save(2, write_bytes(b"two"), {})
    fail_reads(monkeypatch, name, 100, number)
    with pytest.raises(ConfigError, match=f"{name} cannot be read .*nothing was changed"):
        box.newest()
    assert names(tmp_path) == ["LATEST", "step-00000001", "step-00000002"]


def test_a_transient_read_error_is_retried(tmp_path, monkeypatch):
    """A read that fails twice and then works opens the newest checkpoint."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})
    box.save(2, write_bytes(b"two"), {})
    fail_reads(monkeypatch, "manifest.json", 2, errno.ESTALE)
    assert box.newest().step == 2


def test_a_directory_that_cannot_be_listed_holds_no_verdict(tmp_path, monkeypatch):
    """Where the checkpoints cannot be listed a run does not start from scratch beside them."""

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    directory(tmp_path).save(1, write_bytes(b"one"), {})
    monkeypatch.setattr(files, "WAITS", ())
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_out_dir(tmp_path, resume=False)


def one_rank_cannot_read(out: str) -> str:
    run = Runtime(dist.get_rank(), 0, 2, 2, CPU, torch.float32)
    box = CheckpointDirectory(out, run, 3)
    box.save(1, write_bytes(b"one") if run.is_main else (lambda to: None), {})
    if not run.is_main:
        os.open = lambda path, *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))  # type: ignore
        files.WAITS = ()  # type: ignore[assignment]
    try:
        box.newest()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_read_ends_the_resume_on_all_ranks(tmp_path):
    """If one rank cannot read the manifest, no rank waits for it: all end with the same sentence."""
    first, second = run_on_ranks(one_rank_cannot_read, 2, str(tmp_path), show=False)
    assert first == second and "cannot be read (Input/output error)" in first


def test_a_symbolic_link_in_the_place_of_a_checkpoint_is_deleted_as_a_link(tmp_path):
    """Retention takes away the link and leaves what it leads to; the saves after it work."""
    box = directory(tmp_path)
    box.save(1, write_bytes(b"one"), {})
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-00000001").rename(tmp_path / "elsewhere")
    (checkpoints / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (checkpoints / ".tmp-stale").symlink_to(tmp_path / "elsewhere")
    for step in (2, 3, 4, 5):
        box.save(step, write_bytes(b"x"), {})
    box.drain()
    assert names(tmp_path) == ["LATEST", "step-00000003", "step-00000004", "step-00000005"]
    assert (tmp_path / "elsewhere" / "payload").read_bytes() == b"one"


def test_a_checkpoint_that_retention_deletes_is_not_called_damaged(tmp_path, monkeypatch, capsys):
    """Verifying the checkpoints of a run that trains reports one that is deleted meanwhile as that, and exits with 0;
    exporting takes one that has become the newest."""
    box = directory(tmp_path)
    for step in (1, 2):
        box.save(step, write_bytes(b"x"), FACTS)
    real = verify_module.verify_files

    def verify(path, *args):
        if path.name == "step-00000001":  # what the running job does in the middle of this
            shutil.rmtree(path)
            box.save(3, write_bytes(b"x"), FACTS)
        real(path, *args)

    monkeypatch.setattr(verify_module, "verify_files", verify)
    verify_module.main(str(tmp_path))
    said = capsys.readouterr().out
    assert "step-00000002: whole" in said and "step-00000001: deleted while it was read" in said
    (only,) = (tmp_path / "checkpoints").glob("step-00000003")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    monkeypatch.setattr(weights_module, "verify_files", lambda path, *_: delete_and_replace(path, box))
    assert weights_module.find_newest(tmp_path).step == 4 and not only.exists()


def delete_and_replace(path: Path, box: CheckpointDirectory) -> None:
    """Do what a training run may do while its newest checkpoint is verified: save a newer one, delete this one."""
    if path.name == "step-00000003":
        box.save(4, write_bytes(b"x"), FACTS)
        box.drain()
        shutil.rmtree(path)
        raise Damaged("payload is missing")


def test_a_fifo_in_the_place_of_a_file_does_not_hang(tmp_path):
    """A FIFO called manifest.json or like a file of the payload is refused at once, and the checkpoint before taken."""
    box = directory(tmp_path)
    for step in (1, 2, 3):
        path = box.save(step, write_bytes(b"x"), {})
        if step > 1:
            name = "manifest.json" if step == 3 else "payload"
            (path / name).unlink()
            os.mkfifo(path / name)
    assert box.newest().step == 1
