"""How the ranks of a job find each other, make sure that they run the same, and make the process group."""

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

from nanoGPT.distributed.agreement import find_disagreement
from nanoGPT.distributed.environment import agent_has_store, master_address, may_restart
from nanoGPT.distributed.network import choose_interface
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError

LAST_WORDS = datetime.timedelta(seconds=20)  # for a rank that cannot start to tell the others


def join_process_group(run: Runtime, timeout: datetime.timedelta, described: dict[str, Any]) -> None:
    """Meet the other ranks, compare what they are about to run, and make the process group. Collective.

    The group is gloo for CPU tensors and NCCL for CUDA's; one rank alone needs no address.

    Args:
        run: this rank's Runtime.
        timeout: for the others to arrive, and later for every collective.
        described: what this rank is about to run (`nanoGPT.distributed.agreement`).

    Raises:
        ConfigError: the ranks do not agree, one of them cannot start, or the port is in use.
    """
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
    with common_store(run, timeout) as store:
        compare_ranks(store, run, described)
        dist.init_process_group(backend, store=dist.PrefixStore("process group", store), **options)


@contextlib.contextmanager
def common_store(run: Runtime, timeout: datetime.timedelta) -> Iterator[dist.Store]:
    """Connect to the store of this start of the job, at MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: the address is missing or wrong, its port is in use, or rank 0's node has gone.
    """
    address, port = master_address()
    try:
        if may_restart() and agent_has_store():
            with clean_store(run, timeout) as store:
                yield store
        else:
            yield connect(address, port, run.rank == 0 and not agent_has_store(), timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {port} is in use on this machine: set MASTER_PORT to a free one") from None
        raise ConfigError(
            f"the connection to {address}:{port} was lost or never made ({str(error).splitlines()[0]}): look at what "
            "the node of rank 0 printed, and start all nodes again"
        ) from None
    except dist.DistStoreError as error:
        raise ConfigError(
            f"not all of the {run.world_size} ranks have met within {timeout} ({str(error).splitlines()[0]}): start "
            "every node, or allow more --timeout_minutes"
        ) from None


def connect(address: str, port: int, serves: bool, timeout: datetime.timedelta) -> dist.TCPStore:
    """Serve a store, or wait in Python until another process serves it, and connect.

    Raises:
        DistNetworkError: nobody serves it within the timeout.
    """
    until = time.monotonic() + timeout.total_seconds()
    while not serves and not is_served(address, port):
        if time.monotonic() > until:
            raise dist.DistNetworkError(f"nobody answered within {timeout}")
        time.sleep(0.2)
    # multi_tenant: an elastic agent in this process may serve at the same port.
    return dist.TCPStore(address, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)


def is_served(address: str, port: int) -> bool:
    """Return whether somebody listens there."""
    try:
        socket.create_connection((address, port), timeout=2).close()
        return True
    except OSError:
        return False


def compare_ranks(store: dist.Store, run: Runtime, described: dict[str, Any]) -> None:
    """End all ranks unless all are about to run the same: each tells the store, rank 0 compares. Collective.

    Raises:
        ConfigError: the ranks do not agree, or one of them cannot start.
    """
    store.set(f"described by {run.rank}", json.dumps(described))
    readers: list[str] = []
    if run.is_main:
        everyone = [json.loads(store.get(f"described by {rank}")) for rank in range(run.world_size)]
        readers = [f"read by {rank}" for rank, each in enumerate(everyone) if "refusal" not in each]
        store.set("verdict", find_disagreement(everyone) or "agreed")
    verdict = store.get("verdict").decode()
    if verdict == "agreed":
        return
    store.set(f"read by {run.rank}", "")
    with contextlib.suppress(dist.DistError):
        store.wait(readers, LAST_WORDS)  # the store may end with rank 0
    raise ConfigError(verdict, is_shared=True)


def tell_other_nodes(refusal: str) -> None:
    """Tell ranks on other nodes that this one cannot start, as far as they come within LAST_WORDS: they would wait.

    On one machine the launcher ends the other ranks. All that this rank can rely on is its environment.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    with contextlib.suppress(Exception):  # the reason has been printed in any case
        rank, world_size, local_world_size, port = (int(os.environ[name]) for name in names)
        if local_world_size == world_size or may_restart():
            return
        store = connect(os.environ["MASTER_ADDR"], port, rank == 0 and not agent_has_store(), LAST_WORDS)
        store.set(f"described by {rank}", json.dumps({"refusal": refusal}))
        if rank == 0:
            store.set("verdict", f"rank 0 cannot start: {refusal}")
            store.wait([f"read by {other}" for other in range(local_world_size, world_size)], LAST_WORDS)


@contextlib.contextmanager
def clean_store(run: Runtime, timeout: datetime.timedelta) -> Iterator[dist.Store]:
    """A part of torchrun's store into which no earlier start of the job has written.

    torchrun keeps its store through all restarts (torch 2.13), and in it the addresses of ranks that are gone: a rank
    that reads one before it is renewed cannot connect. So each rank asks, by a name that nobody has used, and rank 0,
    inside this context, tells it where all of this start meet.
    """
    connect = partial(dist.TCPStore, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    store, name, joined = connect(), os.urandom(8).hex(), threading.Event()
    if run.is_main:
        threading.Thread(target=answer, args=(connect(), run.world_size, name, joined), daemon=True).start()
    else:
        store.set(f"question of rank {run.rank}", name)
        name = store.get(f"answer to {name}").decode()
    try:
        yield dist.PrefixStore(name, store)
    finally:
        joined.set()


def answer(store: dist.Store, world_size: int, name: str, joined: threading.Event) -> None:
    """Tell every rank that asks, and those that asked in an earlier start, the name of this one, until all are here."""
    while not joined.wait(0.1):
        for question in (f"question of rank {rank}" for rank in range(1, world_size)):
            if store.check([question]):
                store.set(f"answer to {store.get(question).decode()}", name)
