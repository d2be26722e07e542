"""Write the metrics, the environment, the heartbeats and the stacks of a run into out_dir.

    metrics.jsonl            one JSON object per logged step; a resumed run removes the lines that it will write again
    env.json                 versions, hardware, git commit, configuration, and the reason for each automatic choice
    log.txt                  when the run started and ended, and which rank failed with which error
    heartbeat/rank{r}.json   step, stage of the step and time of each rank, updated every second
    stacks/rank{r}.txt       the stacks of all threads: on SIGQUIT, on a crash, and when the job is stopped in a hang

Rank 0 also prints each logged line. If standard error is a terminal, it shows a progress bar below these lines.
"""

import contextlib
import dataclasses
import faulthandler
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from measure.diagnostics import replace_non_finite
from nanoGPT.distributed.environment import collect_versions
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, OutOfMemory
from nanoGPT.files import write_atomically
from nanoGPT.hardware import (
    describe_hardware,
    find_peak_flops,
    read_environment,
    read_git_commit,
    read_gpu_driver,
    read_peak_memory,
)
from nanoGPT.run_log import append_to_log
from nanoGPT.train_config import TrainConfig
from operate.heartbeat import HeartbeatThread, write_collectives
from operate.out_of_memory import MemoryReport
from operate.run_description import PACKAGES, find_version
from operate.trackers import Tracker


def read_lines_before(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of earlier steps than `step` in a metrics file. Damaged lines are left out."""
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] < step:
                lines.append(json.loads(line))
    return lines


def count_tokens(out_dir: Path, lines: list[dict[str, Any]], first_step: int, tokens_per_step: int) -> int:
    """Return the tokens of all steps before `first_step`. Earlier starts of the run may have had other batches.

    Args:
        out_dir: directory of the run; env.json is still that of the previous start.
        lines: the metrics of earlier steps.
        first_step: of this start.
        tokens_per_step: of this start.
    """
    try:
        steps = lines[-1]["step"] + (lines[-1]["loss"] is not None)
        rate = json.loads((out_dir / "env.json").read_text())["tokens_per_step"]
        return int(lines[-1]["tokens"] + (first_step - steps) * rate)
    except (OSError, LookupError, ValueError, TypeError, RecursionError):  # no metrics, or damaged ones
        return first_step * tokens_per_step


class Telemetry:
    """The metrics, heartbeats and stacks of a run. It is a context manager around building the model and training it.

    Args:
        config: this rank's configuration.
        run: this rank's Runtime.
        first_step: the first step of this run; lines of an earlier run from this step on are removed.
        flops_per_token: FLOPs per token of the forward and backward pass, for MFU.
    """

    def __init__(self, config: TrainConfig, run: Runtime, first_step: int, flops_per_token: int) -> None:
        self.config, self.run, self.out_dir = config, run, Path(config.out_dir)
        self.tokens_per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
        self.flops_per_token, self.peak_flops = flops_per_token, find_peak_flops(run)
        run.enter_stage("start", first_step)
        self.first_step = self.next_step = first_step
        self.clock = time.perf_counter()
        self.memory_report = MemoryReport(config, run)
        try:
            self._open_files(first_step)
        except OSError as error:
            message = f"{error.filename} is not writable ({error.strerror}): move it away"
            raise ConfigError(message, on_one_rank=True) from None
        trainer = type(config).__module__.partition(".")[0]
        self.heartbeat = HeartbeatThread(run, self.out_dir, config.stall_seconds, self.stack_file, trainer)
        self.tracker = Tracker(config, run, first_step) if run.is_main and config.track != "none" else None

    def _open_files(self, first_step: int) -> None:
        for folder in ("heartbeat", "stacks"):
            (self.out_dir / folder).mkdir(exist_ok=True)
        self.stack_file = open(self.out_dir / "stacks" / f"rank{self.run.rank}.txt", "a")
        if self.run.is_main:
            self._open_metrics(first_step)

    def _open_metrics(self, first_step: int) -> None:
        tokens = f"{self.tokens_per_step:,} tokens per step, on any number of ranks"
        path = self.out_dir / "metrics.jsonl"
        lines = read_lines_before(path, first_step)
        self.tokens_before = count_tokens(self.out_dir, lines, first_step, self.tokens_per_step)
        if self.config.eval_only:  # the files describe the run that trains
            self.run.print0(tokens)
            return
        self.run.print0(f"{tokens}; writing to {self.out_dir}")
        steps = f"started at step {first_step} of {self.config.max_iters}"
        append_to_log(self.out_dir, "rank 0", f"{steps}, {type(self.config).__name__}, {self.run.world_size} rank(s)")
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.metrics = open(path, "a", buffering=1)
        environment = {
            "command": sys.argv,
            "versions": {**collect_versions(), **{name: find_version(name) for name in PACKAGES}},
            "environment": read_environment(),
            "hardware": describe_hardware(self.run.device),
            "driver": read_gpu_driver(),
            "git_commit": read_git_commit(),
            "world_size": self.run.world_size,
            "config": dataclasses.asdict(self.config),
            "chosen": self.run.reasons,
            "tokens_per_step": self.tokens_per_step,
        }
        (self.out_dir / "env.json").write_text(json.dumps(environment, indent=1) + "\n")

    def __enter__(self) -> "Telemetry":
        faulthandler.enable(self.stack_file)
        faulthandler.register(signal.SIGQUIT, self.stack_file)
        self.heartbeat.start()
        # tqdm's default lock is shared by all processes, and leaks if ranks are forked.
        tqdm.set_lock(threading.RLock())
        self.bar = tqdm(
            total=self.config.max_iters,
            initial=self.run.progress.step,
            unit="step",
            disable=not (self.run.is_main and sys.stderr.isatty()),
        )
        self.clock = time.perf_counter()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.run.finish()  # with the heartbeat, so that the watchdog sees an asynchronous save that hangs
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.heartbeat.close()
            self.bar.close()
            progress = self.run.progress
            if error is not None:
                text = f"failed in step {progress.step}, {progress.stage}: {type(error).__name__}: {error}"
                append_to_log(self.out_dir, f"rank {self.run.rank}", text)
                with contextlib.suppress(OSError):  # the disk may be full, and must not hide the original error
                    self.stack_file.write("".join(traceback.format_exception(error)))
                    self.stack_file.flush()
                with contextlib.suppress(Exception):  # nor must torch's recorder
                    write_collectives(self.out_dir, self.run.rank)
            elif self.run.is_main:
                signal_name = self.run.stop_signal or "a signal to another rank"
                text = f"stopped by {signal_name}" if self.run.is_stopping else "ended"
                append_to_log(self.out_dir, "rank 0", f"{text} in step {progress.step}")
                if self.run.is_stopping:
                    directory = quote(self.config.out_dir)
                    self.run.print0(f"stopped by a signal; resume with --init_from=resume --out_dir={directory}")
            if self.tracker:
                self.tracker.close()
        if error is not None and (sentence := self.memory_report.explain(error)):
            raise OutOfMemory(sentence) from error

    def watch_memory(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Name the memory of this model and optimizer in the error if memory runs out."""
        self.memory_report.model, self.memory_report.optimizer = model, optimizer

    @contextlib.contextmanager
    def untimed(self, stage: str, step: int) -> Iterator[None]:
        """Enter a stage whose time is not part of that of training steps: building the model, evaluations, saves."""
        self.run.enter_stage(stage, step)
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start

    def log(self, step: int, loss: float | None, lr: float | None, grad_norm: float | None, **more: Any) -> None:
        """Write and print one line of metrics on rank 0. `step_ms` is the mean since the previous line."""
        now = time.perf_counter()
        steps, seconds = max(1, step + 1 - self.next_step), now - self.clock
        self.next_step, self.clock = step + 1, now
        if not self.run.is_main:
            return
        has_trained = loss is not None  # False for a line of an evaluation alone
        rate = self.tokens_per_step * steps / seconds if has_trained else None
        mfu = rate * self.flops_per_token / self.run.world_size / self.peak_flops if rate and self.peak_flops else None
        line = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": replace_non_finite(grad_norm),
            "tokens": self.tokens_before + (step + has_trained - self.first_step) * self.tokens_per_step,
            "tokens_per_second": rate,
            "step_ms": 1000 * seconds / steps if has_trained else None,
            "mfu": mfu,
            "peak_memory_bytes": read_peak_memory(self.run.device),
            **more,
        }
        if not self.config.eval_only:
            self._write_metrics(line)
        if self.tracker:
            self.tracker.log(line)
        self.bar.update(min(step + 1, self.config.max_iters) - self.bar.n)
        tqdm.write(format_line(line), file=sys.stdout)
        sys.stdout.flush()

    def _write_metrics(self, line: dict[str, Any]) -> None:
        """Write a line. Open a new file if the run's directory was deleted or moved away, and then created again."""
        path = self.out_dir / "metrics.jsonl"
        try:
            if self.out_dir.is_dir() and not path.exists():
                self.metrics = open(path, "a", buffering=1)
            self.metrics.write(json.dumps(line) + "\n")
        except OSError as error:  # the disk is full: continue, because a user may free space before the next save
            self.run.print0(f"step {line['step']} is missing in metrics.jsonl ({error.strerror}): free some space")


def format_line(line: dict[str, Any]) -> str:
    """Return a line of metrics as readable text."""
    words = [f"step {line['step']:>5}"]
    if line["loss"] is not None:
        words.append(f"loss {line['loss']:.4f}")
    if line.get("val_loss") is not None:
        words.append(f"val loss {line['val_loss']:.4f}")
    if line["grad_norm"] is not None:
        words.append(f"grad norm {line['grad_norm']:.3f}")
    if line["tokens_per_second"] is not None:
        words.append(f"{line['step_ms']:,.0f} ms, {line['tokens_per_second']:,.0f} tokens/s")
    if line["mfu"] is not None:
        words.append(f"MFU {line['mfu']:.1%}")
    return "  ".join(words)
