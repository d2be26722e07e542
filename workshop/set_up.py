"""Make .venv and install the project into it, as `make setup` does. It can be interrupted at any moment.

    python3 workshop/set_up.py core    # what training needs
    python3 workshop/set_up.py dev     # what the tests and notebooks need, too

It runs before anything is installed, so it imports only the standard library.

.venv.lock            locked while a set-up is running; another one waits
.venv/.unfinished     exists while .venv is being changed; a set-up that finds it deletes .venv and starts again
.venv/.core, .dev     written last: the directory and the Python that .venv was made for; the Makefile compares them
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
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
GOALS = {
    "core": (".", "Installing into .venv, once: about two minutes."),
    "dev": (".[dev]", "Installing what the tests and notebooks need into .venv, once."),
}
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", "constraints.txt")
AGAIN = "then run the same command again"
CHECKS = "check the network and the free disk space, " + AGAIN
CHECK_PYTHON = (
    "import os, sys, pip; sys.exit(sys.version_info < (3, 11) or not os.path.samefile(sys.prefix, sys.argv[1]))"
)


class SetUpError(Exception):
    """The set-up cannot go on. Its message is one sentence that says what to do."""


@contextlib.contextmanager
def set_up_lock() -> Iterator[int]:
    """Hold the lock of this directory's set-up; while another set-up holds it, say so and wait."""
    descriptor = os.open(ROOT / ".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another make is setting up .venv: waiting for it to finish.", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield descriptor
    finally:
        os.close(descriptor)


def is_same(path: str, other: Path) -> bool:
    """Return whether two paths name the same file; a path that does not exist names none."""
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return False


def read_stamp(path: Path) -> list[str]:
    """Return the directory and the Python that a stamp names; an empty list if it is absent or names none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.fsdecode(path.read_bytes()).split("\n")[:-1]
    return []


def write_stamp(path: Path, lines: list[Path], time_ns: int | None = None) -> None:
    """Write a stamp atomically, with the given modification time."""
    try:
        TEMPORARY.write_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))
        if time_ns is not None:
            os.utime(TEMPORARY, ns=(time_ns, time_ns))
        os.replace(TEMPORARY, path)
    finally:
        TEMPORARY.unlink(missing_ok=True)


def is_done(goal: str) -> bool:
    """Return whether .venv is finished, was made for this directory and its Python, and is newer than what it needs."""
    stamp = VENV / f".{goal}"
    needs = [ROOT / "pyproject.toml", ROOT / "constraints.txt", *([CORE] if stamp != CORE else [])]
    lines = read_stamp(stamp)
    return (
        not UNFINISHED.exists()
        and len(lines) == 2
        and is_same(lines[0], ROOT)
        and is_same(lines[1], PYTHON)
        and all(stamp.stat().st_mtime_ns >= path.stat().st_mtime_ns for path in needs)
    )


def is_new() -> bool:
    """Return whether there is no .venv, or one in which a set-up had not even written its marker."""
    return not os.path.lexists(VENV) or (VENV.is_dir() and not set(VENV.iterdir()) - {TEMPORARY})


def find_problem() -> str | None:
    """Return why this .venv has to be made again; None if packages can be installed into it.

    Raises:
        SetUpError: it cannot be used, and this program did not make it, so it must not delete it.
    """
    if not VENV.is_dir():
        raise SetUpError(f".venv is not a directory: delete it, {AGAIN}")
    made_for = [read_stamp(path)[:1] for path in (UNFINISHED, CORE)]
    made_here = any(is_same(directory, ROOT) for lines in made_for for directory in lines)
    if VENV.is_symlink() and not made_here:
        raise SetUpError(
            f".venv is a link to {os.path.realpath(VENV)}, which was not set up for this directory: "
            f"delete the link (`rm .venv`), {AGAIN}"
        )
    if UNFINISHED.exists():
        return "was left unfinished"
    if made_for[1] and not made_here:
        return "was made for another directory"
    if has_working_python():
        return None
    if not CORE.exists():
        raise SetUpError(
            ".venv was not made by make, and its Python does not start, is older than 3.11 or has no pip: "
            f"delete it (`rm -rf .venv`), {AGAIN}"
        )
    return "has lost its Python or its pip"


def has_working_python() -> bool:
    """Return whether the Python of .venv starts, is new enough, has pip and installs into .venv."""
    try:
        return subprocess.run([PYTHON, "-I", "-c", CHECK_PYTHON, VENV], capture_output=True).returncode == 0
    except OSError:
        return False


def run_step(what: str, words: list[str | Path], lock: int, show: bool = False) -> None:
    """Run a program, which inherits the lock in case it outlives this process.

    Args:
        what: what it does, for the error message.
        words: the program and its arguments.
        lock: file descriptor of the lock.
        show: whether to pass on what it writes to standard error.

    Raises:
        SetUpError: it failed.
    """
    lines: list[str] = []
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", pass_fds=[lock]
    ) as program:
        assert program.stderr
        try:
            for line in program.stderr:
                sys.stderr.write(line if show else "")
                lines.append(line.strip())
        except BaseException:
            program.kill()
            raise
    if program.returncode:
        raise SetUpError(f"{what} failed ({find_reason(program.returncode, lines)}): {CHECKS}")


def find_reason(code: int, lines: list[str]) -> str:
    """Return in a few words why pip or venv failed, from its exit code and its messages."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    errors = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("error:")]
    errors = [error for error in errors if error != "subprocess-exited-with-error"]
    reason = [*errors, *[line for line in reversed(lines) if line], f"exit code {code}"][0]
    offline = any("after connection broken by" in line for line in lines)
    return f"the package index cannot be reached; {reason}" if offline else reason


def check_ensurepip() -> None:
    """Check that this Python can make an environment.

    Raises:
        SetUpError: a part of the standard library is not installed.
    """
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        name = "python{}.{}".format(*sys.version_info)
        raise SetUpError(
            f"{sys.executable} cannot make .venv (it has no module {error.name}): install that, on Debian and Ubuntu "
            f"by `apt install {name}-venv`, or choose another Python with PYTHON=/path/to/python3.11, {AGAIN}"
        ) from None


def clear_venv() -> None:
    """Delete everything in .venv but the marker. A marker that is there is not written again: the disk may be full."""
    if not UNFINISHED.exists():
        write_stamp(UNFINISHED, [ROOT])
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != UNFINISHED:
            path.unlink()


def make_venv(lock: int) -> None:
    """Make an environment with pip in the empty .venv.

    Raises:
        SetUpError: it cannot be made, for example because the disk is full.
    """
    # This process may be running in the .venv that was just deleted: the base Python still exists.
    base = getattr(sys, "_base_executable", sys.executable)
    run_step("making .venv", [base, "-m", "venv", "--without-pip", os.path.realpath(VENV)], lock)
    # `venv` would do this too, but hides why it fails.
    run_step("installing pip into .venv", [PYTHON, "-I", "-m", "ensurepip", "--upgrade", "--default-pip"], lock)


def package_times() -> list[int]:
    """Return when a package was last added to or removed from .venv."""
    return [path.stat().st_mtime_ns for path in VENV.glob("lib/python*/site-packages")]


def install(goal: str, lock: int) -> None:
    """Install the project for a goal.

    Raises:
        SetUpError: pip failed. If it changed nothing, for example without a network, a finished .venv stays as it was.
    """
    before = package_times()
    try:
        run_step("pip install", [PYTHON, *INSTALL, "--editable", GOALS[goal][0]], lock, show=True)
    except SetUpError:
        if CORE.exists() and package_times() == before:
            UNFINISHED.unlink()
        raise


def set_up(goal: str, lock: int) -> None:
    """Bring .venv to a goal, from whatever state it is in.

    Raises:
        SetUpError: it cannot be done.
    """
    must_make = is_new()
    if not must_make and (problem := find_problem()):
        print(f".venv {problem}: making it again.", flush=True)
        must_make = True
    if must_make:
        check_ensurepip()
    print(GOALS[goal][1], flush=True)
    VENV.mkdir(exist_ok=True)
    if must_make:
        clear_venv()
    write_stamp(UNFINISHED, [ROOT])
    # The stamp gets the time of the start: a file that changes while pip is running is then newer than the stamp.
    started = UNFINISHED.stat().st_mtime_ns
    if must_make:
        make_venv(lock)
    install(goal, lock)
    write_stamp(VENV / f".{goal}", [ROOT, Path(os.path.realpath(PYTHON))], started)
    UNFINISHED.unlink()


def main(goal: str) -> int:
    try:
        with set_up_lock() as lock:
            if not is_done(goal):
                set_up(goal, lock)
    except SetUpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: .venv cannot be set up ({error}): check the disk's free space and permissions, {AGAIN}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("\nstopped: the same command sets .venv up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make .venv and install the project into it.")
    parser.add_argument("goal", choices=GOALS)
    sys.exit(main(parser.parse_args().goal))
