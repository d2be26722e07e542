"""Train with DeepSpeed's ZeRO and with ours: the same GPT, initial weights, micro-batches, AdamW and clipping.

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed    # not part of this repository; without GPUs
    python -m bench.trainer.against_deepspeed --gpus=2           # starts its own ranks
    python -m bench.trainer.against_deepspeed --gpus=2 --write   # write bench/results/deepspeed-*.json

The first run is the baseline on one rank, and all losses are compared with it. DeepSpeed trains twice in each stage:
with the JSON that corresponds to our flags (`bench/trainer/deepspeed_config.py`), and with DeepSpeed's own defaults.
Collectives are those of the third step. The tensors are those that are alive on rank 0 after that step.
"""

import importlib.metadata
import importlib.util
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import make_config, run_cell
from bench.tables.records import write_result
from bench.trainer.deepspeed_config import build_deepspeed_config
from bench.trainer.deepspeed_rank import MEASURED_STEP, train_with_deepspeed
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from workshop.phases import load_config_class
from workshop.ranks import run_on_ranks

HOW_TO_INSTALL = "DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed"
OURS: list[tuple[str, dict[str, Any]]] = [
    ("phase1", {}),
    ("phase1", {"zero_stage": 2}),
    ("phase3", {}),
    ("phase3", {"fsdp_sync_every_micro_batch": True}),
]
THEIRS: list[tuple[str, dict[str, Any]]] = [("phase1", {}), ("phase1", {"zero_stage": 2}), ("phase3", {})]


@dataclass
class Options:
    """Compare our ZeRO-1, ZeRO-2 and FSDP with DeepSpeed."""

    gpus: int = 2
    """number of ranks; processes on CPUs without GPUs"""
    steps: int = 12
    """steps of each run"""
    write: bool = False
    """write bench/results/deepspeed-<hardware>.json"""


def run_ours(phase: str, ranks: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Train with one of our trainers and return a row."""
    with tempfile.TemporaryDirectory() as folder:
        result = run_cell(phase, ranks, make_config(phase, Path(folder) / "run", **flags))
    ours = result.rank_0
    collectives = [
        {key: row[key] for key in ("kind", "calls", "tensor_bytes", "ring_bytes")} for row in ours["collectives"]
    ]
    live = sum(ours["memory"]["after_step"].values())
    return {"losses": list(result.curve.values()), "collectives": collectives, "live_bytes": live}


def run_theirs(phase: str, ranks: int, flags: dict[str, Any], defaults: bool) -> dict[str, Any]:
    """Train with DeepSpeed and return the row of rank 0, with the JSON."""
    config = load_config_class(phase)(**flags)
    json = build_deepspeed_config(config, ranks, defaults=defaults)
    row: dict[str, Any] = run_on_ranks(
        train_with_deepspeed, ranks, config, json, timeout=600, show=False, device=config.device
    )[0]
    return {**row, "json": json}


def compare(options: Options) -> dict[str, Any]:
    """Return one row per run; each has the losses, the collectives and the bytes of rank 0.

    Raises:
        ConfigError: DeepSpeed is not installed, or an option is out of range.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"deepspeed is not installed: run `{HOW_TO_INSTALL}` in a separate environment")
    if options.steps <= MEASURED_STEP or options.gpus < 2:
        raise ConfigError(
            f"--steps={options.steps} --gpus={options.gpus} is out of range: use at least --steps={MEASURED_STEP + 1} "
            "and --gpus=2"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = {"device": device, "dtype": "float32", "compile": False, "max_iters": options.steps, "eval_iters": 1}
    baseline = {"trainer": "baseline", "ranks": 1, "options": {}, **run_ours("baseline", 1, shared)}
    rows = [finish_row(baseline, baseline)]
    for phase, flags in OURS:
        row = {"trainer": phase, "ranks": options.gpus, "options": flags}
        rows.append(finish_row(row | run_ours(phase, options.gpus, {**shared, **flags}), baseline))
    for phase, flags in THEIRS:
        for defaults in (False, True):
            row = {"trainer": f"DeepSpeed, {phase}", "ranks": options.gpus, "options": flags, "defaults": defaults}
            rows.append(finish_row(row | run_theirs(phase, options.gpus, {**shared, **flags}, defaults), baseline))
    return {"flags": shared, "deepspeed": importlib.metadata.version("deepspeed"), "rows": rows}


def finish_row(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Add the largest difference from the losses of the baseline, and print the row."""
    row["loss_gap"] = max(abs(a - b) for a, b in zip(row["losses"], baseline["losses"], strict=True))
    sent = sum(each["ring_bytes"] for each in row["collectives"]) / 1e6
    name = " ".join([row["trainer"], *(f"{key}={value}" for key, value in row["options"].items())])
    name += " with its defaults" if row.get("defaults") else ""
    print(f"{name:48} max loss difference {row['loss_gap']:.1e}  {sent:6.2f} MB per rank and step", flush=True)
    return row


def main(options: Options) -> None:
    """Compare, print a line per run, and write the result if `options.write` is set."""
    samples = compare(options)
    if options.write:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        settings = {"command": "python -m bench.trainer.against_deepspeed --write", **asdict(options)}
        print(f"wrote {write_result('deepspeed', device, settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        main(command_line(Options, sys.argv[1:]))
