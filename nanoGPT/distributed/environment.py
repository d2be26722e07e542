"""The environment of a process: torchrun's variables, versions, the hardware, and the commit."""

import contextlib
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE


def environment_number(name: str, default: int = 0) -> int:
    """Return the number in an environment variable of torchrun; `default` if it is not set or empty.

    Raises:
        ConfigError: the value is not a number.
    """
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(
            f"the environment variable {name}={value} is not a number: start ranks with torchrun, or unset it"
        )
    return int(value)


def name_launcher() -> str:
    """Return the process id and, on Linux, the start time of torchrun's agent; without one, those of this process.

    The start time distinguishes it from an earlier process with the same id, as in containers.
    """
    process, started = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(), ""
    with contextlib.suppress(OSError):  # only Linux has /proc
        started = "-" + Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{process}{started}"


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


# ---- hardware


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of torch's allocator on a GPU, else the maximum resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def count_cores() -> int:
    """Return the number of CPU cores that this process may use, which in a container is often less than all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_hardware(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def read_gpu_driver() -> str | None:
    """Return the version of NVIDIA's driver as the kernel module reports it; None without one."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


def read_environment() -> dict[str, str]:
    """Return the environment variables that change how torch, CUDA, NCCL, OpenMP and glibc work."""
    prefixes = ("NCCL_", "CUDA_", "PYTORCH_", "TORCH_", "TRITON_", "GLOO_", "OMP_", "GLIBC_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def read_git_commit() -> str | None:
    """Return the git commit of this code; None without git or outside of a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(PACKAGE), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return None
