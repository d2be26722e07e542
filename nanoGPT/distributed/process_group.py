"""How the ranks of a job find each other, make sure that they run the same, and learn of a restart by torchrun."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.distributed.agreement import find_disagreement
from nanoGPT.errors import ConfigError
from nanoGPT.job.out_dir import DirectoryLock, check_out_dir
from nanoGPT.train_config import TrainConfig, saved_config

if TYPE_CHECKING:
    from nanoGPT.distributed.runtime import Runtime

LAST_WORDS = datetime.timedelta(seconds=20)  # for a rank that cannot start to tell the others
SIOCGIFADDR = 0x8915  # Linux's request for an interface's IPv4 address
ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): the way there is the way out of this machine


def join_process_group(run: "Runtime", timeout: datetime.timedelta, described: dict[str, Any]) -> None:
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


def choose_interface(run: "Runtime") -> None:
    """Tell gloo which network interface to use, unless the environment does."""
    if run.local_world_size == run.world_size:
        # On one machine gloo needs no more than the loopback, and must not depend on how its name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif interface := interface_towards(os.environ.get("MASTER_ADDR", "")):
        # gloo would listen where this machine's name leads, on Debian to 127.0.1.1. NCCL asks no name: it looks at the
        # interfaces, and passes over the loopback by itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


@contextlib.contextmanager
def common_store(run: "Runtime", timeout: datetime.timedelta) -> Iterator[dist.Store]:
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


def master_address() -> tuple[str, int]:
    """Return where ranks meet.

    Raises:
        ConfigError: the environment does not say it, or the port is none.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address} and MASTER_PORT={port}: start ranks "
            "with torchrun or make, or set all four"
        )
    return address, port_number(port)


def port_number(port: str) -> int:
    """Return a port as a number.

    Raises:
        ConfigError: it is none.
    """
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port} is no port: give a number up to 65535, the same on every node")
    return int(port)


def agent_has_store() -> bool:
    """Return whether torchrun's agent on rank 0's node serves the store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def compare_ranks(store: dist.Store, run: "Runtime", described: dict[str, Any]) -> None:
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
def clean_store(run: "Runtime", timeout: datetime.timedelta) -> Iterator[dist.Store]:
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


def may_restart() -> bool:
    """Whether torchrun may start the ranks again (`--max-restarts`), so that this may be such a start."""
    return environment_number("TORCHELASTIC_MAX_RESTARTS") > 0


def environment_number(name: str) -> int:
    """Return a number that torchrun has put into the environment; 0 if it has not.

    Raises:
        ConfigError: it is no number.
    """
    value = os.environ.get(name) or "0"
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"the environment has {name}={value}: start ranks with torchrun or make, or unset it")
    return int(value)


def enter_out_dir(run: "Runtime", config: TrainConfig) -> None:
    """Check and lock the run's directory. Where torchrun restarts ranks, its checkpoints are for `agree` to judge."""
    out_dir = Path(config.out_dir)
    if not may_restart():
        check_out_dir(out_dir, resume=config.init_from == "resume")
    elif run.is_main:
        check_out_dir(out_dir, resume=bool(step_directories(out_dir)))  # whether it can be written
    if run.is_main:
        run.lock = DirectoryLock(out_dir)
        if run.lock.warning:
            run.say(run.lock.warning)


def agree(run: "Runtime", config: TrainConfig) -> None:
    """Give this start a token that all ranks know; if torchrun has restarted the job, let it resume. Collective.

    torchrun repeats the same command, without --init_from=resume. The count of restarts is each agent's own, so any
    that is not 0 tells. The lock file names the agents of the job that may use the directory: checkpoints of another
    job are refused at every restart, as they were at the start. What rank 0 sees on the disk counts for all.

    Args:
        config: where the job resumes, it becomes that of the newest checkpoint, with init_from=resume.

    Raises:
        ConfigError: checkpoints are in the way, or missing.
    """
    agent = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}"
    count = environment_number("TORCHELASTIC_RESTART_COUNT")
    tokens, agents, counts = zip(*run.gather((run.token, agent, count)), strict=True)
    run.token = tokens[0]
    if may_restart():
        saved = run.gather(saved_by(agents, run, config) if any(counts) else None)[0]
        if saved is not None and config.init_from != "resume":
            run.say("torchrun has restarted the job: it goes on from its newest checkpoint")
            for name, value in {**saved, "out_dir": config.out_dir, "init_from": "resume"}.items():
                setattr(config, name, value)
        if refused := run.gather(refusal(run, config))[0]:
            raise ConfigError(refused)
    if run.lock:
        with contextlib.nullcontext() if may_restart() else contextlib.suppress(OSError):  # on a full disk
            run.lock.write("\n".join(agents))


def saved_by(agents: tuple[str, ...], run: "Runtime", config: TrainConfig) -> dict[str, object] | None:
    """The configuration in the newest checkpoint, if there is one and it is of a job of these agents; rank 0 reads."""
    if not run.lock or not step_directories(Path(config.out_dir)):
        return None
    return saved_config(type(config), config.out_dir) if {*agents} & {*run.lock.read().splitlines()} else None


def refusal(run: "Runtime", config: TrainConfig) -> str | None:
    """What is wrong with the directory; rank 0 looks."""
    try:
        if run.is_main:
            check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
    except ConfigError as error:
        return str(error)
    return None
