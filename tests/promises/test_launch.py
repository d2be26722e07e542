"""Start and stop of jobs, with real launchers, real signals and real exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nanoGPT.checkpoint.manifest import serialize_manifest, step_directories
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError, report_failure
from nanoGPT.job.start import STOP_SIGNALS, enter_out_dir, listen_for_signals, report_job_errors
from nanoGPT.train_config import TrainConfig
from operate import launch as launch_module
from operate.autopsy.causes import find_cause
from operate.autopsy.evidence import read_evidence
from operate.nodes import NodeConfig
from operate.restart import record_job, resume_after_restart
from operate.root_cause import explain_exit, find_root_cause
from operate.watchdog import list_children
from tests.helpers.programs import (
    LONG_RUN,
    Program,
    await_steps,
    find_free_port,
    launch,
    make_flags,
    run_program,
    wait_until,
)
from tests.helpers.training import ROOT, TINY, gap, tiny, train, train_all
from workshop.ranks import losses, run_on_ranks


def read_rank_pids(out: Path) -> list[int]:
    return [json.loads(p.read_text())["pid"] for p in sorted((out / "heartbeat").glob("rank*.json"))]


def await_heartbeats(out: Path, ranks: int) -> list[int]:
    """Wait until every rank has written its heartbeat. Return the process ids."""
    wait_until(lambda: len(read_rank_pids(out)) == ranks)
    return read_rank_pids(out)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_job_trains_and_writes_a_sample(tmp_path, monkeypatch):
    """Four launched ranks train to the end and exit with code 0. They print each line once, and a sample of text.

    Each rank but the first has a file of its output. No temporary file is left.
    """
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    fields = {"max_iters": 6, "n_layer": 1, "gradient_accumulation_steps": 4}
    process = launch(tmp_path, 4, **fields)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert output.count("step     3  loss") == 1 and "A sample from" in output and "Traceback" not in output
    assert "device cpu (found no GPU)" in output or "device cpu (requested)" in output
    assert sorted(path.parent.name for path in tmp_path.glob("logs/*/attempt_0/*/stdout.log")) == ["1", "2", "3"]
    remaining_files = [path.name for path in (tmp_path / "tmp").iterdir()]
    # The cache of torch.compile may stay.
    assert not [name for name in remaining_files if not name.startswith("torchinductor_")], remaining_files
    assert gap(losses(tmp_path), train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **fields))) < 1e-5


def test_sigterm_ends_a_launcher_that_waits_for_other_nodes(tmp_path):
    """SIGTERM ends a launcher that waits for the launcher of another node."""
    port = find_free_port()
    process = Program("operate.launch", "--nnodes=2", "nanoGPT/train.py", f"--out_dir={tmp_path}", MASTER_PORT=port)
    wait_until(lambda: f"rendezvous at 127.0.0.1:{port}" in process.output())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert_ended_early(process.returncode, output, signal.SIGTERM)


def test_a_signal_saves_and_resumes(tmp_path):
    """After SIGUSR2, as after SIGTERM, the launcher finishes the step, saves and exits with code 0.

    The autopsy finds no fault. The resumed run has exactly the losses of an uninterrupted run.
    """
    fields = {**LONG_RUN, "max_iters": 300, "n_layer": 1, "gradient_accumulation_steps": 2}
    words = ["--gpus=2", "phase3_fsdp/train.py", *make_flags(**{**fields, "out_dir": tmp_path / "cut"})]
    process = Program("tests.helpers.slow_steps", "operate.launch", *words)
    await_steps(tmp_path / "cut", 3, process)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate()
    assert process.returncode == 0 and "--init_from=resume" in output and "A sample" not in output, output
    cause = find_cause(read_evidence(tmp_path / "cut"))
    assert (cause.kind, cause.text) == ("none", "no fault: the run was stopped by a signal")
    last_step = max(losses(tmp_path / "cut"))
    manifest = (tmp_path / "cut" / "checkpoints" / f"step-{last_step + 1:08d}" / "manifest.json").read_text()
    assert last_step < 299 and "Infinity" not in manifest  # which JSON does not have
    fields |= {"max_iters": last_step + 4, "lr_decay_iters": 300}
    runs = [("cut", {"init_from": "resume"}), ("whole", {})]
    cells = [("phase3_fsdp", tiny("phase3_fsdp", tmp_path / name, **fields, **more)) for name, more in runs]
    resumed, uninterrupted = train_all(2, cells)
    assert resumed == uninterrupted and max(resumed) == last_step + 3


def test_a_killed_rank_ends_the_job(tmp_path):
    """After SIGKILL of one rank, the launcher names the rank, returns 137 and leaves no other rank.

    The autopsy names the rank and the signal.
    """
    process = launch(tmp_path, 2)
    await_steps(tmp_path, 2, process)
    pids = await_heartbeats(tmp_path, 2)
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 137, output
    assert output.splitlines()[-1].startswith("error: rank 1: it was killed by SIGKILL"), output
    assert "Traceback" not in output
    assert all(is_gone(pid) for pid in pids)
    cause = find_cause(read_evidence(tmp_path))
    assert (cause.kind, cause.text) == ("killed", "rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_with_their_launcher(ranks, tmp_path):
    """The launcher tunes glibc's allocator for its ranks. After SIGKILL of the launcher, its ranks save and exit."""
    process = launch(tmp_path, ranks, phase="nanoGPT")
    await_steps(tmp_path, 1, process)
    assert "trim_threshold" in json.loads((tmp_path / "env.json").read_text())["environment"]["GLIBC_TUNABLES"]
    pids = await_heartbeats(tmp_path, ranks)
    process.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
    assert process.returncode == -signal.SIGKILL and len(step_directories(tmp_path)) == 1
    log = (tmp_path / "log.txt").read_text()  # the other rank may have noticed it first
    assert "stopped by SIGTERM" in log or "stopped by a request of another rank" in log


def test_a_rank_that_starts_after_its_launcher_was_killed_exits(tmp_path):
    """Importing torch takes seconds. A launcher that is killed in that time leaves no rank that trains alone."""
    with subprocess.Popen(["true"]) as launcher:
        launcher.wait()
    variables = {"NANOGPT_PARENT": str(launcher.pid)}
    outcome = run_program(
        "nanoGPT/train.py", *make_flags(**{**TINY, "out_dir": tmp_path, "max_iters": 10**6}), **variables
    )
    assert outcome.code in (0, -signal.SIGTERM)  # it has begun and saved, or it has not


def assert_ended_early(code: int, output: str, number: signal.Signals) -> None:
    """Assert that a signal ended a job without a traceback, before training or after a save that can be resumed."""
    assert code in (0, -number, 128 + number), (code, output)
    assert "Traceback" not in output and "KeyboardInterrupt" not in output, output
    assert code != 0 or "--init_from=resume" in output


@pytest.mark.parametrize(("ranks", "name"), [(1, "SIGXCPU"), (1, "SIGINT"), (2, "SIGUSR1"), (2, "SIGINT")])
def test_a_signal_while_ranks_start_ends_the_job(ranks, name, tmp_path):
    """A signal or Ctrl-C right after the launcher has started a rank ends the job and leaves no rank.

    Ctrl-C is acknowledged at once.
    """
    process = launch(tmp_path, ranks, phase="nanoGPT", new_interpreters=True)
    number = signal.Signals[name]
    wait_until(lambda: list_children(process.pid))
    pids = list_children(process.pid)
    process.send_signal(number)
    output, _ = process.communicate()
    assert_ended_early(process.returncode, output, number)
    assert ("Ctrl-C: the ranks receive SIGTERM and stop" in output) == (name == "SIGINT")
    assert all(is_gone(pid) for pid in pids)


def test_a_second_run_in_a_directory_is_refused_and_sigquit_writes_stacks(tmp_path):
    """A second run in the same directory is refused. SIGQUIT to the launcher writes the stacks of all threads.

    The run continues until SIGXCPU, which the kernel sends to the rank itself at a limit of processor time.
    """
    first = launch(tmp_path, 1, phase="nanoGPT")
    await_steps(tmp_path, 1, first)
    first.send_signal(signal.SIGQUIT)
    second = launch(tmp_path, 1, phase="nanoGPT")
    output, _ = second.communicate()
    assert second.returncode == 2 and "another run is writing into" in output, output
    await_steps(tmp_path, len(losses(tmp_path)) + 2, first)
    stacks = (tmp_path / "stacks" / "rank0.txt").read_text()
    assert "train.py" in stacks and "heartbeat.py" in stacks
    os.kill(read_rank_pids(tmp_path)[0], signal.SIGXCPU)
    output, _ = first.communicate()
    assert first.returncode == 0 and "resume with --init_from=resume" in output, output


def start_torchrun(phase: str, out: Path, *options: str, **fields) -> Program:
    """Run `cd phase && torchrun --standalone --nproc_per_node=2 train.py`. After a few steps, the ranks are slow."""
    words = [
        "tests.helpers.slow_steps",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        *options,
        "train.py",
    ]
    return Program(*words, *make_flags(**{**TINY, **fields, "out_dir": out, "device": "cpu"}), cwd=ROOT / phase)


def test_a_run_continues_after_torchrun_restarts_it(tmp_path):
    """After SIGKILL of a rank, torchrun with `--max-restarts=1` resumes from the checkpoint, with the same losses."""
    fields = {"max_iters": 9, "eval_interval": 4, "n_layer": 1, "gradient_accumulation_steps": 2}
    process = start_torchrun("phase3_fsdp", tmp_path / "cut", "--max-restarts=1", **fields)
    wait_until(lambda: process.poll() is not None or list((tmp_path / "cut" / "checkpoints").glob("step-*")))
    assert process.poll() is None, process.output()
    os.kill(read_rank_pids(tmp_path / "cut")[1], signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert output.count("torchrun has restarted the job: it resumes from its newest checkpoint") == 1, output
    assert "resuming after" in output and f"{tmp_path}/cut/checkpoints/step-" in output
    assert losses(tmp_path / "cut") == train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "whole", **fields))


def start_again(out: Path, agent: str = "this job", **fields) -> tuple[str, int, int | None] | str:
    """Start a rank as torchrun with restarts does. Return its init_from, n_layer and resume_step, or the error message.

    Args:
        agent: the run id of torchrun.
        fields: of the configuration.
    """
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": agent}
    run = create_runtime("cpu", "float32")
    run.barrier()
    config = tiny("nanoGPT", out, **fields)
    resume_after_restart(run, config)
    run.barrier()
    try:
        enter_out_dir(run, config)
        record_job(run, out)
        return config.init_from, config.n_layer, config.resume_step
    except ConfigError as error:
        return str(error)
    finally:
        if run.lock:
            run.lock.close()
        run.barrier()


def start_repeatedly(out: Path) -> list[tuple[str, int, int | None] | str]:
    """Start a rank seven times: twice without a checkpoint, then with a checkpoint of a model with 12 layers.

    Before the fifth start, the checkpoint becomes one that the job itself has saved, in its fourth start.
    """
    results = [start_again(out), start_again(out)]
    folder = out / "checkpoints" / "step-00000004"
    if os.environ["RANK"] == "0":
        folder.mkdir(parents=True)
        config = {**vars(tiny("nanoGPT", out)), "n_layer": 12}
        files = [{"name": "ckpt.pt", "size": 1, "sha256": ""}]
        manifest = {"config": config, "step": 4, "world_size": 2, "versions": {}, "files": files}
        (folder / "manifest.json").write_text(serialize_manifest(manifest))
    results += [start_again(out), start_again(out, init_from="resume", resume_step=4)]
    if os.environ["RANK"] == "0":
        own_token = (out / ".lock").read_text().splitlines()[-1]
        (folder / "manifest.json").write_text(serialize_manifest({**manifest, "run": own_token}))
    results += [start_again(out, init_from="resume", resume_step=4) for _ in range(2)]
    return [*results, start_again(out, "another job")]


def test_only_a_restart_by_torchrun_resumes_automatically(tmp_path):
    """If torchrun has restarted the job and a checkpoint exists, all ranks resume from the newest checkpoint.

    Another job does not resume automatically. --resume_step counts until the job has saved a checkpoint of its own.
    """
    results, others = run_on_ranks(start_repeatedly, 2, tmp_path, show=False)
    assert results == others
    assert results[:2] == [("scratch", 2, None)] * 2
    assert results[2:6] == [("resume", 12, None), ("resume", 2, 4), ("resume", 2, None), ("resume", 2, None)]
    assert len(results) == 7 and "contains checkpoints up to step-00000004" in results[6]


def test_each_run_has_a_new_directory(tmp_path, monkeypatch):
    """Without --out_dir, the launcher creates a new directory for each run. On several nodes, all use one name."""
    monkeypatch.chdir(tmp_path)
    names = [launch_module.create_out_dir(TrainConfig(), NodeConfig()) for _ in range(3)]
    assert len(set(names)) == 3 and all(name.startswith("out/nanoGPT-") for name in names)
    assert launch_module.create_out_dir(TrainConfig(), NodeConfig(nnodes=2)) == "out/nanoGPT-2nodes"
    for config in (TrainConfig(init_from="resume"), TrainConfig(out_dir="mine")):
        assert launch_module.create_out_dir(config, NodeConfig()) == config.out_dir


def test_a_rank_that_exits_without_an_error_is_not_blamed_on_another(tmp_path):
    """If an observer or a library ends a rank with exit code 0, the message of the others says so."""
    code = "import os\nfrom nanoGPT.observers import Observer as Base\n\n\nclass Observer(Base):\n"
    code += "    def begin_step(self, step):\n        if step == 2 and self.run.rank == 1:\n            os._exit(0)\n"
    (tmp_path / "leaves.py").write_text(code)
    flags = make_flags(**{**LONG_RUN, "out_dir": tmp_path / "run", "observers": "operate,leaves"})
    outcome = run_program("operate.launch", "--gpus=2", "nanoGPT/train.py", *flags, PYTHONPATH=str(tmp_path))
    assert outcome.code == 1 and "error: rank 0: lost a rank, which failed on another node or exited" in outcome.output


def test_the_text_of_an_exit_is_the_error(capsys, monkeypatch):
    """An observer may call `sys.exit` with an exit code, or with a text."""
    monkeypatch.delenv("RANK", raising=False)
    assert [report_job_errors(lambda code=code: sys.exit(code)) for code in (None, 7, "enough")] == [0, 7, 1]
    assert capsys.readouterr().err == "error: enough\n"


@pytest.mark.parametrize(
    "lost_message",
    [
        "RuntimeError: Connection closed by peer [127.0.0.1]",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0",
    ],
)
def test_the_root_cause_is_named(lost_message, tmp_path):
    """Of several failed ranks, the root cause is a killed rank, otherwise the first rank that raised an error itself.

    A rank that lost its peer, was stopped or killed by the launcher, or was aborted by NCCL's watchdog is not the root
    cause.
    """

    def failure(rank: int, code: int, message: str, when: int) -> ProcessFailure:
        error_file = tmp_path / f"{rank}.json"
        error_file.write_text(json.dumps({"message": message, "timestamp": when}))
        return ProcessFailure(rank, 1, code, str(error_file))

    lost = failure(0, 1, lost_message, 1)
    terminated = failure(1, -signal.SIGTERM, "Signal 15 (SIGTERM) received by PID 1", 2)
    late, early = failure(2, 1, "OSError: late", 4), failure(3, 1, "OSError: early", 3)
    killed = failure(4, -signal.SIGKILL, "Signal 9 (SIGKILL) received by PID 1", 3)
    aborted = failure(5, -signal.SIGABRT, "Signal 6 (SIGABRT) received by PID 1", 0)  # by NCCL's watchdog
    failures = dict(enumerate((lost, terminated, late, early, killed, aborted)))
    for rank in (4, 3, 2, 5, 0):
        assert find_root_cause(failures, 7)[0] == rank
        del failures[rank]
    assert find_root_cause({0: lost, 1: terminated}, 2)[0] == 1  # nobody else can have lost this rank
    stuck = failure(6, -signal.SIGKILL, "Signal 9 (SIGKILL) received by PID 1", 9)  # killed by the launcher
    assert find_root_cause({2: late, 6: stuck}, 7)[0] == 2


def test_a_repeated_signal_does_not_change_the_end_of_a_run(monkeypatch):
    """A scheduler may repeat its signal when the ranks have saved and ended. Before any rank has started, a signal ends
    the launcher."""
    with subprocess.Popen(["sleep", "60"]) as rank:
        monkeypatch.setattr(launch_module, "list_rank_processes", lambda: [rank.pid] if rank.poll() is None else [])
        received: list[int] = []
        handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)}
        try:
            launch_module.forward_signals(received)
            signal.raise_signal(signal.SIGUSR1)
            assert rank.wait() == -signal.SIGUSR1
            signal.raise_signal(signal.SIGUSR1)
            assert received == [signal.SIGUSR1] * 2
            launch_module.forward_signals(received)  # a launcher without ranks
            with pytest.raises(SystemExit) as stop:
                signal.raise_signal(signal.SIGUSR1)
            assert stop.value.code == 128 + signal.SIGUSR1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def ctrl_c_interrupts() -> bool:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def test_signals_end_a_run(monkeypatch):
    """The first signal stops the run after the step. A later SIGINT stops it immediately.

    A second SIGINT within two seconds counts as the first one. A signal that nohup ignores stays ignored.
    """
    numbers = STOP_SIGNALS
    before, now = [signal.getsignal(number) for number in numbers], time.monotonic()
    run = create_runtime("cpu", "auto")
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        listen_for_signals(run)
        signal.raise_signal(signal.SIGHUP)
        assert run.stop_reason is None
        assert not ctrl_c_interrupts() and not ctrl_c_interrupts() and run.stop_reason == "SIGINT"
        monkeypatch.setattr("nanoGPT.job.start.time.monotonic", lambda: now + 60)
        signal.raise_signal(signal.SIGTERM)
        assert ctrl_c_interrupts()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


FAILING_TRAINER = """
import sys
from nanoGPT.job.start import main, start
from nanoGPT.train_config import TrainConfig
from nanoGPT.errors import ConfigError, NonFiniteLoss, PeerFailed, SaveError

def train(config):
    with start(config):
        raise {error}

main(train, TrainConfig, {trainer!r})
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("NonFiniteLoss('why')", 3),
        ("SaveError('why')", 1),
        ("KeyboardInterrupt", 130),
        ("PeerFailed('why')", 1),
        ("ValueError('why')", 1),
    ],
)
def test_every_error_has_its_exit_code(error, code, tmp_path):
    """Every error has its exit code and one sentence. Only an unexpected error prints a traceback."""
    program = tmp_path / "program.py"
    program.write_text(FAILING_TRAINER.format(error=error, trainer=str(ROOT / "nanoGPT" / "train.py")))
    outcome = run_program(str(program), f"--out_dir={tmp_path}", "--device=cpu")
    assert outcome.code == code and outcome.output.count("error: ") == 1, outcome
    assert ("Traceback" in outcome.output) == error.startswith("ValueError")


def test_a_rank_prints_its_error_if_the_error_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    """On a full disk, no incomplete error file is left for torch's agent. The rank prints its error itself, and the
    launcher refers to it."""
    monkeypatch.setenv("NANOGPT_LAUNCHER", "1")
    for path, prints in ((tmp_path / "error.json", False), (tmp_path / "full" / "error.json", True)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        assert report_failure(1, "the disk is full") == 1
        assert ("error: the disk is full" in capsys.readouterr().err) == prints
        assert path.exists() != prints
    failure = ProcessFailure(0, 1, 1, str(path))
    assert explain_exit(1, failure.message, []) == (1, "its message is above, or in the output that it wrote last")
