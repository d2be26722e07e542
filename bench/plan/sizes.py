"""Predict the memory of the named configurations, with three modes of activation checkpointing.

    python -m bench.plan.sizes --write     # a minute and a half; bench/results/sizes-<hardware>.json

Each configuration is read from its file, and its own phase is traced at its real size (`bench/plan/planner.py`).
"""

import sys
from concurrent.futures import Executor
from typing import Any

import torch

from bench.plan.options import phase_options
from bench.plan.plan import start_workers
from bench.plan.planner import Job, Planner
from bench.plan.speed import GPUS
from bench.tables.records import write_result
from nanoGPT.checkpoint.weights import PADDED_VOCAB
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.job.parse import parse
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from workshop.imports import ROOT
from workshop.phases import find_package, load_config_class

# Phase, configuration, number of GPUs and their kind.
SIZES = (
    ("baseline", "train_gpt2", 8, "a100-40"),
    ("phase2", "train_gpt2_medium", 8, "a100-40"),
    ("phase1", "train_gpt2_large", 8, "a100-40"),
    ("phase3", "train_gpt2_xl", 8, "a100-80"),
    ("phase3", "train_mid_350m", 2, "rtx6000ada"),
    ("phase3", "train_mid", 2, "rtx6000ada"),
    ("phase3", "train_target_1b", 2, "rtx6000ada"),
    ("phase3", "train_target", 2, "rtx6000ada"),
    ("phase3", "train_7b", 8, "h100"),
)
MODES = ("none", "selective", "full")


def read_config(phase: str, name: str, gpus: int) -> TrainConfig:
    """Return a configuration as a run on this number of ranks has it."""
    trainer = ROOT / find_package(phase) / "train.py"
    return parse(load_config_class(phase), [f"config/{name}.py"], trainer, gpus)


def predict_memory(phase: str, name: str, gpus: int, gpu: str, pool: Executor) -> dict[str, Any]:
    """Return the shape, the batch and the memory per rank of a configuration."""
    config = read_config(phase, name, gpus)
    shape = GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias, PADDED_VOCAB)
    micro_batches = config.gradient_accumulation_steps // gpus
    planner = Planner(Job(shape, GPUS[gpu], gpus, micro_batches, config.optimizer, "bfloat16"), pool)
    options = phase_options(config)
    modes: dict[str, Any] = {}
    for mode in MODES if phase == "phase3" else ("none",):
        checkpointing = {"fsdp_activation_checkpointing": mode} if phase == "phase3" else {}
        row = (phase, {**options, **checkpointing})
        modes[mode] = {"bytes": dict(planner.peak_memory(row, config.batch_size))}
        modes[mode]["largest_batch_size"] = planner.largest_batch_size(row)
    state = planner.extrapolate("state", (phase, options), config.batch_size)
    return {
        "phase": phase,
        "name": name,
        "gpus": gpus,
        "gpu": gpu,
        "parameters": shape.count_params(),
        "n_layer": shape.n_layer,
        "n_embd": shape.n_embd,
        "optimizer": config.optimizer,
        "batch_size": config.batch_size,
        "block_size": shape.block_size,
        "micro_batches": micro_batches,
        "mode": options.get("fsdp_activation_checkpointing", "none"),
        "state_bytes": state,
        "modes": modes,
    }


def main(write: bool = False) -> None:
    """Predict the memory of all named configurations.

    Args:
        write: also write bench/results/sizes-<hardware>.json.
    """
    rows = []
    with start_workers() as pool:
        for size in SIZES:
            rows.append(predict_memory(*size, pool))
            peaks = {mode: f"{sum(each['bytes'].values()) / 1e9:.1f} GB" for mode, each in rows[-1]["modes"].items()}
            print(f"{rows[-1]['name']}: {rows[-1]['parameters']:,} parameters, peak memory per rank {peaks}")
    if write:
        settings = {"command": "python -m bench.plan.sizes --write"}
        print(f"wrote {write_result('sizes', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
