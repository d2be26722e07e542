"""Prepare how a rank connects to the other ranks, before it joins the process group.

A job on one node that is not restarted, with a core for each rank, needs none of this. Several nodes need the network
interface that reaches the other nodes, a job that torchrun restarts needs a new prefix in the store of its agent, and
ranks that share cores are faster with another scheduling.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from nanoGPT.distributed.environment import count_cores, environment_number
from nanoGPT.errors import LostConnection

SIOCGIFADDR = 0x8915  # the ioctl request of Linux for the IPv4 address of an interface

# An address that is reserved for documentation (RFC 5737). The route to it is the default route of this node.
EXTERNAL_ADDRESS = "192.0.2.1"


def prepare_connection(timeout: timedelta) -> None:
    """Prepare how this rank connects to the others. Collective if torchrun may restart the ranks.

    Args:
        timeout: how long to wait for the other ranks.

    Raises:
        LostConnection: rank 0 did not answer in time.
    """
    ranks = environment_number("WORLD_SIZE")
    local_ranks = environment_number("LOCAL_WORLD_SIZE", ranks)
    if local_ranks > count_cores():
        use_batch_scheduling()
    if local_ranks < ranks and (interface := find_interface(os.environ.get("MASTER_ADDR", ""))):
        # By default gloo listens on the address of the host name, which is 127.0.1.1 on Debian. NCCL needs no setting:
        # it does not use the host name, and skips the loopback interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    choose_store_prefix(environment_number("RANK"), ranks, timeout)


def use_batch_scheduling() -> None:
    """Select Linux's SCHED_BATCH for this thread, and for all threads and processes that it starts.

    A thread that receives data then does not interrupt the running thread. By default, the receiving thread of gloo
    often interrupts the thread that holds its lock, and tries the lock again and again until that thread can continue.
    With more ranks than cores, a training step takes less time.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def choose_store_prefix(rank: int, world_size: int, timeout: timedelta) -> None:
    """Set NANOGPT_STORE_PREFIX, the prefix of the keys through which the ranks of this start meet.

    If torchrun may restart the ranks, it keeps its store (torch 2.13), with the addresses of ranks that have exited.
    Each start then uses its own prefix. Agents count restarts separately, so rank 0 chooses a random prefix. Each other
    rank asks for it under a random name, and a thread of rank 0 answers.

    Raises:
        LostConnection: rank 0 did not answer in time.
    """
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 serves a new store
    if not has_agent_store or environment_number("TORCHELASTIC_MAX_RESTARTS") == 0:
        return
    name = os.urandom(8).hex()
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        if rank == 0:
            threading.Thread(target=serve_prefix, args=(store, world_size, name), daemon=True).start()
        else:
            store.set(f"question of rank {rank}", name)
            name = store.get(f"answer to {name}").decode()
    except ValueError:  # MASTER_ADDR or MASTER_PORT is missing, which the trainer reports
        return
    except dist.DistError as error:
        raise LostConnection(
            f"rank 0 did not answer within {timeout} ({str(error).splitlines()[0]}): start all nodes, and check the "
            "output of the node of rank 0"
        ) from None
    os.environ["NANOGPT_STORE_PREFIX"] = name


def serve_prefix(store: dist.Store, world_size: int, prefix: str) -> None:
    """Answer every request for the prefix of this start, until all ranks have joined the process group.

    A request of an earlier start is answered too; no rank reads that answer.
    """
    while not dist.is_initialized():  # which needs a connection of gloo to every rank
        for request in (f"question of rank {rank}" for rank in range(1, world_size)):
            if store.check([request]):
                store.set(f"answer to {store.get(request).decode()}", prefix)
        time.sleep(0.1)


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
