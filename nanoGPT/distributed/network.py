"""The network interface by which ranks of several machines reach each other."""

import contextlib
import fcntl
import os
import socket
import struct
import sys

from nanoGPT.distributed.runtime import Runtime

SIOCGIFADDR = 0x8915  # Linux's request for an interface's IPv4 address


ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): the way there is the way out of this machine


def choose_interface(run: Runtime) -> None:
    """Tell gloo which network interface to use, unless the environment does."""
    if run.local_world_size == run.world_size:
        # On one machine gloo needs no more than the loopback, and must not depend on how its name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif interface := interface_towards(os.environ.get("MASTER_ADDR", "")):
        # gloo would listen where this machine's name leads, on Debian to 127.0.1.1. NCCL asks no name: it looks at the
        # interfaces, and passes over the loopback by itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_towards(master: str) -> str | None:
    """The network interface by which this machine reaches the master; on the master, the one with its address.

    A name that is the loopback here is another address on other machines: then the way out of this one counts, and
    where there is none, an interface that is not the loopback.

    Returns:
        None where it cannot be told: no IPv4, no Linux.
    """
    if ":" in master:
        return None
    names = {address: name for _, name in socket.if_nameindex() if (address := address_of(name))}
    for towards in (master, ELSEWHERE):
        with contextlib.suppress(OSError):
            address = local_address(towards)
            if not address.startswith("127.") or master == "localhost" or master.startswith("127."):
                return names.get(address)
    return next((name for address, name in names.items() if not address.startswith("127.")), None)


def local_address(towards: str) -> str:
    """This machine's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str | None:
    """An interface's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None
