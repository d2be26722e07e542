"""What torchrun tells a rank in its environment: where ranks meet, and whether it may restart them."""

import os

from nanoGPT.errors import ConfigError


def master_address() -> tuple[str, int]:
    """Return where ranks meet.

    Raises:
        ConfigError: the environment does not say it, or the port is none.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address} and MASTER_PORT={port}: start ranks "
            "with torchrun or make, or set all four"
        )
    return address, port_number(port)


def port_number(port: str) -> int:
    """Return a port as a number.

    Raises:
        ConfigError: it is none.
    """
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port} is no port: give a number up to 65535, the same on every node")
    return int(port)


def agent_has_store() -> bool:
    """Return whether torchrun's agent on rank 0's node serves the store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def may_restart() -> bool:
    """Whether torchrun may start the ranks again (`--max-restarts`), so that this may be such a start."""
    return environment_number("TORCHELASTIC_MAX_RESTARTS") > 0


def environment_number(name: str) -> int:
    """Return a number that torchrun has put into the environment; 0 if it has not.

    Raises:
        ConfigError: it is no number.
    """
    value = os.environ.get(name) or "0"
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"the environment has {name}={value}: start ranks with torchrun or make, or unset it")
    return int(value)
