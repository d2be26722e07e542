"""Estimate the duration of a suite with the planner's roofline model, for a given GPU or for this machine."""

from collections.abc import Mapping
from typing import Any

from bench.plan.plan import list_choices
from bench.plan.run import detect_hardware, predict_run
from bench.plan.speed import GPUS, Gpu
from nanoGPT.errors import ConfigError, did_you_mean
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


def estimate_seconds(config: TrainConfig | None, phase: str, ranks: int, gpu: Gpu) -> float:
    """Return the estimated duration of a run in seconds, with its startup and its evaluations."""
    assert config is not None
    predicted = predict_run(config, phase, ranks, gpu)
    evaluations = (config.max_iters // config.eval_interval + 1) * -(-config.eval_iters // ranks)
    seconds = config.max_iters * predicted.step_seconds + evaluations * predicted.forward_seconds
    return STARTUP_SECONDS + STARTUP_SECONDS_PER_RANK * ranks + seconds


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
