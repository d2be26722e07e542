"""The program `python -m evaluation`: start the ranks, and solve the problems on each of them."""

import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from evaluation.evaluation import CONTINUE, Evaluation
from evaluation.models import open_model
from evaluation.prompts import Prompter
from evaluation.settings import SolveConfig, validate
from evaluation.tasks import select_problems, write_tasks
from nanoGPT.distributed.runtime import create_runtime, join_process_group
from nanoGPT.errors import ConfigError, RunError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.program import unbreakable_output
from nanoGPT.job.start import STOP_SIGNALS, listen_for_signals, report_job_errors
from nanoGPT.observers import Flags
from nanoGPT.sample import choose_run
from operate.agreement import check_agreement
from operate.connection import prepare_connection
from operate.launch import configure_agent, forward_signals, list_rank_processes
from operate.nodes import NodeConfig
from operate.out_of_memory import is_out_of_memory
from operate.restart import watch_launcher
from operate.root_cause import explain_exit, find_root_cause
from operate.run_description import describe_starting_point, digest_code, find_version
from operate.watchdog import send_signal

STOP_SECONDS = 60.0  # time in which the ranks finish their problems after a signal

# ---- start ranks


def main(arguments: list[str]) -> None:
    """Run as a program: as a rank if torchrun or this program has started it, else start the ranks.

    Args:
        arguments: the command line without the program's name.
    """
    if "RANK" in os.environ:
        with unbreakable_output():
            code = report_job_errors(lambda: solve_or_explain(parse(arguments)), CONTINUE)
        os._exit(code)  # do not wait for other threads, nor for the process group after a failure
    with report_errors():
        config = parse(arguments)
        ranks = config.gpus or (torch.cuda.device_count() if config.device in ("auto", "cuda") else 0) or 1
        if ranks == 1:
            code = report_job_errors(lambda: solve_or_explain(config), CONTINUE)
        else:
            code = start_ranks(ranks, arguments)
    os._exit(code)


def parse(arguments: list[str]) -> SolveConfig:
    """Return the configuration from a command line.

    Raises:
        ConfigError: a flag or a value is invalid.
    """
    config: SolveConfig = command_line(SolveConfig, arguments)
    validate(config)
    config = dataclasses.replace(config, out_dir=config.out_dir or choose_run())
    to = config.to or f"out/answers-{Path(config.out_dir or '').name}-{Path(config.problems).stem}"
    if Path(config.problems).is_dir() and Path(to).resolve().is_relative_to(Path(config.problems).resolve()):
        raise ConfigError(f"--to={to} is inside of --problems={config.problems}: use another directory")
    return dataclasses.replace(config, to=to)


def start_ranks(ranks: int, arguments: list[str]) -> int:
    """Start ranks on this machine, wait for them, and return the exit code. If a rank fails, print one sentence."""
    os.environ |= {"OMP_NUM_THREADS": "1", **os.environ, "NANOGPT_LAUNCHER": str(os.getpid())}
    received_signals: list[int] = []
    forward_signals(received_signals)
    threading.Thread(target=kill_hung_ranks, args=(received_signals,), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="nanogpt-", ignore_cleanup_errors=True) as logs:
        try:
            agent = configure_agent(NodeConfig(gpus=ranks), logs)
            elastic_launch(agent, sys.executable)("-m", "evaluation", *arguments)
            return 0
        except ChildFailedError as error:
            rank, failure = find_root_cause(error.failures, ranks)
            code, reason = explain_exit(failure.exitcode, failure.message, received_signals)
            if failure.exitcode < 0:
                reason = f"it was killed by {signal.Signals(-failure.exitcode).name}: {CONTINUE}"
            print(f"error: rank {rank}: {reason}", file=sys.stderr)
            return code


def kill_hung_ranks(received_signals: list[int]) -> None:
    """Wait for a signal that stops the ranks, and kill those that have not stopped STOP_SECONDS later.

    A rank that waits for another one, which hangs, cannot handle the signal. The answers so far are on the disk.
    """
    while not {*received_signals} & {*STOP_SIGNALS}:
        time.sleep(0.5)
    time.sleep(STOP_SECONDS)
    send_signal(list_rank_processes(), signal.SIGKILL)


# ---- one rank


def solve_or_explain(config: SolveConfig) -> int:
    """Solve the problems on this rank. Return the exit code.

    Raises:
        RunError: the memory is not sufficient.
    """
    try:
        return solve(config)
    except Exception as error:
        if isinstance(error, RunError) or not is_out_of_memory(error):
            raise
        remedy = "use a smaller --batch_size, more ranks, or --spread=offload"
        raise RunError(f"out of memory: {remedy}", on_one_rank=True) from error


def solve(config: SolveConfig) -> int:
    """Solve the problems on this rank. Return the exit code."""
    run = create_runtime(config.device, config.dtype, supports_mps=False)
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    elif run.world_size > 1:
        torch.set_num_threads(1)  # ranks share the cores
    watch_launcher()
    assert config.out_dir is not None
    description: dict[str, Any] = {f"--{name}": value for name, value in dataclasses.asdict(config).items()}
    description |= {
        "the device": run.device.type,
        "the dtype": str(run.dtype).removeprefix("torch."),
        "the code": digest_code(),
        "the weights": describe_starting_point(config.out_dir),
    }
    description |= {f"the version of {name}": find_version(name) for name in ("torch", "transformers")}
    if not torch.distributed.is_initialized():
        run.timeout = Flags().timeout
        prepare_connection(run.timeout)
        join_process_group(run)
        check_agreement(run, description)
    listen_for_signals(run)
    model = open_model(config.out_dir, run, config.resume_step)
    prompter = Prompter(config.prompt, model.codec, config.stop)

    def report(error: ConfigError) -> None:
        if not config.skip_bad:
            raise error
        run.print0(f"skipped: {error}")

    work = []
    for number, problem in run.call_on_rank0(lambda: list(select_problems(config, model.context, report))):
        try:
            work.append((problem, write_tasks(number, problem, prompter, model, config)))
        except ConfigError as error:
            report(error)
    if not work:
        raise ConfigError(f"--problems={config.problems}: all problems were skipped: correct them, or use others")
    return Evaluation(config, run, model, prompter, work).finish()
