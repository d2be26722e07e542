"""Prepare how a rank connects to the other ranks, before it joins the process group.

A single start of a job needs none of this. A job that torchrun restarts needs a new prefix in the store of its agent,
and ranks that share cores are faster with another scheduling.
"""

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from nanoGPT.distributed.environment import count_cores, environment_number
from nanoGPT.errors import LostConnection


def prepare_connection(device: torch.device, timeout: timedelta) -> None:
    """Prepare how this rank connects to the others. Collective if torchrun may restart the ranks.

    Args:
        device: of this rank.
        timeout: how long to wait for the other ranks.

    Raises:
        LostConnection: rank 0 did not answer in time.
    """
    if device.type == "cpu" and environment_number("LOCAL_WORLD_SIZE") > count_cores():
        use_batch_scheduling()
    choose_store_prefix(environment_number("RANK"), environment_number("WORLD_SIZE"), timeout)


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
