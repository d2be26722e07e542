"""`make setup` recovers from every interruption. The tests use real environments and pip, with a tiny project."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.programs import DEADLINE, Outcome, assert_refused
from tests.helpers.training import ROOT
from tests.helpers.wheels import write_wheel
from workshop.set_up import describe_platform

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "lesson"
version = "1"
"""
BACKEND = """
import shutil
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return shutil.copy("lesson-1-py3-none-any.whl", wheel_directory).rpartition("/")[2]
"""
WAITING = "Another make is setting up .venv: waiting for it to finish."
UNFINISHED = ".venv is unfinished: creating it."


def set_requirements(project: Path, *requirements: str) -> None:
    """Make the project require these packages, and delta for its tests."""
    write_wheel(project, "lesson", *requirements, "delta; extra == 'dev'")
    (project / "pyproject.toml").write_text(PROJECT)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the Makefile and the set-up of this repository, without a .venv. It requires only local wheels."""
    project = tmp_path / "project"
    (project / "workshop").mkdir(parents=True)
    for name in ("Makefile", "workshop/set_up.py"):
        (project / name).write_text((ROOT / name).read_text())
    (project / "backend.py").write_text(BACKEND)
    (project / "constraints.txt").write_text("")
    for name in ("alpha", "beta", "delta"):
        write_wheel(tmp_path, name)
    set_requirements(project, "alpha", "beta")
    return project


def start_make(project: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start make in a new process group. pip finds only the wheels in the parent directory of the project."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.parent), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.Popen(
        ["make", f"PYTHON={sys.executable}", *words],
        cwd=project,
        env={**inherited, **offline, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores SIGINT
    )


def make(project: Path, *words: str, **environment: str) -> Outcome:
    process = start_make(project, *words, **environment)
    output, _ = process.communicate(timeout=DEADLINE)
    return Outcome(process.returncode, output)


def stop_make(project: Path, pattern: str, number: signal.Signals, *words: str) -> str:
    """Start make, send a signal to all its processes as soon as it has written a path in .venv. Return its output."""
    begin, process = time.time(), start_make(project, *words)
    has_begun = False
    while not has_begun:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
        with contextlib.suppress(FileNotFoundError):  # make may delete an unfinished .venv at the same time
            has_begun = any(path.lstat().st_ctime > begin for path in project.glob(f".venv/{pattern}"))
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0, output
    return output


def list_packages(project: Path) -> set[str]:
    """Return the installed packages of the tests."""
    return {path.stem for path in project.glob(".venv/lib/python*/site-packages/*.dist-info") if path.stem[-2:] == "-1"}


def assert_set_up(project: Path, outcome: Outcome) -> None:
    """Assert that make succeeded, that .venv's Python imports the packages, and that make finds nothing left to do."""
    assert outcome.code == 0, outcome
    command = [".venv/bin/python", "-c", "import lesson.module299, alpha.module299, beta.module299, pip"]
    subprocess.run(command, cwd=project, check=True)
    assert "Nothing to be done" in make(project, "setup").output


@pytest.mark.slow
def test_an_interrupted_set_up_recovers(project):
    """After SIGKILL while .venv is created, inside pip or inside a package, and after Ctrl-C, a repetition succeeds.

    This also holds for a finished .venv that gets other packages, and for one that was moved to another directory.
    """
    packages = "lib/python*/site-packages"
    assert UNFINISHED not in stop_make(project, "pyvenv.cfg", signal.SIGKILL, "setup")
    for pattern in (f"{packages}/pip/_vendor", f"{packages}/alpha/module1.py"):
        assert UNFINISHED in stop_make(project, pattern, signal.SIGKILL, "setup")
    output = stop_make(project, f"{packages}/beta/module1.py", signal.SIGINT, "setup")
    assert "stopped: run the same command again" in output and "Traceback" not in output, output
    outcome = make(project, "setup")
    assert UNFINISHED in outcome.output
    assert_set_up(project, outcome)
    stop_make(project, f"{packages}/delta/module1.py", signal.SIGKILL, ".venv/.dev")
    outcome = make(project, ".venv/.dev")
    assert UNFINISHED in outcome.output and "delta-1" in list_packages(project)
    assert_set_up(project, outcome)
    project = project.rename(project.with_name("moved"))
    outcome = make(project, "setup", f"PYTHON={project}/.venv/bin/python3")
    assert "was created for another directory: creating it." in outcome.output
    assert_set_up(project, outcome)


@pytest.mark.slow
def test_of_two_set_ups_one_waits(project):
    """The second make reports that it waits. Then it has nothing left to install."""
    first, second = start_make(project, "setup"), start_make(project, "setup")
    outputs = [process.communicate(timeout=DEADLINE)[0] for process in (first, second)]
    assert first.returncode == second.returncode == 0, outputs
    assert sorted(WAITING in output for output in outputs) == [False, True]
    assert_set_up(project, Outcome(0, ""))


def test_a_failed_update_keeps_the_environment(project):
    """If pip finds no package, the error says what to do, and .venv stays. With a bundle, no network is needed.

    The bundle is refused on another machine.
    """
    assert make(project, "setup").code == 0
    set_requirements(project, "alpha", "beta", "late")
    outcome = make(project, "setup")
    assert_refused(outcome, "pip install failed", "check the network and the free disk space", "run the same command")
    assert "No matching distribution found for late" in outcome.output
    assert list_packages(project) == {"lesson-1", "alpha-1", "beta-1"} and not (project / ".venv/.unfinished").exists()
    bundle = project / "offline-bundle"
    (bundle / "wheels").mkdir(parents=True)
    write_wheel(bundle / "wheels", "late")
    (bundle / "bundle.json").write_text(json.dumps({**describe_platform(), "python": "3.99"}))
    assert_refused(make(project, "setup"), "with Python 3.99, but this is", "PYTHON=/path/to/python3.99")
    (bundle / "bundle.json").write_text(json.dumps(describe_platform()))
    offline = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    assert_set_up(project, make(project, "setup", "TORCH=cpu", **offline))
    assert "late-1" in list_packages(project)


def test_what_make_did_not_create_is_never_deleted(project, tmp_path):
    """A file, a .venv without pip, or a link to the .venv of another directory is refused and stays."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    for create in (
        lambda venv: venv.touch(),
        lambda venv: venv.symlink_to("nowhere"),
        lambda venv: venv.symlink_to(tmp_path / "other"),
        lambda venv: (tmp_path / "other").rename(venv),
    ):
        create(project / ".venv")
        assert_refused(make(project, "setup"), "was not created by `make`", "rm -rf .venv")
        if (project / ".venv").is_symlink() or (project / ".venv").is_file():
            (project / ".venv").unlink()
    assert (project / ".venv/bin/python").exists()
    outcome = make(project, "setup", "PYTHON=/bin/false")
    assert (
        outcome.code == 2
        and "/bin/false is missing or older than Python 3.11: install Python 3.11, and run make setup" in outcome.output
    )
