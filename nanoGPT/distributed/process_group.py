"""Create the process group of a run."""

import os
import sys
from typing import Any

import torch.distributed as dist

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, LostConnection


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
    if run.local_world_size == run.world_size:
        # On one node the loopback interface is enough, and gloo then does not depend on how the host name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        store, _, _ = next(dist.rendezvous("env://", run.rank, run.world_size, timeout=run.timeout))
        store = dist.PrefixStore(os.environ.get("NANOGPT_STORE_PREFIX", ""), store)  # of this restart
        dist.init_process_group(backend, store=store, rank=run.rank, world_size=run.world_size, **options)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"port {port} is in use on this machine: set MASTER_PORT to a free port") from None
        raise LostConnection(
            f"the {run.world_size} ranks did not meet at {address}:{port} ({str(error).splitlines()[0]}; the limit is "
            f"{run.timeout}): start all nodes, and check the output of the node of rank 0"
        ) from None
