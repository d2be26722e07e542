"""`make setup` recovers from every interruption. The tests use real environments and pip, with a tiny project."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.programs import DEADLINE, Outcome
from tests.helpers.training import ROOT
from workshop import set_up
from workshop.set_up import GOALS, describe_downloads, describe_platform, find_reason

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
# Python imports this first. At the event that matches POINT, it sends SIGNAL to the process group of the set-up. If
# GO is set, it sends no signal and waits until the file GO exists.
SITECUSTOMIZE = """
import os, sys
def stop(event, args):
    if event in ("open", "os.rename", "os.remove", "subprocess.Popen") and re.search(os.environ["POINT"], repr(args)):
        if "GO" not in os.environ:
            os.kill(0, int(os.environ.get("SIGNAL", 9)))
            return
        open(os.environ["GO"] + ".reached", "w").close()
        deadline = time.monotonic() + 1200  # in case the test fails before it creates GO
        while not os.path.exists(os.environ["GO"]) and time.monotonic() < deadline:
            time.sleep(0.01)
if os.environ.get("POINT"):
    import re, time  # not in the other interpreters, of which each set-up starts many
    sys.addaudithook(stop)
"""
BEFORE_THE_MARKER = r"\.unfinished'\)?, -1, -1\)"  # os.replace
WRITING_SETTINGS = r"pyvenv\.cfg', 'w'"
BEFORE_PIP = r"'ensurepip'"
INSIDE_A_PACKAGE = r"alpha/second\.py', 'w"
BETWEEN_DELTA_AND_GAMMA = r"gamma/__init__\.py', 'w"
INSIDE_GAMMA = r"gamma/second\.py', 'w"
BEFORE_THE_STAMP = r"\.core'\)?, -1, -1\)"  # os.replace
AFTER_THE_STAMP = r"^\(\S+\.unfinished'\)?, -1\)"  # os.unlink
UNFINISHED = ".venv is unfinished: creating it again."
INSTALLING = f"{GOALS['core'][1]}\n{describe_downloads('default')}"
SETUPTOOLS = ("setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")
WAITING = "Another make is setting up .venv: waiting for it to finish."


WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, name: str, *requirements: str, size: int = 0) -> None:
    """Write the wheel of a package with two modules and, if `size` is not 0, a file of `size` bytes."""
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for module in ("__init__", "second"):
            wheel.writestr(f"{name}/{module}.py", "")
        if size:
            wheel.writestr(f"{name}/large.bin", bytes(size))
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", "Provides-Extra: dev"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        wheel.writestr(f"{name}-1.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{name}-1.dist-info/WHEEL", WHEEL)
        wheel.writestr(f"{name}-1.dist-info/RECORD", "")


def set_requirements(project: Path, *requirements: str) -> None:
    """Make the project require these packages, and delta for its tests."""
    write_wheel(project, "lesson", *requirements, "delta; extra == 'dev'")
    (project / "pyproject.toml").write_text(PROJECT)


def write_project(parent: Path) -> Path:
    """Write a project with the Makefile and the set-up of this repository. It requires only local wheels."""
    project = parent / "project"
    (project / "workshop").mkdir(parents=True)
    for name in ("Makefile", "workshop/set_up.py"):
        shutil.copy(ROOT / name, project / name)
    (project / "backend.py").write_text(BACKEND)
    (project / "constraints.txt").write_text("")
    (parent / "sitecustomize.py").write_text(SITECUSTOMIZE)
    for name in ("alpha", "beta", "delta"):
        write_wheel(parent, name)
    write_wheel(parent, "gamma", "delta")
    set_requirements(project, "alpha", "beta")
    return project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without a .venv."""
    return write_project(tmp_path)


@pytest.fixture(scope="module")
def killed_set_ups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """Kill set-ups of a project at four points, let the fifth finish, and return the project and their outcomes."""
    project = write_project(tmp_path_factory.mktemp("finished"))
    points = [BEFORE_THE_MARKER, WRITING_SETTINGS, BEFORE_PIP, INSIDE_A_PACKAGE, ""]
    return project, [make(project, "setup", POINT=point) for point in points]


@pytest.fixture(scope="module")
def template(killed_set_ups: tuple[Path, list[Outcome]]) -> Path:
    """A project that is set up. Installing pip is expensive, so the tests copy this project."""
    project, outcomes = killed_set_ups
    assert outcomes[-1].code == 0, outcomes[-1]
    return project


@pytest.fixture
def ready_project(template: Path, tmp_path: Path) -> Path:
    """A project that is set up. It is a copy of `template`, and its stamp names its own directory.

    The 900 files of pip are hard links: pip and Python replace files and do not write into them. setuptools is left
    out, as in Python 3.12: no test uses it, but each pip reads its metadata.
    """
    packages = next(template.glob(".venv/lib/python*/site-packages"))

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n.startswith(SETUPTOOLS)} if Path(folder) == packages else set()

    def copy(source: str, target: str) -> None:
        (os.link if source.startswith(f"{packages}/pip/") else shutil.copy2)(source, target)

    shutil.copytree(template.parent, tmp_path / "here", symlinks=True, ignore=ignore, copy_function=copy)
    project = tmp_path / "here" / "project"
    move_stamp(project, template, project)
    return project


def move_stamp(project: Path, old: Path, new: Path) -> None:
    """Change the directory that the stamp names, and keep its time."""
    stamp = project / ".venv" / ".core"
    times = stamp.stat()
    stamp.write_text(stamp.read_text().replace(f"{old}\n", f"{new}\n"))
    os.utime(stamp, ns=(times.st_atime_ns, times.st_mtime_ns))


def start_make(project: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start make in a new process group. pip finds only the wheels in the parent directory of the project."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.parent), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.Popen(
        ["make", f"PYTHON={sys.executable}", *words],
        cwd=project,
        env={**inherited, **offline, "PYTHONPATH": str(project.parent), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores SIGINT
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    output, _ = process.communicate(timeout=DEADLINE)
    return Outcome(process.returncode, output)


def make(project: Path, *words: str, **environment: str) -> Outcome:
    return finish(start_make(project, *words, **environment))


def list_packages(project: Path) -> set[str]:
    """Return the installed packages as NAME-VERSION."""
    return {path.stem for path in project.glob(".venv/lib/python*/site-packages/*.dist-info") if path.stem[-2:] == "-1"}


def assert_set_up(project: Path, outcome: Outcome) -> None:
    """Assert that make succeeded, that .venv's Python imports the packages, and that make finds nothing left to do."""
    assert outcome.code == 0, outcome
    subprocess.run([".venv/bin/python", "-c", "import lesson, alpha.second, beta, pip"], cwd=project, check=True)
    assert "Nothing to be done" in make(project, "setup").output


def assert_starts_again(project: Path, message: str, *words: str) -> None:
    """Assert that make prints this message and creates .venv again. It first deletes the packages."""
    outcome = make(project, "setup", *words, POINT=BEFORE_PIP)
    assert outcome.code == -signal.SIGKILL and outcome.output.startswith(f"{message}\n{INSTALLING}\n"), outcome
    assert (project / ".venv/bin/python").exists() and list_packages(project) == set()


def assert_refused(outcome: Outcome, *words: str) -> None:
    """Assert that make failed with one error that contains these words, and without a traceback."""
    sentences = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2 and len(sentences) == 1 and "Traceback" not in outcome.output, outcome
    for word in words:
        assert word in sentences[0]


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until a process has written a file."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_killed_set_up_starts_again(killed_set_ups):
    """After SIGKILL while .venv is created, before pip is installed, or inside a package, the next set-up succeeds."""
    project, (*killed, last) = killed_set_ups
    for count, outcome in enumerate(killed):
        assert outcome.code == -signal.SIGKILL and (UNFINISHED in outcome.output) == (count > 1), outcome
    assert UNFINISHED in last.output
    assert_set_up(project, last)


def test_ctrl_c_is_one_line_and_the_next_set_up_starts_again(project, ready_project):
    """SIGINT while .venv is created or inside a package ends the set-up with one line, without a traceback."""
    set_requirements(ready_project, "alpha", "beta", "gamma")
    for folder, point in ((project, WRITING_SETTINGS), (project, BEFORE_PIP), (ready_project, INSIDE_GAMMA)):
        outcome = make(folder, "setup", POINT=point, SIGNAL="2")
        assert outcome.code != 0 and "\nstopped: run the same command again" in outcome.output, outcome
        assert "Traceback" not in outcome.output, outcome
        assert_starts_again(folder, UNFINISHED)


def test_ctrl_c_before_a_package_changes_keeps_the_environment(ready_project):
    """After SIGINT while pip downloads, a finished .venv stays finished, and the next set-up continues with it."""
    set_requirements(ready_project, "alpha", "beta", "gamma")
    outcome = make(ready_project, "setup", POINT=r"'-m', 'pip', 'install'", SIGNAL="2")
    assert outcome.code != 0 and "\nstopped: run the same command again" in outcome.output, outcome
    assert list_packages(ready_project) == {"lesson-1", "alpha-1", "beta-1"}
    assert not (ready_project / ".venv/.unfinished").exists()
    assert_set_up(ready_project, make(ready_project, "setup"))


@pytest.mark.parametrize(
    "point",
    [BETWEEN_DELTA_AND_GAMMA, INSIDE_GAMMA, BEFORE_THE_STAMP, AFTER_THE_STAMP],
    ids=["between-packages", "package", "before-the-stamp", "after-the-stamp"],
)
def test_a_killed_update_starts_again(ready_project, point):
    """After SIGKILL while packages are added to a finished .venv, or around the stamp, the next set-up starts again."""
    set_requirements(ready_project, "alpha", "beta", "gamma")
    assert make(ready_project, "setup", POINT=point).code == -signal.SIGKILL
    assert_starts_again(ready_project, UNFINISHED)


def test_a_killed_installation_of_the_test_packages_starts_again(ready_project):
    """After this kill, every command creates .venv again, not only `make test`, because packages may be shared."""
    assert make(ready_project, ".venv/.dev", POINT=r"delta/second\.py', 'w").code == -signal.SIGKILL
    assert_starts_again(ready_project, UNFINISHED)


def test_a_set_up_from_inside_the_environment_starts_again(ready_project):
    """If .venv is activated, the set-up deletes its own `python3`. It creates .venv with the base Python instead."""
    (ready_project / ".venv/.unfinished").touch()
    assert_starts_again(ready_project, UNFINISHED, "PYTHON=.venv/bin/python3")


def test_of_two_set_ups_one_waits(ready_project, tmp_path):
    """The second make reports that it waits. Then it has nothing left to install."""
    go = tmp_path / "go"
    set_requirements(ready_project, "alpha", "beta", "gamma")
    first = start_make(ready_project, "setup", POINT=INSIDE_GAMMA, GO=str(go))
    wait_for(first, Path(f"{go}.reached"))
    second = start_make(ready_project, "setup")
    assert second.stdout and second.stdout.readline().strip() == WAITING
    go.touch()
    assert finish(first) == Outcome(0, f"{INSTALLING}\n")
    assert_set_up(ready_project, Outcome(second.wait(DEADLINE), ""))
    assert second.stdout.read() == "" and "gamma-1" in list_packages(ready_project)


@pytest.mark.skipif(not Path("/proc/self/cmdline").is_file(), reason="the test needs /proc")
def test_a_pip_that_outlives_its_make_keeps_the_lock(ready_project, tmp_path):
    """After SIGKILL of make and the set-up, but not of pip, the next set-up waits for pip and then starts again."""
    go = tmp_path / "go"
    set_requirements(ready_project, "alpha", "beta", "gamma")
    first = start_make(ready_project, "setup", POINT=INSIDE_GAMMA, GO=str(go))
    wait_for(first, Path(f"{go}.reached"))
    for path in list_processes(first.pid):
        if "-m\0pip" not in path.read_text():
            os.kill(int(path.parent.name), signal.SIGKILL)
    second = start_make(ready_project, "setup", POINT=BEFORE_PIP)
    assert second.stdout and second.stdout.readline().strip() == WAITING
    go.touch()
    assert finish(second) == Outcome(-signal.SIGKILL, f"{UNFINISHED}\n{INSTALLING}\n")
    assert finish(first).code == -signal.SIGKILL


def list_processes(group: int) -> list[Path]:
    """Return /proc/PID/cmdline of every process of a process group."""
    paths = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.getpgid(int(path.parent.name)) == group:
                paths.append(path)
        except ProcessLookupError:
            pass
    return paths


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the file size of all processes that start in this context. A program then fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_unfinished_environment_that_fills_the_disk_is_deleted(ready_project):
    """The set-up deletes the packages before it writes files, because these packages may fill the disk."""
    (ready_project / ".venv/.unfinished").touch()
    with file_size_limit(0):
        assert_refused(make(ready_project, "setup"), ".venv cannot be set up", "free disk space")
    assert os.listdir(ready_project / ".venv") == [".unfinished"]
    assert_starts_again(ready_project, UNFINISHED)


def test_a_full_disk_before_the_installation_of_pip_is_one_error(project):
    """The error contains only the reason from the output of `venv` and `ensurepip`."""
    with file_size_limit(1 << 16):
        outcome = make(project, "setup")
    assert_refused(outcome, "installing pip into .venv failed (", "[Errno 27] File too large")
    assert outcome.output.startswith(f"{INSTALLING}\n") and outcome.output.count("\n") == INSTALLING.count("\n") + 3


def test_a_full_disk_is_one_error_and_the_next_set_up_starts_again(ready_project):
    """If a package cannot be written, the error contains pip's reason, and the next set-up starts again."""
    write_wheel(ready_project.parent, "gamma", size=3 << 20)
    set_requirements(ready_project, "alpha", "beta", "gamma")
    with file_size_limit(2 << 20):
        outcome = make(ready_project, "setup")
    assert_refused(outcome, "[Errno 27] File too large", "free disk space", "run the same command again")
    assert_starts_again(ready_project, UNFINISHED)


def test_a_killed_pip_is_one_error(ready_project):
    """If only pip is killed, as the system does when memory is full, the error names the signal."""
    (ready_project / "backend.py").write_text("import os\nos.kill(os.getppid(), 9)\n")
    (ready_project / "constraints.txt").touch()
    assert_refused(make(ready_project, "setup"), "pip install failed (it was stopped by SIGKILL)")


def test_a_failed_update_keeps_the_environment(ready_project):
    """If pip cannot find a new package, the error says so, and nothing is deleted. A later set-up installs it."""
    set_requirements(ready_project, "alpha", "beta", "late")
    for _ in range(2):
        assert_refused(
            make(ready_project, "setup"),
            "pip install failed (Could not find a version that satisfies the requirement late",
        )
    assert list_packages(ready_project) == {"lesson-1", "alpha-1", "beta-1"}
    assert not (ready_project / ".venv/.unfinished").exists()
    write_wheel(ready_project.parent, "late")
    outcome = make(ready_project, "setup")
    assert list_packages(ready_project) == {"lesson-1", "alpha-1", "beta-1", "late-1"}
    assert_set_up(ready_project, outcome)


def test_an_unreachable_index_is_one_error(ready_project):
    """Without a connection, the error says that the index cannot be reached, not only that a package is missing."""
    (ready_project / "constraints.txt").write_text("alpha==2\n")
    unreachable = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    assert_refused(
        make(ready_project, "setup", **unreachable), "the package index cannot be reached", "check the network"
    )
    messages_of_uv = ["error: Request failed after 3 retries", "cause: error sending request for url (...)"]
    assert find_reason(2, messages_of_uv).startswith("the package index cannot be reached; Request failed")


def test_the_test_packages_are_installed_once(ready_project):
    """`.venv/.dev` installs the extra `dev` once. Then make finds nothing to do until pyproject.toml changes."""
    outcome = make(ready_project, ".venv/.dev")
    assert outcome == Outcome(0, "Installing the packages for the tests into .venv, once.\n")
    assert "delta-1" in list_packages(ready_project)
    for goal in (".venv/.core", ".venv/.dev"):
        assert "up to date" in make(ready_project, goal).output
    set_requirements(ready_project, "alpha")
    assert make(ready_project, ".venv/.dev").output == f"{INSTALLING}\n{outcome.output}"


def test_a_moved_or_copied_environment_is_created_again(ready_project, tmp_path):
    """A moved .venv is created again, because its scripts name the old directory. A link to it changes nothing."""
    (tmp_path / "link").symlink_to(ready_project)
    move_stamp(ready_project, ready_project, tmp_path / "link")
    assert "Nothing to be done" in make(ready_project, "setup").output
    moved_project = ready_project.rename(ready_project.with_name("moved"))
    (tmp_path / "link").unlink()
    assert_starts_again(moved_project, ".venv was created for another directory: creating it again.")


def test_an_environment_whose_python_is_missing_is_created_again(ready_project):
    """If a system upgrade has removed the Python that .venv links to, .venv is created again."""
    python = ready_project / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/usr/bin/python3.1")
    assert_starts_again(ready_project, ".venv has no working Python or no pip: creating it again.")


def test_an_environment_whose_python_was_replaced_is_created_again(ready_project):
    """If Python now searches another directory for packages, as after an upgrade to 3.13, .venv is created again."""
    (packages_folder,) = ready_project.glob(".venv/lib/python*")
    packages_folder.rename(packages_folder.with_name("python3.1"))
    stamp = ready_project / ".venv/.core"
    stamp.write_text(f"{ready_project}\n/usr/bin/env\n")
    assert_starts_again(ready_project, ".venv has no working Python or no pip: creating it again.")


def test_an_environment_of_another_program_is_never_deleted(project):
    """A .venv without pip that another program created, such as uv, is refused and stays."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    assert_refused(make(project, "setup"), "was not created by make", "has no pip", "rm -rf .venv")
    assert (project / ".venv/bin/python").exists()


@pytest.mark.parametrize(
    ("system", "has_gpu", "build", "words"),
    [
        ("Linux", False, "default", ("CUDA, a download of several GB", "add TORCH=cpu to the command")),
        ("Linux", True, "default", ("CUDA, a download of several GB",)),
        ("Linux", False, "cpu", ("CPU build of PyTorch (0.2 GB)",)),
        ("Darwin", False, "default", ("PyTorch",)),
    ],
)
def test_the_downloads_are_announced(system, has_gpu, build, words, monkeypatch):
    """Before it downloads, the set-up prints how much, and without a GPU how to download less."""
    monkeypatch.setattr(set_up.platform, "system", lambda: system)
    monkeypatch.setattr(set_up.shutil, "which", lambda name: f"/usr/bin/{name}" if has_gpu else None)
    text = describe_downloads(build)
    assert all(word in text for word in words) and ("TORCH=cpu" in text) == ("add TORCH=cpu to the command" in words)


FAKE_UV = """
import pathlib, sys
packages = next(pathlib.Path(".venv").glob("lib/python*/site-packages"))
(packages / "torch-2.dist-info").mkdir()
(packages / "torch-2.dist-info" / "uv.txt").write_text(" ".join(sys.argv[1:]))
"""


def test_the_cpu_build_of_torch_is_installed_first(ready_project):
    """TORCH=cpu installs the CPU build of PyTorch once, with uv, before pip installs the project."""
    with zipfile.ZipFile(ready_project.parent / "uv-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("uv/__main__.py", FAKE_UV)
        for name in ("METADATA", "WHEEL", "RECORD"):
            text = {"METADATA": "Metadata-Version: 2.1\nName: uv\nVersion: 1\n", "WHEEL": WHEEL, "RECORD": ""}[name]
            wheel.writestr(f"uv-1.dist-info/{name}", text)
    (ready_project / "pyproject.toml").touch()
    assert_set_up(ready_project, make(ready_project, "setup", "TORCH=cpu"))
    (arguments_file,) = ready_project.glob(".venv/lib/python*/site-packages/torch-2.dist-info/uv.txt")
    words = arguments_file.read_text().split()
    assert words[:2] == ["pip", "install"] and words[words.index("--torch-backend") + 1] == "cpu"
    assert words[-1] == "torch" and words[words.index("--constraint") + 1] == "constraints.txt"
    assert make(ready_project, ".venv/.dev", "TORCH=cpu").code == 0, "a second goal installs PyTorch again"
    assert_refused(make(ready_project, ".venv/.notebooks", "TORCH=tpu"), "TORCH=tpu is unknown: use default or cpu")


def test_an_environment_of_another_program_that_has_pip_is_used(ready_project):
    """The project is installed into this environment, and its existing files stay."""
    (ready_project / ".venv/.core").unlink()
    (ready_project / ".venv/mine").touch()
    assert_set_up(ready_project, make(ready_project, "setup"))
    assert (ready_project / ".venv/mine").exists()


def test_a_link_to_an_environment_of_another_directory_is_refused(ready_project, project):
    """The set-up neither installs into this environment nor deletes from it, because another directory uses it."""
    (project / ".venv").symlink_to(ready_project / ".venv")
    for stamp in (ready_project / ".venv/.core", ready_project / ".venv/.unfinished"):
        before = list_packages(ready_project)
        assert_refused(make(project, "setup"), f".venv is a link to {ready_project}/.venv", "rm .venv")
        assert list_packages(ready_project) == before and stamp.parent.exists()
        (ready_project / ".venv/.unfinished").touch()


def test_a_link_to_an_empty_directory_is_used(project, tmp_path):
    """.venv can be a link to a directory on another disk, also after an interruption."""
    (tmp_path / "disk").mkdir()
    (project / ".venv").symlink_to(tmp_path / "disk")
    assert make(project, "setup", POINT=BEFORE_PIP).code == -signal.SIGKILL
    assert (tmp_path / "disk/pyvenv.cfg").exists()
    assert_starts_again(project, UNFINISHED)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_file_or_a_dangling_link_named_venv_is_refused(project, kind):
    """A file or a dangling link in the place of .venv is refused and stays."""
    if kind == "file":
        (project / ".venv").touch()
    else:
        (project / ".venv").symlink_to("nowhere")
    assert_refused(make(project, "setup"), ".venv is not a directory")
    assert os.path.lexists(project / ".venv")


def test_a_python_without_ensurepip_is_one_error(project):
    """Without python3-venv, Debian's Python has no ensurepip. The error says so, and leaves no .venv."""
    (project.parent / "ensurepip.py").write_text("raise ModuleNotFoundError('no', name='ensurepip')")
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    assert_refused(make(project, "setup"), "no module ensurepip", f"apt install {package}", "PYTHON=/path")
    (project.parent / "ensurepip.py").unlink()
    assert make(project, "setup", POINT=BEFORE_PIP).output == f"{INSTALLING}\n"


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python3"])
def test_an_old_or_missing_python_is_refused(project, python):
    """A Python before 3.11, or a missing Python, is refused before .venv is created."""
    outcome = make(project, "setup", f"PYTHON={python}")
    assert outcome.code == 2 and f"{python} is missing or older than Python 3.11: run make setup" in outcome.output
    assert not (project / ".venv").exists()


def test_make_keeps_prepared_data_after_a_late_failure(ready_project):
    """If prepare.py fails after its last write, which is atomic, make keeps meta.json."""
    folder = ready_project / "nanoGPT/data/shakespeare"
    folder.mkdir(parents=True)
    (ready_project / "nanoGPT/prepare").mkdir()
    (ready_project / "nanoGPT/prepare/text.py").touch()
    (folder / "prepare.py").write_text(f"open('{folder}/meta.json', 'w').close()\nraise SystemExit(1)\n")
    assert make(ready_project, "data").code == 2
    assert (folder / "meta.json").exists()


def test_clean_deletes_only_caches(project):
    """`make clean` deletes caches, but nothing below .venv and out/, which other programs may use."""
    kept, deleted = [".venv/lib", "out/run", "nanoGPT/data"], ["nanoGPT/__pycache__", ".mypy_cache", "x.egg-info"]
    for name in (*deleted, *kept, ".venv/lib/__pycache__", "out/run/__pycache__"):
        (project / name).mkdir(parents=True)
    assert make(project, "clean") == Outcome(0, "")
    assert [name for name in deleted if (project / name).exists()] == []
    assert all((project / name).is_dir() for name in (*kept, ".venv/lib/__pycache__", "out/run/__pycache__"))


def write_bundle(project: Path, **platform: str) -> None:
    """Move the wheels of a project into an offline bundle, with a dataset of one file."""
    bundle = project / "offline-bundle"
    (bundle / "data" / "tiny").mkdir(parents=True)
    (bundle / "wheels").mkdir()
    for wheel in project.parent.glob("*.whl"):
        wheel.rename(bundle / "wheels" / wheel.name)
    for name in ("meta.json", "train.bin"):
        (bundle / "data" / "tiny" / name).write_text(name)
    (bundle / "bundle.json").write_text(json.dumps({**describe_platform(), **platform}))


def test_a_bundle_is_used_without_a_network(ready_project):
    """With an offline bundle, make installs only its wheels and copies its data. Data that is prepared already stays.

    The index is an address that refuses connections, and TORCH=cpu needs no other index. If a wheel is missing, the
    error names the bundle.
    """
    write_bundle(ready_project)
    offline = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    outcome = make(ready_project, ".venv/.dev", "TORCH=cpu", **offline)
    lines = ["Using offline-bundle/: nothing is downloaded.", "Installing the packages for the tests into .venv, once."]
    assert outcome == Outcome(0, "\n".join([*lines, ""]))
    assert "delta-1" in list_packages(ready_project)
    data = ready_project / "nanoGPT/data/tiny"
    assert (data / "train.bin").read_text() == "train.bin"
    (data / "train.bin").write_text("mine")
    set_requirements(ready_project, "alpha", "late")
    assert_refused(make(ready_project, "setup", **offline), "requirement late", "delete the directory offline-bundle")
    assert (data / "train.bin").read_text() == "mine"


def test_a_bundle_for_another_machine_is_refused(project):
    """A bundle for another version of Python is refused before .venv is created, and the error names both versions."""
    write_bundle(project, python="3.99")
    outcome = make(project, "setup")
    assert_refused(outcome, "with Python 3.99, but this is", "PYTHON=/path/to/python3.99")
    (project / "offline-bundle/bundle.json").write_text("{")
    assert_refused(make(project, "setup"), "bundle.json cannot be read: unpack the archive again")
