"""This rank's place in the job: its device, its dtype, and what it says to the other ranks.

A rank is one process. Started by torchrun or `nanoGPT.launch` it finds its place in the environment; started alone it
is rank 0 of 1. Every run has a process group, also with one rank, so that no code asks whether there is one.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nanoGPT.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Progress:
    """How far a rank has come.

    Attributes:
        step, stage: where it is, for people.
        places: calls of `Runtime.enter_stage`, which all ranks make in the same order.
        marks: signs of progress in between, each rank's own.
    """

    step: int = 0
    stage: str = "start"
    places: int = 0
    marks: int = 0


class DirectoryOwner(Protocol):
    """The lock on a run's directory (`nanoGPT/job/out_dir.py`), as those who write into the directory ask it."""

    def is_ours(self) -> bool:
        """Return whether the directory is still the one that this process locked."""
        ...

    def keep(self) -> str | None:
        """Create the directory again if it was moved away; return a sentence for the user if so."""
        ...


@dataclass
class Runtime:
    """This rank's place in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    dtype: torch.dtype
    reasons: dict[str, str] = field(default_factory=dict)  # why each automatic choice was made
    stop_signal: str | None = None
    lock: DirectoryOwner | None = None  # rank 0's, on out_dir, as long as it runs
    autocasts: bool = True  # False where parameters are cast instead, as FSDP does
    group: dist.ProcessGroup | None = None  # of `any` and `gather`; None: that of the whole job
    at_end: list[Callable[[], None]] = field(default_factory=list)  # called when training has ended, on every rank
    token: str = field(default_factory=lambda: os.urandom(4).hex())  # this start of the job's, the same on all ranks
    progress: Progress = field(default_factory=Progress)  # shared with the Runtimes that `with_own_group` makes

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Matrix products in `dtype`; nothing in fp32."""
        if self.dtype == torch.float32 or not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def new_loss_sum(self) -> torch.Tensor:
        """A scalar to sum losses in: fp64 wherever the device has it."""
        return torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place. Collective."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective, over the CPU: no rank waits for its GPU."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small picklable value, on every rank, in rank order. Collective."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.any(False)

    def with_own_group(self) -> "Runtime":
        """The same ranks, talking over the CPU in a group of their own: for another thread. Collective."""
        group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        return dataclasses.replace(self, group=group)

    def enter_stage(self, stage: str, step: int | None = None) -> None:
        """Note where this rank is, and that it has come so far. Every rank calls it, in the same order.

        A job in which no rank does so for `stall_seconds` is ended, by the rank that has come least far.
        """
        progress = self.progress
        progress.step = progress.step if step is None else step
        progress.stage = stage
        progress.places += 1

    def report_progress(self) -> None:
        """A sign of progress on the way, such as a part of a file written; on any rank, from any thread, any time."""
        self.progress.marks += 1

    def print0(self, line: str) -> None:
        """Print a line, on rank 0 only."""
        if self.is_main:
            print(line, flush=True)

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop, by SIGTERM or SIGINT. Collective; all ranks get the same answer."""
        return self.any(self.stop_signal is not None)


def pick_device(wanted: str, local_rank: int, local_world_size: int, world_size: int) -> tuple[torch.device, str]:
    """Choose this rank's device and say why.

    Raises:
        ConfigError: the device is unknown or absent, or there are more ranks than GPUs.
    """
    kind, reason = wanted, "asked for"
    if wanted == "auto":
        if torch.cuda.is_available():
            kind, reason = "cuda", f"found {torch.cuda.device_count()} GPU(s)"
        elif torch.backends.mps.is_available() and world_size == 1:
            kind, reason = "mps", "found Apple's GPU, for one process"
        else:
            kind, reason = "cpu", "found no GPU"
    if kind not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"--device={wanted} is unknown: use auto, cpu, cuda or mps")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--device=cuda, but this machine has no GPU that torch can use: use --device=cpu")
        gpus = torch.cuda.device_count()
        if local_world_size > gpus:
            raise ConfigError(
                f"{local_world_size} ranks were asked for on a machine with {gpus} GPU(s): "
                f"use GPUS={gpus}, or --device=cpu (DEVICE=cpu) to run the ranks on the CPU"
            )
        return torch.device("cuda", local_rank), reason
    if kind == "mps" and (world_size > 1 or not torch.backends.mps.is_available()):
        raise ConfigError("--device=mps runs one process on a Mac with Apple's GPU: use --device=cpu")
    return torch.device(kind), reason


def pick_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Choose the dtype of the matrix products and say why.

    Raises:
        ConfigError: bfloat16 on a GPU without it.
    """
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bfloat16" and not has_bf16:
        raise ConfigError(f"--dtype=bfloat16, which {torch.cuda.get_device_name(device)} lacks: use --dtype=float16")
    if wanted != "auto":
        return DTYPES[wanted], "asked for"
    if device.type != "cuda":
        return torch.float32, f"a {device.type} device"
    return (torch.bfloat16, "the GPU has it") if has_bf16 else (torch.float16, "the GPU has no bfloat16")


def create_runtime(device: str, dtype: str) -> Runtime:
    """Return this process's Runtime, from the environment that torchrun sets.

    Args:
        device: as `--device` names it.
        dtype: as `--dtype` names it.

    Raises:
        ConfigError: the environment, the device or the dtype cannot be used.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not all(value.isascii() and value.isdigit() for value in given.values()) or ("RANK" in given) != (
        "WORLD_SIZE" in given
    ):
        raise ConfigError(f"the environment has {given}: start ranks with torchrun or make, or unset these")
    rank, world_size = int(given.get("RANK", 0)), int(given.get("WORLD_SIZE", 1))
    local_rank, local_world_size = int(given.get("LOCAL_RANK", rank)), int(given.get("LOCAL_WORLD_SIZE", world_size))
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise ConfigError(f"the environment has {given}: a rank must be below the number of ranks")
    own_device, why_device = pick_device(device, local_rank, local_world_size, world_size)
    own_dtype, why_dtype = pick_dtype(dtype, own_device)
    reasons = {"device": f"{own_device.type} ({why_device})", "dtype": f"{own_dtype} ({why_dtype})"}
    return Runtime(rank, local_rank, world_size, local_world_size, own_device, own_dtype, reasons)


def reseed(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Key the device's generator by the micro-batch, so that dropout follows it to whichever rank runs it."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    if device.type == "cpu":
        torch.default_generator.manual_seed(key)  # torch.manual_seed asks every backend: 115 us against 1
    else:
        torch.get_device_module(device).manual_seed(key)
