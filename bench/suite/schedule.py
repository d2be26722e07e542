"""How long a suite will take, before it starts: the planner's roofline, for a GPU or for the machine it runs on."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bench.plan.planner import exchanges
from bench.plan.speed import GPUS, PARTS, Gpu, step_seconds, waiting
from bench.plan.trace import trace
from nanoGPT.checkpoint.weights import tokenizer_rows
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig

START, START_A_RANK = 6.0, 1.5  # seconds until a run's first step, and of its end


def gpu_of(name: str | None, elsewhere: bool = False) -> Gpu:
    """A GPU by name, or what this machine has.

    Args:
        elsewhere: the GPUs are not this machine's.

    Raises:
        ConfigError: a name that the planner does not know, or none of a GPU that is elsewhere.
    """
    if name is None and elsewhere:
        raise ConfigError("give the cluster's GPUs, such as --gpu=h100: times are estimated for them")
    if name is None:
        return here()
    if name not in GPUS:
        raise ConfigError(f"--gpu={name} is unknown{did_you_mean(name, list(GPUS)) or ': give ' + ', '.join(GPUS)}")
    return GPUS[name]


def here() -> Gpu:
    """This machine's GPU, if the planner knows it; else its CPU, measured in half a second."""
    if torch.cuda.is_available():
        words = torch.cuda.get_device_name().lower().replace(" ", "")
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        fitting = [gpu for name, gpu in GPUS.items() if name.split("-")[0] in words and abs(gpu.gib - gib) < 8]
        return fitting[0] if fitting else GPUS["t4"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have it
    try:
        a, b = torch.rand(768, 768), torch.rand(8_000_000)
        flops = 2 * 768**3 / fastest_of(lambda: a @ a)
        copied = 8 * b.numel() / fastest_of(lambda: b.clone())
    finally:
        torch.set_num_threads(threads)
    return Gpu(1.0, flops, copied, copied / 4, copied / 4)


def fastest_of(work: Any, times: int = 5) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def seconds_of(config: TrainConfig | None, phase: str, ranks: int, gpu: Gpu) -> float:
    """Of a whole run, its start and its evaluations included; an estimate."""
    assert config is not None
    model = GPTConfig.of({**vars(config), "vocab_size": vocabulary(config)})
    found = trace(replace(config, compile=False), model, ranks, gpu)  # whose roofline knows both speeds
    roofline, micro_batches = found.roofline, max(1, config.gradient_accumulation_steps // ranks)
    times = roofline.compiled if config.compile else waiting(roofline.eager, roofline.kernels)
    parts = {part: times[part] / (1 if part == "update" else found.micro_batches) for part in PARTS}
    crowd = max(1.0, ranks / (os.cpu_count() or 1)) if gpu not in GPUS.values() else 1.0  # ranks that share a core
    params = found.costs.state["parameters"] // 4
    units = config.n_layer + 1
    sent = exchanges((phase, {}), found.costs.traffic, params, units, micro_batches, gpu, config.compile)
    evaluations = (config.max_iters // config.eval_interval + 1) * -(-config.eval_iters // ranks)
    seconds = config.max_iters * step_seconds(parts, *sent, micro_batches) + evaluations * parts["forward"]
    return START + START_A_RANK * ranks + crowd * seconds


def vocabulary(config: TrainConfig) -> int:
    """Rows of the model's embedding: what the configuration says, or the dataset."""
    if config.vocab_size:
        return config.vocab_size
    return tokenizer_rows(TokenData(config.dataset, config.block_size, config.batch_size, config.seed).tokenizer)


def describe_seconds(seconds: Mapping[Any, float], price: float | None) -> str:
    """What is left to do, in minutes, and what it costs."""
    if not seconds:
        return ""
    total = sum(seconds.values())
    hours = sum(run.ranks * each for run, each in seconds.items()) / 3600
    cost = f", {hours:,.2f} GPU-hours, {hours * price:,.2f} in all" if price else ""
    return f"; about {max(1, round(total / 60))} minute(s) to go, by the planner{cost}"
