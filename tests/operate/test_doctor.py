"""`make doctor`: the state of a machine and an environment, with a remedy for each problem."""

import json
import shutil
import socket
import subprocess
import sys
import time

import pytest

from operate.checks import Check
from operate.doctor import __main__ as doctor
from operate.doctor import environment, machine
from tests.helpers.programs import find_free_port, run_program
from tests.helpers.training import ROOT
from workshop import set_up


def test_a_fresh_clone_is_checked_without_packages(tmp_path):
    """Without any installed package, the doctor checks the machine and names the commands for what is missing."""
    for name in ("operate/doctor", "workshop"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("operate/__init__.py", "operate/checks.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run([sys.executable, "-S", "-m", "operate.doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "-> run make setup (without a GPU: TORCH=cpu)" in done.stdout and "-> run make data" in done.stdout
    assert "pass  loopback" in done.stdout and "packages" not in done.stdout


def test_the_environment_is_checked_with_real_ranks_and_kernels():
    """In this environment, two ranks all-reduce, a Triton kernel runs, and no check fails."""
    outcome = run_program("operate.doctor.environment")
    checks = {check.subject: check for check in (Check(**json.loads(line)) for line in outcome.output.splitlines())}
    assert outcome.code == 0 and {"packages", "PyTorch", "Triton", "ranks", "settings", "Jupyter"} <= checks.keys()
    assert all(check.result != "fail" for check in checks.values()), checks
    assert checks["ranks"].result == "pass" and checks["ranks"].finding.startswith("2 ranks started and all-reduced")
    assert checks["PyTorch"].result == "pass"


def test_a_broken_environment_is_one_failed_check(tmp_path, monkeypatch, capsys):
    """If .venv's Python cannot import PyTorch, the doctor prints the reason and a remedy, and exits with code 2."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho ImportError: libtorch.so is missing >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(doctor, "VENV_PYTHON", python)
    monkeypatch.setattr(doctor, "check_machine", lambda: iter([]))
    assert doctor.main() == 2
    output = capsys.readouterr()
    assert "fail  packages      ImportError: libtorch.so is missing" in output.out
    assert "-> delete .venv and run make setup" in output.out and output.err.startswith("error: a check failed")


def test_an_interrupted_set_up_is_one_failed_check(monkeypatch, capsys):
    """If .venv is unfinished, the doctor names one remedy, and does not check packages that may be missing."""
    monkeypatch.setattr(set_up, "UNFINISHED", ROOT / "README.md")  # a file that exists
    monkeypatch.setattr(doctor, "VENV_PYTHON", ROOT / "README.md")
    monkeypatch.setattr(machine, "VENV_PYTHON", ROOT / "README.md")
    monkeypatch.setattr(doctor, "check_machine", lambda: iter([machine.check_environment()]))
    assert doctor.main() == 2
    output = capsys.readouterr().out
    assert output.count("fail  ") == 1 and "run the same make setup again" in output and "packages" not in output


def test_a_driver_that_hangs_is_one_failed_check(tmp_path, monkeypatch, capsys):
    """If nvidia-smi, or a program that uses the GPU, gives no answer, the doctor reports it in time and goes on."""
    for name in ("nvidia-smi", "python"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\nexec sleep 60\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "DRIVER_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "VENV_PYTHON", tmp_path / "python")
    monkeypatch.setattr(doctor, "check_machine", lambda: iter([machine.check_driver()]))
    begin = time.monotonic()
    assert doctor.main() == 2 and time.monotonic() - begin < 30
    output = capsys.readouterr().out
    assert "fail  GPU driver    nvidia-smi gives no answer within 0.2 s: the driver hangs" in output
    assert "-> restart the machine" in output and "fail  packages      no answer within 0.2 s" in output


def test_problems_of_a_machine_have_remedies(tmp_path, monkeypatch):
    """An old Python, a used port, little memory, a full disk, missing data and an unfinished .venv are reported."""
    for interface in ("127.0.0.1", ""):  # "": all interfaces
        with socket.create_server((interface, int(find_free_port()))) as server:
            port = server.getsockname()[1]
            monkeypatch.setattr(machine, "PORTS", {port: "torchrun"})
            used = machine.check_ports()
        assert used.result == "warn" and used.finding == f"in use: {port} (torchrun)"
    assert machine.check_ports().result == "pass"
    monkeypatch.setattr(machine, "MIN_FREE_MEMORY", 1 << 60)
    monkeypatch.setattr(machine, "MIN_DISK", 1 << 60)
    assert machine.check_memory().result == "warn" and machine.check_disk().result == "fail"
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.check_data().finding == "not prepared: shakespeare_char, shakespeare, synthetic"
    monkeypatch.setattr(machine, "VENV_PYTHON", tmp_path / "python")
    assert machine.check_environment().remedy.startswith("run make setup")
    monkeypatch.setattr(machine.sys, "version_info", (3, 9, 2))
    assert machine.check_python().result == "fail" and "PYTHON=/path" in machine.check_python().remedy


@pytest.mark.parametrize(("pin", "result"), [("torch==1.0", "warn"), ("not-installed==1", "pass")])
def test_other_versions_are_reported(pin, result, tmp_path, monkeypatch):
    """A package with another version than in constraints.txt is a warning. A missing one is not."""
    (tmp_path / "constraints.txt").write_text(f"# a comment\n{pin}\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    check = environment.check_packages()
    assert check.result == result and ("instead of 1.0" in check.finding) == (result == "warn")
