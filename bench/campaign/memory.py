"""Stages that compare the memory of a training step with the planner's prediction, up to the largest GPT that trains.

The functions import the planner themselves: if its imports fail, the other stages still run.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.campaign.settings import Settings, Skipped
from bench.campaign.tiles import choose_tiles
from bench.campaign.trainers import TINY, choose_batch_size, is_out_of_memory, run_trainer
from bench.plan.models import MODELS
from nanoGPT.model import GPTConfig
from workshop.ranks import RankFailed

if TYPE_CHECKING:
    from bench.plan.options import Row
    from bench.plan.planner import Planner

VOCAB_SIZE = 50304
LARGE_SHAPE = (20, 2560)  # heads, channels: one block has 79M parameters, 1.3 GB of model state
TINY_SHAPE = GPTConfig(TINY["n_layer"], TINY["n_head"], TINY["n_embd"], TINY["block_size"], False, 64)


@contextlib.contextmanager
def start_planner(shape: GPTConfig, micro_batches: int = 1, optimizer: str = "adamw") -> Iterator["Planner"]:
    """Start a planner for one GPU; its kind does not change the memory that the planner predicts."""
    from bench.plan.plan import start_workers
    from bench.plan.planner import Job, Planner
    from bench.plan.speed import GPUS

    with start_workers() as pool:
        yield Planner(Job(shape, GPUS["h100"], 1, micro_batches, optimizer), pool)


def describe_memory(settings: Settings, predicted: float, run: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted and the measured peak. On a CPU, the memory of the process says little."""
    measured = None if settings.dry_run else run["peak_bytes"]
    return {"predicted_bytes": predicted, "measured_bytes": measured, "tiles": run["tiles"]}


def compare_plan(settings: Settings, phase: str) -> dict[str, Any]:
    """Compare the planner's peak memory of an eager step of GPT-2 124M with that of torch's allocator."""
    batch_size = choose_batch_size(settings, "gpt2")
    shape = TINY_SHAPE if settings.dry_run else GPTConfig(*MODELS["gpt2"], 1024, False, VOCAB_SIZE)
    with start_planner(shape) as planner:
        predicted = planner.peak_bytes((phase, {}), batch_size)
    run = run_trainer(settings, phase, "gpt2", compile=False, batch_size=batch_size, gradient_accumulation_steps=1)
    return {"phase": phase, "batch_size": batch_size, **describe_memory(settings, predicted, run)}


def compare_plan_of_config(settings: Settings, phase: str, name: str) -> dict[str, Any]:
    """Compare the planner's peak memory with that of torch's allocator, for three steps of a configuration file.

    The steps are eager, and have two micro-batches.
    """
    from bench.plan.options import phase_options
    from bench.plan.sizes import read_config

    config = read_config(phase, name, 1)
    options, names = phase_options(config), ("n_layer", "n_head", "n_embd", "block_size")
    fields = {field: getattr(config, field) for field in names}
    shape = TINY_SHAPE if settings.dry_run else GPTConfig(**fields, bias=config.bias, vocab_size=VOCAB_SIZE)
    batch_size = TINY["batch_size"] if settings.dry_run else config.batch_size
    with start_planner(shape, 2, config.optimizer) as planner:
        predicted = planner.peak_bytes((phase, options), batch_size)
    fields |= {"optimizer": config.optimizer, "batch_size": batch_size, "gradient_accumulation_steps": 2, **options}
    run = run_trainer(settings, phase, "gpt2", compile=False, max_iters=3, **fields)
    return {"phase": phase, "config": name, "batch_size": batch_size, **describe_memory(settings, predicted, run)}


def choose_depth(planner: "Planner", row: "Row", batch_size: int, limit: float) -> tuple[int, float]:
    """Return the largest number of blocks whose training step needs at most `limit` bytes, and the bytes of that step.

    Raises:
        Skipped: one block needs more.
    """
    depth, predicted = 0, 0.0
    while True:
        planner.shape = replace(planner.shape, n_layer=depth + 1)
        peak = planner.peak_bytes(row, batch_size)
        if peak > limit:
            break
        depth, predicted = depth + 1, peak
    if not depth:
        raise Skipped(f"one block needs {peak / 2**30:.1f} GiB, as the planner predicts")
    return depth, predicted


def train_largest(settings: Settings, percent: int) -> dict[str, Any]:
    """Train the largest GPT for which the planner predicts at most this percentage of the GPU's memory.

    It trains three steps with every saving of memory except CPU offload, with one sequence per micro-batch.
    """
    options = {"fsdp_activation_checkpointing": "full", "kernels": "loss"}
    shape = TINY_SHAPE if settings.dry_run else GPTConfig(1, *LARGE_SHAPE, 1024, False, VOCAB_SIZE)
    memory = 2**21 if settings.dry_run else torch.cuda.get_device_properties(0).total_memory
    with start_planner(shape) as planner:
        depth, predicted = choose_depth(planner, ("phase3", options), 1, percent / 100 * memory)
    shape = replace(shape, n_layer=depth)
    fields = {"n_layer": depth, "n_head": shape.n_head, "n_embd": shape.n_embd, "compile": False, **options}
    fields |= {"max_iters": 3, "batch_size": 1, "gradient_accumulation_steps": 1}
    result = {"parameters": shape.count_params(), "n_layer": depth, "n_embd": shape.n_embd, "memory_bytes": memory}
    try:
        run = run_trainer(settings, "phase3", "gpt2", **fields)
    except RankFailed as failure:
        if not is_out_of_memory(failure):
            raise
        tiles = choose_tiles(settings, options["kernels"])
        return {**result, "fits": False, "predicted_bytes": predicted, "measured_bytes": None, "tiles": tiles}
    return {**result, "fits": True, "losses": run["losses"], **describe_memory(settings, predicted, run)}
