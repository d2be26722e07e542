"""Helpers that many test files use: tiny configurations, training on real ranks, and reading of logged values."""

import importlib
import json
from pathlib import Path
from typing import Any

from bench.matrix.cells import matches_formula
from bench.phases import load_config_class
from nanoGPT.dataset import TokenData
from nanoGPT.files import PACKAGE
from nanoGPT.observers import add_flags, find_default_observers
from nanoGPT.train_config import TrainConfig
from operate.run_files import read_json_lines
from workshop.ranks import losses, run_on_ranks

ROOT = PACKAGE.parent
PACKAGES = ("nanoGPT", "phase1_zero1", "phase2_triton", "phase3_fsdp")
CONFIGS: dict[str, type[TrainConfig]] = {package: load_config_class(package) for package in PACKAGES}
TINY: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "dropout": 0.2,
    "learning_rate": 2e-3,
    "min_lr": 2e-4,
    "max_iters": 12,
    "warmup_iters": 2,
    "eval_interval": 5,
    "eval_iters": 1,
    "log_interval": 1,
    "always_save_checkpoint": True,
}


def tiny(phase: str, out_dir: Path, **changes: Any) -> TrainConfig:
    """Return a configuration that trains in about a second. `changes` replace its fields."""
    config_class = add_flags(CONFIGS[phase], find_default_observers(), changes.get("model", "gpt2"))
    return config_class(**{**TINY, "out_dir": str(out_dir), **changes})


def open_data(dataset: str, block_size: int, batch_size: int, seed: int, **fields: Any) -> TokenData:
    return TokenData(TrainConfig(dataset=dataset, block_size=block_size, batch_size=batch_size, seed=seed, **fields))


def call_train(phase: str, config: TrainConfig) -> None:
    """Create the output directory and train on this rank."""
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    importlib.import_module(f"{phase}.train").train(config)


def train(phase: str, ranks: int, config: TrainConfig) -> dict[int, float]:
    """Train on real ranks, and return the losses by step."""
    device = "cuda" if config.device == "cuda" else "cpu"
    run_on_ranks(call_train, ranks, phase, config, show=False, device=device)
    return losses(config.out_dir)


def train_all(ranks: int, cells: list[tuple[str, TrainConfig]]) -> list[dict[int, float]]:
    """Train configurations, each with its phase, one after another on the same ranks. Return the losses of each."""
    device = "cuda" if cells[0][1].device == "cuda" else "cpu"
    run_on_ranks(call_train_all, ranks, cells, show=False, device=device)
    return [losses(config.out_dir) for _, config in cells]


def call_train_all(cells: list[tuple[str, TrainConfig]]) -> None:
    """Train configurations one after another on this rank."""
    for phase, config in cells:
        call_train(phase, config)


def gap(a: dict[int, float], b: dict[int, float]) -> float:
    """Return the max difference between two loss curves. Both must have the same steps."""
    assert a.keys() == b.keys() and a, (sorted(a), sorted(b))
    return max(abs(a[step] - b[step]) for step in a)


def read_metric(out: Path, name: str) -> dict[int, float]:
    """Return the values of a metric in metrics.jsonl by step, without null values."""
    return {line["step"]: line[name] for line in read_json_lines(out / "metrics.jsonl") if line[name] is not None}


def read_ledger(out: Path) -> dict[str, Any]:
    """Return the ledger of a run, after checking it against the formulas."""
    ledger = json.loads((out / "ledger.json").read_text())
    assert matches_formula(ledger), out
    return ledger
