"""One run of a suite: a command, a directory, and a status file that says how it went.

python -m bench.suite.execution out/suites/scaling/phase1-4-plain-1337-3f2a9c     # what run.json there asks for
"""

import dataclasses
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from bench.matrix.cells import PHASES
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, read_json
from nanoGPT.schema import Malformed, Within
from nanoGPT.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
SLURM = "phase3_fsdp/slurm.sh"
STATES = ("pending", "running", "done", "oom", "timeout", "failed")
ENDED = frozenset({"done", "oom", "timeout", "failed"})
INTERRUPTED = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT}  # before training began
DONE = {False: ENDED, True: frozenset({"done"})}  # what is not run again, unless asked to retry


@dataclass(frozen=True)
class Run:
    """A run of a suite.

    Attributes:
        directory: its own.
        words: of its command line, but for the directory.
        minutes: after which it is ended.
        steps: that it has when it is done.
        config: as parsed; None where it was read from run.json.
    """

    directory: Path
    phase: str
    ranks: int
    variant: str
    seed: int
    words: list[str] = field(hash=False)
    minutes: float
    steps: int
    config: TrainConfig | None = field(default=None, hash=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.phase} on {self.ranks}, {self.variant}, seed {self.seed}"

    @property
    def out_dir(self) -> Path:
        return self.directory / "run"

    def save(self) -> None:
        """Write run.json, from which `read_run` makes the same."""
        self.directory.mkdir(parents=True, exist_ok=True)
        said = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "config"}
        said["directory"] = str(self.directory)
        (self.directory / "run.json").write_text(json.dumps(said, indent=1) + "\n")


class RunFile(TypedDict):
    """What run.json says: the fields of a Run."""

    directory: str
    phase: str
    ranks: Annotated[int, Within(1, 2**20)]
    variant: str
    seed: int
    words: list[str]
    minutes: Annotated[float, Within(math.nextafter(0, 1))]
    steps: Annotated[int, Within(1)]


class StatusFile(TypedDict):
    """What status.json says."""

    state: str
    reason: NotRequired[str]
    seconds: NotRequired[float]
    time: NotRequired[str]


def read_run(directory: Path) -> Run:
    """Return a run from its run.json.

    Raises:
        ConfigError: there is none, or none that can be read.
    """
    try:
        said: dict[str, Any] = {**read_json(directory / "run.json", RunFile)}
        if said["phase"] not in PHASES:
            raise Malformed(f"{said['phase']!r} in run.json is no phase")
    except (*ABSENT, Malformed) as error:
        raise ConfigError(f"{directory} holds no run of a suite: {error}") from None
    return Run(**{**said, "directory": directory})


def read_status(directory: Path) -> dict[str, Any]:
    """Return a run's status; pending if there is none yet, or one of another form.

    Raises:
        ConfigError: it is there, but could not be read.
    """
    try:
        found: dict[str, Any] = {**read_json(directory / "status.json", StatusFile)}
    except (*ABSENT, Malformed):
        found = {}
    blank = {"state": "pending", "reason": "", "seconds": 0.0}
    return {**blank, **found} if found.get("state") in STATES else blank


def write_status(directory: Path, state: str, reason: str = "", seconds: float = 0.0) -> dict[str, Any]:
    """Replace a run's status, whole or not at all."""
    assert state in STATES
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status = {"state": state, "reason": reason, "seconds": seconds, "time": now}
    fresh = directory / ".status.json"
    fresh.write_text(json.dumps(status, indent=1) + "\n")
    fresh.replace(directory / "status.json")
    return status


def last_step(run: Run) -> int:
    """Steps that its metrics tell of."""
    try:
        return int(json.loads((run.out_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0


@contextmanager
def directory_lock(directory: Path) -> Iterator[int]:
    """Hold a suite's or a run's directory; runs inherit the hold, so that one which outlives this program keeps it.

    Raises:
        ConfigError: another program, or a run that it has left, is at work there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made ({error.strerror}): give another --out_dir") from None
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another suite, or a run that it left, is at work in {directory}: wait for it") from None
        except OSError as error:
            print(
                f"the file system of {directory} has no file locks ({error.strerror}): start one suite there at a time"
            )
        yield file.fileno()


def command(run: Run, slurm: bool = False) -> list[str]:
    """What runs it: slurm.sh in a job that was made for it, else the launcher. One that has saved resumes."""
    if run.out_dir.exists() and not step_directories(run.out_dir):
        shutil.rmtree(run.out_dir)  # killed before its first checkpoint: from the start
    trainer = f"{PHASES[run.phase]}/train.py"
    if slurm:
        environment = [
            f"OUT_DIR={run.out_dir}",
            f"TRAINER={trainer}",
            f"PY={sys.executable}",
            f"GPUS={ranks_a_node(run)}",
        ]
        return ["env", *environment, "bash", SLURM, *run.words]
    words = [*run.words, f"--out_dir={run.out_dir.resolve()}"]
    words += ["--init_from=resume"] if run.out_dir.exists() else []
    return [sys.executable, "-m", "nanoGPT.launch", f"--gpus={run.ranks}", trainer, *words]


def ranks_a_node(run: Run) -> int:
    """How many ranks of the run each node of this job has."""
    nodes = int(os.environ.get("SLURM_NNODES") or 0)
    if not nodes or run.ranks % nodes:
        raise ConfigError(
            f"{run.ranks} rank(s) do not fill the {nodes} node(s) of this job: submit it by submit-all.sh"
        )
    return run.ranks // nodes


def forget(run: Run) -> None:
    """Remove what a run has left, so that it is done again from its start."""
    with directory_lock(run.directory):
        shutil.rmtree(run.out_dir, ignore_errors=True)
        write_status(run.directory, "pending")


def execute(run: Run, lock: int | None = None, slurm: bool = False) -> dict[str, Any]:
    """Run it to its end, and write down how it went; one that is done is left alone.

    Args:
        lock: a file descriptor that its processes inherit.
        slurm: this is the run's own job of Slurm.

    Returns:
        Its status; pending when it was stopped, and has saved; `stopped` where this process was asked to.

    Raises:
        ConfigError: another program is at work on it.
    """
    with directory_lock(run.directory) as own:
        if (status := read_status(run.directory))["state"] == "done":
            return status
        run.save()
        words, begin = command(run, slurm), time.time()
        write_status(run.directory, "running")
        environment = {**os.environ, **({} if os.environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": "1"})}
        with open(run.directory / "log.txt", "a") as log:
            fds, from_here = (own,) if lock is None else (own, lock), log.tell()
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=environment, pass_fds=fds)
            asked = wait(process, 60 * run.minutes)
        said = (run.directory / "log.txt").read_bytes()[from_here:].decode(errors="replace")
        state, reason = outcome(run, process.returncode, asked[0] if asked else "", said)
        status = write_status(run.directory, state, reason, time.time() - begin)
        return {**status, "stopped": "signal" in asked}


def wait(process: "subprocess.Popen[bytes]", seconds: float) -> list[str]:
    """Wait for a run's end; why it was stopped, if it was: `timeout`, or `signal` for one that this process got."""
    asked: list[str] = []

    def stop(*_: Any) -> None:
        asked.append("signal")
        process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        asked.append("timeout")
        process.terminate()  # it saves, and ends
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return asked


def outcome(run: Run, code: int, stopped: str, said: str) -> tuple[str, str]:
    """How a run ended, and why, from its exit code and what it said."""
    done = last_step(run)
    if stopped == "timeout":
        return "timeout", f"ended after {run.minutes:g} minutes at step {done} of {run.steps}"
    if code == 0 and done >= run.steps:
        return "done", ""
    if code == 0 or (stopped and code in INTERRUPTED):
        return "pending", f"stopped at step {done} of {run.steps}; the next start goes on"
    lines = [line for line in said.splitlines() if line.startswith("error")]
    reason = lines[-1] if lines else f"exit code {code}; {run.directory / 'log.txt'} has its output"
    if "out of memory" in said.lower() or "killed by SIGKILL" in said:  # as Linux does when memory is short
        return "oom", reason
    return "failed", reason


def main(words: list[str]) -> int:
    """Do the run in a directory; the word `slurm` after it says that this job of Slurm was made for it."""
    if not words or words[1:] not in ([], ["slurm"]):
        raise ConfigError("give the directory of one run, such as out/suites/scaling/phase1-4-plain-1337-3f2a9c")
    status = execute(read_run(Path(words[0])), slurm=len(words) > 1)
    print(status["state"], status["reason"])
    return 0 if status["state"] in ("done", "pending") else 1


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
