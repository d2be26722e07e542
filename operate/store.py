"""Connect to a key-value store through which launchers and nodes exchange values."""

import contextlib
import datetime
import socket
import time
from functools import partial

import torch.distributed as dist

from nanoGPT.errors import ConfigError

CONNECT_TIMEOUT = datetime.timedelta(seconds=30)  # of one attempt to connect to a store


def connect(address: str, port: int, is_server: bool, timeout: datetime.timedelta) -> dist.TCPStore:
    """Serve a store, or wait until another process serves it, and connect to it.

    The wait is in Python and not in C++, so that Python can handle signals during the wait.

    Raises:
        DistNetworkError: no process serves the store within the timeout.
    """
    # multi_tenant: an elastic agent in this process may serve a store on the same port.
    create_store = partial(dist.TCPStore, address, port, None, wait_for_workers=False, multi_tenant=True)
    if is_server:
        return create_store(is_master=True, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(dist.DistNetworkError):  # the process that listened there has exited: wait again
            if is_served(address, port):
                store = create_store(is_master=False, timeout=min(timeout, CONNECT_TIMEOUT))
                store.set_timeout(timeout)
                return store
        time.sleep(0.2)
    raise dist.DistNetworkError(f"no answer within {timeout}")


def port_number(port: str, variable: str = "MASTER_PORT") -> int:
    """Return the port in an environment variable as a number.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{variable}={port} is not a port: use a number from 1 to 65535, the same on every node")
    return int(port)


def is_served(address: str, port: int) -> bool:
    """Return whether a process listens on a port."""
    try:
        socket.create_connection((address, port), timeout=2).close()
        return True
    except OSError:
        return False
