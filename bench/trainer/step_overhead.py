"""Measure the overhead of the trainer: its step against a bare loop on the same model, data loading, and the ledger.

    python -m bench.trainer.step_overhead            # print the times and their ratios
    python -m bench.trainer.step_overhead --write    # also write bench/results/step-overhead-<hardware>.json

All loops run in one process, and their steps alternate. If the speed of the machine changes, it changes for all loops.
The configuration is nanoGPT's for a CPU: batch 12, 64 tokens, fp32, not compiled, no accumulation. Only the measurement
of the ledger accumulates 8 micro-batches.
"""

import contextlib
import dataclasses
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import torch

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.distributed.runtime import Runtime, create_runtime
from nanoGPT.errors import check_finite
from nanoGPT.memory import costs
from nanoGPT.metrics.ledger import Ledger
from nanoGPT.metrics.telemetry import Telemetry
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler, configure_adamw, learning_rate, set_learning_rate
from nanoGPT.train import train_step
from nanoGPT.train_config import TrainConfig

STEPS, WARMUP = 300, 30


def build_model(config: TrainConfig) -> tuple[GPT, torch.optim.AdamW]:
    shape = GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, False, 75)
    model = GPT(shape)
    model.init_weights(config.seed)
    return model, configure_adamw(model, config)


def run_bare_steps(config: TrainConfig, data: TokenData) -> Generator[None]:
    """Run forward, backward, clipping and AdamW on one batch that is already in memory. Yield after each step."""
    model, optimizer = build_model(config)
    x, y = data.batch("train", TRAIN, 0, 0)
    while True:
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def run_trainer_steps(config: TrainConfig, data: TokenData, run: Runtime) -> Generator[None]:
    """Run the step of nanoGPT/train.py with data loading, telemetry and the check for a stop. Yield after each step.

    If the ledger is on, it records every step here. In a training run it records one step.
    """
    model, optimizer = build_model(config)
    scaler = LossScaler(is_enabled=False)
    ledger = Ledger(config, run, 1, model, optimizer, costs.step_costs)
    with Telemetry(config, run, 0, model.flops_per_token()) as telemetry:
        for step in range(10**9):
            lr = learning_rate(step, config)
            set_learning_rate(optimizer, lr)
            ledger.step = step
            with ledger.watch(step):
                loss_sum, norm = train_step(model, optimizer, scaler, data, step, config, run)
            run.exchange_requests(False)
            if step % config.log_interval == 0:
                mean_loss = run.sum(loss_sum).item() / config.gradient_accumulation_steps
                check_finite(step, mean_loss, norm.item())
                telemetry.log(step, loss=mean_loss, lr=lr, grad_norm=norm.item())
            yield


def time_next_step(steps: Generator[None]) -> float:
    """Run the next step of a loop and return its milliseconds."""
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # hides the tables that the ledger prints
        next(steps)
    return 1000 * (time.perf_counter() - begin)


def measure(config: TrainConfig, count: int) -> dict[str, list[float]]:
    """Return `count` samples in milliseconds of a bare step, a trainer step, and reading a batch, in alternation."""
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    run = create_runtime(config.device, config.dtype)
    loops = {"bare_ms": run_bare_steps(config, data), "trainer_ms": run_trainer_steps(config, data, run)}
    samples: dict[str, list[float]] = {name: [] for name in (*loops, "data_ms")}
    for step in range(WARMUP + count):
        times = {name: time_next_step(loop) for name, loop in loops.items()}
        begin = time.perf_counter()
        data.batch("train", TRAIN, step, 1)
        times["data_ms"] = 1000 * (time.perf_counter() - begin)
        if step >= WARMUP:
            for name, value in times.items():
                samples[name].append(value)
    for loop in loops.values():
        loop.close()
    return samples


def measure_ledger(config: TrainConfig, count: int) -> dict[str, list[float]]:
    """Return `count` samples in milliseconds of a step with the ledger and a step without it, in alternation."""
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    run = create_runtime(config.device, config.dtype)
    ledger_config = dataclasses.replace(config, ledger=True, out_dir=f"{config.out_dir}/watched")
    Path(ledger_config.out_dir).mkdir(parents=True)
    loops = {
        "unwatched_ms": run_trainer_steps(config, data, run),
        "watched_ms": run_trainer_steps(ledger_config, data, run),
    }
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(3 + count):
        for name, loop in loops.items():
            milliseconds = time_next_step(loop)
            if step >= 3:
                samples[name].append(milliseconds)
    for loop in loops.values():
        loop.close()
    return samples


def main(write: bool = False) -> None:
    """Measure the overheads and print them.

    Args:
        write: also write bench/results/step-overhead-<hardware>.json.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        config = TrainConfig(
            batch_size=12, gradient_accumulation_steps=1, device="cpu", out_dir=out_dir, learning_rate=1e-4
        )
        samples = measure(config, STEPS)
        samples |= measure_ledger(dataclasses.replace(config, gradient_accumulation_steps=8), STEPS // 5)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    bare, trainer, data = (medians[name] for name in ("bare_ms", "trainer_ms", "data_ms"))
    print(f"median of {STEPS} steps: bare loop {bare:.2f} ms, trainer {trainer:.2f} ms, ratio {trainer / bare:.3f}")
    print(f"step with the ledger / step without it: {medians['watched_ms'] / medians['unwatched_ms']:.3f}")
    print(f"data loading: {data:.3f} ms, {data / trainer:.2%} of a step")
    if write:
        command = "python -m bench.trainer.step_overhead --write"
        settings = {
            "command": command,
            "steps": STEPS,
            "threads": torch.get_num_threads(),
            "batch_size": 12,
            "block_size": 64,
        }
        print(f"wrote {write_result('step-overhead', torch.device('cpu'), settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
