"""Create .venv and install the project into it, as `make setup` does. A set-up can be interrupted at any moment.

    python3 workshop/set_up.py core                # install the packages for training
    python3 workshop/set_up.py core --torch=cpu    # the same, with the CPU build of PyTorch (smaller download on Linux)
    python3 workshop/set_up.py core --torch=auto   # the same, with the build for the driver of this machine
    python3 workshop/set_up.py pytest              # also install pytest, for make check-ptx
    python3 workshop/set_up.py dev                 # also install the packages for the tests
    python3 workshop/set_up.py notebooks           # also install Jupyter
    python3 workshop/set_up.py book                # also install Sphinx, for make book

If the directory `offline-bundle` exists (from the archive of `workshop.offline_bundle`), nothing is downloaded. This
program runs before anything is installed, so it imports only the standard library. It uses these files:

.venv.lock            locked while a set-up is running; another set-up waits for it
.venv/.unfinished     marker: exists while .venv is being changed; a set-up that finds it starts with an empty .venv
offline-bundle/       wheels, and the platform that they are for
.venv/.core, ...      stamps, written last: the directory and the Python of .venv, which the Makefile compares
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UNFINISHED = VENV / ".unfinished"
CORE = VENV / ".core"
TEMPORARY = VENV / ".stamp"
BUNDLE = ROOT / "offline-bundle"
GOALS = {
    "core": (".", "Installing PyTorch and other packages into .venv, once: about two minutes plus downloads."),
    "pytest": (".[pytest]", "Installing pytest into .venv, once."),
    "dev": (".[dev]", "Installing the packages for the tests into .venv, once."),
    "notebooks": (".[notebooks]", "Installing Jupyter into .venv, once."),
    "book": (".[book]", "Installing Sphinx into .venv, once."),
}
CONSTRAINTS = ("--constraint", "constraints.txt")
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *CONSTRAINTS)
INSTALL_BUILD = ("-m", "uv", "pip", "install", "--quiet", *CONSTRAINTS)
RUN_AGAIN = "then run the same command again"
CHECK_PYTHON = (
    "import os, sys, pip; sys.exit(sys.version_info < (3, 11) or not os.path.samefile(sys.prefix, sys.argv[1]))"
)


class SetUpError(Exception):
    """The set-up cannot continue. The message is one sentence that contains the solution."""


@contextlib.contextmanager
def set_up_lock() -> Iterator[int]:
    """Hold the set-up lock of this directory. If another set-up holds it, print a message and wait."""
    descriptor = os.open(ROOT / ".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another make is setting up .venv: waiting for it to finish.", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass  # the file system has no locks
        yield descriptor
    finally:
        os.close(descriptor)


def is_same(path: str, other: Path) -> bool:
    """Return whether two paths are the same file. The result is False if one of them does not exist."""
    return os.path.exists(path) and other.exists() and os.path.samefile(path, other)


def read_stamp(path: Path) -> list[str]:
    """Return the directory and the Python that a stamp contains, or an empty list if there is no stamp."""
    return os.fsdecode(path.read_bytes()).splitlines() if path.is_file() else []


def write_stamp(path: Path, lines: list[Path], time_ns: int | None = None) -> None:
    """Write a stamp atomically, with the given modification time (ns)."""
    TEMPORARY.write_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))
    if time_ns is not None:
        os.utime(TEMPORARY, ns=(time_ns, time_ns))
    os.replace(TEMPORARY, path)


def is_done(goal: str) -> bool:
    """Return whether .venv is finished, belongs to this directory and its Python, and is newer than its sources."""
    stamp = VENV / f".{goal}"
    sources = [ROOT / "pyproject.toml", ROOT / "constraints.txt", *([CORE] if stamp != CORE else [])]
    lines = read_stamp(stamp)
    return (
        not UNFINISHED.exists()
        and len(lines) == 2
        and is_same(lines[0], ROOT)
        and is_same(lines[1], PYTHON)
        and all(stamp.stat().st_mtime_ns >= path.stat().st_mtime_ns for path in sources)
    )


def find_problem() -> str | None:
    """Return why .venv must be created, or None if packages can be installed into it.

    Raises:
        SetUpError: it cannot be used, and this program must not delete it, because it did not create it.
    """
    if not os.path.lexists(VENV) or (VENV.is_dir() and not {*VENV.iterdir()} - {TEMPORARY}):
        return "does not exist"
    names = [line for path in (UNFINISHED, CORE) for line in read_stamp(path)[:1]]
    is_ours = any(is_same(name, ROOT) for name in names)
    if not VENV.is_dir() or (VENV.is_symlink() and not is_ours) or not (names or has_working_python()):
        raise SetUpError(
            ".venv was not created by `make` for this directory, and has no working Python 3.11 with pip: delete it "
            f"(`rm -rf .venv`), {RUN_AGAIN}"
        )
    if UNFINISHED.exists():
        return "is unfinished"
    if CORE.exists() and not is_ours:
        return "was created for another directory"
    return None if has_working_python() else "has no working Python or no pip"


def has_working_python() -> bool:
    """Return whether the Python of .venv starts, is new enough, has pip and installs into .venv."""
    try:
        return subprocess.run([PYTHON, "-I", "-c", CHECK_PYTHON, VENV], capture_output=True).returncode == 0
    except OSError:
        return False


def describe_downloads(torch_build: str) -> str:
    """Return what installing PyTorch downloads on this machine, and how to download less. Sizes as in the README."""
    if platform.system() != "Linux" or torch_build == "cpu":
        return "The largest downloads are PyTorch (0.2 GB) and, on Linux, Triton (0.3 GB)."
    size = "The default build of PyTorch includes CUDA, a download of several GB."
    if shutil.which("nvidia-smi"):
        return size
    return f"{size}\nWithout an NVIDIA GPU, you can download less: press Ctrl+C and add TORCH=cpu to the command."


def run_step(description: str, command: list[str | Path], lock: int) -> None:
    """Run a program, which prints its own errors. `venv` also says which package of Debian it needs.

    The program inherits the lock, which then stays locked even if this process is killed first.

    Raises:
        SetUpError: the program failed.
    """
    code = subprocess.run(command, cwd=ROOT, pass_fds=[lock]).returncode
    if code:
        source = f"{BUNDLE.name}/ (delete it to download packages instead)" if BUNDLE.is_dir() else "the network"
        raise SetUpError(
            f"{description} failed (exit code {code}; its messages are above): check {source} and the free disk space, "
            f"{RUN_AGAIN}"
        )


def describe_platform() -> dict[str, str]:
    """Return the platform and the version of Python that decide which wheels can be installed."""
    return {"platform": f"{platform.system()}-{platform.machine()}", "python": "{}.{}".format(*sys.version_info)}


def check_bundle() -> None:
    """Check that the packages of the offline bundle are for this platform and this Python.

    Raises:
        SetUpError: they are for another one.
    """
    expected, actual = json.loads((BUNDLE / "bundle.json").read_text()), describe_platform()
    if expected != actual:
        raise SetUpError(
            f"{BUNDLE.name} is for {expected['platform']} with Python {expected['python']}, but this is "
            f"{actual['platform']} with Python {actual['python']}: use PYTHON=/path/to/python{expected['python']}, or "
            f"delete the directory {BUNDLE.name} to download packages instead, {RUN_AGAIN}"
        )


def clear_venv() -> None:
    """Delete everything in .venv except the marker. An existing marker is not written again: the disk may be full."""
    if not UNFINISHED.exists():
        write_stamp(UNFINISHED, [ROOT])
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != UNFINISHED:
            path.unlink()


def create_venv(lock: int) -> None:
    """Create a virtual environment with pip in the empty .venv.

    Raises:
        SetUpError: it cannot be created, for example because the disk is full.
    """
    # This process may run the Python of the .venv that was just deleted. The base Python still exists.
    base = getattr(sys, "_base_executable", sys.executable)
    run_step("creating .venv", [base, "-m", "venv", os.path.realpath(VENV)], lock)


def has_torch() -> bool:
    """Return whether .venv has the version of PyTorch that constraints.txt demands, of whatever build."""
    pin = re.search(r"^torch==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return any(VENV.glob(f"lib/python*/site-packages/torch-{pin[1] if pin else ''}*.dist-info"))


def package_times() -> list[int]:
    """Return the time (ns) at which a package was last added to or removed from .venv, as a list."""
    return [path.stat().st_mtime_ns for path in VENV.glob("lib/python*/site-packages")]


def install_torch(build: str, lock: int) -> None:
    """Install a build of PyTorch that pip cannot select on Linux: cpu, a CUDA such as cu126, or auto for the driver's.

    uv knows the index that has it.

    Raises:
        SetUpError: pip or uv failed.
    """
    run_step("installing uv", [PYTHON, *INSTALL, "uv"], lock)
    options = ("--torch-backend", build, "--python", PYTHON)
    run_step(f"installing PyTorch for {build}", [PYTHON, *INSTALL_BUILD, *options, "torch"], lock)


def install(goal: str, torch_build: str, lock: int) -> None:
    """Install the project and the packages of a goal.

    Raises:
        SetUpError: pip failed. If it changed nothing, for example without a network, a finished .venv stays finished.
            The same holds after Ctrl-C.
    """
    before = package_times()
    offline: list[str | Path] = ["--no-index", "--find-links", BUNDLE / "wheels"] if BUNDLE.is_dir() else []
    try:
        if torch_build != "default" and not has_torch() and not offline:
            install_torch(torch_build, lock)
        run_step("pip install", [PYTHON, *INSTALL, *offline, "--editable", GOALS[goal][0]], lock)
    except (SetUpError, KeyboardInterrupt):
        if CORE.exists() and package_times() == before:
            UNFINISHED.unlink()
        raise


def set_up(goal: str, torch_build: str, lock: int) -> None:
    """Create .venv if necessary, and install the packages of a goal.

    Raises:
        SetUpError: the set-up cannot continue.
    """
    problem = find_problem()
    if problem:
        print(f".venv {problem}: creating it.", flush=True)
    if BUNDLE.is_dir():
        check_bundle()
        print(f"Using {BUNDLE.name}/: nothing is downloaded.", flush=True)
    print(GOALS[goal][1], flush=True)
    if goal == "core" and not has_torch() and not BUNDLE.is_dir():
        print(describe_downloads(torch_build), flush=True)
    VENV.mkdir(exist_ok=True)
    if problem:
        clear_venv()
    write_stamp(UNFINISHED, [ROOT])
    # The stamp gets the start time, so that a file that changes while pip is running is newer than the stamp.
    started = UNFINISHED.stat().st_mtime_ns
    if problem:
        create_venv(lock)
    install(goal, torch_build, lock)
    write_stamp(VENV / f".{goal}", [ROOT, Path(os.path.realpath(PYTHON))], started)
    UNFINISHED.unlink()


def main(goal: str, torch_build: str) -> int:
    try:
        with set_up_lock() as lock:
            if not is_done(goal):
                set_up(goal, torch_build, lock)
    except SetUpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        advice = f"check the free disk space and the permissions, {RUN_AGAIN}"
        print(f"error: .venv cannot be set up ({error}): {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped: run the same command again to set up .venv", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Create .venv and install the project into it.")
    parser.add_argument("goal", choices=GOALS)
    parser.add_argument("--torch", default="default", help="build of PyTorch: cpu, a CUDA such as cu126, or auto")
    options = parser.parse_args()
    sys.exit(main(options.goal, options.torch))
