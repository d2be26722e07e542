"""The network interface that ranks on multiple nodes use to communicate."""

import contextlib
import fcntl
import os
import socket
import struct
import sys

from nanoGPT.distributed.runtime import Runtime

SIOCGIFADDR = 0x8915  # the ioctl request of Linux for the IPv4 address of an interface

# An address that is reserved for documentation (RFC 5737). The route to it is the default route of this node.
EXTERNAL_ADDRESS = "192.0.2.1"


def choose_interface(run: Runtime) -> None:
    """Set the network interface of gloo, unless the environment sets it already."""
    if run.local_world_size == run.world_size:
        # On one node the loopback interface is enough, and gloo then does not depend on how the host name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif interface := find_interface(os.environ.get("MASTER_ADDR", "")):
        # By default gloo listens on the address of the host name, which is 127.0.1.1 on Debian. NCCL needs no setting:
        # it does not use the host name, and skips the loopback interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def find_interface(master: str) -> str | None:
    """Return the network interface through which this node reaches the master node.

    On the master node itself, this is the interface with the master's address. If the master's name resolves to the
    loopback address here, the interface of the default route is returned. Without a default route it is any interface
    other than the loopback.

    Args:
        master: host name or IPv4 address of the master node.

    Returns:
        The name of the interface; None if it cannot be found: with IPv6, or on a system other than Linux.
    """
    if ":" in master:
        return None
    names = {address: name for _, name in socket.if_nameindex() if (address := interface_address(name))}
    for destination in (master, EXTERNAL_ADDRESS):
        with contextlib.suppress(OSError):
            address = source_address(destination)
            if not address.startswith("127.") or master == "localhost" or master.startswith("127."):
                return names.get(address)
    return next((name for address, name in names.items() if not address.startswith("127.")), None)


def source_address(destination: str) -> str:
    """Return the address from which this node sends to a destination. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, 9))
        return str(probe.getsockname()[0])


def interface_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        response = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(response[20:24])
    return None
