"""What a run tells of itself, all of it under out_dir.

    metrics.jsonl            one object a logged step; a resumed run drops the lines that it will write again
    env.json                 versions, hardware, git commit, configuration, why each automatic choice was made
    heartbeat/rank{r}.json   step, stage of the step and time, renewed every second
    stacks/rank{r}.txt       every thread's stack: on SIGUSR1, on a crash, and when the job hangs and is ended

Rank 0 also prints each logged line, and below them a progress bar where standard error is a terminal.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from nanoGPT.checkpoint.manifest import versions
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.job.heartbeat import Heart
from nanoGPT.metrics.hardware import git_commit, hardware, peak_flops, peak_memory_bytes
from nanoGPT.metrics.trackers import Tracker
from nanoGPT.train_config import TrainConfig


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def drop_lines_from(path: Path, step: int) -> None:
    """Keep the lines before `step` of a metrics file; a torn last line goes too."""
    kept = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
    temporary = path.with_name(".tmp-metrics.jsonl")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


class Telemetry:
    """One run's metrics, heartbeat and stacks; a context manager around the training loop.

    Args:
        config, run: of this rank.
        first_step: the step that is logged first; later lines of an earlier run go.
        flops_per_token: for MFU.
    """

    def __init__(self, config: TrainConfig, run: Runtime, first_step: int, flops_per_token: int) -> None:
        self.config, self.run, self.out_dir = config, run, Path(config.out_dir)
        self.tokens_per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
        self.flops_per_token, self.peak = flops_per_token, peak_flops(run)
        run.enter_stage("start", first_step)
        self.logged_step, self.seconds = first_step, 0.0
        self.clock = time.perf_counter()
        try:
            self._open_files(first_step)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written ({error.strerror}): move it away") from None
        self.heart = Heart(run, self.out_dir, config.stall_seconds, self.stacks)
        self.tracker = Tracker(config, run) if run.is_main and config.track != "none" else None

    def _open_files(self, first_step: int) -> None:
        for folder in ("heartbeat", "stacks"):
            (self.out_dir / folder).mkdir(exist_ok=True)
        self.stacks = open(self.out_dir / "stacks" / f"rank{self.run.rank}.txt", "a")
        if self.run.is_main:
            self._open_metrics(first_step)

    def _open_metrics(self, first_step: int) -> None:
        path = self.out_dir / "metrics.jsonl"
        drop_lines_from(path, first_step)
        self.metrics = open(path, "a", buffering=1)
        environment = {
            "command": sys.argv,
            "versions": versions(),
            "hardware": hardware(self.run.device),
            "git_commit": git_commit(),
            "world_size": self.run.world_size,
            "config": dataclasses.asdict(self.config),
            "chosen": self.run.reasons,
            "tokens_per_step": self.tokens_per_step,
        }
        (self.out_dir / "env.json").write_text(json.dumps(environment, indent=1) + "\n")
        self.run.print0(f"{self.tokens_per_step:,} tokens a step, on any number of ranks; writing to {self.out_dir}")

    def __enter__(self) -> "Telemetry":
        faulthandler.enable(self.stacks)
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, self.stacks)
        self.heart.start()
        tqdm.set_lock(threading.RLock())  # its own would be shared among processes, and leak where ranks are forked
        self.bar = tqdm(
            total=self.config.max_iters,
            initial=self.run.progress.step,
            unit="step",
            disable=not (self.run.is_main and sys.stderr.isatty()),
        )
        self.clock = time.perf_counter()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.heart.close()
        self.bar.close()
        if error is not None:
            with contextlib.suppress(OSError):  # on a full disk the error itself must get through
                self.stacks.write("".join(traceback.format_exception(error)))
                self.stacks.flush()
        if self.tracker:
            self.tracker.close()

    @contextlib.contextmanager
    def untimed(self, stage: str, step: int) -> Iterator[None]:
        """Enter a stage, such as an evaluation or a save, whose time does not count as that of training steps."""
        self.run.enter_stage(stage, step)
        begin = time.perf_counter()
        yield
        self.clock += time.perf_counter() - begin

    def log(self, step: int, loss: float | None, lr: float | None, grad_norm: float | None, **more: Any) -> None:
        """Write one line of metrics and say it; step_ms is the mean since the last one. Rank 0 writes."""
        now = time.perf_counter()
        steps, seconds = max(1, step + 1 - self.logged_step), now - self.clock
        self.logged_step, self.clock = step + 1, now
        if not self.run.is_main:
            return
        trained = loss is not None
        rate = self.tokens_per_step * steps / seconds if trained else None
        mfu = rate * self.flops_per_token / self.run.world_size / self.peak if rate and self.peak else None
        line = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": finite(grad_norm),
            "tokens": (step + trained) * self.tokens_per_step,
            "tokens_per_second": rate,
            "step_ms": 1000 * seconds / steps if trained else None,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory_bytes(self.run.device),
            **more,
        }
        try:
            self._reopen_metrics()
            self.metrics.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk: the run may yet end, or be able to save, when somebody frees some
            self.run.print0(f"metrics.jsonl misses step {step}: {error.strerror}; free some space")
        if self.tracker:
            self.tracker.log(line)
        self.bar.update(min(step + 1, self.config.max_iters) - self.bar.n)
        tqdm.write(describe(line), file=sys.stdout)
        sys.stdout.flush()

    def _reopen_metrics(self) -> None:
        """Go on in a new file after the run's directory was deleted or moved away, once it has been created again."""
        path = self.out_dir / "metrics.jsonl"
        if self.out_dir.is_dir() and not path.exists():
            self.metrics = open(path, "a", buffering=1)


def describe(line: dict[str, Any]) -> str:
    """One line of metrics for people."""
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
