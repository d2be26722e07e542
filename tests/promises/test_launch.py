"""Starting and ending a job: real launchers, real signals, real exit codes."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nanoGPT.checkpoint.manifest import seal
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError, NonFiniteLoss
from nanoGPT.job.elastic import enter_out_dir, resume_after_restart
from nanoGPT.job.signals import listen_for_signals
from nanoGPT.job.start import start
from nanoGPT.launch import explain, root_cause
from tests.helpers.programs import Program, as_flags, await_steps, launch, run_program, wait_until
from tests.helpers.training import ROOT, TINY, gap, tiny, train
from workshop.ranks import losses, run_on_ranks

SAVED_WITHIN = 100  # steps after SIGTERM, which take less than 10 s where there is nothing else to do


def rank_pids(out: Path) -> list[int]:
    return [json.loads(p.read_text())["pid"] for p in sorted((out / "heartbeat").glob("rank*.json"))]


def await_heartbeats(out: Path, ranks: int) -> list[int]:
    """Wait until every rank has told of itself; their ids."""
    wait_until(lambda: len(rank_pids(out)) == ranks)
    return rank_pids(out)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


def waits(pid: int) -> bool:
    """Whether a process that handles SIGTERM has used no processor time for a second."""

    def used() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    before = used()
    time.sleep(1)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1) and used() == before


def test_a_job_from_start_to_sample(tmp_path, monkeypatch):
    """Four launched ranks train to the end, exit 0, print each logged line once, and a sample of text; no temporary
    file is left."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    process = launch(tmp_path, 4, max_iters=6)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert output.count("step     3  loss") == 1 and "A sample from" in output and "Traceback" not in output
    assert "device cpu (found no GPU)" in output or "device cpu (asked for)" in output
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")], left  # torch's own cache stays
    assert gap(losses(tmp_path), train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", max_iters=6))) < 1e-5


def test_a_node_that_waits_for_the_others_ends_when_it_is_asked_to(tmp_path):
    """SIGTERM finds the launcher in torch's C++, where no handler of Python's runs: it ends all the same."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    process = Program("nanoGPT.launch", "--nnodes=2", "nanoGPT/train.py", f"--out_dir={tmp_path}", MASTER_PORT=port)
    wait_until(lambda: f"meeting at 127.0.0.1:{port}" in process.output() and waits(process.pid))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "before all nodes had met" in output, output


def test_sigterm_saves_and_resumes(tmp_path):
    """SIGTERM to the launcher ends the step, saves in time and exits 0; the line it prints resumes, exactly."""
    process = launch(tmp_path / "cut", 2, max_iters=300, dropout=0.2)
    await_steps(tmp_path / "cut", 3, process)
    process.send_signal(signal.SIGTERM)
    asked_at = max(losses(tmp_path / "cut"))
    output, _ = process.communicate()
    assert process.returncode == 0 and "--init_from=resume" in output and "A sample" not in output, output
    stopped = max(losses(tmp_path / "cut"))
    assert (tmp_path / "cut" / "checkpoints" / f"step-{stopped + 1:08d}").is_dir()
    assert stopped < asked_at + SAVED_WITHIN
    ends = {"max_iters": stopped + 4, "lr_decay_iters": 300, "stall_seconds": 1000, "eval_interval": 100000}
    resumed = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "cut", init_from="resume", **ends))
    whole = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "whole", **ends))
    assert resumed == whole


def test_a_killed_rank_ends_the_job(tmp_path):
    """SIGKILL of one rank: the launcher names it, returns 137, and no other rank is left."""
    process = launch(tmp_path, 2)
    await_steps(tmp_path, 2, process)
    pids = await_heartbeats(tmp_path, 2)
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 137, output
    assert output.splitlines()[-1].startswith("error: rank 1: it was killed by SIGKILL"), output
    assert "Traceback" not in output
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_with_their_launcher(ranks, tmp_path):
    """SIGKILL of the launcher: its ranks, which have 100,000 steps to do, end by themselves, also one alone."""
    process = launch(tmp_path, ranks, phase="nanoGPT")
    await_steps(tmp_path, 1, process)
    pids = await_heartbeats(tmp_path, ranks)
    process.kill()
    wait_until(lambda: all(gone(pid) for pid in pids), 60)


@pytest.mark.parametrize(("ranks", "first", "then"), [(1, "SIGTERM", "SIGINT"), (2, "SIGINT", "SIGTERM")])
def test_a_signal_before_training_ends_the_job(ranks, first, then, tmp_path):
    """SIGTERM or Ctrl-C while ranks start, at whatever moment, ends the job within seconds and leaves no rank."""
    processes = [(launch(tmp_path / name, ranks, phase="nanoGPT"), signal.Signals[name]) for name in (first, then)]
    for process, number in processes:
        time.sleep(0.5)  # whatever moment it is: each has the same outcome
        process.send_signal(number)
    for process, number in processes:
        output, _ = process.communicate()
        assert process.returncode in (0, -number, 128 + number), (process.returncode, output)
        assert "Traceback" not in output and "KeyboardInterrupt" not in output, output
        assert process.returncode != 0 or "--init_from=resume" in output


def test_two_runs_do_not_share_a_directory_and_stacks_on_a_signal(tmp_path):
    """A second run into the same directory is refused; SIGUSR1 writes every thread's stack; the first run goes on."""
    first = launch(tmp_path, 1, phase="nanoGPT")
    await_steps(tmp_path, 1, first)
    os.kill(rank_pids(tmp_path)[0], signal.SIGUSR1)
    second = launch(tmp_path, 1, phase="nanoGPT")
    output, _ = second.communicate()
    assert second.returncode == 2 and "another run is writing into" in output, output
    await_steps(tmp_path, len(losses(tmp_path)) + 2, first)
    stacks = (tmp_path / "stacks" / "rank0.txt").read_text()
    assert "train.py" in stacks and "heartbeat.py" in stacks
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate()
    assert first.returncode == 0, output


def test_a_loss_that_blows_up_returns_3(tmp_path):
    """Through the launcher a loss that is not finite is one sentence and exit code 3."""
    process = launch(tmp_path, 2, learning_rate=1e30, grad_clip=0)
    output, _ = process.communicate()
    assert process.returncode == 3, output
    assert "not finite" in output.splitlines()[-1] and output.count("error:") == 1


def torchrun(phase: str, out: Path, *options: str, **fields) -> Program:
    """`cd phase && torchrun --standalone --nproc_per_node=2 train.py`."""
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", *options, "train.py"]
    return Program(*words, *as_flags(**{**TINY, **fields, "out_dir": out, "device": "cpu"}), cwd=ROOT / phase)


def test_torchrun_restarts_and_the_run_goes_on(tmp_path):
    """From a phase's directory: after SIGKILL of a rank `--max-restarts=1` goes on from the checkpoint, exactly."""
    fields = {"max_iters": 16, "dropout": 0.2, "eval_interval": 4}
    process = torchrun("phase3_fsdp", tmp_path / "cut", "--max-restarts=1", **fields)
    wait_until(lambda: process.poll() is not None or list((tmp_path / "cut" / "checkpoints").glob("step-*")))
    assert process.poll() is None, process.output()
    os.kill(rank_pids(tmp_path / "cut")[1], signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert output.count("torchrun has restarted the job: it goes on from its newest checkpoint") == 1, output
    assert "resuming after" in output and f"{tmp_path}/cut/checkpoints/step-" in output
    assert losses(tmp_path / "cut") == train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "whole", **fields))


def start_again(out: Path, counts: tuple[int, int], agent: str = "this job") -> tuple[str, int] | str:
    """What a rank makes of a start by torchrun with restarts allowed: init_from and n_layer, or the refusal."""
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": agent}
    config = tiny("nanoGPT", out)
    run = create_runtime(config.device, config.dtype)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[run.rank])
    try:
        lock = enter_out_dir(run, config)
        config = resume_after_restart(run, config, lock)
        return config.init_from, config.n_layer
    except ConfigError as error:
        return str(error)
    finally:
        if run.lock:
            run.lock.close()
        run.barrier()


def start_often(out: Path) -> list[tuple[str, int] | str]:
    """First without a checkpoint, then with one: of a job that began as --init_from=gpt2, in a shape of its own."""
    found = [start_again(out, (0, 0)), start_again(out, (0, 1))]
    folder = out / "checkpoints" / "step-00000004"
    if os.environ["RANK"] == "0":
        folder.mkdir(parents=True)
        config = {**vars(tiny("nanoGPT", out)), "n_layer": 12}
        files = [{"name": "ckpt.pt", "size": 1, "sha256": ""}]
        manifest = {"config": config, "step": 4, "world_size": 2, "versions": {}, "files": files}
        (folder / "manifest.json").write_text(seal(manifest))
    found += [start_again(out, (0, 1)), start_again(out, (2, 2)), start_again(out, (0, 0))]
    return [*found, start_again(out, (1, 1), "another job")]


def test_which_starts_resume_by_themselves(tmp_path):
    """A restart of any agent of the job resumes on all ranks, if there is a checkpoint; no other start does."""
    found, others = run_on_ranks(start_often, 2, tmp_path, show=False)
    assert found == others
    assert found[:4] == [("scratch", 2), ("scratch", 2), ("resume", 12), ("resume", 12)]
    assert len(found[4:]) == 2 and all("holds checkpoints up to step-00000004" in refused for refused in found[4:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_directory_for_each_run(ranks, tmp_path):
    """Without --out_dir the launcher makes a directory of its own for each run; nodes take one that all can name, and a
    resume makes none."""
    from nanoGPT.launch import Place, choose_out_dir
    from nanoGPT.train_config import TrainConfig

    before, trainer = os.getcwd(), ROOT / "nanoGPT/train.py"
    os.chdir(tmp_path)
    try:
        chosen = [choose_out_dir(TrainConfig(), trainer, Place(gpus=ranks)) for _ in range(3)]
    finally:
        os.chdir(before)
    for config in (TrainConfig(init_from="resume"), TrainConfig(out_dir="mine")):
        assert choose_out_dir(config, trainer, Place(gpus=ranks)) == config.out_dir
    place = Place(gpus=ranks, nnodes=2)  # whose launchers cannot agree on a time
    assert choose_out_dir(TrainConfig(), trainer, place) == "out/nanoGPT-2nodes"
    assert len(set(chosen)) == 3 and all(name.startswith("out/nanoGPT-") for name in chosen)


def test_the_first_reason_of_its_own_is_named(tmp_path):
    """Of several failed ranks the killed one is named, else the first whose reason is its own. A rank that lost its
    peer, that the launcher ended, or that NCCL's watchdog aborted only followed, however early."""

    def failure(rank: int, code: int, message: str, when: int) -> ProcessFailure:
        told = tmp_path / f"{rank}.json"
        told.write_text(json.dumps({"message": message, "timestamp": when}))
        return ProcessFailure(rank, 1, code, str(told))

    lost = failure(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]", 1)
    ended = failure(1, -signal.SIGTERM, "Signal 15 (SIGTERM) received by PID 1", 2)
    late, early = failure(2, 1, "OSError: late", 4), failure(3, 1, "OSError: early", 3)
    killed = failure(4, -signal.SIGKILL, "Signal 9 (SIGKILL) received by PID 1", 5)
    aborted = failure(5, -signal.SIGABRT, "Signal 6 (SIGABRT) received by PID 1", 0)  # by NCCL's watchdog
    everyone = dict(enumerate((lost, ended, late, early, killed, aborted)))
    for rank in (4, 3, 2, 5, 0):
        assert root_cause(everyone)[0] == rank
        del everyone[rank]


def test_a_signal_that_nobody_handled_is_explained():
    """A rank that ends by the signal which the launcher was sent had nothing to save; by another one it was killed."""
    early = "SIGINT came before training had begun"
    for exit_code, asked, code, words in (
        (3, [], 3, "message"),
        (-signal.SIGTERM, [signal.SIGINT], 130, early),
        (-signal.SIGINT, [signal.SIGINT, signal.SIGTERM], 130, early),
        (-signal.SIGKILL, [signal.SIGINT], 137, "killed by SIGKILL; --init_from=resume"),
        (-signal.SIGTERM, [], 143, "killed by SIGTERM; --init_from=resume"),
    ):
        got, reason = explain(exit_code, "message", asked)
        assert got == code and words in reason


def ctrl_c_ends_at_once() -> bool:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def test_which_signals_end_a_run(monkeypatch):
    """A first signal asks for the end of the step, a second SIGINT within two seconds is the same one, a later one ends
    the run at once; what nohup ignores stays ignored."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before, now = [signal.getsignal(number) for number in numbers], time.monotonic()
    run = create_runtime("cpu", "auto")
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        listen_for_signals(run)
        signal.raise_signal(signal.SIGHUP)
        assert run.stop_signal is None
        assert not ctrl_c_ends_at_once() and not ctrl_c_ends_at_once() and run.stop_signal == "SIGINT"
        monkeypatch.setattr("nanoGPT.job.signals.time.monotonic", lambda: now + 60)
        signal.raise_signal(signal.SIGTERM)
        assert ctrl_c_ends_at_once()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


ENDS = """
import sys
from nanoGPT.job.start import main
from nanoGPT.memory import costs
from nanoGPT.train_config import TrainConfig
from nanoGPT.errors import ConfigError, NonFiniteLoss, SaveError

def train(config):
    raise {error}

main(train, TrainConfig, {trainer!r}, costs)
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError('why')", 2),
        ("NonFiniteLoss('why')", 3),
        ("SaveError('why')", 1),
        ("KeyboardInterrupt", 130),
        ("MemoryError('why')", 1),
        ("ValueError('why')", 1),
    ],
)
def test_how_a_trainer_ends(error, code, tmp_path):
    """Every error has its exit code and one sentence, and only what nobody foresaw a traceback."""
    program = tmp_path / "program.py"
    program.write_text(ENDS.format(error=error, trainer=str(ROOT / "nanoGPT" / "train.py")))
    ended = run_program(str(program))
    assert ended.code == code and ended.output.count("error: ") == 1, ended
    assert ("Traceback" in ended.output) == error.startswith("ValueError")


def end_at_a_loss(out: str) -> list[str]:
    done: list[str] = []
    try:
        with start(tiny("nanoGPT", Path(out))) as (run, _):
            run.at_end.append(lambda: done.append("saved"))
            raise NonFiniteLoss("step 3")
    except NonFiniteLoss:
        return done


def test_a_loss_that_blows_up_waits_for_the_save_before_it(tmp_path):
    """What is still being saved when a loss is not finite is from before, and is awaited."""
    assert run_on_ranks(end_at_a_loss, 2, str(tmp_path), show=False) == [["saved"], ["saved"]]
