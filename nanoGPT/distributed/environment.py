"""The environment of a process: the variables that torchrun sets, and the versions of Python and torch."""

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from nanoGPT.errors import ConfigError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def master_address() -> tuple[str, int]:
    """Return the address and the port where the ranks meet.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is missing, or the port is invalid.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address} and MASTER_PORT={port}: start ranks "
            "with torchrun, or set all four"
        )
    return address, port_number(port)


def port_number(port: str, variable: str = "MASTER_PORT") -> int:
    """Return the port in an environment variable as a number.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{variable}={port} is not a port: use a number from 1 to 65535, the same on every node")
    return int(port)


def environment_number(name: str) -> int:
    """Return the number in an environment variable of torchrun; 0 if it is not set.

    Raises:
        ConfigError: the value is not a number.
    """
    value = os.environ.get(name) or "0"
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


def read_launched_ranks(micro_batches: int) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, for a program that only a launcher can start.

    Raises:
        ConfigError: no launcher started this process, or the ranks cannot share the micro-batches of a step equally.
    """
    rank, ranks = environment_number("RANK"), environment_number("WORLD_SIZE")
    if not ranks or "RANK" not in os.environ:
        raise ConfigError("this program needs a launcher: start it with torchrun --standalone --nproc_per_node=2")
    if micro_batches < ranks or micro_batches % ranks:
        raise ConfigError(
            f"--micro_batches={micro_batches} cannot be divided by {ranks} ranks: use a multiple of {ranks}"
        )
    return rank, ranks


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
