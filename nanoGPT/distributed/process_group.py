"""Connect the ranks of a job, compare what they are about to run, and create the process group."""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as distributed_c10d

from nanoGPT.distributed.environment import agent_has_store, master_address, may_restart
from nanoGPT.distributed.network import choose_interface
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, LostConnection
from operate.agreement import find_disagreement

CONNECT_TIMEOUT = datetime.timedelta(seconds=30)  # of one attempt to connect to a store
RECORDED_COLLECTIVES = "500"  # per rank, by torch's flight recorder


def join_process_group(run: Runtime, timeout: datetime.timedelta, description: dict[str, Any]) -> None:
    """Connect to the other ranks, compare what they are about to run, and create the process group. Collective.

    The group uses gloo for CPU tensors and NCCL for CUDA tensors. A single rank needs no address.

    Args:
        run: this rank's Runtime.
        timeout: how long to wait for the other ranks, here and in every collective.
        description: what this rank is about to run (`operate.agreement`).

    Raises:
        ConfigError: the ranks do not agree, or the port is in use.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)  # torch reads it at the first collective
    backend, device_id = ("cpu:gloo,cuda:nccl", run.device) if run.device.type == "cuda" else ("gloo", None)
    options: dict[str, Any] = {
        "rank": run.rank,
        "world_size": run.world_size,
        "timeout": timeout,
        "device_id": device_id,
    }
    if run.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), **options)
        return
    choose_interface(run)
    with open_store(run, timeout) as store:
        compare_ranks(store, run, description)
        dist.init_process_group(backend, store=dist.PrefixStore("process group", store), **options)


def dump_collectives() -> dict[str, Any]:
    """Return the last collectives of this rank by backend, from torch's flight recorders: shapes, states and times.

    A rank whose last collective has a smaller `collective_seq_id` than that of the others is the one they wait for.
    A run on GPUs uses both backends: gloo for signals and saves. The main thread may be waiting in a collective: this
    function does not use the process group.
    """
    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {
        backend: json.loads(getattr(distributed_c10d, name)())
        for backend, name in recorders.items()
        if hasattr(distributed_c10d, name)  # a build of torch without CUDA has no NCCL
    }


@contextlib.contextmanager
def open_store(run: Runtime, timeout: datetime.timedelta) -> Iterator[dist.Store]:
    """Connect to the store of this start of the job, at MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: the address is missing or wrong, the port is in use, or the node of rank 0 has stopped.
    """
    address, port = master_address()
    try:
        if may_restart() and agent_has_store():
            with open_unused_store(run, timeout) as store:
                yield store
        else:
            yield connect(address, port, run.rank == 0 and not agent_has_store(), timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {port} is in use on this machine: set MASTER_PORT to a free port") from None
        raise LostConnection(
            f"the connection to {address}:{port} was lost or never established ({str(error).splitlines()[0]}): check "
            "the output of the node of rank 0, and start all nodes again"
        ) from None
    except dist.DistStoreError as error:
        raise LostConnection(
            f"not all of the {run.world_size} ranks have connected within {timeout} ({str(error).splitlines()[0]}): "
            "start every node"
        ) from None


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


def is_served(address: str, port: int) -> bool:
    """Return whether a process listens on a port."""
    try:
        socket.create_connection((address, port), timeout=2).close()
        return True
    except OSError:
        return False


def compare_ranks(store: dist.Store, run: Runtime, description: dict[str, Any]) -> None:
    """Compare the descriptions of all ranks, and stop all ranks if they differ. Collective.

    Every rank writes its description into the store, and rank 0 compares them.

    Raises:
        ConfigError: the ranks do not agree.
    """
    store.set(f"described by {run.rank}", json.dumps(description))
    if run.is_main:
        descriptions = [json.loads(store.get(f"described by {rank}")) for rank in range(run.world_size)]
        store.set("verdict", find_disagreement(descriptions) or "agreed")
    verdict = store.get("verdict").decode()
    if verdict == "agreed":
        return
    store.set(f"read by {run.rank}", "")
    with contextlib.suppress(dist.DistError):  # rank 0 may serve the store, so it waits until all have read it
        store.wait([f"read by {rank}" for rank in range(run.world_size)], CONNECT_TIMEOUT)
    raise ConfigError(verdict)


@contextlib.contextmanager
def open_unused_store(run: Runtime, timeout: datetime.timedelta) -> Iterator[dist.Store]:
    """Open a part of torchrun's store that no earlier start of the job has used.

    torchrun keeps its store through all restarts (torch 2.13). The store still has the addresses of ranks that have
    exited, and a rank that reads an old address cannot connect. Rank 0 therefore chooses a new random prefix for the
    keys of this start. Each other rank requests this prefix under a random name, and rank 0 answers inside this
    context.
    """
    connect = partial(dist.TCPStore, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    store, name, has_joined = connect(), os.urandom(8).hex(), threading.Event()
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
