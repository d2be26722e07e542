"""Where a run runs: its ranks, device, precision and signals; and how it ends.

A rank is one process. Started by torchrun or `nanoGPT.launch` it finds its place in the environment; started alone it
is rank 0 of 1. Every run has a process group, also with one rank, so that no code asks whether there is one.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.cli.program import unbreakable_output
from nanoGPT.dataset import TokenData
from nanoGPT.distributed import process_group as rendezvous
from nanoGPT.distributed.agreement import describe_run, find_disagreement
from nanoGPT.errors import LOST_PEER, ConfigError, NonFiniteLoss, SaveError, end_with_launcher, fail, listen_for_signals
from nanoGPT.job.heartbeat import Progress
from nanoGPT.job.known_errors import explain_known_error
from nanoGPT.job.out_dir import DirectoryLock
from nanoGPT.memory.out_of_memory import MemoryReport, check_weights_fit
from nanoGPT.train_config import TrainConfig, handed_config, nearest, parse, validate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


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
    lock: DirectoryLock | None = None  # rank 0's, on out_dir, as long as it runs
    autocasts: bool = True  # False where parameters are cast instead, as FSDP does
    group: dist.ProcessGroup | None = None  # of `any` and `gather`; None: that of the whole job
    at_end: list[Callable[[], None]] = field(default_factory=list)  # called when training has ended, on every rank
    token: str = field(default_factory=lambda: os.urandom(4).hex())  # this start of the job's, the same on all ranks
    progress: Progress = field(default_factory=Progress)  # shared with the Runtimes that `apart` makes

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Matrix products in `dtype`; nothing in fp32."""
        if self.dtype == torch.float32 or not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def zeros(self) -> torch.Tensor:
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

    def apart(self) -> "Runtime":
        """The same ranks, talking over the CPU in a group of their own: for another thread. Collective."""
        group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        return dataclasses.replace(self, group=group)

    def at(self, phase: str, step: int | None = None) -> None:
        """Note where this rank is, and that it has come so far. Every rank calls it, in the same order.

        A job in which no rank does so for `stall_seconds` is ended, by the rank that has come least far.
        """
        progress = self.progress
        progress.step = progress.step if step is None else step
        progress.phase = phase
        progress.places += 1

    def mark(self) -> None:
        """A sign of progress on the way, such as a part of a file written; on any rank, from any thread, any time."""
        self.progress.marks += 1

    def say(self, line: str) -> None:
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


def locate(config: TrainConfig) -> Runtime:
    """This process's Runtime, from the environment that torchrun sets and from the configuration."""
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
    device, why_device = pick_device(config.device, local_rank, local_world_size, world_size)
    dtype, why_dtype = pick_dtype(config.dtype, device)
    reasons = {"device": f"{device.type} ({why_device})", "dtype": f"{dtype} ({why_dtype})"}
    return Runtime(rank, local_rank, world_size, local_world_size, device, dtype, reasons)


def preflight(config: TrainConfig, world_size: int, local_world_size: int) -> TokenData:
    """Refuse, before any process group starts and anything is written, whatever can be known not to work.

    Returns:
        The run's data.

    Raises:
        ConfigError: one sentence that says what to do.
    """
    validate(config, world_size)
    device, _ = pick_device(config.device, 0, local_world_size, world_size)
    pick_dtype(config.dtype, device)
    known = config.init_from in ("scratch", "resume", *PRETRAINED)
    if not known and not (config.init_from and Path(config.init_from).is_dir()):
        close = nearest(config.init_from, ["scratch", "resume", *PRETRAINED])
        raise ConfigError(
            f"--init_from={config.init_from} is neither scratch, resume, {', '.join(PRETRAINED)} nor a directory{close}"
        )
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    if device.type == "cpu" and config.init_from in ("scratch", "resume"):
        check_weights_fit(config, data.tokenizer["vocab_size"], world_size, local_world_size)
    return data


@contextlib.contextmanager
def start(config: TrainConfig, reads_only: bool = False) -> Iterator[Runtime]:
    """Check the configuration, join the process group, listen for signals; at the end wait for all ranks.

    The group is not destroyed: a gloo group that goes while DDP still refers to it can wait forever for its own
    threads. A program ends by `os._exit` when every rank is here.

    Args:
        config: this rank's.
        reads_only: nothing is written into out_dir, which another run may be using.
    """
    run = locate(config)
    data = preflight(config, run.world_size, run.local_world_size)
    if not reads_only:
        rendezvous.enter_out_dir(run, config)
    described = describe_run(config, data, run)
    del data  # it holds every file open, and the trainer opens its own
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    elif run.world_size > 1:
        torch.set_num_threads(1)  # ranks share the cores
    if "TORCHELASTIC_RUN_ID" in os.environ or "NANOGPT_PARENT" in os.environ:
        threading.Thread(target=end_with_launcher, args=(os.getppid(),), daemon=True).start()
    if dist.is_initialized():  # a notebook or a test may have joined already
        if disagreement := find_disagreement(run.gather(described)):
            raise ConfigError(disagreement)
    else:
        rendezvous.join_process_group(run, datetime.timedelta(minutes=config.timeout_minutes), described)
    if not reads_only:
        rendezvous.agree(run, config)
    listen_for_signals(run)
    run.say(", ".join(f"{name} {value}" for name, value in run.reasons.items()) + f", {run.world_size} rank(s)")
    try:
        yield run
    except NonFiniteLoss:
        finish(run)  # all ranks are here, and what is still being saved is from before
        raise
    finish(run)
    run.barrier()


def finish(run: Runtime) -> None:
    """Let what runs beside the training come to its end. Collective."""
    for end in run.at_end:
        end()


def reseed(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Key the device's generator by the micro-batch, so that dropout follows it to whichever rank runs it."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    if device.type == "cpu":
        torch.default_generator.manual_seed(key)  # torch.manual_seed asks every backend: 115 us against 1
    else:
        torch.get_device_module(device).manual_seed(key)


def main(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str) -> None:
    """Run a trainer as a program: parse the command line, train, and exit with a sentence if something is wrong.

    Args:
        train: takes the configuration.
        config_class: what the command line is parsed into.
        trainer: its `__file__`; config files are looked up beside it.
    """
    with unbreakable_output():
        code = exit_code_of(train, config_class, trainer)
    os._exit(code)  # other threads, and the process group after a failure, have nothing more to do


def exit_code_of(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str) -> int:
    """Parse the command line and train; report an error in one sentence and return the exit code."""
    memory_report = MemoryReport()
    try:
        train(handed_config(config_class) or parse(config_class, sys.argv[1:], Path(trainer)))
        code = 0
    except ConfigError as error:
        code = fail(2, str(error), alike_on_all_ranks=not error.on_one_rank)
        if not dist.is_initialized() and not error.is_shared:
            rendezvous.tell_other_nodes(str(error))
    except NonFiniteLoss as error:
        code = fail(3, str(error), alike_on_all_ranks=True)
    except SaveError as error:
        code = fail(1, str(error), alike_on_all_ranks=True)
    except KeyboardInterrupt:
        code = fail(130, "interrupted before the step ended; the last checkpoint stands")
    except SystemExit:
        raise  # --help
    except BaseException as error:
        sentence = explain_known_error(error) or memory_report.explain(error)
        if sentence is None:
            if not any(words in str(error) for words in LOST_PEER):
                traceback.print_exc()
            sentence = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        code = fail(1, sentence)
        if not dist.is_initialized():
            rendezvous.tell_other_nodes(sentence)
    return code
