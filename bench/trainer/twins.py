"""Train scaled-down twins of the configurations `train_mid` and `train_target` for 200 steps on two ranks.

    python -m bench.trainer.twins             # about 80 s of CPU time per rank and twin
    python -m bench.trainer.twins --write     # also write bench/results/twins-<hardware>.json

A twin has the blocks, the heads and the options of its configuration: Muon, bfloat16, activation checkpointing, and
wrapping by size. Its width, its context, its batch and its units are smaller, its learning rate is higher, and its text
is Shakespeare's. The memory that the ledger measures is compared with the formula and with the planner.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import run_cell
from bench.plan.run import detect_hardware, predict_run
from bench.plan.sizes import read_config
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from phase3_fsdp.fsdp import FsdpConfig

NAMES = ("train_mid", "train_target")
RANKS, STEPS = 2, 200
SHOWN_STEPS = (0, 50, 100, 150, 199)
DIVISOR = 32  # of the width and of the context
BATCH_DIVISOR = 4  # of the micro-batch and of the global batch


def make_twin(name: str, out_dir: Path) -> FsdpConfig:
    """Return the twin of a configuration of phase 3. A unit shrinks with the square of the width, as a matrix does."""
    config = read_config("phase3", name, RANKS)
    assert isinstance(config, FsdpConfig) and config.fsdp_min_num_params
    fields: dict[str, Any] = {
        "dataset": "shakespeare_char",
        "device": "cpu",
        "compile": False,
        "n_embd": config.n_embd // DIVISOR,
        "block_size": config.block_size // DIVISOR,
        "batch_size": config.batch_size // BATCH_DIVISOR,
        "gradient_accumulation_steps": config.gradient_accumulation_steps // BATCH_DIVISOR,
        "fsdp_min_num_params": config.fsdp_min_num_params // DIVISOR**2,
        "learning_rate": 5 * config.learning_rate,
        "min_lr": 5 * config.min_lr,
        "max_iters": STEPS,
        "warmup_iters": STEPS // 10,
        "eval_interval": STEPS,
        "eval_iters": 1,
        "log_interval": 1,
        "ledger": True,
        "out_dir": str(out_dir),
    }
    return replace(config, **fields)


def run_twin(name: str, folder: Path) -> dict[str, Any]:
    """Train a twin; return its shape, its losses, and the memory of rank 0: measured, and predicted before the run."""
    twin = make_twin(name, folder / name)
    predicted = predict_run(twin, "phase3", RANKS, detect_hardware())
    result = run_cell("phase3", RANKS, twin, timeout=1800)
    return {
        "name": name,
        "n_layer": twin.n_layer,
        "n_embd": twin.n_embd,
        "block_size": twin.block_size,
        "batch_size": twin.batch_size,
        "gradient_accumulation_steps": twin.gradient_accumulation_steps,
        "optimizer": twin.optimizer,
        "dtype": twin.dtype,
        "parameters": result.ledger["parameters"],
        "losses": [result.curve[step] for step in range(STEPS)],
        "state_bytes": result.rank_0["state_bytes"],
        "expected_state_bytes": result.rank_0["expected_state_bytes"],
        "peak_bytes": result.rank_0["memory"]["peak"],
        "predicted_peak_bytes": predicted.peak_bytes,
        "step_ms": result.step_ms,
    }


def main(write: bool = False) -> None:
    """Train both twins.

    Args:
        write: also write bench/results/twins-<hardware>.json.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            row = run_twin(name, Path(folder))
            rows.append(row)
            peak, state = sum(row["peak_bytes"].values()), sum(row["state_bytes"].values())
            losses = ", ".join(f"{row['losses'][step]:.3f} at step {step}" for step in SHOWN_STEPS)
            print(
                f"twin of {name}, {row['parameters']:,} parameters: loss {losses}; state {state:,} bytes (formula "
                f"{sum(row['expected_state_bytes'].values()):,}), peak {peak:,} (planner "
                f"{row['predicted_peak_bytes']:,}), {row['step_ms']:.0f} ms per step",
                flush=True,
            )
    if write:
        settings = {"command": "python -m bench.trainer.twins --write", "ranks": RANKS, "steps": STEPS}
        settings |= {"divisor": DIVISOR, "batch_divisor": BATCH_DIVISOR}
        print(f"wrote {write_result('twins', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
