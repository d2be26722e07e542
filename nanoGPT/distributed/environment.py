"""The environment of a process: the variables that torchrun sets, and the versions of Python and torch."""

import os
import platform

import torch

from nanoGPT.errors import ConfigError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ELASTIC_VARIABLE = "NANOGPT_ELASTIC"  # set by `make elastic`: the address of its store, and the name of the job


def master_address() -> tuple[str, int]:
    """Return the address and the port where the ranks meet.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is missing, or the port is invalid.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address} and MASTER_PORT={port}: start ranks "
            "with torchrun or make, or set all four"
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


def agent_has_store() -> bool:
    """Return whether torchrun's agent on the node of rank 0 serves the store. Otherwise rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def may_restart() -> bool:
    """Return whether torchrun may restart the ranks (`--max-restarts`). This start may then be a restart."""
    return environment_number("TORCHELASTIC_MAX_RESTARTS") > 0


def read_elastic_job() -> tuple[str, int, str] | None:
    """Return the host and the port of an elastic job's store, and the name of the job; None for other jobs.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    address, _, job = os.environ.get(ELASTIC_VARIABLE, "").partition(" ")
    host, _, port = address.rpartition(":")
    return (host, port_number(port, ELASTIC_VARIABLE), job) if job else None


def environment_number(name: str) -> int:
    """Return the number in an environment variable of torchrun; 0 if it is not set.

    Raises:
        ConfigError: the value is not a number.
    """
    value = os.environ.get(name) or "0"
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(
            f"the environment variable {name}={value} is not a number: start ranks with torchrun or make, or unset it"
        )
    return int(value)


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
    """Return the versions of Python and torch."""
    return {"python": platform.python_version(), "torch": torch.__version__}
