"""Execute one run of a suite: start its command in its directory, and record the outcome in status.json.

python -m bench.suite.execution out/suites/scaling/phase1-4-plain-1337-3f2a9c     # execute the run.json there
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.phases import PHASES, ROOT
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, lock_directory, write_atomically
from nanoGPT.job.command import report_errors
from nanoGPT.job.start import handle_stop_signals

SLURM = "operate/deploy/slurm.sh"
STATES = ("pending", "running", "done", "oom", "timeout", "failed")
# Exit codes of a launcher that a signal stops before training begins.
SIGNAL_EXIT_CODES = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT}
# States of runs that are not executed again, by the value of --retry.
FINISHED_STATES = {False: frozenset({"done", "oom", "timeout", "failed"}), True: frozenset({"done"})}


@dataclass(frozen=True)
class Run:
    """A run of a suite.

    Attributes:
        directory: for the files of this run only.
        words: command-line flags of the trainer, without --out_dir.
        minutes: time limit.
        steps: number of training steps.
    """

    directory: Path
    phase: str
    ranks: int
    variant: str
    seed: int
    words: list[str] = field(hash=False)
    minutes: float
    steps: int

    @property
    def name(self) -> str:
        return f"{self.phase} on {self.ranks} rank(s), {self.variant}, seed {self.seed}"

    @property
    def out_dir(self) -> Path:
        return self.directory / "run"

    @property
    def output_file(self) -> Path:
        return self.directory / "output.txt"

    def save(self) -> None:
        """Write run.json, which `read_run` reads."""
        self.directory.mkdir(parents=True, exist_ok=True)
        values = {name: value for name, value in vars(self).items() if name != "directory"}
        (self.directory / "run.json").write_text(json.dumps(values, indent=1) + "\n")


def read_run(directory: Path) -> Run:
    """Return a run from its run.json.

    Raises:
        ConfigError: run.json is missing or malformed.
    """
    try:
        return Run(directory, **json.loads((directory / "run.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{directory} does not contain a run of a suite: {error}") from None


def read_status(directory: Path) -> dict[str, Any]:
    """Return a run's status; pending if status.json is missing or malformed.

    Raises:
        OSError: status.json exists, but cannot be read.
    """
    try:
        status = json.loads((directory / "status.json").read_text())
    except (*ABSENT, ValueError):
        status = None
    is_valid = isinstance(status, dict) and status.get("state") in STATES
    return {"state": "pending", "reason": "", "seconds": 0.0} | (status if is_valid else {})


def write_status(directory: Path, state: str, reason: str = "", seconds: float = 0.0) -> dict[str, Any]:
    """Write a run's status atomically, and return it."""
    assert state in STATES
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status = {"state": state, "reason": reason, "seconds": seconds, "time": now}
    write_atomically(directory / "status.json", json.dumps(status, indent=1).encode() + b"\n")
    return status


def read_last_step(run: Run) -> int:
    """Return the last step in the run's metrics.jsonl; 0 if there is none."""
    try:
        return int(json.loads((run.out_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0


def build_command(run: Run, slurm: bool = False) -> list[str]:
    """Return the command that starts the run, or resumes it from its last checkpoint.

    Args:
        slurm: use slurm.sh, in the run's own Slurm job, instead of the launcher.
    """
    if run.out_dir.exists() and not step_directories(run.out_dir):
        shutil.rmtree(run.out_dir)  # the run was killed before its first checkpoint, so it starts again
    trainer = f"{PHASES[run.phase]}/train.py"
    if slurm:
        environment = [
            f"OUT_DIR={run.out_dir}",
            f"TRAINER={trainer}",
            f"PY={os.environ.get('PY', sys.executable)}",
            f"GPUS={count_ranks_per_node(run)}",
        ]
        return ["env", *environment, "bash", SLURM, *run.words]
    flags = [*run.words, f"--out_dir={run.out_dir.resolve()}"]
    flags += ["--init_from=resume"] if run.out_dir.exists() else []
    return [sys.executable, "-m", "operate.launch", f"--gpus={run.ranks}", trainer, *flags]


def count_ranks_per_node(run: Run) -> int:
    """Return the number of the run's ranks on each node of this Slurm job.

    Raises:
        ConfigError: the ranks cannot be divided among the nodes.
    """
    nodes = int(os.environ.get("SLURM_NNODES") or 0)
    if not nodes or run.ranks % nodes:
        raise ConfigError(
            f"{run.ranks} rank(s) cannot be divided among the {nodes} node(s) of this job: submit it with submit-all.sh"
        )
    return run.ranks // nodes


def execute(run: Run, slurm: bool = False) -> dict[str, Any]:
    """Execute a run and write its status, unless it is done already.

    Args:
        slurm: this process is the run's own Slurm job.

    Returns:
        The status; pending if the run was stopped and can be resumed. `stopped` is True if this process got a signal.

    Raises:
        ConfigError: another program executes the run, or its directory cannot be created.
    """
    with lock_directory(run.directory) as lock:
        if (status := read_status(run.directory))["state"] == "done":
            return status
        run.save()
        command, begin = build_command(run, slurm), time.time()
        write_status(run.directory, "running")
        names = {"WANDB_RUN_GROUP": run.directory.parent.name, "WANDB_NAME": run.directory.name}
        environment = {"OMP_NUM_THREADS": "1", **names, **os.environ}
        with open(run.output_file, "a") as file:
            output_start = file.tell()
            streams: dict[str, Any] = {"stdout": file, "stderr": file}
            # A run that outlives this program still has the lock.
            process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=(lock.fileno(),), **streams)
            stop_reasons = wait_for_exit(process, 60 * run.minutes)
        output = run.output_file.read_bytes()[output_start:].decode(errors="replace")
        state, reason = classify_exit(run, process.returncode, stop_reasons[0] if stop_reasons else "", output)
        status = write_status(run.directory, state, reason, time.time() - begin)
        return {**status, "stopped": "signal" in stop_reasons}


def wait_for_exit(process: "subprocess.Popen[bytes]", seconds: float) -> list[str]:
    """Wait until a run exits. Stop it after `seconds`, or on a signal.

    Returns:
        The reasons why the run was stopped, in order: `timeout` or `signal`; empty if it exited without a stop.
    """
    reasons: list[str] = []

    def forward_signal(*_: Any) -> None:
        reasons.append("signal")
        process.terminate()

    handlers = handle_stop_signals(forward_signal)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        reasons.append("timeout")
        process.terminate()  # the trainer saves a checkpoint and exits
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return reasons


def classify_exit(run: Run, code: int, stop_reason: str, output: str) -> tuple[str, str]:
    """Return the state and the reason, from a run's exit code and what it printed.

    Args:
        stop_reason: why the run was stopped: `timeout`, `signal`, or empty if it was not.
    """
    step = read_last_step(run)
    if code == 0 and step >= run.steps:
        return "done", ""
    if stop_reason == "timeout":
        return "timeout", f"stopped after {run.minutes:g} minutes at step {step} of {run.steps}"
    if code == 0 or (stop_reason and code in SIGNAL_EXIT_CODES):
        return "pending", f"stopped at step {step} of {run.steps}; the next start resumes the run"
    errors = [line for line in output.splitlines() if line.startswith("error")]
    reason = errors[-1] if errors else f"exit code {code}; see {run.output_file} for its output"
    # Linux kills a process with SIGKILL when memory is exhausted.
    if "out of memory" in output.lower() or "killed by SIGKILL" in output:
        return "oom", reason
    return "failed", reason


def main(args: list[str]) -> int:
    """Execute the run in a directory and return the exit code.

    Args:
        args: the directory of the run; the sbatch scripts add the word `slurm`.
    """
    if not args or args[1:] not in ([], ["slurm"]):
        raise ConfigError("pass the directory of one run, such as out/suites/scaling/phase1-4-plain-1337-3f2a9c")
    status = execute(read_run(Path(args[0])), slurm=len(args) > 1)
    print(status["state"], status["reason"])
    return 0 if status["state"] in ("done", "pending") else 1


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
