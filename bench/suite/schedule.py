"""Estimate the duration of a suite with the planner's roofline model, for a given GPU or for this machine."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bench.plan.plan import list_choices
from bench.plan.planner import estimate_communication
from bench.plan.speed import GPUS, STAGES, Gpu, apply_launch_bound, step_seconds
from bench.plan.trace import trace
from nanoGPT.checkpoint.weights import tokenizer_rows
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import DTYPES
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig

STARTUP_SECONDS, STARTUP_SECONDS_PER_RANK = 6.0, 1.5  # from the start of a run to its first step, and its shutdown


def select_gpu(name: str | None, is_remote: bool = False) -> Gpu:
    """Return a GPU by name. Without a name, return the hardware of this machine.

    Args:
        is_remote: the runs use GPUs of another machine.

    Raises:
        ConfigError: the planner does not know the name, or remote GPUs have no name.
    """
    if name is None and is_remote:
        raise ConfigError("--gpu is missing: name the cluster's GPUs, such as --gpu=h100, to estimate the duration")
    if name is None:
        return detect_hardware()
    if name not in GPUS:
        choices = did_you_mean(name, list(GPUS)) or list_choices(GPUS)
        raise ConfigError(f"--gpu={name} is unknown{choices}")
    return GPUS[name]


def detect_hardware() -> Gpu:
    """Return this machine's GPU; a T4 if the planner does not know it. Without a GPU, measure the CPU (0.5 s)."""
    if torch.cuda.is_available():
        device_name = torch.cuda.get_device_name().lower().replace(" ", "")
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        matches = [gpu for name, gpu in GPUS.items() if name.split("-")[0] in device_name and abs(gpu.gib - gib) < 8]
        return matches[0] if matches else GPUS["t4"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank on a CPU uses one thread
    try:
        a, b = torch.rand(768, 768), torch.rand(8_000_000)
        flops = 2 * 768**3 / fastest_of(lambda: a @ a)
        bandwidth = 8 * b.numel() / fastest_of(lambda: b.clone())
    finally:
        torch.set_num_threads(threads)
    return Gpu(1.0, flops, bandwidth, bandwidth / 4, bandwidth / 4, flops)


def fastest_of(work: Any, times: int = 5) -> float:
    """Call `work` several times. Return the seconds of the fastest call."""
    durations = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return min(durations)


def estimate_seconds(config: TrainConfig | None, phase: str, ranks: int, gpu: Gpu) -> float:
    """Return the estimated duration of a run in seconds, with its startup and its evaluations."""
    assert config is not None
    shape = GPTConfig.from_dict({**vars(config), "vocab_size": vocabulary_size(config)})
    is_cpu = gpu not in GPUS.values()
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    # The roofline of an eager trace has eager and compiled times.
    traced = trace(replace(config, compile=False, dtype=dtype), shape, ranks, gpu)
    roofline, micro_batches = traced.roofline, max(1, config.gradient_accumulation_steps // ranks)
    times = roofline.compiled if config.compile else apply_launch_bound(roofline.eager, roofline.kernels)
    stages = {stage: times[stage] / (1 if stage == "update" else traced.micro_batches) for stage in STAGES}
    ranks_per_core = max(1.0, ranks / (os.cpu_count() or 1)) if is_cpu else 1.0
    names = ("fsdp_shard_size", "fsdp_cpu_offload")
    options = {name: value for name in names if (value := getattr(config, name, None)) not in (None, "all", False)}
    params, units = shape.count_params(), config.n_layer + 1
    communication = estimate_communication(
        (phase, options),
        traced.costs.traffic,
        params,
        units,
        micro_batches,
        gpu,
        config.compile,
        DTYPES[dtype].itemsize,
    )
    evaluations = (config.max_iters // config.eval_interval + 1) * -(-config.eval_iters // ranks)
    seconds = config.max_iters * step_seconds(stages, *communication, micro_batches) + evaluations * stages["forward"]
    return STARTUP_SECONDS + STARTUP_SECONDS_PER_RANK * ranks + ranks_per_core * seconds


def vocabulary_size(config: TrainConfig) -> int:
    """Return the rows of the model's embedding: from the configuration, or else from the dataset's tokenizer."""
    if config.vocab_size:
        return config.vocab_size
    return tokenizer_rows(TokenData(config.dataset, config.block_size, config.batch_size, config.seed).tokenizer)


def describe_duration(seconds: Mapping[Any, float], price: float | None) -> str:
    """Return the end of a sentence: the minutes that the runs take, and their cost if there is a price.

    Args:
        seconds: estimated duration of each run.
        price: of a GPU per hour.
    """
    if not seconds:
        return ""
    total = sum(seconds.values())
    hours = sum(run.ranks * duration for run, duration in seconds.items()) / 3600
    cost = f", {hours:,.2f} GPU-hours, cost {hours * price:,.2f}" if price else ""
    return f"; estimated time: {max(1, round(total / 60))} minute(s){cost}"
