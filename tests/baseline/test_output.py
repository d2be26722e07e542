"""Output that nobody can read: a run goes on, saves, and ends as it was asked to."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoGPT.cli.program import DroppingFile, unbreakable_output
from nanoGPT.metrics.hardware import git_commit
from tests.helpers.programs import Program, await_steps, run_program
from tests.helpers.training import ROOT, TINY
from workshop.ranks import losses

SHORT = {**TINY, "max_iters": 6, "eval_interval": 3}


def command(out: Path, ranks: int, phase: str = "nanoGPT", **fields) -> list[str]:
    flags = [f"--{name}={value}" for name, value in {**SHORT, **fields, "out_dir": out, "device": "cpu"}.items()]
    return [sys.executable, "-m", "nanoGPT.launch", f"--gpus={ranks}", f"{phase}/train.py", *flags]


def steps_saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def closed_pipe() -> int:
    """Return the writing end of a pipe whose reader has gone, as after `| head` or an interrupted `| tee`."""
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


def closed_terminal() -> int:
    """Return a terminal that was closed: writing to it raises EIO."""
    master, terminal = os.openpty()
    os.close(master)
    return terminal


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("output", [closed_pipe, closed_terminal, full_disk])
def test_a_run_whose_output_is_dead_trains_to_its_end(output: Callable[[], int], ranks, tmp_path):
    """Standard output and standard error that cannot be written change neither the run, nor its checkpoints, nor its
    exit code."""
    assert Program(*command(tmp_path, ranks)[2:], into=output).wait() == 0
    assert steps_saved(tmp_path) == ["step-00000003", "step-00000006"] and len(losses(tmp_path)) == 6


def test_a_run_without_any_output_trains_to_its_end(tmp_path):
    """Descriptors 0, 1 and 2 that were closed before the start are no file of the run."""
    done = subprocess.run(
        ["bash", "-c", '"$0" "$@" <&- >&- 2>&-', *command(tmp_path, 1)], cwd=ROOT, timeout=100, check=False
    )
    assert done.returncode == 0 and steps_saved(tmp_path)[-1] == "step-00000006"


def test_an_interrupted_run_whose_reader_has_gone_saves(tmp_path):
    """Ctrl-C with `| tee log` ends tee first: the run still ends its step and saves."""
    words = command(tmp_path, 2, max_iters=100000, eval_interval=100000)
    process = subprocess.Popen(
        ["bash", "-c", '"$0" "$@" 2>&1 | tee /dev/null', *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )
    await_steps(tmp_path, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    (saved,) = steps_saved(tmp_path)
    assert int(saved[5:]) == len(losses(tmp_path)) >= 3


def test_a_reader_that_stops_reading_delays_only_the_first_write(monkeypatch):
    """A pipe that is full and that nobody empties, such as `| less`, is waited for once; then its lines are dropped."""
    monkeypatch.setattr(DroppingFile, "patience", 0.05)
    ours, theirs = os.pipe()
    stream = DroppingFile(theirs, "w")
    os.set_blocking(theirs, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(theirs, b"x" * 4096)
    os.set_blocking(theirs, True)
    waits, select_within = [], select.select
    monkeypatch.setattr(select, "select", lambda *words: waits.append(words[3]) or select_within(*words))
    assert stream.write(b"lost " * 2000) == 10000
    assert waits == [0.05] and stream.patience == 0.0
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.read(ours, 1 << 16)
    assert stream.write(b"read") == 4 and os.read(ours, 100) == b"read" and stream.patience > 0
    stream.close()
    os.close(ours)


def test_an_encoding_without_the_character_loses_no_line(tmp_path):
    """PYTHONIOENCODING=ascii prints what ASCII lacks as an escape, and raises nothing."""
    code = "from nanoGPT.cli.program import unbreakable_output\nwith unbreakable_output(): print('caf\\u00e9 \\udcff')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, b"caf\\xe9 \\udcff\n")


def test_only_the_standard_streams_are_replaced(capsys):
    """Inside a test or a notebook, whose streams are their own, nothing is replaced."""
    before = sys.stdout, sys.stderr
    with unbreakable_output():
        assert (sys.stdout, sys.stderr) == before


def test_git_is_optional(tmp_path, monkeypatch):
    """Without git on the PATH a run starts, and env.json has null for the commit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None
    ended = run_program("nanoGPT/train.py", *command(tmp_path / "run", 1)[5:], PATH=str(tmp_path))
    assert ended.code == 0, ended.output
    assert '"git_commit": null' in (tmp_path / "run" / "env.json").read_text()


BROKEN_WANDB = """
def init(**_): {init}
class Run:
    def log(self, *_, **__): raise ConnectionError("no network")
    def finish(self): print("finished")
"""


@pytest.mark.parametrize("init", ["raise ConnectionError('no network')", "return Run()"])
def test_a_tracker_that_fails_ends_no_run(init, tmp_path):
    """A tracker that cannot start, or fails while it is used, is reported in one line; the run goes on without it."""
    (tmp_path / "wandb.py").write_text(BROKEN_WANDB.format(init=init))
    words = [sys.executable, "nanoGPT/train.py", *command(tmp_path / "run", 1, track="wandb")[5:]]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--track=wandb failed (ConnectionError: no network)") == 1
    assert steps_saved(tmp_path / "run")[-1] == "step-00000006"
