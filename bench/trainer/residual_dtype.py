"""Measure what a residual stream in bfloat16 changes: the loss of a real run, and the memory of its activations.

    python -m bench.trainer.residual_dtype             # twelve runs of about a minute each
    python -m bench.trainer.residual_dtype --write     # also write bench/results/residual-dtype-<hardware>.json
    python -m bench.trainer.residual_dtype_plot        # draw the committed result

All runs have the defaults on a CPU, with fewer steps. Under autocast, as in the baseline and in phases 1 and 2, the
residual stream is fp32: the embedding is fp32, and each block adds bfloat16 results to it. `bf16 residual` rounds the
output of the embedding to bfloat16, so that every later sum is bfloat16 too. Phase 3 has no autocast: FSDP all-gathers
parameters in bfloat16, so all of its activations are bfloat16 already.
"""

import importlib
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.matrix.cells import make_config
from bench.tables.records import write_result
from bench.tables.residual_tables import LAST_STEPS
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPT
from nanoGPT.train_config import TrainConfig
from workshop.phases import find_package
from workshop.ranks import losses, run_on_ranks

STEPS, SEEDS = 320, (1, 2, 3)


@dataclass(frozen=True)
class Variant:
    """A precision of training.

    Attributes:
        name: in the table and in the figure.
        phase: of the trainer.
        dtype: the value of `--dtype`.
        rounds_residual: the residual stream is rounded to bfloat16.
    """

    name: str
    phase: str
    dtype: str
    rounds_residual: bool = False


VARIANTS = (
    Variant("fp32", "baseline", "float32"),
    Variant("autocast", "baseline", "bfloat16"),
    Variant("autocast, bf16 residual", "baseline", "bfloat16", rounds_residual=True),
    Variant("phase 3 in bf16", "phase3", "bfloat16"),
)


class RoundedGPT(GPT):
    """A GPT whose residual stream is bfloat16."""

    def embed(self, idx: Tensor, first_position: int | Tensor) -> Tensor:
        return super().embed(idx, first_position).bfloat16()


def train(variant: Variant, config: TrainConfig) -> None:
    """Train in this process."""
    trainer = importlib.import_module(f"{find_package(variant.phase)}.train")
    with mock.patch.object(trainer, "GPT", RoundedGPT if variant.rounds_residual else GPT):
        trainer.train(config)


def run_variant(variant: Variant, seed: int, folder: Path) -> dict[str, Any]:
    """Train a variant; return its losses, its last validation loss, and the bytes of activations at the peak."""
    out_dir = folder / f"{variant.name}-{seed}"
    fields: dict[str, Any] = {"device": "cpu", "dtype": variant.dtype, "seed": seed}
    config = make_config(variant.phase, out_dir, max_iters=STEPS, eval_interval=STEPS, **fields)
    run_on_ranks(train, 1, variant, config, timeout=1800, show=False)
    last = json.loads((out_dir / "metrics.jsonl").read_text().splitlines()[-1])
    peak = json.loads((out_dir / "ledger.json").read_text())["ranks"][0]["memory"]["peak"]
    row = {
        "variant": variant.name,
        "seed": seed,
        "val_loss": last["val_loss"],
        "losses": list(losses(out_dir).values()),
    }
    return {**row, "activation_bytes": peak["activations"]}


def main(write: bool = False) -> None:
    """Train all variants with all seeds.

    Args:
        write: also write bench/results/residual-dtype-<hardware>.json.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for variant in VARIANTS:
                row = run_variant(variant, seed, Path(folder))
                rows.append(row)
                mean = statistics.fmean(row["losses"][-LAST_STEPS:])
                print(
                    f"{variant.name}, seed {seed}: validation loss {row['val_loss']:.4f}, training loss of the last "
                    f"{LAST_STEPS} steps {mean:.4f}, activations {row['activation_bytes']:,} bytes",
                    flush=True,
                )
    if write:
        settings = {"command": "python -m bench.trainer.residual_dtype --write", "steps": STEPS}
        print(f"wrote {write_result('residual-dtype', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
