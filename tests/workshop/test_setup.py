"""`make setup` recovers from every interruption: real environments and a real pip, with a tiny project and wheels."""

import contextlib
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

from tests.helpers.programs import Ended
from tests.helpers.training import ROOT

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
# Python imports this first. At the point that POINT describes it signals the whole set-up, or waits until GO exists.
SITECUSTOMIZE = """
import os, re, sys, time
def stop(event, args):
    if event in ("open", "os.rename", "os.remove", "subprocess.Popen") and re.search(os.environ["POINT"], repr(args)):
        if "GO" not in os.environ:
            os.kill(0, int(os.environ.get("SIGNAL", 9)))
            return
        open(os.environ["GO"] + ".reached", "w").close()
        end = time.monotonic() + 60  # for a test that fails before it writes GO
        while not os.path.exists(os.environ["GO"]) and time.monotonic() < end:
            time.sleep(0.01)
if os.environ.get("POINT"):
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
AGAIN = ".venv was left unfinished: making it again."
INSTALLING = "Installing into .venv, once: about two minutes."
WAITING = "Another make is setting up .venv: waiting for it to finish."


def write_wheel(folder: Path, name: str, *needs: str, size: int = 0) -> None:
    """Write the wheel of a package: two modules and, if asked, a file of `size` bytes."""
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for module in ("__init__", "second"):
            wheel.writestr(f"{name}/{module}.py", "")
        if size:
            wheel.writestr(f"{name}/large.bin", bytes(size))
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", "Provides-Extra: dev"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        wheel.writestr(f"{name}-1.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.dist-info/RECORD", "")


def change_needs(project: Path, *needs: str) -> None:
    """Make the project need these packages, and those of its tests."""
    write_wheel(project, "lesson", *needs, "delta; extra == 'dev'")
    (project / "pyproject.toml").write_text(PROJECT)


def write_project(parent: Path) -> Path:
    """Write a project that has this repository's Makefile and set-up, and needs local wheels."""
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
    change_needs(project, "alpha", "beta")
    return project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that was never set up."""
    return write_project(tmp_path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = write_project(tmp_path_factory.mktemp("finished"))
    assert make(project, "setup").code == 0
    return project


@pytest.fixture
def finished(template: Path, tmp_path: Path) -> Path:
    """A project that is set up: a copy of another one, with the stamp that a set-up in this place writes."""
    shutil.copytree(template.parent, tmp_path / "here", symlinks=True)
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
    """Start make in a process group of its own. pip finds only the wheels beside the project."""
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
    )


def finish(process: subprocess.Popen[str]) -> Ended:
    output, _ = process.communicate(timeout=100)
    return Ended(process.returncode, output)


def make(project: Path, *words: str, **environment: str) -> Ended:
    return finish(start_make(project, *words, **environment))


def packages(project: Path) -> set[str]:
    """Return the packages that are installed, by their names and versions."""
    return {path.stem for path in project.glob(".venv/lib/python*/site-packages/*.dist-info") if path.stem[-2:] == "-1"}


def assert_set_up(project: Path, ended: Ended) -> None:
    """Assert that make succeeded, that .venv's Python imports the packages, and that make finds nothing left to do."""
    assert ended.code == 0, ended
    subprocess.run([".venv/bin/python", "-c", "import lesson, alpha.second, beta, pip"], cwd=project, check=True)
    assert "Nothing to be done" in make(project, "setup").output


def assert_begins_again(project: Path, said: str, *words: str) -> None:
    """Assert that make says this line and makes .venv from the start: what it does first is to delete the packages."""
    ended = make(project, "setup", *words, POINT=BEFORE_PIP)
    assert ended.code == -signal.SIGKILL and ended.output.splitlines()[:2] == [said, INSTALLING], ended
    assert (project / ".venv/bin/python").exists() and packages(project) == set()


def assert_refused(ended: Ended, *words: str) -> None:
    """Assert that make failed with one sentence that holds these words."""
    sentences = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert ended.code == 2 and len(sentences) == 1 and "Traceback" not in ended.output, ended
    for word in words:
        assert word in sentences[0]


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until a file appears, which a process writes."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_killed_set_up_starts_again(project):
    """SIGKILL while .venv is made, before pip is in it, and inside a package: the next set-up succeeds."""
    for count, point in enumerate([BEFORE_THE_MARKER, WRITING_SETTINGS, BEFORE_PIP, INSIDE_A_PACKAGE]):
        killed = make(project, "setup", POINT=point)
        assert killed.code == -signal.SIGKILL and (AGAIN in killed.output) == (count > 1), killed
    ended = make(project, "setup")
    assert AGAIN in ended.output
    assert_set_up(project, ended)


def test_ctrl_c_is_one_line_and_the_next_set_up_starts_again(project, finished):
    """SIGINT to every process of a set-up ends it without a traceback, while .venv is made and inside a package."""
    change_needs(finished, "alpha", "beta", "gamma")
    for folder, point in ((project, WRITING_SETTINGS), (project, BEFORE_PIP), (finished, INSIDE_GAMMA)):
        ended = make(folder, "setup", POINT=point, SIGNAL="2")
        assert ended.code != 0 and "\nstopped: the same command" in ended.output, ended
        assert "Traceback" not in ended.output, ended
        assert_begins_again(folder, AGAIN)


@pytest.mark.parametrize(
    "point",
    [BETWEEN_DELTA_AND_GAMMA, INSIDE_GAMMA, BEFORE_THE_STAMP, AFTER_THE_STAMP],
    ids=["between-packages", "package", "before-the-stamp", "after-the-stamp"],
)
def test_a_killed_update_starts_again(finished, point):
    """SIGKILL while packages are added to a finished .venv, or around the stamp, is an interrupted set-up, too."""
    change_needs(finished, "alpha", "beta", "gamma")
    assert make(finished, "setup", POINT=point).code == -signal.SIGKILL
    assert_begins_again(finished, AGAIN)


def test_a_killed_installation_of_the_tests_needs_starts_again(finished):
    """After it every command makes .venv again, not only `make test`: pip may have been replacing a shared package."""
    assert make(finished, ".venv/.dev", POINT=r"delta/second\.py', 'w").code == -signal.SIGKILL
    assert_begins_again(finished, AGAIN)


def test_a_set_up_from_inside_the_environment_starts_again(finished):
    """Where .venv is activated, `python3` is the one that the set-up deletes: .venv is made by the Python below it."""
    (finished / ".venv/.unfinished").touch()
    assert_begins_again(finished, AGAIN, "PYTHON=.venv/bin/python3")


def test_of_two_set_ups_one_waits(project, tmp_path):
    """The second make says that it waits, then finds the work done."""
    go = tmp_path / "go"
    first = start_make(project, "setup", POINT=INSIDE_A_PACKAGE, GO=str(go))
    wait_for(first, Path(f"{go}.reached"))
    second = start_make(project, "setup")
    assert second.stdout and second.stdout.readline().strip() == WAITING
    go.touch()
    assert finish(first) == Ended(0, f"{INSTALLING}\n")
    assert_set_up(project, Ended(second.wait(timeout=100), ""))
    assert second.stdout.read() == ""


@pytest.mark.skipif(not Path("/proc/self/cmdline").is_file(), reason="processes are looked up in /proc")
def test_a_pip_that_outlives_its_make_keeps_the_lock(finished, tmp_path):
    """After a SIGKILL of make and the set-up alone, the next one waits for their pip, and then starts again."""
    go = tmp_path / "go"
    change_needs(finished, "alpha", "beta", "gamma")
    first = start_make(finished, "setup", POINT=INSIDE_GAMMA, GO=str(go))
    wait_for(first, Path(f"{go}.reached"))
    for path in processes_of(first.pid):
        if "-m\0pip" not in path.read_text():
            os.kill(int(path.parent.name), signal.SIGKILL)
    second = start_make(finished, "setup", POINT=BEFORE_PIP)
    assert second.stdout and second.stdout.readline().strip() == WAITING
    go.touch()
    assert finish(second) == Ended(-signal.SIGKILL, f"{AGAIN}\n{INSTALLING}\n")
    assert finish(first).code == -signal.SIGKILL


def processes_of(group: int) -> list[Path]:
    """Return /proc/PID/cmdline of every process of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.getpgid(int(path.parent.name)) == group:
                found.append(path)
        except ProcessLookupError:
            pass
    return found


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no process that starts here write a larger file. To a program that is like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_unfinished_environment_that_fills_the_disk_is_deleted(finished):
    """Its packages are deleted before anything is written, so that they cannot be what fills the disk for ever."""
    (finished / ".venv/.unfinished").touch()
    with file_size_limit(0):
        assert_refused(make(finished, "setup"), ".venv cannot be set up", "free space")
    assert os.listdir(finished / ".venv") == [".unfinished"]
    assert_begins_again(finished, AGAIN)


def test_a_disk_that_is_full_before_pip_arrives_is_one_sentence(project):
    """What `venv` and `ensurepip` print is left out but for their reason."""
    with file_size_limit(1 << 16):
        ended = make(project, "setup")
    assert_refused(ended, "installing pip into .venv failed (", "[Errno 27] File too large")
    assert ended.output.splitlines()[0] == INSTALLING and ended.output.count("\n") == 3


def test_a_full_disk_is_one_sentence_and_the_next_set_up_starts_again(finished):
    """Where a package cannot be written, pip's reason arrives in one sentence, and the next make starts again."""
    write_wheel(finished.parent, "gamma", size=3 << 20)
    change_needs(finished, "alpha", "beta", "gamma")
    with file_size_limit(2 << 20):
        ended = make(finished, "setup")
    assert_refused(ended, "[Errno 27] File too large", "free disk space", "run the same command again")
    assert_begins_again(finished, AGAIN)


def test_a_pip_that_is_killed_is_one_sentence(finished):
    """When the system kills pip alone, as it does when memory is full, the sentence names the signal."""
    (finished / "backend.py").write_text("import os\nos.kill(os.getppid(), 9)\n")
    (finished / "constraints.txt").touch()
    assert_refused(make(finished, "setup"), "pip install failed (it was ended by SIGKILL)")


def test_a_failed_update_leaves_a_finished_environment(finished):
    """A new package that pip cannot find is one sentence, and nothing is deleted; later it is installed."""
    change_needs(finished, "alpha", "beta", "late")
    for _ in range(2):
        assert_refused(
            make(finished, "setup"), "pip install failed (Could not find a version that satisfies the requirement late"
        )
    assert packages(finished) == {"lesson-1", "alpha-1", "beta-1"} and not (finished / ".venv/.unfinished").exists()
    write_wheel(finished.parent, "late")
    ended = make(finished, "setup")
    assert packages(finished) == {"lesson-1", "alpha-1", "beta-1", "late-1"}
    assert_set_up(finished, ended)


def test_an_unreachable_index_is_one_sentence(finished):
    """Without a connection the sentence says that the index cannot be reached, not only that a package is missing."""
    (finished / "constraints.txt").write_text("alpha==2\n")
    dead = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    assert_refused(make(finished, "setup", **dead), "the package index cannot be reached", "check the network")


def test_the_needs_of_the_tests_are_installed_once(finished):
    """`.venv/.dev` installs the extra, and then make finds nothing to do, until pyproject.toml changes."""
    ended = make(finished, ".venv/.dev")
    assert ended == Ended(0, "Installing what the tests and notebooks need into .venv, once.\n")
    assert "delta-1" in packages(finished)
    for goal in (".venv/.core", ".venv/.dev"):
        assert "up to date" in make(finished, goal).output
    change_needs(finished, "alpha")
    assert make(finished, ".venv/.dev").output == f"{INSTALLING}\n{ended.output}"


def test_a_moved_or_copied_environment_is_made_again(finished, tmp_path):
    """Its scripts and its editable install name the old place. Another name of the same place is no other place."""
    (tmp_path / "link").symlink_to(finished)
    move_stamp(finished, finished, tmp_path / "link")
    assert "Nothing to be done" in make(finished, "setup").output
    moved = finished.rename(finished.with_name("moved"))
    (tmp_path / "link").unlink()
    assert_begins_again(moved, ".venv was made for another directory: making it again.")


def test_an_environment_whose_python_is_gone_is_made_again(finished):
    """A system upgrade removed the Python that .venv links to."""
    python = finished / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/usr/bin/python3.1")
    assert_begins_again(finished, ".venv has lost its Python or its pip: making it again.")


def test_an_environment_whose_python_was_replaced_is_made_again(finished):
    """The Python that .venv links to now looks for its packages elsewhere, as after an upgrade from 3.11 to 3.13."""
    (packages_folder,) = finished.glob(".venv/lib/python*")
    packages_folder.rename(packages_folder.with_name("python3.1"))
    stamp = finished / ".venv/.core"
    stamp.write_text(f"{finished}\n/usr/bin/env\n")
    assert_begins_again(finished, ".venv has lost its Python or its pip: making it again.")


def test_an_environment_of_another_program_is_never_deleted(project):
    """A .venv without pip that make did not make, such as uv's, is one sentence."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    assert_refused(make(project, "setup"), "was not made by make", "has no pip", "rm -rf .venv")
    assert (project / ".venv/bin/python").exists()


def test_an_environment_of_another_program_that_has_pip_is_used(finished):
    """The project is installed into it, and what was there stays."""
    (finished / ".venv/.core").unlink()
    (finished / ".venv/mine").touch()
    assert_set_up(finished, make(finished, "setup"))
    assert (finished / ".venv/mine").exists()


def test_a_link_to_an_environment_of_another_directory_is_refused(finished, project):
    """Nothing is installed into it or deleted from it: that would change the other directory's environment."""
    (project / ".venv").symlink_to(finished / ".venv")
    for stamp in (finished / ".venv/.core", finished / ".venv/.unfinished"):
        before = packages(finished)
        assert_refused(make(project, "setup"), f".venv is a link to {finished}/.venv", "rm .venv")
        assert packages(finished) == before and stamp.parent.exists()
        (finished / ".venv/.unfinished").touch()


def test_a_link_to_an_empty_directory_is_used(project, tmp_path):
    """.venv may be on another disk, also after an interruption."""
    (tmp_path / "disk").mkdir()
    (project / ".venv").symlink_to(tmp_path / "disk")
    assert make(project, "setup", POINT=BEFORE_PIP).code == -signal.SIGKILL
    assert (tmp_path / "disk/pyvenv.cfg").exists()
    assert_begins_again(project, AGAIN)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_something_else_named_venv_is_one_sentence(project, kind):
    """A file or a dangling link in the place of .venv is named and stays."""
    if kind == "file":
        (project / ".venv").touch()
    else:
        (project / ".venv").symlink_to("nowhere")
    assert_refused(make(project, "setup"), ".venv is not a directory")
    assert os.path.lexists(project / ".venv")


def test_a_python_without_ensurepip_is_one_sentence(project):
    """Debian's Python has no ensurepip without python3-venv: the sentence says so, and no .venv is left."""
    (project.parent / "ensurepip.py").write_text("raise ModuleNotFoundError('no', name='ensurepip')")
    named = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    assert_refused(make(project, "setup"), "no module ensurepip", f"apt install {named}", "PYTHON=/path")
    (project.parent / "ensurepip.py").unlink()
    assert make(project, "setup", POINT=BEFORE_PIP).output == f"{INSTALLING}\n"


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python3"])
def test_an_old_or_missing_python_is_one_sentence(project, python):
    """A Python before 3.11, or none at all, is answered before anything is made."""
    ended = make(project, "setup", f"PYTHON={python}")
    assert ended.code == 2 and "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11" in ended.output
    assert not (project / ".venv").exists()


def test_prepared_data_outlives_a_failure_after_it(finished):
    """When prepare.py fails or is interrupted after its last write, which is atomic, make keeps meta.json."""
    folder = finished / "nanoGPT/data/shakespeare"
    folder.mkdir(parents=True)
    (finished / "nanoGPT/prepare").mkdir()
    (finished / "nanoGPT/prepare/text.py").touch()
    (folder / "prepare.py").write_text(f"open('{folder}/meta.json', 'w').close()\nraise SystemExit(1)\n")
    assert make(finished, "data").code == 2
    assert (folder / "meta.json").exists()


def test_clean_deletes_caches_and_nothing_else(project):
    """Nothing below .venv and out/, where other programs may be at work, is deleted."""
    kept, deleted = [".venv/lib", "out/run", "nanoGPT/data"], ["nanoGPT/__pycache__", ".mypy_cache", "x.egg-info"]
    for name in (*deleted, *kept, ".venv/lib/__pycache__", "out/run/__pycache__"):
        (project / name).mkdir(parents=True)
    assert make(project, "clean") == Ended(0, "")
    assert [name for name in deleted if (project / name).exists()] == []
    assert all((project / name).is_dir() for name in (*kept, ".venv/lib/__pycache__", "out/run/__pycache__"))
