"""Combine the options of FSDP on 1 to 8 ranks; compare losses with the baseline and communication with the formula.

    make bench NAME=fsdp                     # 50 steps per row; 20 minutes on 2 cores that also ran other work
    make bench NAME=fsdp ARGS=--write        # also write bench/results/fsdp-options-<hardware>.json

The rows do not contain every combination of all options. They contain every pair of values of every two options (a
covering array of strength 2), because most faults depend on at most two options (Kuhn, Wallace and Gallo 2004).
Gradient accumulation and clipping are on. Dropout is on, except where the masks cannot be the baseline's: compiled code
and the attention kernel draw different masks.
"""

import dataclasses
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import make_config, run_cell
from bench.tables.records import write_result
from nanoGPT.job.program import command_line, report_errors
from nanoGPT.train_config import TrainConfig

Row = dict[str, Any]
OPTIONS: dict[str, list[Any]] = {
    "ranks": [2, 4, 1, 8],
    "fsdp_wrap": ["block", "1000"],
    "fsdp_reshard_after_forward": [True, False],
    "fsdp_shard_size": ["all", "2", "1"],
    "fsdp_cpu_offload": [False, True],
    "fsdp_activation_checkpointing": ["none", "full", "selective", "every_2"],
    "fsdp_sync_every_micro_batch": [False, True],
    "kernels": ["none", "triton"],
    "compile": [False, True],
    "async_save": [False, True],
    "dtype": ["float32", "bfloat16"],
    "vocab_size": [75, 50304],
}
# The batch is large enough, the warmup long enough and the learning rate low enough that rounding differences do not
# grow. With batches of 32 tokens, even the compiled and the eager baseline differed by 1e-4 after 50 steps. At twice
# this learning rate, fp32 losses differed by 1.9e-5, and the loss of the eager baseline in bfloat16 with a vocabulary
# of 50304 rose from 3 to 12 for one step.
SMALL: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 32,
    "batch_size": 8,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-3,
    "warmup_iters": 20,
    "eval_interval": 20,
    "eval_iters": 3,
}
TINY = {**SMALL, "n_embd": 32, "block_size": 16, "batch_size": 2}  # for tests: a few steps, with interpreted kernels
DEFAULTS: dict[str, Any] = {"dtype": "float32", "vocab_size": 75}  # for rows without these fields
MAX_LOSS_DIFFERENCE = {"float32": 1e-5, "bfloat16": 1e-2}


def is_possible(row: Row) -> bool:
    """Return False if the shard size does not divide the ranks, or if kernels are combined with a large vocabulary.

    The interpreted loss kernel would take too long for a vocabulary of 50304.
    """
    if row.get("kernels") == "triton" and row.get("vocab_size") == 50304:
        return False
    return row["ranks"] % int(row["fsdp_shard_size"].replace("all", "1")) == 0


def make_covering_array(options: dict[str, list[Any]], seed: int = 0, kernels_cost: int = 0) -> list[Row]:
    """Return rows that contain every possible pair of values of every two options.

    The algorithm is greedy. It makes 200 random rows that contain one of the remaining pairs, and takes the row that
    covers the most remaining pairs.

    Args:
        kernels_cost: penalty for a row with kernels, in pairs.
    """

    def gain(row: Row) -> int:
        return len(find_pairs(row) & remaining) - (kernels_cost if row["kernels"] != "none" else 0)

    generator, names = random.Random(seed), list(options)
    remaining = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    remaining = {pair for pair in remaining if is_possible({"ranks": 4, "fsdp_shard_size": "1", **dict(pair)})}
    rows: list[Row] = []
    while remaining:
        first = min(remaining, key=str)
        candidates = [{**{n: generator.choice(options[n]) for n in names}, **dict(first)} for _ in range(200)]
        rows.append(max(filter(is_possible, candidates), key=gain))
        remaining -= find_pairs(rows[-1])
    return rows


def find_pairs(row: Row) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


def list_rows(is_quick: bool = False) -> list[Row]:
    """Return every row.

    Args:
        is_quick: return a smaller covering array without the slow options (compilation and a large vocabulary), and
            with few rows of interpreted kernels.
    """
    if not is_quick:
        return make_covering_array(OPTIONS)
    options = {name: values for name, values in OPTIONS.items() if name != "compile"} | {"vocab_size": [75, 131]}
    # With this seed, there is one row of kernels for each number of ranks.
    return make_covering_array(options, seed=10, kernels_cost=10)


def make_fields(row: Row, steps: int, model: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration for a row."""
    has_other_masks = row.get("compile") or row["kernels"] != "none"
    options = {name: value for name, value in row.items() if name != "ranks"}
    return {**model, "dropout": 0.0 if has_other_masks else 0.2, "max_iters": steps, **DEFAULTS, **options}


def make_cells(row: Row, folder: Path, steps: int, model: dict[str, Any] = SMALL) -> list[tuple[str, int, TrainConfig]]:
    """Return the two runs of a row, each with its phase, its number of ranks and its configuration.

    The first run is the baseline on one rank, with the same model, data, dropout and precision. Rows with the same
    values of these share one baseline run. The second run has the row's options.
    """
    fields = make_fields(row, steps, model)
    known = {field.name for field in dataclasses.fields(TrainConfig)} - {"compile"}
    reference = folder.parent / f"reference-{fields['vocab_size']}-{fields['dropout']}-{fields['dtype']}"
    plain = make_config("baseline", reference, **{name: value for name, value in fields.items() if name in known})
    return [("baseline", 1, plain), ("phase3", row["ranks"], make_config("phase3", folder / "run", **fields))]


def run_row(row: Row, folder: Path, steps: int, model: dict[str, Any] = SMALL) -> Row:
    """Train the runs of a row that this folder does not contain yet.

    Returns:
        The row with these keys:
            gap: max loss difference from the baseline.
            traffic, expected: tensor bytes of rank 0's collectives, by kind and number of ranks; measured by the
                ledger, and from the formula.
            state, expected_state: bytes of rank 0's model state; measured, and from the formula.
    """
    reference, result = (run_cell(*cell) for cell in make_cells(row, folder, steps, model))
    collectives = {f"{each['kind']} over {each['ranks']}": each for each in result.rank_0["collectives"]}
    return {
        **row,
        "dropout": make_fields(row, steps, model)["dropout"],
        "gap": result.max_loss_difference(reference),
        "traffic": {name: each["tensor_bytes"] for name, each in collectives.items()},
        "expected": {name: each["expected_bytes"] for name, each in collectives.items()},
        "state": sum(result.rank_0["state_bytes"].values()),
        "expected_state": sum(result.rank_0["expected_state_bytes"].values()),
    }


def main(steps: int = 50, write: bool = False) -> None:
    """Run every row.

    Args:
        steps: training steps of each run.
        write: also write bench/results/fsdp-options-<hardware>.json.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, row in enumerate(list_rows()):
            rows.append(run_row(row, Path(folder) / str(i), steps))
            print(json.dumps(rows[-1]), flush=True)
    if write:
        settings = {"command": "make bench NAME=fsdp ARGS=--write", "steps": steps, "model": SMALL}
        print(f"wrote {write_result('fsdp-options', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
