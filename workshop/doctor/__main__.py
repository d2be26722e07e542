"""Check this machine and the environment, and print a remedy below each problem: `make doctor`.

    python3 -m workshop.doctor

The program needs only Python: it also runs before `make setup`. If .venv exists, it also checks the packages, PyTorch,
GPUs, Triton, Jupyter and two real ranks, unless a set-up of .venv was interrupted. `make preflight` checks a
particular run instead.

The exit code is 2 if a check fails. Otherwise it is 0, even if there are warnings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.checks import Check, has_failed, report, summarize
from workshop.doctor.machine import ROOT, VENV_PYTHON, check_machine

SUBJECT_WIDTH = 12
BASIC = ("environment", "GPU driver")  # if one of these checks fails, those of the packages would fail or hang


def check_packages() -> Iterator[Check]:
    """Yield the checks of .venv, which its own Python runs. It prints its errors itself."""
    command = [str(VENV_PYTHON), "-m", "workshop.doctor.environment"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        for line in program.stdout:
            if line.startswith("{"):  # libraries may print other lines
                yield Check(**json.loads(line))
    if program.returncode:
        finding = f"the checks of .venv stopped with exit code {program.returncode}; their messages are above"
        yield Check("packages", "fail", finding, "delete .venv and run make setup")


def main() -> int:
    """Run all checks, print each as soon as it is known, and return the exit code."""
    begin = time.monotonic()
    checks = report(check_machine(), SUBJECT_WIDTH)
    if VENV_PYTHON.exists() and not has_failed([check for check in checks if check.subject in BASIC]):
        checks += report(check_packages(), SUBJECT_WIDTH)
    print(f"\n{summarize(checks)}, in {time.monotonic() - begin:.0f} s")
    if has_failed(checks):
        print("error: a check failed: follow the remedies above", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
