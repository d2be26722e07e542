"""Create the process group of a run, on the network interface that reaches the other nodes."""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from nanoGPT.distributed.environment import count_cores, environment_number
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
    if run.device.type == "cpu" and run.local_world_size > count_cores():
        use_batch_scheduling()
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
        with open_store(run) as store:
            dist.init_process_group(backend, store=store, rank=run.rank, world_size=run.world_size, **options)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {port} is in use on this machine: set MASTER_PORT to a free port") from None
        raise LostConnection(
            f"the {run.world_size} ranks did not meet at {address}:{port} within {run.timeout} "
            f"({str(error).splitlines()[0]}): start all nodes, and check the output of the node of rank 0"
        ) from None


def use_batch_scheduling() -> None:
    """Select Linux's SCHED_BATCH for this thread, and for all threads and processes that it starts.

    A thread that receives data then does not interrupt the running thread. By default, the receiving thread of gloo
    often interrupts the thread that holds its lock, and tries the lock again and again until that thread can continue.
    With more ranks than cores, a training step takes less time.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def open_store(run: Runtime) -> Iterator[dist.Store]:
    """Connect to the store through which the ranks meet, at MASTER_ADDR and MASTER_PORT.

    If torchrun may restart the ranks, it keeps its store (torch 2.13), with the addresses of ranks that have exited.
    Each start then uses its own prefix of the keys. Agents count restarts separately, so rank 0 chooses a random
    prefix. Each other rank asks for it under a random name, and rank 0 answers inside this context.
    """

    def connect() -> dist.Store:
        store, _, _ = next(dist.rendezvous("env://", run.rank, run.world_size, timeout=run.timeout))
        store.set_timeout(run.timeout)
        return store

    store, name, has_joined = connect(), os.urandom(8).hex(), threading.Event()
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 serves a new store
    if not has_agent_store or environment_number("TORCHELASTIC_MAX_RESTARTS") == 0:
        yield store
        return
    if run.is_main:
        threading.Thread(target=serve_prefix, args=(connect(), run.world_size, name, has_joined), daemon=True).start()
    else:
        store.set(f"question of rank {run.rank}", name)
        name = store.get(f"answer to {name}").decode()
    try:
        yield dist.PrefixStore(name, store)
    finally:
        has_joined.set()


def serve_prefix(store: dist.Store, world_size: int, prefix: str, has_joined: threading.Event) -> None:
    """Answer every request for the prefix of this start, until all ranks have joined the process group.

    A request of an earlier start is answered too; no rank reads that answer.
    """
    while not has_joined.wait(0.1):
        for request in (f"question of rank {rank}" for rank in range(1, world_size)):
            if store.check([request]):
                store.set(f"answer to {store.get(request).decode()}", prefix)


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
