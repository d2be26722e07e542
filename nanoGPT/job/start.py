"""Start and finish a run: check it, join the process group, lock its directory, and return the exit code."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.checkpoint.starting_point import load_sources
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.algorithms import AttentionChoice, choose_attention, use_algorithms
from nanoGPT.distributed.environment import environment_number, name_launcher
from nanoGPT.distributed.runtime import Runtime, create_runtime, join_process_group, pick_device, pick_dtype
from nanoGPT.errors import (
    ConfigError,
    RunError,
    blames_peer,
    report_failure,
)
from nanoGPT.files import is_present, lock_directory, open_lock_file
from nanoGPT.job.parse import config_from_launcher, package_of, parse
from nanoGPT.job.program import unbreakable_output
from nanoGPT.observers import Observers
from nanoGPT.train_config import TrainConfig, validate

# Terminals, schedulers and clouds announce the end of a job with one of these: to the launcher or to all processes.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def handle_stop_signals(handler: Callable[[int, Any], object]) -> dict[int, Any]:
    """Install a handler for STOP_SIGNALS, but not for one that is ignored: nohup ignores SIGHUP.

    Returns:
        The earlier handler of each signal.
    """
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def listen_for_signals(run: Runtime) -> None:
    """Install handlers for STOP_SIGNALS, which stop the run at the end of a step.

    With several ranks, all ranks stop after the next exchange of requests, within about a second.

    A SIGINT more than two seconds after the first signal stops the run at once.
    """
    requested_at = 0.0

    def request_stop(number: int, _frame: object) -> None:
        nonlocal requested_at
        if requested_at and number == signal.SIGINT and time.monotonic() - requested_at > 2:
            raise KeyboardInterrupt
        requested_at = requested_at or time.monotonic()
        run.request_stop(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        handle_stop_signals(request_stop)


def check_run(config: TrainConfig, world_size: int, local_world_size: int) -> AttentionChoice:
    """Check everything that can be checked before a process group starts and before any file is written.

    Returns:
        The choice of attention's backend.

    Raises:
        ConfigError: the run cannot work; the message says what to do.
    """
    validate(config, world_size)
    device, _ = pick_device(config.device, 0, local_world_size, world_size, config.supports_mps)
    dtype, _ = pick_dtype(config.dtype, device)
    attention = choose_attention(config.attention, config.deterministic, device, dtype, config.dropout)
    if config.init_from not in ("scratch", "resume"):
        load_sources(f"--init_from={config.init_from}").check_source(config)
    TokenData(config)  # the trainer opens it again
    return attention


def choose_out_dir(config: TrainConfig, package: str) -> str:
    """Return the output directory of a run that no launcher has chosen one for: that of the flags, else a new one.

    The ranks of a node compute the same name without communication, from the process of their agent. If torchrun
    restarts them, they get the same name again. With several nodes, the name contains the number of nodes.
    """
    if config.out_dir != TrainConfig.out_dir or config.init_from == "resume":
        return config.out_dir
    ranks, local_ranks = environment_number("WORLD_SIZE") or 1, environment_number("LOCAL_WORLD_SIZE") or 1
    if local_ranks < ranks:
        return f"{config.out_dir}/{package}-{ranks // local_ranks}nodes"
    return f"{config.out_dir}/{package}-{name_launcher()}"


def enter_out_dir(run: Runtime, config: TrainConfig) -> None:
    """Check the directory of the run, and lock it on rank 0 until this process ends. Collective.

    Raises:
        ConfigError: the run cannot use it, or another run does. Every rank raises it.
    """

    def lock() -> None:
        check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
        run.lock = lock_directory(Path(config.out_dir))

    run.call_on_rank0(lock)


def check_out_dir(out_dir: Path, resume: bool) -> None:
    """Check that a run can use out_dir.

    Args:
        out_dir: the run's directory; it is created if it does not exist.
        resume: whether the run resumes from a checkpoint in out_dir.

    Raises:
        ConfigError: out_dir is not writable, there is no checkpoint to resume, a new run would mix its checkpoints
            with existing ones, or another run is writing there.
    """
    checkpoints = step_directories(out_dir)
    if resume and not checkpoints:
        raise ConfigError(f"there is no checkpoint under {out_dir} to resume: give the --out_dir of an earlier run")
    if checkpoints and not resume:
        if is_present(out_dir / ".lock"):
            lock_directory(out_dir).close()  # if another run is writing there, this is the better reason
        raise ConfigError(
            f"{out_dir} contains checkpoints up to {checkpoints[0].name}: continue with --init_from=resume, "
            "or choose another --out_dir"
        )
    open_lock_file(out_dir).close()


@contextlib.contextmanager
def start(config: TrainConfig, reads_only: bool = False) -> Iterator[Runtime]:
    """Check the configuration, join the process group and listen for signals. At the end, wait for all ranks.

    The process group is not destroyed: if a gloo group is destroyed while DDP still refers to it, it can wait forever
    for its own threads. The program calls `os._exit` when all ranks have finished.

    Args:
        config: this rank's configuration.
        reads_only: write nothing into out_dir, because another run may be using it. Observers only explain errors.

    Yields:
        This rank's Runtime.
    """
    observers = Observers(config)
    try:
        observers.prepare()
        run = create_runtime(config.device, config.dtype, config.supports_mps)
        run.timeout, run.uses_autocast = config.timeout, config.uses_autocast
        attention = check_run(config, run.world_size, run.local_world_size)
        run.reasons["attention"] = attention.reason
        if run.device.type == "cuda":
            torch.cuda.set_device(run.device)
        elif run.world_size > 1:
            torch.set_num_threads(1)  # ranks share the cores
        with use_algorithms(attention, config.deterministic):  # NCCL reads its algorithms when the ranks join
            if not dist.is_initialized():  # a notebook or a test may have created the group already
                join_process_group(run)
            run.token = run.gather(run.token)[0]
            if not reads_only:
                observers.configure(run)
                enter_out_dir(run, config)
                listen_for_signals(run)  # an evaluation has nothing to save, so a signal may end it at once
                run.observers = observers
                observers.start(run)
            reasons = ", ".join(f"{name} {value}" for name, value in run.reasons.items())
            run.print0(f"{reasons}, {run.world_size} rank(s)")
            yield run
            run.barrier()
    except BaseException as error:
        sentence = None if isinstance(error, RunError) else observers.explain(error)
        if not reads_only:
            observers.end(error)
        if sentence:
            raise RunError(sentence, on_one_rank=True) from error
        raise
    if not reads_only:
        observers.end(None)


def main(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str) -> None:
    """Run a trainer as a program: parse the command line, train, and exit with one message if an error occurs.

    Args:
        train: the function that trains, called with the configuration.
        config_class: the class of the configuration.
        trainer: the trainer's `__file__`; config files are looked up in its directory.
    """

    def parse_and_train() -> None:
        config = config_from_launcher(config_class)
        if config is None:
            config = parse(config_class, sys.argv[1:], Path(trainer), environment_number("WORLD_SIZE") or 1)
            config = dataclasses.replace(config, out_dir=choose_out_dir(config, package_of(config_class)))
        train(config)

    with unbreakable_output():
        code = report_job_errors(parse_and_train)
    os._exit(code)  # do not wait for other threads, nor for the process group


def report_job_errors(job: Callable[[], int | None], remedy: str = "resume from the last checkpoint") -> int:
    """Run this rank's job. Report an error in one sentence, and return the exit code.

    Args:
        job: what this rank does; it may return an exit code.
        remedy: what to do after Ctrl-C has stopped the job at once.
    """
    code = 0
    try:
        code = job() or 0
    except RunError as error:
        code = report_failure(error.exit_code, str(error), error.on_one_rank)
    except KeyboardInterrupt:
        code = report_failure(130, f"interrupted before the step was complete: {remedy}")
    except SystemExit as error:  # --help, or an observer that sets the exit code
        code = int(error.code or 0) if isinstance(error.code, int | None) else report_failure(1, str(error.code))
    except BaseException as error:
        if not blames_peer(error):
            traceback.print_exc()
        reason, _, _ = str(error).strip().partition("\n")
        code = report_failure(1, f"{type(error).__name__}: {reason}")
    sys.stdout.flush()
    return code
