"""Train a phase for a few steps on real ranks and read its results. Benchmarks of full training steps use this module.

config = make_config("phase3", out_dir, max_iters=10, fsdp_shard_size="2")
result = run_cell("phase3", 4, config)          # trains with the ledger on
result.step_ms, result.curve, result.ledger["ranks"][0]["state_bytes"]
"""

import importlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.phases import find_package, load_config_class
from nanoGPT.train_config import TrainConfig
from operate.ranks import losses, run_on_ranks
from operate.run_files import read_json_lines


@dataclass(frozen=True)
class RunResult:
    """Losses, speed and ledger of a run.

    Attributes:
        curve: loss by step.
        step_ms: median time of a step, without the first step and the step that the ledger records; None if there is
            no other step.
        tokens_per_second: throughput of all ranks together at that median.
        ledger: content of ledger.json.
    """

    curve: dict[int, float]
    step_ms: float | None
    tokens_per_second: float | None
    ledger: dict[str, Any]

    @property
    def rank_0(self) -> dict[str, Any]:
        """The part of rank 0 in the ledger."""
        part: dict[str, Any] = self.ledger["ranks"][0]
        return part

    def max_loss_difference(self, other: "RunResult") -> float:
        """Return the largest difference between two loss curves. Both must have the same steps."""
        assert self.curve.keys() == other.curve.keys(), (sorted(self.curve), sorted(other.curve))
        return max(abs(self.curve[step] - other.curve[step]) for step in self.curve)


def matches_formula(ledger: dict[str, Any]) -> bool:
    """Return whether the bytes of state and of collectives of every rank match the formula exactly."""
    return all(
        each["state_bytes"] == each["expected_state_bytes"]
        and all(row["tensor_bytes"] == row["expected_bytes"] for row in each["collectives"])
        for each in ledger["ranks"]
    )


def make_config(phase: str, out_dir: Path, **fields: Any) -> TrainConfig:
    """Return a phase's configuration with these fields, the ledger on, and every step logged."""
    config_class = load_config_class(phase, fields.get("model", "gpt2"))
    return config_class(**{"log_interval": 1, "ledger": True, "out_dir": str(out_dir), **fields})


def run_cell(phase: str, ranks: int, config: TrainConfig, timeout: float = 600, threads: int = 1) -> RunResult:
    """Return the result of a run, from `config.out_dir`. If there is no run yet, train on real ranks first.

    Args:
        timeout: seconds for the training.
        threads: of each rank.
    """
    out_dir = Path(config.out_dir)
    if not (out_dir / "ledger.json").exists():
        out_dir.mkdir(parents=True)
        device = "cuda" if config.device == "cuda" else "cpu"
        run_on_ranks(train, ranks, find_package(phase), config, threads, timeout=timeout, show=False, device=device)
    ledger = json.loads((out_dir / "ledger.json").read_text())
    lines = read_json_lines(out_dir / "metrics.jsonl")
    untimed = {lines[0]["step"], ledger["step"]}
    timed = [line["step_ms"] for line in lines if line["step_ms"] and line["step"] not in untimed]
    step_ms = statistics.median(timed) if timed else None
    tokens = config.gradient_accumulation_steps * config.batch_size * config.block_size
    return RunResult(losses(out_dir), step_ms, 1e3 * tokens / step_ms if step_ms else None, ledger)


def train(package: str, config: TrainConfig, threads: int) -> None:
    torch.set_num_threads(threads)
    importlib.import_module(f"{package}.train").train(config)
