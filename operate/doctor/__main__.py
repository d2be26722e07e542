"""Check this machine and the environment, and print a remedy below each problem: `make doctor`.

    python3 -m operate.doctor

The program needs only Python: it also runs before `make setup`. If .venv exists, it also checks the packages, PyTorch,
GPUs, Triton, Jupyter and two real ranks, unless a set-up of .venv was interrupted. `make preflight` checks a
particular run instead.

The exit code is 2 if a check fails. Otherwise it is 0, even if there are warnings.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from operate.checks import Check, format_check, has_failed, summarize
from operate.doctor.machine import ROOT, VENV_PYTHON, check_machine

SUBJECT_WIDTH = 12
SILENT_SECONDS = 300.0  # without a line, until the checks of .venv count as hanging; busy machines take over 120 s
REINSTALL = "delete .venv and run make setup"


def check_packages() -> Iterator[Check]:
    """Yield the checks of .venv, which its own Python runs."""
    command = [str(VENV_PYTHON), "-m", "operate.doctor.environment"]
    with tempfile.TemporaryFile("w+") as errors:
        program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=read_lines, args=(program, lines), daemon=True).start()
        try:
            while line := lines.get(timeout=SILENT_SECONDS):
                if line.startswith("{"):  # libraries may print other lines
                    yield Check(**json.loads(line))
        except queue.Empty:
            program.kill()  # without waiting: a process that waits for a driver may not end
            finding = f"no answer within {SILENT_SECONDS:g} s, for example from a GPU driver that hangs"
            yield Check("packages", "fail", finding, "run nvidia-smi; if it hangs, too, restart the machine")
            return
        program.wait()
        errors.seek(0)
        error = errors.read().strip().splitlines()
    if program.returncode:
        reason = error[-1] if error else f"it stopped with exit code {program.returncode}"
        yield Check("packages", "fail", reason, REINSTALL)


def read_lines(program: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Pass on the lines that a program prints, and an empty text when its output has ended."""
    assert program.stdout
    with program.stdout as output:
        for line in output:
            lines.put(line)
    lines.put("")


def main() -> int:
    """Run all checks, print each as soon as it is known, and return the exit code."""
    begin, checks = time.monotonic(), []

    def report(check: Check) -> None:
        checks.append(check)
        print(format_check(check, SUBJECT_WIDTH), flush=True)

    for check in check_machine():
        report(check)
    if VENV_PYTHON.exists() and not has_failed([check for check in checks if check.subject == "environment"]):
        for check in check_packages():
            report(check)
    print(f"\n{summarize(checks)}, in {time.monotonic() - begin:.0f} s")
    if has_failed(checks):
        print("error: a check failed: follow the remedies above", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
