"""`make doctor`: the state of a machine and an environment, with a remedy for each problem."""

import json
import shutil

from bench.checks import Check
from tests.helpers.programs import run_in_new_interpreter, run_program
from tests.helpers.training import ROOT
from workshop.doctor import __main__ as doctor
from workshop.doctor import machine


def test_a_fresh_clone_is_checked_without_packages(tmp_path):
    """Without any installed package, the doctor checks the machine and names the commands for what is missing."""
    shutil.copytree(ROOT / "workshop", tmp_path / "workshop", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bench").mkdir()
    for name in ("bench/__init__.py", "bench/checks.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = run_in_new_interpreter("-S", "-m", "workshop.doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-> run make setup (without a GPU: TORCH=cpu)" in done.stdout and "-> run make data" in done.stdout
    assert "pass  loopback" in done.stdout and "packages" not in done.stdout


def test_the_environment_is_checked_with_real_ranks_and_kernels():
    """In this environment, two ranks all-reduce, a Triton kernel runs, and no check fails."""
    outcome = run_program("workshop.doctor.environment")
    checks = {check.subject: check for check in (Check(**json.loads(line)) for line in outcome.output.splitlines())}
    assert outcome.code == 0 and {"packages", "PyTorch", "Triton", "ranks", "settings"} <= checks.keys()
    assert all(check.result != "fail" for check in checks.values()), checks
    assert checks["ranks"].result == checks["PyTorch"].result == "pass"


def run_doctor(monkeypatch, capsys, *checks: Check) -> str:
    """Run the doctor with these checks of the machine and a .venv whose Python fails. Return what it prints."""
    monkeypatch.setattr(doctor, "VENV_PYTHON", machine.Path(shutil.which("false") or ""))
    monkeypatch.setattr(doctor, "check_machine", lambda: iter(checks))
    assert doctor.main() == 2
    output = capsys.readouterr()
    assert output.err == "error: a check failed: follow the remedies above\n"
    return output.out


def test_a_broken_environment_is_one_failed_check(tmp_path, monkeypatch, capsys):
    """If .venv's Python fails, is unfinished, or the GPU driver hangs, one check fails and has a remedy."""
    output = run_doctor(monkeypatch, capsys)
    assert "fail  packages      the checks of .venv stopped with exit code 1" in output
    assert "-> delete .venv and run make setup" in output
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "DRIVER_SECONDS", 0.2)
    output = run_doctor(monkeypatch, capsys, machine.check_driver())
    assert "nvidia-smi gives no answer within 0.2 s: the driver hangs" in output and "packages" not in output
