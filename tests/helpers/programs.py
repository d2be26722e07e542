"""Programs of the repository, run as a user runs them, but from a process that has imported torch already.

A fresh interpreter takes more than two seconds to import what a program needs, and most claims are not about that.
"""

import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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


class Program:
    """A running program, with what tests use of subprocess.Popen; it writes its output into a file."""

    def __init__(
        self,
        *words: str,
        cwd: Path = ROOT,
        into: Callable[[], int] | None = None,
        processor_seconds: int | None = None,
        **environment: str,
    ) -> None:
        """Start `python words...`, or `python -m words...` where the first word is no script.

        Args:
            into: called in the program's process; the descriptor that takes its output in place of the file.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.words = words
        self.file = tempfile.NamedTemporaryFile("r", errors="replace")
        output = self.file.name if into is None else into
        with without_main_module():
            environ = {**os.environ, **environment}
            self.process = context.Process(target=be_program, args=(words, output, cwd, processor_seconds, environ))
            self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def output(self) -> str:
        """What it has written so far."""
        self.file.seek(0)
        return self.file.read()

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int:
        assert self.process.exitcode is not None
        return self.process.exitcode

    def wait(self, timeout: float = 100) -> int:
        self.process.join(timeout)
        alive = self.process.is_alive()
        if alive:
            self.kill()
        assert not alive, f"{self.words} had not ended after {timeout} s:\n{self.output()}"
        return self.returncode

    def communicate(self, timeout: float = 100) -> tuple[str, None]:
        """Wait for its end; what it has written, and None for what Popen has as standard error."""
        self.wait(timeout)
        return self.output(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run_program(*words: str, timeout: float = 100, processor_seconds: int | None = None, **environment: str) -> Ended:
    """Run a program of the repository to its end, as `python words...` does.

    Args:
        processor_seconds: the program is killed when it has used so many, whatever else the machine does.
    """
    program = Program(*words, processor_seconds=processor_seconds, **environment)
    output, _ = program.communicate(timeout)
    return Ended(program.returncode, output)


def be_program(
    words: tuple[str, ...],
    output: str | Callable[[], int],
    cwd: Path,
    processor_seconds: int | None,
    environment: dict[str, str],
) -> None:
    if processor_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND) if isinstance(output, str) else output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
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


def launch(out: Path, ranks: int, phase: str = "phase3_fsdp", **fields) -> Program:
    """`python -m nanoGPT.launch` with ranks that train until somebody ends them."""
    words = as_flags(**{**LONG, **fields, "out_dir": out, "device": "cpu"})
    return Program("nanoGPT.launch", f"--gpus={ranks}", f"{phase}/train.py", *words)


def wait_until(is_true: Callable[[], object], seconds: float = 120) -> None:
    """Wait for a condition; the deadline is for a test that fails, on a machine that has other things to do."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def await_steps(out: Path, steps: int, process: "Program | subprocess.Popen") -> None:
    """Wait until a run has logged so many steps."""

    def logged() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") >= steps

    wait_until(logged)
