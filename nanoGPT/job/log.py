"""Write what a run leaves in out_dir, and print its metrics.

    metrics.jsonl   one JSON object per logged step; a resumed run removes the lines that it will write again
    log.txt         when the run started and ended, and which rank failed with which error
    env.json        versions, hardware, git commit, configuration, and the reason for each automatic choice

Rank 0 also prints each logged line.
"""

import contextlib
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from shlex import quote
from typing import Any

from nanoGPT.distributed.environment import (
    collect_versions,
    describe_hardware,
    read_environment,
    read_git_commit,
    read_gpu_driver,
    read_peak_memory,
)
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import write_atomically
from nanoGPT.model import ModelConfig
from nanoGPT.observers import Observer
from nanoGPT.train_config import TrainConfig


def append_to_log(out_dir: str | Path, source: str, text: str) -> None:
    """Append one line with the time. Lines of several processes do not mix, because each is written at once.

    Args:
        out_dir: the run's directory.
        source: who writes, such as "rank 0" or "launcher".
        text: line breaks are replaced by spaces.
    """
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {source}: {' '.join(text.split())}\n"
    with contextlib.suppress(OSError):  # a full disk must not hide the original error
        with open(Path(out_dir) / "log.txt", "ab", buffering=0) as file:
            file.write(line.encode("utf-8", "replace"))


def read_lines_before(path: Path, step: int, eval_interval: int) -> list[dict[str, Any]]:
    """Return the lines of a metrics file that a run which starts at `step` will not write again.

    These are the lines from before `step`, and one of an evaluation at the end of the earlier start, unless the run
    begins with an evaluation. Damaged lines are left out.
    """
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            values = json.loads(line)
            is_last_evaluation = values["step"] == step and values["loss"] is None and step % eval_interval > 0
            if values["tokens"] >= 0 and (values["step"] < step or is_last_evaluation):
                lines.append(values)
    return lines


def count_tokens(lines: list[dict[str, Any]], first_step: int, tokens_per_step: int) -> int:
    """Return the tokens of all steps before `first_step`. Earlier starts of the run may have had other batches.

    Args:
        lines: the metrics of earlier steps. A run logs each step before a save, so no step is missing after the last
            line, unless the disk was full.
        first_step: of this start.
        tokens_per_step: of this start.
    """
    last: dict[str, Any] = lines[-1] if lines else {"step": 0, "loss": None, "tokens": 0}
    return last["tokens"] + (first_step - last["step"] - (last["loss"] is not None)) * tokens_per_step


class Log(Observer):
    """Writes the files of a run, and prints its metrics. It is an observer of stages and of the end.

    Args:
        config: this rank's configuration.
        run: this rank's Runtime.
        first_step: the first step of this run; lines of an earlier run from this step on are removed.
        model_args: the shape of the model.

    Raises:
        ConfigError: a file is not writable. Every rank raises it.
    """

    def __init__(self, config: TrainConfig, run: Runtime, first_step: int, model_args: ModelConfig) -> None:
        super().__init__(config)
        self.run, self.out_dir, self.model_args = run, Path(config.out_dir), model_args
        self.tokens_per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
        self.first_step = self.next_step = first_step
        self.clock, self.step_seconds, self.is_timed = time.perf_counter(), 0.0, False
        self.tokens_before = run.call_on_rank0(self._open_files)

    def _open_files(self) -> int:
        """Open the files on rank 0. Return the tokens of all earlier steps."""
        path = self.out_dir / "metrics.jsonl"
        count, shape = self.config.gradient_accumulation_steps, f"{self.config.batch_size} x {self.config.block_size}"
        text = f"{self.tokens_per_step:,} tokens of {self.config.dataset} per step: {count} micro-batches of {shape}, "
        text += "on any number of ranks"
        try:
            lines = read_lines_before(path, self.first_step, self.config.eval_interval)
            tokens_before = count_tokens(lines, self.first_step, self.tokens_per_step)
            if self.config.eval_only:  # the files describe the run that trains
                self.run.print0(text)
                return tokens_before
            self.run.print0(f"{text}; writing to {self.out_dir}")
            if self.first_step >= self.config.max_iters:
                self.run.print0(f"all {self.config.max_iters} steps are done: raise --max_iters to continue")
            start = f"started at step {self.first_step} of {self.config.max_iters}"
            append_to_log(
                self.out_dir, "rank 0", f"{start}, {type(self.config).__name__}, {self.run.world_size} rank(s)"
            )
            if self.config.resume_step is not None and path.exists():  # also if this run is killed before it saves
                path.rename(path.with_name(f"metrics-before-{time.time():.0f}.jsonl"))
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
            self.metrics = open(path, "a", buffering=1)
            (self.out_dir / "env.json").write_text(json.dumps(self._describe_environment(), indent=1) + "\n")
            return tokens_before
        except OSError as error:
            path = error.filename or self.out_dir  # writing to a full disk names no file
            raise ConfigError(f"{path} is not writable ({error.strerror}): move it away, or free some space") from None

    def _describe_environment(self) -> dict[str, Any]:
        return {
            "command": sys.argv,
            "versions": collect_versions(),
            "environment": read_environment(),
            "hardware": describe_hardware(self.run.device),
            "driver": read_gpu_driver(),
            "git_commit": read_git_commit(),
            "world_size": self.run.world_size,
            "config": dataclasses.asdict(self.config),
            "model_args": vars(self.model_args),
            "chosen": self.run.reasons,
            "tokens_per_step": self.tokens_per_step,
        }

    def enter_stage(self, stage: str, step: int) -> None:
        """Measure the time of training steps: of micro-batches and updates, without evaluations and saves."""
        now = time.perf_counter()
        self.step_seconds += now - self.clock if self.is_timed else 0.0
        self.clock, self.is_timed = now, stage == "update" or stage.startswith("micro-batch")

    def write(
        self, step: int, loss: float | None, lr: float | None, grad_norm: float | None, val_loss: float | None
    ) -> None:
        """Log one line of metrics, and show it to all observers. `step_ms` is the mean since the previous line.

        Args:
            step: of the line.
            loss, lr, grad_norm: of the training step; None for a line of an evaluation alone.
            val_loss: of the evaluation before this step; None without one.
        """
        self.enter_stage("log", step)
        steps, seconds = max(1, step + 1 - self.next_step), self.step_seconds
        self.next_step, self.step_seconds = step + 1, 0.0
        has_trained = loss is not None
        rate = self.tokens_per_step * steps / seconds if has_trained else None
        line = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm if math.isfinite(grad_norm or 0.0) else None,
            "tokens": self.tokens_before + (step + has_trained - self.first_step) * self.tokens_per_step,
            "tokens_per_second": rate,
            "step_ms": 1000 * seconds / steps if has_trained else None,
            "mfu": None,  # the observer `operate` computes it
            "peak_memory_bytes": read_peak_memory(self.run.device),
            "val_loss": val_loss,
        }
        self.run.observers.log(line)
        if self.run.is_main and not self.config.eval_only:
            self._write_metrics(line)
        self.run.print0(format_line(line))

    def _write_metrics(self, line: dict[str, Any]) -> None:
        """Write a line. Open a new file if the run's directory was deleted or moved away, and then created again."""
        path = self.out_dir / "metrics.jsonl"
        try:
            if self.out_dir.is_dir() and not path.exists():
                self.metrics = open(path, "a", buffering=1)
            self.metrics.write(json.dumps(line, default=float) + "\n")  # also scalars of numpy and torch
        except OSError as error:  # the disk is full: continue, because a user may free space before the next save
            self.run.print0(f"step {line['step']} is missing in metrics.jsonl ({error.strerror}): free some space")

    def end(self, error: BaseException | None) -> None:
        """Write into log.txt how the run ended, and print how to resume a run that was stopped."""
        progress = self.run.progress
        if error is not None:
            text = f"failed in step {progress.step}, {progress.stage}: {type(error).__name__}: {error}"
            append_to_log(self.out_dir, f"rank {self.run.rank}", text)
        elif self.run.is_main:
            reason = self.run.stop_reason or "a request of another rank"
            text = f"stopped by {reason}" if self.run.is_stopping else "ended"
            append_to_log(self.out_dir, "rank 0", f"{text} in step {progress.step}")
            if self.run.is_stopping:
                self.run.print0(f"{text}; resume with --init_from=resume --out_dir={quote(self.config.out_dir)}")


def format_line(line: dict[str, Any]) -> str:
    """Return a line of metrics as readable text."""
    words = [f"step {line['step']:>5}"]
    if line["loss"] is not None:
        words.append(f"loss {line['loss']:.4f}")
    if line.get("val_loss") is not None:
        words.append(f"val loss {line['val_loss']:.4f}")
    if line["grad_norm"] is not None:
        words.append(f"grad norm {line['grad_norm']:.3f}")
    elif line["loss"] is not None:
        words.append("no update, because float16 gradients overflow: the loss scale is halved")
    if line["tokens_per_second"] is not None:
        words.append(f"{line['step_ms']:,.0f} ms, {line['tokens_per_second']:,.0f} tokens/s")
    if line["mfu"] is not None:
        words.append(f"MFU {line['mfu']:.1%}")
    return "  ".join(words)
