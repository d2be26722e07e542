"""Watch a run: heartbeats and a watchdog, stacks, restarts, trackers, and errors that are explained in one sentence.

heartbeat/rank{r}.json   step, stage of the step and time of each rank, updated every second
stacks/rank{r}.txt       the stacks of all threads: on SIGQUIT, on a crash, and when the job is stopped in a hang
"""

import contextlib
import faulthandler
import importlib.util
import os
import signal
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from measure.memory_limits import check_memory
from measure.mfu import compute_mfu
from nanoGPT import observers
from nanoGPT.checkpoint.manifest import read_manifests
from nanoGPT.distributed.environment import environment_number
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, DivergedRanks, RunError, blames_peer
from nanoGPT.model import GPT
from nanoGPT.train_config import validate
from operate.agreement import check_agreement
from operate.connection import prepare_connection
from operate.credentials import check_credentials
from operate.device_progress import DeviceProgress, watch_device
from operate.heartbeat import HeartbeatThread, write_collectives
from operate.known_errors import explain_known_error
from operate.out_of_memory import MemoryReport, explain_memory_error
from operate.progress_bar import ProgressBar
from operate.restart import (
    end_elastic_job,
    exclude_spare_ranks,
    record_job,
    resume_after_restart,
    watch_launcher,
)
from operate.run_description import describe_run
from operate.schedule import describe_changes, describe_schedule
from operate.trackers import Tracker

RECORDED_COLLECTIVES = "500"  # per rank, by torch's flight recorder


@dataclass
class Flags(observers.Flags):
    """The flags of this observer."""

    track: Literal["none", "tensorboard", "wandb"] = "none"
    """log the metrics to this tool too; needs `pip install -e '.[track]'`. wandb reads the project, the name and the
    group of the run from the environment variables WANDB_PROJECT, WANDB_NAME and WANDB_RUN_GROUP"""
    stall_seconds: float = 300.0
    """stop the job and write the stacks of all ranks if no rank makes progress for this many seconds"""

    def check(self, world_size: int) -> None:
        if not 1 <= self.stall_seconds < 2**31:
            raise ConfigError(f"--stall_seconds={self.stall_seconds} is out of range: use 1 or more, up to {2**31 - 1}")
        if self.track != "none" and importlib.util.find_spec(self.track) is None:
            raise ConfigError(
                f"--track={self.track} needs a package that is not installed: run `.venv/bin/pip install -e '.[track]'`"
            )

    @property
    def timeout(self) -> timedelta:
        """Return a timeout that is longer than `stall_seconds`, so that the watchdog reports a hang first."""
        Flags.check(self, 1)  # a launcher asks for the timeout before it checks the configuration
        return max(super().timeout, 2 * timedelta(seconds=self.stall_seconds))


def read_flags(config: Any) -> Flags:
    """Return the flags of this observer in a configuration."""
    return observers.read_flags(config, Flags)


class Observer(observers.Observer):
    """Watches this rank, and ends the process if the job hangs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.flags, self.out_dir = read_flags(config), Path(config.out_dir)
        self.heartbeat: HeartbeatThread | None = None
        self.device_progress: DeviceProgress | None = None
        self.tracker: Tracker | None = None
        self.bar: ProgressBar | None = None
        self.memory_report: MemoryReport | None = None
        self.sharded_params: list[nn.Parameter] = []
        self.flops_per_token = 0
        self.used_params = 0  # a hash of which of them have had a gradient, in every step
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)  # torch reads it at the first collective

    def prepare(self) -> None:
        """Exclude spare ranks, watch the launcher, check memory and credentials, and prepare the connection."""
        exclude_spare_ranks(self.config)
        watch_launcher()
        ranks, local_ranks = environment_number("WORLD_SIZE") or 1, environment_number("LOCAL_WORLD_SIZE") or 1
        validate(self.config, ranks)  # the check of the memory builds the model
        check_memory(self.config, ranks, local_ranks)
        if environment_number("RANK") == 0:
            check_credentials(self.flags.track)
        if not dist.is_initialized():  # a notebook or a test may have created the process group already
            prepare_connection(self.config.timeout)

    def configure(self, run: Runtime) -> None:
        """Continue a job that was restarted."""
        resume_after_restart(run, self.config)

    def start(self, run: Runtime) -> None:
        """Compare the ranks, and begin to write heartbeats."""
        super().start(run)
        check_agreement(run, describe_run(self.config, run))
        record_job(run, self.out_dir)
        self.device_progress, self.memory_report = watch_device(run.device), MemoryReport(self.config, run)
        try:
            for folder in ("heartbeat", "stacks"):
                (self.out_dir / folder).mkdir(parents=True, exist_ok=True)
            self.stack_file = open(self.out_dir / "stacks" / f"rank{run.rank}.txt", "a")
        except OSError as error:
            message = f"{error.filename} is not writable ({error.strerror}): move it away"
            raise ConfigError(message, on_one_rank=True) from None
        faulthandler.enable(self.stack_file)
        faulthandler.register(signal.SIGQUIT, self.stack_file)
        trainer, limit = type(self.config).__module__.partition(".")[0], self.flags.stall_seconds
        self.heartbeat = HeartbeatThread(run, self.out_dir, limit, self.stack_file, trainer, self.device_progress)
        self.heartbeat.start()

    def build(self, model: nn.Module, optimizer: Optimizer, first_step: int) -> None:
        """Pass the model to the report of out-of-memory errors, describe the schedule, and connect to the tracker."""
        self.flops_per_token = cast(GPT, model).config.flops_per_token()
        if self.memory_report:
            self.memory_report.model, self.memory_report.optimizer = model, optimizer
        # DDP and ZeRO-1 know which ranks have a gradient. FSDP would pair the collectives of different units.
        self.sharded_params = list(model.parameters()) if hasattr(model, "set_requires_gradient_sync") else []
        if self.run.is_main and not self.config.eval_only:
            manifests = (each for _, each in read_manifests(self.out_dir) if each["step"] == first_step)
            saved = next(manifests, {"config": vars(self.config)})["config"]  # a new run is compared with itself
            for sentence in (*describe_changes(self.config, saved), *describe_schedule(self.config, saved)):
                print(sentence, flush=True)
        self.bar = ProgressBar(first_step, self.config.max_iters, self.run.is_main)
        if self.run.is_main and self.flags.track != "none":
            self.tracker = Tracker(self.config, self.flags.track, self.run, first_step, vars(model.config))

    def enter_stage(self, stage: str, step: int) -> None:
        """Count the stages that the GPU reaches, and note which parameters FSDP has reduced."""
        if self.device_progress:
            self.device_progress.record(self.run.progress.stages_entered)
        if stage == "update":
            self.used_params = hash((self.used_params, *(param.grad is not None for param in self.sharded_params)))

    def begin_step(self, step: int) -> None:
        """Show the progress bar."""
        if self.bar:
            self.bar.show()

    def log(self, line: dict[str, Any]) -> None:
        """Check that FSDP has reduced the same parameters on all ranks, add the MFU, and send the line to the tracker.

        Raises:
            DivergedRanks: it has not. Every rank raises it.
        """
        highest, lowest = self.run.max(self.used_params, -self.used_params) if self.sharded_params else (0, 0)
        if highest != -lowest:
            raise DivergedRanks(
                f"up to step {line['step']} the ranks have gradients of different parameters, which FSDP has mixed up: "
                "let every rank use the same parameters in each micro-batch (docs/models.md), or use phase 1"
            )
        if line["tokens_per_second"]:
            line["mfu"] = compute_mfu(line["tokens_per_second"], self.flops_per_token, self.run)
        if self.tracker:
            self.tracker.log(line)
        if self.bar:
            self.bar.hide(line["step"])

    def explain(self, error: BaseException) -> str | None:
        """Return a sentence for an error that the user can fix."""
        explain_memory = self.memory_report.explain if self.memory_report else explain_memory_error
        return explain_known_error(error) or explain_memory(error)

    def end(self, error: BaseException | None) -> None:
        """Stop the heartbeats. After an error, write the stack and the last collectives."""
        if self.heartbeat:
            self.heartbeat.close()
            if error is not None:
                with contextlib.suppress(OSError):  # the disk may be full, and must not hide the original error
                    self.stack_file.write("".join(traceback.format_exception(error)))
                    self.stack_file.flush()
                with contextlib.suppress(Exception):  # an error of the flight recorder must not hide it either
                    write_collectives(self.out_dir, self.run.rank)
        if self.bar:
            self.bar.close()
        if self.tracker:
            self.tracker.close()  # before the message, after which the launcher waits only EXIT_SECONDS
        is_known = isinstance(error, RunError | SystemExit) and not getattr(error, "on_one_rank", False)
        if self.heartbeat and error is not None and not is_known and not blames_peer(error):
            self.heartbeat.detector.report_lost_rank(self.run.rank)  # the other ranks do not have this error
        end_elastic_job(self.config, error)
