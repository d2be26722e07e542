"""Start and finish a run: check it, join the process group, and return the exit code of a trainer."""

import contextlib
import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.check_run import check_run
from nanoGPT.distributed.algorithms import choose_attention, use_algorithms
from nanoGPT.distributed.environment import environment_number
from nanoGPT.distributed.process_group import join_process_group
from nanoGPT.distributed.runtime import Runtime, create_runtime
from nanoGPT.errors import (
    LOST_PEER_MESSAGES,
    ConfigError,
    DivergedRanks,
    LostConnection,
    NonFiniteLoss,
    OutOfMemory,
    PeerFailed,
    SaveError,
)
from nanoGPT.exits import report_failure
from nanoGPT.parse import config_from_launcher, parse
from nanoGPT.program import unbreakable_output
from nanoGPT.signals import listen_for_signals, stop_with_launcher
from nanoGPT.train_config import C, TrainConfig
from operate.agreement import find_disagreement
from operate.credentials import check_credentials
from operate.known_errors import explain_known_error
from operate.out_of_memory import explain_memory_error
from operate.restart import (
    choose_free_out_dir,
    enter_out_dir,
    exclude_spare_ranks,
    exit_code_of_success,
    resume_after_restart,
    stop_elastic_job,
)
from operate.run_description import describe_run


@contextlib.contextmanager
def start(config: C, reads_only: bool = False) -> Iterator[tuple[Runtime, C]]:
    """Check the configuration, join the process group and listen for signals. At the end, wait for all ranks.

    The process group is not destroyed: if a gloo group is destroyed while DDP still refers to it, it can wait forever
    for its own threads. The program calls `os._exit` when all ranks have finished.

    Args:
        config: this rank's configuration.
        reads_only: write nothing into out_dir, because another run may be using it.

    Yields:
        This rank's Runtime, and the configuration. If torchrun has restarted the job, this is the saved configuration.
    """
    exclude_spare_ranks(config)
    run = create_runtime(config.device, config.dtype, config.supports_mps)
    run.timeout, run.uses_autocast = config.timeout, config.uses_autocast
    attention = choose_attention(config.attention, config.deterministic, run.device, run.dtype, config.dropout)
    run.reasons["attention"] = attention.reason
    data = check_run(config, run.world_size, run.local_world_size)
    if run.is_main and not reads_only:
        check_credentials(config)
    if not reads_only:
        config = dataclasses.replace(config, out_dir=choose_free_out_dir(run, config))
    lock = None if reads_only else enter_out_dir(run, config)
    description = describe_run(config, data, run)
    del data  # it keeps every file open, and the trainer opens the files again
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    elif run.world_size > 1:
        torch.set_num_threads(1)  # ranks share the cores
    if "TORCHELASTIC_RUN_ID" in os.environ or "NANOGPT_PARENT" in os.environ:
        threading.Thread(target=stop_with_launcher, args=(os.getppid(), run), daemon=True).start()
    if dist.is_initialized():  # a notebook or a test may have created the group already
        if disagreement := find_disagreement(run.gather(description)):
            raise ConfigError(disagreement)
    else:
        join_process_group(run, run.timeout, description)
    if not reads_only:
        config = resume_after_restart(run, config, lock)
        listen_for_signals(run)  # an evaluation has nothing to save, so a signal may end it at once
    run.print0(", ".join(f"{name} {value}" for name, value in run.reasons.items()) + f", {run.world_size} rank(s)")
    try:
        with use_algorithms(attention, config.deterministic):
            yield run, config
    except (DivergedRanks, NonFiniteLoss):
        run.finish()  # all ranks raise this at the same step, and a save in progress is of an earlier step
        raise
    run.finish()
    run.barrier()


def main(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str) -> None:
    """Run a trainer as a program: parse the command line, train, and exit with one message if an error occurs.

    Args:
        train: the function that trains, called with the configuration.
        config_class: the class of the configuration.
        trainer: the trainer's `__file__`; config files are looked up in its directory.
    """
    with unbreakable_output():
        code = run_trainer(train, config_class, trainer)
    os._exit(code)  # do not wait for other threads, nor for the process group after a failure


def run_trainer(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str) -> int:
    """Parse the command line and train. Report an error in one sentence, and return the exit code."""

    def parse_and_train() -> int:
        world_size = environment_number("WORLD_SIZE") or 1
        config = config_from_launcher(config_class) or parse(config_class, sys.argv[1:], Path(trainer), world_size)
        train(config)
        return exit_code_of_success(config)

    return report_job_errors(parse_and_train)


def report_job_errors(
    job: Callable[[], int],
    explain: Callable[[BaseException], str | None] = explain_memory_error,
    remedy: str = "resume from the last checkpoint",
) -> int:
    """Run this rank's job. Report an error in one sentence, and return the exit code.

    Args:
        job: returns the exit code of success.
        explain: returns a sentence for an error that has no other explanation, or None.
        remedy: what to do after Ctrl-C has stopped the job at once.
    """
    try:
        code = job()
    except ConfigError as error:
        code = report_failure(2, str(error), is_same_on_all_ranks=not error.on_one_rank)
        if not isinstance(error, LostConnection):
            stop_elastic_job(code, str(error))
    except NonFiniteLoss as error:
        code = report_failure(3, str(error), is_same_on_all_ranks=True)
        stop_elastic_job(code, str(error))
    except (DivergedRanks, SaveError) as error:
        code = report_failure(1, str(error), is_same_on_all_ranks=True)
    except OutOfMemory as error:
        code = report_failure(1, str(error))
    except KeyboardInterrupt:
        code = report_failure(130, f"interrupted before the step was complete: {remedy}")
    except SystemExit:
        raise  # --help
    except BaseException as error:
        sentence = explain_known_error(error) or explain(error)
        if sentence is None:
            if not isinstance(error, PeerFailed) and not any(words in str(error) for words in LOST_PEER_MESSAGES):
                traceback.print_exc()
            sentence = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        code = report_failure(1, sentence)
    return code
