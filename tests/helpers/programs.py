"""Programs of the repository, run as a user runs them: from a process that has imported torch, or by the launcher."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.training import ROOT, TINY
from workshop.ranks import PRELOADED, without_main_module

LONG = {**TINY, "max_iters": 100000, "eval_interval": 100000, "stall_seconds": 1000}


@dataclass
class Ended:
    """How a program ended, and what it wrote to standard output and standard error."""

    code: int
    output: str


def run_program(*words: str, timeout: float = 100, **environment: str) -> Ended:
    """Run a script of the repository as `python script words...` does, from a process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile("r", errors="replace") as file, without_main_module():
        process = context.Process(target=be_program, args=(words, file.name, {**os.environ, **environment}))
        process.start()
        process.join(timeout)
        alive = process.is_alive()
        process.kill()
        process.join()
        output = file.read()
    assert not alive, f"{words} had not ended after {timeout} s:\n{output}"
    assert process.exitcode is not None
    return Ended(process.exitcode, output)


def be_program(words: tuple[str, ...], output: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = list(words)
    code = 0
    try:
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def assert_refused(ended: Ended, *words: str) -> str:
    """Assert that a program ended with code 2, one sentence that holds `words`, and no traceback."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.output, ended.output
    sentences = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, ended.output
    for word in words:
        assert word in sentences[0], (word, sentences[0])
    return sentences[0]


def as_flags(**fields) -> list[str]:
    return [f"--{name}={value}" for name, value in fields.items()]


def launch(out: Path, ranks: int, phase: str = "phase3_fsdp", **fields) -> subprocess.Popen:
    """`python -m nanoGPT.launch` in a process of its own."""
    command = [sys.executable, "-m", "nanoGPT.launch", f"--gpus={ranks}", f"{phase}/train.py"]
    return subprocess.Popen(
        [*command, *as_flags(**{**LONG, **fields, "out_dir": out, "device": "cpu"})],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pipesize=2**20,  # nobody reads it while the job runs: 64 KiB are full after a thousand steps
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )


def await_steps(out: Path, steps: int, process: subprocess.Popen) -> None:
    for _ in range(600):
        if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") >= steps:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no progress within 60 seconds")
