"""The Runtime of a rank: its rank and world size, its device and dtype, the process group, and small collectives.

A rank is one process. torchrun and other launchers pass rank and world size in environment variables. Without them
the process is rank 0 of 1. Every run has a process group, even with one rank, so that all code can rely on it.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nanoGPT.distributed.environment import environment_number
from nanoGPT.errors import ConfigError, LostConnection, PeerFailed, RunError, quote_cause
from nanoGPT.observers import Observers

T = TypeVar("T")

MAX_EXCHANGE_PERIOD = 32  # steps between two exchanges of requests: a bound for the delay if steps suddenly become slow

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Progress:
    """The progress of a rank, which the watchdog monitors.

    Attributes:
        step, stage: the current step and its stage, for messages.
        stages_entered: number of calls of `Runtime.enter_stage`. All ranks make these calls in the same order.
        progress_reports: number of calls of `Runtime.report_progress`, which may differ between ranks.
    """

    step: int = 0
    stage: str = "start"
    stages_entered: int = 0
    progress_reports: int = 0


@dataclass
class Runtime:
    """One rank of the job: its position, its device and dtype, and small collectives. Default: a single process.

    Attributes:
        reasons: why each automatic choice was made.
        stop_reason: why this rank shall stop, such as the name of a signal; None if it shall not.
        wants_save: whether this rank shall save soon.
        is_stopping: whether any rank shall stop, as of the last `exchange_requests`.
        observers: the observers of the run.
        lock: the lock file of out_dir; only on rank 0, while the run uses the directory.
        uses_autocast: False if parameters are cast instead, as FSDP does.
        group: the process group of `max` and `gather`; None: the default group.
        timeout: how long a collective of `group` may take; None: torch's default.
        token: random identity of this start of the job, the same on all ranks.
        progress: shared with the Runtimes that `with_own_group` returns.
        last_exchange: time of the last exchange in `exchange_requests`, in seconds.
        exchange_period: number of steps between the last exchange and the next one.
        steps_to_exchange: number of these steps that are left.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    reasons: dict[str, str] = field(default_factory=dict)
    stop_reason: str | None = None
    wants_save: bool = False
    is_stopping: bool = False
    observers: Observers = field(default_factory=lambda: Observers(None))
    lock: Any = None
    uses_autocast: bool = True
    group: dist.ProcessGroup | None = None
    timeout: datetime.timedelta | None = None
    token: str = field(default_factory=lambda: os.urandom(4).hex())
    progress: Progress = field(default_factory=Progress)
    last_exchange: float = field(default_factory=time.monotonic)
    exchange_period: int = 1
    steps_to_exchange: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which matrix products run in `dtype`."""
        if self.dtype == torch.float32 or not self.uses_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def new_loss_sum(self) -> torch.Tensor:
        """Return a zero scalar to sum losses in. It is fp64, or fp32 on MPS, which has no fp64."""
        return torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, in a new tensor. Collective."""
        value = value.clone()
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def max(self, *values: int) -> tuple[int, ...]:
        """Return the maximum of each value over all ranks. Collective over CPU tensors: it does not wait for GPUs."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(tensor.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order, on every rank. Collective; for small picklable values."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def call_on_all(self, task: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return its small picklable results in rank order. Collective.

        Raises:
            ConfigError: the function raised it, or an OSError. Every rank raises the error of the first such rank.
            RunError: the function failed otherwise.
        """
        result: Any = None
        failure: RunError | None = None
        try:
            result = task()
        except PeerFailed:
            pass  # the rank that failed has the reason
        except ConfigError as error:
            failure = ConfigError(str(error))
        except Exception as error:
            reason = f"rank {self.rank}: {type(error).__name__}: {quote_cause(error)}"
            remedy = ": check the file system, or choose another --out_dir"
            failure = ConfigError(reason + remedy) if isinstance(error, OSError) else RunError(reason)
        results, failures = zip(*self.gather((result, failure)), strict=True)
        if any(failures):
            raise next(filter(None, failures))
        return list(results)

    def call_on_rank0(self, task: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result on every rank. Otherwise as `call_on_all`."""
        return cast(T, self.call_on_all(lambda: task() if self.is_main else None)[0])

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.max(0)

    def with_own_group(self) -> "Runtime":
        """Return a Runtime of the same ranks with a separate gloo group, for use in another thread. Collective."""
        group = dist.new_group(backend="gloo", timeout=self.timeout) if self.world_size > 1 else None
        return dataclasses.replace(self, group=group)

    def enter_stage(self, stage: str, step: int | None = None) -> None:
        """Record that this rank begins a stage of a step. Every rank makes these calls in the same order."""
        progress = self.progress
        progress.step = progress.step if step is None else step
        progress.stage = stage
        progress.stages_entered += 1
        self.observers.enter_stage(stage, progress.step)

    def report_progress(self) -> None:
        """Record progress within a stage, such as a part of a file written. Any rank and any thread may call it."""
        self.progress.progress_reports += 1

    def print0(self, line: str) -> None:
        """Print a line on rank 0 only."""
        if self.is_main:
            print(line, flush=True)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to save and to stop. A signal handler or an observer calls it, on any rank."""
        self.stop_reason = self.stop_reason or reason

    def request_save(self) -> None:
        """Ask all ranks to save a checkpoint. An observer calls it, on any rank."""
        self.wants_save = True

    def exchange_requests(self, is_save_due: bool) -> tuple[bool, bool]:
        """Return whether training should stop, and whether it should save. Call it after every step, on all ranks.

        The result is the same on all ranks. Training stops if a signal or an observer has asked any rank to stop. It
        saves before it stops, and if a save is due on any rank.

        Ranks receive a signal at different moments, but all of them must stop after the same step. They agree with one
        small all-reduce. An all-reduce after every step would delay short steps. The ranks therefore exchange their
        requests about once a second: all of them compute how many steps the slowest rank makes in a second. The number
        at most doubles, because the first steps of a run are often not typical. A request may therefore take effect a
        few steps later.
        """
        self.steps_to_exchange -= 1
        if self.steps_to_exchange > 0 and self.world_size > 1:
            return False, False
        now = time.monotonic()
        steps_per_second = round(self.exchange_period / max(now - self.last_exchange, 1e-6))
        wants_save, self.wants_save, self.last_exchange = self.wants_save, False, now
        # The minimum of the steps per second, as a maximum.
        stops, saves, slowest = self.max(self.stop_reason is not None, is_save_due or wants_save, -steps_per_second)
        self.exchange_period = max(1, min(-slowest, 2 * self.exchange_period, MAX_EXCHANGE_PERIOD))
        self.steps_to_exchange = self.exchange_period
        self.is_stopping = bool(stops)
        return self.is_stopping, bool(stops or saves)


def pick_device(
    name: str, local_rank: int, local_world_size: int, world_size: int, supports_mps: bool = True
) -> tuple[torch.device, str]:
    """Return the device of this rank, and the reason for the choice.

    Args:
        name: the value of `--device`.
        local_rank: this rank's number on its node.
        local_world_size: number of ranks on this node.
        world_size: number of ranks of the job.
        supports_mps: whether the trainer can run on an Apple GPU.

    Raises:
        ConfigError: the device is unknown or missing, or there are more ranks than GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_mps = supports_mps and world_size == 1 and torch.backends.mps.is_available()
    kind, reason = name, "requested"
    if name == "auto" and gpus:
        kind, reason = "cuda", f"found {gpus} GPU(s)"
    elif name == "auto":
        kind, reason = ("mps", "found an Apple GPU") if has_mps else ("cpu", "found no GPU that this trainer can use")
    if kind not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"--device={name} is unknown: use auto, cpu, cuda or mps")
    if kind == "cuda" and not gpus:
        raise ConfigError("--device=cuda, but torch finds no GPU on this machine: use --device=cpu")
    if kind == "cuda" and local_world_size > gpus:
        raise ConfigError(
            f"{local_world_size} ranks do not fit on this machine, which has {gpus} GPU(s): "
            f"use GPUS={gpus}, or --device=cpu (DEVICE=cpu) to run the ranks on the CPU"
        )
    if kind == "mps" and not has_mps:
        raise ConfigError(
            "--device=mps supports only one process, without FSDP, on a Mac with an Apple GPU: use --device=cpu"
        )
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind), reason


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of matrix products, and the reason for the choice.

    Args:
        name: the value of `--dtype`.
        device: the device of this rank.

    Raises:
        ConfigError: the GPU does not support bfloat16.
    """
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    if name == "bfloat16" and not has_bf16:
        gpu = torch.cuda.get_device_name(device)
        raise ConfigError(f"--dtype=bfloat16 is not supported by this GPU ({gpu}): use --dtype=float16")
    if name == "float32" and device.type == "cuda":
        uses_tf32 = torch.get_float32_matmul_precision() != "highest"
        return torch.float32, f"requested; matrix products {'use' if uses_tf32 else 'do not use'} TF32"
    if name != "auto":
        return DTYPES[name], "requested"
    if device.type != "cuda":
        return torch.float32, f"the default on {device.type}"
    return (torch.bfloat16, "the GPU supports it") if has_bf16 else (torch.float16, "the GPU does not support bfloat16")


def create_runtime(device: str, dtype: str, supports_mps: bool = True) -> Runtime:
    """Return the Runtime of this process, from the environment variables of torchrun.

    Args:
        device: the value of `--device`.
        dtype: the value of `--dtype`.
        supports_mps: whether the trainer can run on an Apple GPU.

    Raises:
        ConfigError: the environment, the device or the dtype cannot be used.
    """
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if "RANK" not in os.environ and environment_number(name) > 1:
            raise ConfigError(
                f"srun or mpirun has started {os.environ[name]} copies of this program ({name}), and each would train "
                f"alone: let it start one torchrun on each node, as operate/deploy/slurm.sh does, or unset {name}"
            )
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        raise ConfigError("the environment has only one of RANK and WORLD_SIZE: start ranks with torchrun, or unset it")
    rank, world_size = environment_number("RANK"), environment_number("WORLD_SIZE", 1)
    local_rank = environment_number("LOCAL_RANK", rank)
    local_world_size = environment_number("LOCAL_WORLD_SIZE", world_size)
    first_rank = rank - local_rank  # of the ranks of this node, which follow each other
    if not (local_rank < local_world_size and 0 <= first_rank <= world_size - local_world_size):
        raise ConfigError(
            f"the environment has RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE="
            f"{local_world_size}, which contradict each other: start ranks with torchrun, or unset these variables"
        )
    torch_device, device_reason = pick_device(device, local_rank, local_world_size, world_size, supports_mps)
    torch_dtype, dtype_reason = pick_dtype(dtype, torch_device)
    reasons = {"device": f"{torch_device.type} ({device_reason})", "dtype": f"{torch_dtype} ({dtype_reason})"}
    return Runtime(rank, local_rank, world_size, local_world_size, torch_device, torch_dtype, reasons)


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


def reseed(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed the random generator of the device with a key of the micro-batch.

    Dropout masks then depend on the micro-batch, and not on the rank that computes it.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    if device.type == "cpu":
        torch.default_generator.manual_seed(key)  # 1 us; torch.manual_seed calls every backend and takes 115 us
    else:
        torch.get_device_module(device).manual_seed(key)
