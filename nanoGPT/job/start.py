"""Start a run and end it: checks before any process group, the ranks' meeting, and the exit code of a trainer."""

import contextlib
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.cli.program import unbreakable_output
from nanoGPT.distributed.agreement import find_disagreement
from nanoGPT.distributed.process_group import join_process_group, tell_other_nodes
from nanoGPT.distributed.runtime import Runtime, create_runtime
from nanoGPT.errors import LOST_PEER, ConfigError, NonFiniteLoss, SaveError
from nanoGPT.job.elastic import enter_out_dir, resume_after_restart
from nanoGPT.job.exits import report_failure
from nanoGPT.job.known_errors import explain_known_error
from nanoGPT.job.parse import config_from_launcher, parse
from nanoGPT.job.preflight import preflight
from nanoGPT.job.run_description import describe_run
from nanoGPT.job.signals import end_with_launcher, listen_for_signals
from nanoGPT.memory.out_of_memory import CostsModule, MemoryReport
from nanoGPT.train_config import C, TrainConfig


@contextlib.contextmanager
def start(config: C, reads_only: bool = False) -> Iterator[tuple[Runtime, C]]:
    """Check the configuration, join the process group, listen for signals; at the end wait for all ranks.

    The group is not destroyed: a gloo group that goes while DDP still refers to it can wait forever for its own
    threads. A program ends by `os._exit` when every rank is here.

    Args:
        config: this rank's.
        reads_only: nothing is written into out_dir, which another run may be using.

    Yields:
        This rank's Runtime; and the configuration, which is another one if torchrun has restarted the job.
    """
    run = create_runtime(config.device, config.dtype)
    data = preflight(config, run.world_size, run.local_world_size)
    lock = None if reads_only else enter_out_dir(run, config)
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
        join_process_group(run, datetime.timedelta(minutes=config.timeout_minutes), described)
    if not reads_only:
        config = resume_after_restart(run, config, lock)
    listen_for_signals(run)
    run.print0(", ".join(f"{name} {value}" for name, value in run.reasons.items()) + f", {run.world_size} rank(s)")
    try:
        yield run, config
    except NonFiniteLoss:
        finish(run)  # all ranks are here, and what is still being saved is from before
        raise
    finish(run)
    run.barrier()


def finish(run: Runtime) -> None:
    """Let what runs beside the training come to its end. Collective."""
    for end in run.at_end:
        end()


def main(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str, costs: CostsModule) -> None:
    """Run a trainer as a program: parse the command line, train, and exit with a sentence if something is wrong.

    Args:
        train: takes the configuration.
        config_class: what the command line is parsed into.
        trainer: its `__file__`; config files are looked up beside it.
        costs: its module of that name, which says what flags free if memory runs out.
    """
    with unbreakable_output():
        code = exit_code_of(train, config_class, trainer, costs)
    os._exit(code)  # other threads, and the process group after a failure, have nothing more to do


def exit_code_of(train: Callable[[Any], Any], config_class: type[TrainConfig], trainer: str, costs: CostsModule) -> int:
    """Parse the command line and train; report an error in one sentence and return the exit code."""
    memory_report = MemoryReport(costs)
    try:
        train(config_from_launcher(config_class) or parse(config_class, sys.argv[1:], Path(trainer)))
        code = 0
    except ConfigError as error:
        code = report_failure(2, str(error), alike_on_all_ranks=not error.on_one_rank)
        if not dist.is_initialized() and not error.is_shared:
            tell_other_nodes(str(error))
    except NonFiniteLoss as error:
        code = report_failure(3, str(error), alike_on_all_ranks=True)
    except SaveError as error:
        code = report_failure(1, str(error), alike_on_all_ranks=True)
    except KeyboardInterrupt:
        code = report_failure(130, "interrupted before the step ended; the last checkpoint stands")
    except SystemExit:
        raise  # --help
    except BaseException as error:
        sentence = explain_known_error(error) or memory_report.explain(error)
        if sentence is None:
            if not any(words in str(error) for words in LOST_PEER):
                traceback.print_exc()
            sentence = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        code = report_failure(1, sentence)
        if not dist.is_initialized():
            tell_other_nodes(sentence)
    return code
