"""Check the machine before anything is installed. This module imports only the standard library.

It also runs on Python 3.9, so that it can report that this version is too old.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.checks import Check

ROOT = Path(__file__).resolve().parent.parent.parent
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
GIB = 1 << 30
MIN_PYTHON = (3, 11)
MIN_FREE_MEMORY = 4 * GIB  # for four ranks, a notebook and a browser
MIN_DISK, ENVIRONMENT_DISK = 1 * GIB, 8 * GIB  # for runs; for an environment with the CUDA build of PyTorch
DRIVER_SECONDS = 10.0  # until nvidia-smi counts as hanging
DATASETS = ("shakespeare_char", "shakespeare", "synthetic")


def check_machine() -> Iterator[Check]:
    """Yield the checks that need no packages."""
    yield check_platform()
    yield check_python()
    if os.name == "nt":
        return
    yield check_memory()
    yield check_disk()
    yield check_loopback()
    yield check_driver()
    yield check_data()
    yield check_environment()


def check_platform() -> Check:
    """Report the operating system and the processors, and what does not work there."""
    finding = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    if os.name == "nt":
        return Check("machine", "fail", finding, "use WSL 2, and follow the instructions for Linux")
    if sys.platform == "darwin":
        return Check("machine", "warn", finding, "phase 2, --kernels and notebook 4 need Triton: use Linux for them")
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        return Check("machine", "warn", finding, "other programs are running: stop them, or expect slower steps")
    return Check("machine", "pass", finding)


def check_python() -> Check:
    """Check the version of this Python, and the modules that create a virtual environment."""
    finding = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < MIN_PYTHON:
        remedy = "install Python 3.11 or newer, and name it: make doctor PYTHON=/path/to/python3.11"
        return Check("Python", "fail", finding, remedy)
    if not importlib.util.find_spec("ensurepip") and not VENV_PYTHON.exists():
        name = "python{}.{}-venv".format(*sys.version_info)
        return Check("Python", "fail", f"{finding} has no module ensurepip", f"install it: sudo apt install {name}")
    return Check("Python", "pass", finding)


def check_memory() -> Check:
    """Check the memory that new programs can use."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return Check("memory", "skip", "only Linux reports how much is free")
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    free, total = (1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    finding = f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB are free"
    if free < MIN_FREE_MEMORY:
        return Check("memory", "warn", finding, "stop other programs, or use at most 2 ranks")
    return Check("memory", "pass", finding)


def check_disk() -> Check:
    """Check the free space for runs, and for the environment if it does not exist yet."""
    free = shutil.disk_usage(ROOT).free
    finding = f"{free / GIB:.1f} GiB are free in {ROOT}"
    if free < MIN_DISK:
        return Check("disk", "fail", finding, "delete files: old runs are in out/")
    if not VENV_PYTHON.exists() and free < ENVIRONMENT_DISK:
        remedy = "make setup TORCH=cpu needs less space than the build with CUDA"
        return Check("disk", "warn", finding, remedy)
    return Check("disk", "pass", finding)


def check_loopback() -> Check:
    """Connect to this process through 127.0.0.1, and look up the names that ranks look up."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "a firewall or a VPN blocks local connections: allow them on the interface lo, or stop it"
        return Check("loopback", "fail", f"127.0.0.1 does not work ({error})", remedy)
    for name in ("localhost", socket.gethostname()):
        try:
            socket.getaddrinfo(name, 80)
        except OSError:
            remedy = f"add it: 127.0.0.1 {name} in /etc/hosts"
            return Check("loopback", "warn", f"the name {name} has no address", remedy)
    return Check("loopback", "pass", "127.0.0.1 works, and the names localhost and of this machine have addresses")


def check_driver() -> Check:
    """Report the GPUs that the NVIDIA driver finds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU driver", "skip", "no nvidia-smi: ranks run on the CPU, which is enough for the workshop")
    output = ""
    with contextlib.suppress(OSError), tempfile.TemporaryFile("w+") as file:
        query = subprocess.Popen([program, "-L"], stdout=file, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            query.wait(DRIVER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(query.pid, signal.SIGKILL)  # without waiting: a process that waits for a driver may not end
            finding = f"nvidia-smi gives no answer within {DRIVER_SECONDS:g} s: the driver hangs"
            return Check("GPU driver", "fail", finding, "restart the machine; programs that use a GPU would hang, too")
        file.seek(0)
        output = file.read()
    gpus = [line.split(" (UUID")[0] for line in output.splitlines() if line.startswith("GPU")]
    if not gpus:
        return Check("GPU driver", "warn", "nvidia-smi finds no GPU", "restart the machine, or reinstall the driver")
    return Check("GPU driver", "pass", "; ".join(gpus))


def check_data() -> Check:
    """Check that the datasets of the notebooks are prepared."""
    missing = [name for name in DATASETS if not (ROOT / "nanoGPT" / "data" / name / "meta.json").exists()]
    if missing:
        return Check("data", "warn", f"not prepared: {', '.join(missing)}", "run make data, or start a training run")
    return Check("data", "pass", f"prepared: {', '.join(DATASETS)}")


def check_environment() -> Check:
    """Check that .venv is complete and belongs to this directory."""
    if not VENV_PYTHON.exists():
        return Check("environment", "warn", ".venv does not exist yet", "run make setup (without a GPU: TORCH=cpu)")
    if sys.version_info < MIN_PYTHON:
        return Check("environment", "skip", "cannot be checked with this Python", "use the Python of .venv")
    from workshop.set_up import UNFINISHED, is_done

    if UNFINISHED.exists():
        return Check(
            "environment",
            "fail",
            ".venv is unfinished",
            "the set-up failed or was interrupted: run the same make setup again",
        )
    if not is_done("core"):
        return Check("environment", "warn", ".venv was not set up for this version of the repository", "run make setup")
    return Check("environment", "pass", f"{VENV_PYTHON.parent.parent} is complete")
