"""Combine the options of FSDP: every pair of values of every two options, in as few runs as possible.

Most faults depend on at most two options (Kuhn, Wallace and Gallo 2004), so a covering array of strength 2 finds them
without every combination of all options. Gradient accumulation and clipping are on. Dropout is on, except where the
masks cannot be the baseline's: the attention kernel draws different masks.
"""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

from bench.matrix.cells import make_config
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from phase3_fsdp.fsdp import FsdpConfig, init_shards, put_parameters_on_meta, shard_model

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
    "async_save": [False, True],
    "dtype": ["float32", "bfloat16"],
    "vocab_size": [75, 131],
}
SEED = 10  # with this seed, there is one row of kernels for each number of ranks
KERNELS_COST = 10  # penalty for a row with kernels, in pairs, because the interpreter is slow
STEPS = 3
# One short sequence and one head, because the interpreter runs kernels once for each of their blocks.
MODEL: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 2,
    "n_head": 1,
    "n_embd": 32,
    "block_size": 8,
    "batch_size": 1,
    "learning_rate": 2e-3,
    "warmup_iters": 20,
    "max_iters": STEPS,
    "eval_interval": 20,
    "eval_iters": 1,
}
MAX_LOSS_DIFFERENCE = {"float32": 1e-5, "bfloat16": 1e-2}


def is_possible(row: Row) -> bool:
    """Return whether the shard size divides the ranks."""
    return row["ranks"] % int(row["fsdp_shard_size"].replace("all", "1")) == 0


def make_covering_array() -> list[Row]:
    """Return rows that contain every possible pair of values of every two options.

    The algorithm is greedy. It makes 200 random rows that contain one of the remaining pairs, and takes the row that
    covers the most remaining pairs.
    """

    def gain(row: Row) -> int:
        return len(find_pairs(row) & remaining) - (KERNELS_COST if row["kernels"] != "none" else 0)

    generator, names = random.Random(SEED), list(OPTIONS)
    remaining = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in OPTIONS[a] for y in OPTIONS[b]}
    remaining = {pair for pair in remaining if is_possible({"ranks": 4, "fsdp_shard_size": "1", **dict(pair)})}
    rows: list[Row] = []
    while remaining:
        first = min(remaining, key=str)
        candidates = [{**{n: generator.choice(OPTIONS[n]) for n in names}, **dict(first)} for _ in range(200)]
        rows.append(max(filter(is_possible, candidates), key=gain))
        remaining -= find_pairs(rows[-1])
    return rows


def find_pairs(row: Row) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


def make_cells(row: Row, folder: Path) -> list[tuple[str, int, TrainConfig]]:
    """Return the two runs of a row, each with its phase, its number of ranks and its configuration.

    The first run is the baseline on one rank, with the same model, data, dropout and precision. Rows with the same
    values of these share one baseline run. The second run has the row's options.
    """
    options = {name: value for name, value in row.items() if name != "ranks"}
    fields = {**MODEL, "gradient_accumulation_steps": min(2 * row["ranks"], 8), "dropout": 0.2, **options}
    if row["kernels"] != "none":
        fields["dropout"] = 0.0
        # The only row of 4 ranks with kernels took more time than all others. No kernel reads parameters of two blocks.
        fields["n_layer"] = 1 if row["ranks"] == 4 else MODEL["n_layer"]
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    reference = folder.parent / f"reference-{fields['vocab_size']}-{fields['dropout']}-{fields['dtype']}"
    plain = make_config("baseline", reference, **{name: value for name, value in fields.items() if name in known})
    return [("baseline", 1, plain), ("phase3", row["ranks"], make_config("phase3", folder / "run", **fields))]


def make_sharded_model(shape: GPTConfig, model_class: type[GPT] = GPT, **options: Any) -> tuple[GPT, FsdpConfig]:
    """Return a sharded model with its initial weights, and its configuration. Call it in a rank."""
    fields = {name: value for name, value in vars(shape).items() if name != "gelu"}
    config = FsdpConfig(**{"device": "cpu", **fields, **options})
    run = create_runtime(config.device, config.dtype)
    with put_parameters_on_meta():
        model = model_class(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    return model, config
