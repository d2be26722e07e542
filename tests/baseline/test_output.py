"""Output that cannot be written: a run still trains, saves, and exits normally."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoGPT.distributed.environment import read_git_commit
from nanoGPT.job.command import report_errors
from tests.helpers.checkpoints import list_steps
from tests.helpers.programs import DEADLINE, Program, await_steps, make_flags, run_program
from tests.helpers.training import ROOT, TINY
from workshop.ranks import losses

SHORT_RUN = {**TINY, "max_iters": 6, "eval_interval": 3}


def launch_command(out: Path, ranks: int, **fields) -> list[str]:
    flags = make_flags(**{**SHORT_RUN, **fields, "out_dir": out})
    return [sys.executable, "-m", "operate.launch", f"--gpus={ranks}", "nanoGPT/train.py", *flags]


def open_closed_pipe() -> int:
    """Return the write end of a pipe whose read end is closed, as after `| head` or an interrupted `| tee`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


def open_full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(
    ("output", "ranks"),
    [(open_closed_pipe, 2), (open_full_disk, 1)],
)
def test_a_run_with_broken_output_trains_to_its_end(output: Callable[[], int], ranks, tmp_path):
    """If standard output and standard error cannot be written, the run, its checkpoints and its exit code are the
    same."""
    assert Program(*launch_command(tmp_path, ranks)[2:], open_output=output).wait() == 0
    assert list_steps(tmp_path) == ["step-00000003", "step-00000006"] and len(losses(tmp_path)) == 6


def test_an_interrupted_run_saves_after_its_reader_has_exited(tmp_path, python):
    """With `| tee log`, Ctrl-C stops tee first. The run still completes its step and saves."""
    _, *words = launch_command(tmp_path, 2, max_iters=100000, eval_interval=100000)
    process = subprocess.Popen(
        ["bash", "-c", '"$0" "$@" 2>&1 | tee /dev/null', python, *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job would ignore it
    )
    await_steps(tmp_path, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(DEADLINE)
    (saved,) = list_steps(tmp_path)
    assert int(saved[5:]) == len(losses(tmp_path)) >= 3


def test_a_character_that_cannot_be_encoded_is_escaped(monkeypatch):
    """Programs whose output may be dropped, and those whose output must not be, print any text in any encoding."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    with report_errors(output_is_optional=False):
        print("kůň", flush=True)
    assert output.getvalue() == b"k\\u016f\\u0148\n"
    code = "from nanoGPT.job.program import unbreakable_output\nwith unbreakable_output(): print('caf\\u00e9 \\udcff')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"caf\\xe9 \\udcff\n"


def test_git_is_optional(tmp_path, monkeypatch):
    """Without git on the PATH, a run starts, and env.json has null as the commit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git_commit() is None
    outcome = run_program("nanoGPT/train.py", *launch_command(tmp_path / "run", 1)[5:], PATH=str(tmp_path))
    assert outcome.code == 0, outcome.output
    assert '"git_commit": null' in (tmp_path / "run" / "env.json").read_text()


BROKEN_WANDB = """
def init(**_): {init}
class Run:
    def log(self, *_, **__): raise ConnectionError("no network")
    def finish(self): print("finished")
"""


WITH_BROKEN_WANDB = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("wandb", {module!r})
sys.modules["wandb"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["wandb"])
runpy.run_path("nanoGPT/train.py", run_name="__main__")
"""


@pytest.mark.parametrize("init", ["raise ConnectionError('no network')", "return Run()"])
def test_a_failing_tracker_does_not_stop_the_run(init, tmp_path):
    """If a tracker cannot start or fails later, the run prints one line and continues without it."""
    (tmp_path / "wandb.py").write_text(BROKEN_WANDB.format(init=init))
    (tmp_path / "program.py").write_text(WITH_BROKEN_WANDB.format(module=str(tmp_path / "wandb.py")))
    words = launch_command(tmp_path / "run", 1, track="wandb")[5:]
    outcome = run_program(str(tmp_path / "program.py"), *words, WANDB_API_KEY="0" * 40)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("--track=wandb failed (ConnectionError: no network)") == 1
    assert list_steps(tmp_path / "run")[-1] == "step-00000006"
