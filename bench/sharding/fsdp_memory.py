"""What a rank of FSDP holds and takes, on 1, 2, 4 and 8 ranks, beside DDP and beside the formula.

    python -m bench.sharding.fsdp_memory  # the default model, a few steps each; about two minutes on 2 cores
    python -m bench.sharding.fsdp_memory --write      # and bench/results/fsdp-memory-<hardware>.json

Bytes are those of the ledger, tensor by tensor, on rank 0 in the third step; `step_ms` is the median of the others.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import config_of, run_cell
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
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
    """Train a few steps with the defaults and these options: the ledger of rank 0, and the formula's numbers."""
    words = {"device": "cpu", "batch_size": 12, "gradient_accumulation_steps": 8, "max_iters": steps, "eval_iters": 1}
    config = config_of("phase3", folder, **words, **options)
    assert isinstance(config, FsdpConfig)
    found = run_cell("phase3", ranks, config)
    shape = GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias, 75, config.dropout)
    return {
        "ranks": ranks,
        "options": options,
        "parameters": found.ledger["parameters"],
        "expected_activations": activations(shape, config),
        "ledger": found.rank_0,
        "step_ms": found.step_ms,
    }


def activations(shape: GPTConfig, config: FsdpConfig) -> int:
    """What a forward keeps by the arithmetic, less the logits, of which the trainer lets go."""
    B, T = config.batch_size, config.block_size
    return activation_bytes(shape, B, T, mode=config.fsdp_activation_checkpointing) - 4 * B * T * shape.vocab_size


def main(steps: int = 12, write: bool = False) -> None:
    """Run every case.

    Args:
        steps: of each run.
        write: also write bench/results/fsdp-memory-<hardware>.json.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (ranks, options) in enumerate(CASES):
            rows.append(run_case(ranks, options, Path(folder) / str(i), steps))
            print(json.dumps(rows[-1]), flush=True)
    if write:
        settings = {"command": "python -m bench.sharding.fsdp_memory", "steps": steps}
        print(f"wrote {write_result('fsdp-memory', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    command_line(main, sys.argv[1:])
