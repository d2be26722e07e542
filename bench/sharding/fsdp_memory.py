"""Measure memory per rank and step time of FSDP on 1, 2, 4 and 8 ranks, and compare them with DDP and the formula.

    python -m bench.sharding.fsdp_memory              # the default model, a few steps per run; two minutes on 2 cores
    python -m bench.sharding.fsdp_memory --write      # also write bench/results/fsdp-memory-<hardware>.json

The ledger counts the bytes of every tensor on rank 0 in the third step. `step_ms` is the median of the other steps.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import make_config, run_cell
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPTConfig
from phase3_fsdp.activation_bytes import activation_bytes
from phase3_fsdp.fsdp import FsdpConfig

MODES = ("none", "selective", "every_2", "full")
Case = tuple[int, dict[str, Any]]
CASES: list[Case] = [
    (1, {"use_fsdp": False}),
    (4, {"use_fsdp": False}),
    *((ranks, {}) for ranks in (1, 2, 4, 8)),
    (4, {"fsdp_reshard_after_forward": False}),
    (4, {"fsdp_shard_size": "2"}),
    (4, {"fsdp_sync_every_micro_batch": True}),
    *((4, {"fsdp_activation_checkpointing": mode}) for mode in MODES[1:]),
]


def run_case(ranks: int, options: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """Train a few steps with the defaults and these options; return the ledger of rank 0 and the formula's numbers."""
    fields = {"device": "cpu", "batch_size": 12, "gradient_accumulation_steps": 8, "max_iters": steps, "eval_iters": 1}
    config = make_config("phase3", folder, **fields, **options)
    assert isinstance(config, FsdpConfig)
    result = run_cell("phase3", ranks, config)
    shape = GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias, 75, config.dropout)
    return {
        "ranks": ranks,
        "options": options,
        "parameters": result.ledger["parameters"],
        "expected_activations": expected_activation_bytes(shape, config),
        "ledger": result.rank_0,
        "step_ms": result.step_ms,
    }


def expected_activation_bytes(shape: GPTConfig, config: FsdpConfig) -> int:
    """Return the bytes that the forward pass saves by the formula."""
    return activation_bytes(shape, config.batch_size, config.block_size, mode=config.fsdp_activation_checkpointing)


def main(steps: int = 12, write: bool = False) -> None:
    """Run every case.

    Args:
        steps: training steps of each run.
        write: also write bench/results/fsdp-memory-<hardware>.json.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (ranks, options) in enumerate(CASES):
            rows.append(run_case(ranks, options, Path(folder) / str(i), steps))
            print(json.dumps(rows[-1]), flush=True)
    if write:
        settings = {"command": "python -m bench.sharding.fsdp_memory --write", "steps": steps}
        print(f"wrote {write_result('fsdp-memory', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
