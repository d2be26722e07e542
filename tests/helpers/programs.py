"""Run programs of the repository as a user does, but in a process that is forked from a server with torch imported.

A new interpreter would take more than two seconds for these imports, and most tests do not need a new interpreter.
The ranks of a launcher are forked from the launcher for the same reason, unless a test asks for new interpreters.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from operate.ranks import PRELOADED, without_main_module
from operate.watchdog import list_children, send_signal
from tests.helpers.forking import CAN_FORK_RANKS, fork_rank_server, prepare_fork
from tests.helpers.training import ROOT, TINY

DEADLINE = 1200.0  # seconds; only a failing test waits so long, even on a busy machine
LONG_RUN = {**TINY, "max_iters": 100000, "eval_interval": 100000, "stall_seconds": 1000}


def run_in_new_interpreter(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python words...` in a new interpreter until it exits."""
    options: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **environment}, "timeout": DEADLINE}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)


def run_with_compiled_kernels(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `python words...` in a new interpreter, in which Triton compiles kernels instead of interpreting them."""
    return run_in_new_interpreter(*words, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))


@dataclass
class Outcome:
    """The exit code of a program, and its standard output and standard error."""

    code: int
    output: str


class Program:
    """A running program with the methods of subprocess.Popen that tests use. It writes its output into a file.

    Attributes:
        started: all programs of this process, in the order in which they were started.
    """

    started: ClassVar[list["Program"]] = []

    def __init__(
        self,
        *words: str,
        cwd: Path = ROOT,
        open_output: Callable[[], int] | None = None,
        new_interpreters: bool = False,
        **environment: str,
    ) -> None:
        """Start `python words...`, or `python -m words...` if the first word is not a script.

        Args:
            open_output: function that the program's process calls; it returns the file descriptor for the output,
                instead of the file.
            new_interpreters: the program starts its ranks in new interpreters, as it does for a user.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.words = words
        self.file = tempfile.NamedTemporaryFile("r", errors="replace")
        output = self.file.name if open_output is None else open_output
        with without_main_module():
            forks = not new_interpreters and CAN_FORK_RANKS
            process_args = (words, output, cwd, forks, {**os.environ, **environment})
            self.process = context.Process(target=run_in_this_process, args=process_args)
            self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        Program.started.append(self)

    def output(self) -> str:
        """Return the output that the program has written until now."""
        self.file.seek(0)
        return self.file.read()

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int:
        assert self.process.exitcode is not None
        return self.process.exitcode

    def wait(self, timeout: float = DEADLINE) -> int:
        self.process.join(timeout)
        alive = self.process.is_alive()
        if alive:
            kill_programs([self])
        assert not alive, f"{self.words} did not exit within {timeout} s:\n{self.output()}"
        return self.returncode

    def communicate(self, timeout: float = DEADLINE) -> tuple[str, None]:
        """Wait until the program exits. Return its output, and None instead of Popen's standard error."""
        self.wait(timeout)
        return self.output(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def kill_programs(programs: list[Program]) -> None:
    """Kill the programs that still run, and all their descendants, such as the ranks of a launcher."""
    running = [program.pid for program in programs if program.poll() is None]
    for pid in running:
        send_signal([pid], signal.SIGSTOP)  # so that it starts no more children
        running += list_children(pid)  # the loop also visits the children that it adds
    send_signal(running, signal.SIGKILL)
    for program in programs:
        program.process.join(10)


def run_program(*words: str, **environment: str) -> Outcome:
    """Run a program of the repository until it exits, as `python words...` does."""
    program = Program(*words, **environment)
    output, _ = program.communicate()
    return Outcome(program.returncode, output)


def run_in_this_process(
    words: tuple[str, ...],
    output: str | Callable[[], int],
    cwd: Path,
    forks: bool,
    environment: dict[str, str],
) -> None:
    """Run a program in this forked process, and exit with its exit code.

    Args:
        forks: fork the Python programs that this program starts from this process.
    """
    if forks:
        subprocess.Popen = subprocess_handler.Popen = ForkingPopen  # type: ignore[misc]
        multiprocessing.util.spawnv_passfds = fork_rank_server  # type: ignore[attr-defined]
    # torch reads the source of all callers for this name, 20 times per start, for a log that nobody reads.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth - 1).f_code.co_name
    os.chdir(cwd)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND) if isinstance(output, str) else output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup, and children inherit that
    run_as_main(words, environment)


def run_as_main(words: tuple[str, ...], environment: dict[str, str]) -> None:
    """Run a program with this environment in this process, and exit with its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job, and children inherit that
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


class ForkingPopen(subprocess.Popen):
    """A subprocess.Popen that forks this process to run a Python program. It starts all other commands as usual."""

    def __init__(self, args: Any, **options: Any) -> None:
        self.options = options
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        is_python = args[0] == sys.executable
        words = tuple(os.fspath(word) for word in args[1:] if word not in ("-u", "-m")) if is_python else ()
        outputs = [self.options.get(name) for name in ("stdout", "stderr")]
        if not words or words[0].startswith("-") or any(isinstance(output, int) for output in outputs):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            run_in_fork(words, unblocked, **self.options)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        self._child_created = True


def run_in_fork(
    words: tuple[str, ...],
    signal_mask: set[signal.Signals],
    env: dict[str, str],
    cwd: Path | str = ".",
    stdout: Any = None,
    stderr: Any = None,
    pass_fds: tuple[int, ...] = (),
    start_new_session: bool = False,
) -> None:
    """Run a program in this fork, with the arguments of subprocess.Popen. Remove what a new interpreter has not."""
    try:
        for output, descriptor in ((stdout, 1), (stderr, 2)):
            if output is not None:
                os.dup2(output.fileno(), descriptor)
        prepare_fork({1, 2, *pass_fds})
        if start_new_session:
            os.setsid()
        os.chdir(cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        run_as_main(words, env)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def find_free_port() -> str:
    """Return a port that no process uses.

    It is below the ports that Linux gives to programs that ask for any port, so that no other test gets it meanwhile.
    """
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            port = random.SystemRandom().randrange(20000, 32000)
            probe.bind(("", port))
            return str(port)


def assert_refused(outcome: Outcome, *words: str) -> str:
    """Assert that a program exited with code 2 and printed one error that contains `words`, and no traceback.

    Returns:
        The error line.
    """
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.output, outcome.output
    sentences = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, outcome.output
    for word in words:
        assert word in sentences[0], (word, sentences[0])
    return sentences[0]


def make_flags(**fields) -> list[str]:
    """Return configuration fields as flags of the command line."""
    return [f"--{name}={value}" for name, value in fields.items()]


def launch(out: Path, ranks: int, phase: str = "phase3_fsdp", new_interpreters: bool = False, **fields) -> Program:
    """Start `python -m operate.launch` with ranks that train until the test stops them."""
    words = make_flags(**{**LONG_RUN, **fields, "out_dir": out, "device": "cpu"})
    trainer = f"{phase}/train.py"
    return Program("operate.launch", f"--gpus={ranks}", trainer, *words, new_interpreters=new_interpreters)


def wait_until(is_true: Callable[[], object]) -> None:
    """Wait until a condition is true. A test that fails waits long, because the machine may run other programs."""
    deadline = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < deadline, f"the condition was not true within {DEADLINE} s"
        time.sleep(0.05)


def await_steps(out: Path, steps: int, process: "Program | subprocess.Popen") -> None:
    """Wait until a run has logged at least `steps` lines."""

    def has_logged() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") >= steps

    wait_until(has_logged)
