"""Create the process group of a run, on the network interface that reaches the other nodes."""

import contextlib
import fcntl
import os
import socket
import struct
import sys
from typing import Any

import torch.distributed as dist

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, LostConnection

SIOCGIFADDR = 0x8915  # the ioctl request of Linux for the IPv4 address of an interface

# An address that is reserved for documentation (RFC 5737). The route to it is the default route of this node.
EXTERNAL_ADDRESS = "192.0.2.1"


def join_process_group(run: Runtime) -> None:
    """Meet the other ranks, and create the process group. Collective.

    The group uses gloo for CPU tensors and NCCL for CUDA tensors. A single rank needs no address.

    Args:
        run: this rank's Runtime. `run.timeout` is how long to wait for the other ranks, here and in every collective.

    Raises:
        ConfigError: the address is missing or wrong, or the port is in use.
        LostConnection: not all ranks came in time, or the connection to one was lost.
    """
    backend, device_id = ("cpu:gloo,cuda:nccl", run.device) if run.device.type == "cuda" else ("gloo", None)
    options: dict[str, Any] = {"timeout": run.timeout, "device_id": device_id}
    if run.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
        return
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address} and MASTER_PORT={port}: start ranks "
            "with torchrun, or set all four, with a port from 1 to 65535"
        )
    choose_interface(run)
    try:
        store, _, _ = next(dist.rendezvous("env://", run.rank, run.world_size, timeout=run.timeout))
        store = dist.PrefixStore(os.environ.get("NANOGPT_STORE_PREFIX", ""), store)  # which a restart needs (`operate`)
        dist.init_process_group(backend, store=store, rank=run.rank, world_size=run.world_size, **options)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {port} is in use on this machine: set MASTER_PORT to a free port") from None
        raise LostConnection(
            f"the {run.world_size} ranks did not meet at {address}:{port} within {run.timeout} "
            f"({str(error).splitlines()[0]}): start all nodes, and check the output of the node of rank 0"
        ) from None


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
