"""A short run of a phase on real ranks, and all that it tells: what benchmarks of whole steps are made of.

config = config_of("phase3", out_dir, max_iters=10, fsdp_shard_size="2")
found = run_cell("phase3", 4, config)          # trains, with the ledger on
found.step_ms, found.curve, found.ledger["ranks"][0]["state_bytes"]
"""

import importlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoGPT.train_config import TrainConfig
from workshop.ranks import losses, run_on_ranks

PHASES = {"baseline": "nanoGPT", "phase1": "phase1_zero1", "phase2": "phase2_triton", "phase3": "phase3_fsdp"}


@dataclass(frozen=True)
class Found:
    """What a run left.

    Attributes:
        curve: loss by step.
        step_ms: median of the steps but the first and the one that the ledger watched; None where there is no other.
        tokens_per_second: of all ranks, at that time.
        ledger: ledger.json.
    """

    curve: dict[int, float]
    step_ms: float | None
    tokens_per_second: float | None
    ledger: dict[str, Any]

    @property
    def rank_0(self) -> dict[str, Any]:
        """Its part of the ledger."""
        part: dict[str, Any] = self.ledger["ranks"][0]
        return part

    def gap(self, other: "Found") -> float:
        """The largest difference of the two curves, which have the same steps."""
        assert self.curve.keys() == other.curve.keys(), (sorted(self.curve), sorted(other.curve))
        return max(abs(self.curve[step] - other.curve[step]) for step in self.curve)


def as_expected(ledger: dict[str, Any]) -> bool:
    """Whether the state and the collectives of every rank are the formula's to the byte."""
    return all(
        each["state_bytes"] == each["expected_state_bytes"]
        and all(row["tensor_bytes"] == row["expected_bytes"] for row in each["collectives"])
        for each in ledger["ranks"]
    )


def config_of(phase: str, out_dir: Path, **words: Any) -> TrainConfig:
    """A phase's configuration with the ledger on and every step logged."""
    config_class = importlib.import_module(f"{PHASES[phase]}.train").Config
    config: TrainConfig = config_class(**{"log_interval": 1, "ledger": True, "out_dir": str(out_dir), **words})
    return config


def run_cell(phase: str, ranks: int, config: TrainConfig, timeout: float = 600) -> Found:
    """Train on real ranks, if this out_dir has no such run yet, and read what it left there."""
    out_dir = Path(config.out_dir)
    if not (out_dir / "ledger.json").exists():
        out_dir.mkdir(parents=True)
        device = "cuda" if config.device == "cuda" else "cpu"
        run_on_ranks(train, ranks, PHASES[phase], config, timeout=timeout, show=False, device=device)
    ledger = json.loads((out_dir / "ledger.json").read_text())
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    apart = {lines[0]["step"], ledger["step"]}
    timed = [line["step_ms"] for line in lines if line["step_ms"] and line["step"] not in apart]
    step_ms = statistics.median(timed) if timed else None
    tokens = config.gradient_accumulation_steps * config.batch_size * config.block_size
    return Found(losses(out_dir), step_ms, 1e3 * tokens / step_ms if step_ms else None, ledger)


def train(package: str, config: TrainConfig) -> None:
    importlib.import_module(f"{package}.train").train(config)
