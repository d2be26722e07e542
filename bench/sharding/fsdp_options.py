"""Every option of FSDP with every other, on 1 to 8 ranks: losses beside the baseline's, traffic beside the formula's.

    make bench-fsdp                     # 50 steps a row; 45 minutes on 2 cores that had other work too
    make bench-fsdp ARGS=--write        # and bench/results/fsdp-options-<hardware>.json

Not all combinations are run, but for any two options every pair of their values (a covering array of strength 2: most
faults need no more than two things at a time; Kuhn, Wallace and Gallo 2004). Accumulation and clipping are on. Dropout
is on except where masks cannot be the baseline's: compiled code and attention's kernel draw their own.
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

from bench.matrix.cells import config_of, run_cell
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.train_config import TrainConfig

Row = dict[str, Any]
OPTIONS: dict[str, list[Any]] = {
    "ranks": [2, 4, 1, 8],
    "fsdp_wrap": ["block", "size"],
    "fsdp_reshard_after_forward": [True, False],
    "fsdp_shard_size": ["all", "2", "1"],
    "fsdp_cpu_offload": [False, True],
    "fsdp_activation_checkpointing": ["none", "full", "selective", "every_2"],
    "fsdp_sync_every_micro_batch": [False, True],
    "fsdp_prefetch": [0, 1, 2],
    "kernels": ["none", "triton"],
    "compile": [False, True],
    "async_save": [False, True],
    "dtype": ["float32", "bfloat16"],
    "vocab_size": [75, 50304],
}
DDP: list[Row] = [
    {"ranks": ranks, "use_fsdp": False, "fsdp_activation_checkpointing": again, "kernels": kernels, "compile": compiled}
    for ranks, again, kernels, compiled in (
        (1, "full", "none", False),
        (2, "none", "triton", True),
        (4, "selective", "none", False),
    )
]
# Large and slow enough that a difference in the last digit is not multiplied: with batches of 32 tokens even the
# baseline, compiled and not, was 1e-4 apart after 50 steps.
SMALL: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 32,
    "batch_size": 8,
    "gradient_accumulation_steps": 8,
    "warmup_iters": 20,
    "eval_interval": 20,
    "eval_iters": 3,
}
TINY = {**SMALL, "n_embd": 32, "block_size": 16, "batch_size": 2}  # enough for a few steps, and interpreted fast
DEFAULTS: dict[str, Any] = {"dtype": "float32", "vocab_size": 75}  # for rows that do not name them
LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}


def possible(row: Row) -> bool:
    """Shards divide the ranks; and nobody waits for the loss's kernel over 50304 rows where it is interpreted."""
    if row.get("kernels") == "triton" and row.get("vocab_size") == 50304:
        return False
    return row["ranks"] % int(row["fsdp_shard_size"].replace("all", "1")) == 0


def covering_array(options: dict[str, list[Any]], seed: int = 0, kernels_cost: int = 0) -> list[Row]:
    """Rows in which every pair of values of every two options occurs, as far as it is possible.

    Greedy: each row is the best of many that begin with a pair still to be covered; options are filled in at random.

    Args:
        kernels_cost: pairs that a row must have more to be chosen although it has kernels.
    """

    def gain(row: Row) -> int:
        return len(pairs_in(row) & wanted) - (kernels_cost if row["kernels"] != "none" else 0)

    draw, names = random.Random(seed), list(options)
    wanted = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    wanted = {pair for pair in wanted if possible({"ranks": 4, "fsdp_shard_size": "1", **dict(pair)})}
    rows: list[Row] = []
    while wanted:
        first = min(wanted, key=str)
        tries = [{**{n: draw.choice(options[n]) for n in names}, **dict(first)} for _ in range(200)]
        rows.append(max(filter(possible, tries), key=gain))
        wanted -= pairs_in(rows[-1])
    return rows


def pairs_in(row: Row) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


def all_rows(quick: bool = False) -> list[Row]:
    """Every row; or an array of its own without what takes most of the time, compilation and a large vocabulary, and
    with few rows of interpreted kernels."""
    if not quick:
        return [*covering_array(OPTIONS), *DDP]
    options = {name: values for name, values in OPTIONS.items() if name != "compile"} | {"vocab_size": [75, 131]}
    return [*covering_array(options, kernels_cost=10), *(row for row in DDP if not row["compile"])]


def words_of(row: Row, steps: int, model: dict[str, Any]) -> dict[str, Any]:
    """The fields of the configuration that a row asks for."""
    own_masks = row.get("compile") or row["kernels"] != "none"
    options = {name: value for name, value in row.items() if name != "ranks"}
    if row.get("fsdp_wrap") == "size":
        options["fsdp_min_num_params"] = 1000
    return {**model, "dropout": 0.0 if own_masks else 0.2, "max_iters": steps, **DEFAULTS, **options}


def cells_of(row: Row, folder: Path, steps: int, model: dict[str, Any] = SMALL) -> list[tuple[str, int, TrainConfig]]:
    """What a row trains, each with its phase and its number of ranks.

    The first is the baseline on one rank, with the same model, data, dropout and precision, which rows share; the
    second has the row's options.
    """
    words = words_of(row, steps, model)
    known = {field.name for field in dataclasses.fields(TrainConfig)} - {"compile"}
    reference = folder.parent / f"reference-{words['vocab_size']}-{words['dropout']}-{words['dtype']}"
    plain = config_of("baseline", reference, **{name: value for name, value in words.items() if name in known})
    return [("baseline", 1, plain), ("phase3", row["ranks"], config_of("phase3", folder / "run", **words))]


def run_row(row: Row, folder: Path, steps: int, model: dict[str, Any] = SMALL) -> Row:
    """Train with a row's options, as far as that has not been done in this folder.

    Returns:
        The row with `gap`, the largest difference from the baseline's losses; `traffic`, bytes that the ledger counted
        and `expected`, those of the formula, by kind and ranks; `state` and `expected_state`, the bytes of rank 0.
    """
    reference, found = (run_cell(*cell) for cell in cells_of(row, folder, steps, model))
    sent = {f"{each['kind']} over {each['ranks']}": each for each in found.rank_0["collectives"]}
    return {
        **row,
        "dropout": words_of(row, steps, model)["dropout"],
        "gap": found.gap(reference),
        "traffic": {name: each["tensor_bytes"] for name, each in sent.items()},
        "expected": {name: each["expected_bytes"] for name, each in sent.items()},
        "state": sum(found.rank_0["state_bytes"].values()),
        "expected_state": sum(found.rank_0["expected_state_bytes"].values()),
    }


def main(steps: int = 50, write: bool = False) -> None:
    """Run every row.

    Args:
        steps: of each run.
        write: also write bench/results/fsdp-options-<hardware>.json.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, row in enumerate(all_rows()):
            rows.append(run_row(row, Path(folder) / str(i), steps))
            print(json.dumps(rows[-1]), flush=True)
    if write:
        settings = {"command": "make bench-fsdp", "steps": steps, "model": SMALL}
        print(f"wrote {write_result('fsdp-options', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    command_line(main, sys.argv[1:])
