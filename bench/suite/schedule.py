"""Estimate time, cost, memory and disk of a suite with the planner, for a given GPU or for this machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.plan.plan import list_choices
from bench.plan.run import detect_hardware, estimate_checkpoint_bytes, predict_run, vocabulary_size
from bench.plan.speed import GPUS, Gpu
from bench.suite.execution import Run
from bench.tables.records import format_table
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


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    Attributes:
        seconds: with its startup and its evaluations.
        peak_bytes: peak memory per rank.
        disk_bytes: of the checkpoints that the run keeps.
    """

    seconds: float
    peak_bytes: int
    disk_bytes: int


def estimate_run(config: TrainConfig | None, phase: str, ranks: int, gpu: Gpu) -> Estimate:
    """Return the estimate of a run. An evaluation with token accuracy computes two forward passes."""
    assert config is not None
    predicted = predict_run(config, phase, ranks, gpu)
    evaluations = (config.max_iters // config.eval_interval + 1) * -(-config.eval_iters // ranks)
    evaluations *= 2 if config.eval_accuracy else 1
    seconds = config.max_iters * predicted.step_seconds + evaluations * predicted.forward_seconds
    seconds += STARTUP_SECONDS + STARTUP_SECONDS_PER_RANK * ranks
    params = GPTConfig.from_dict({**vars(config), "vocab_size": vocabulary_size(config)}).count_params()
    saves = min(config.keep_checkpoints + 1, -(-config.max_iters // config.eval_interval))
    return Estimate(seconds, predicted.peak_bytes, saves * estimate_checkpoint_bytes(params, config))


def format_schedule(runs: Mapping[str, list[Run]], gpu: Gpu, price: float | None) -> str:
    """Return a table of runs, with a line for each phase, rank count and variant, and a line with the total.

    Args:
        runs: the runs that will be executed, by the name of their suite.
        gpu: the device of every rank.
        price: of a GPU per hour; None: unknown.
    """
    groups: dict[tuple[str, str, int, str], list[Run]] = {}
    for name, members in runs.items():
        for run in members:
            groups.setdefault((name, run.phase, run.ranks, run.variant), []).append(run)
    if not groups:
        return ""
    needs = {key: estimate_group(group, gpu) for key, group in groups.items()}
    lines = [[*map(str, key), *format_needs(each, price)] for key, each in needs.items()]
    total = {key: sum(each[key] for each in needs.values()) for key in next(iter(needs.values()))}
    total["peak"] = max(each["peak"] for each in needs.values())
    header = ["suite", "phase", "ranks", "variant", "runs", "wall clock (h:mm:ss)", "GPU-hours"]
    header += ["cost"] if price else []
    header += ["peak memory per rank (GB)", "checkpoints (GB)"]
    return format_table(header, [*lines, ["total", "", "", "", *format_needs(total, price)]])


def estimate_group(group: list[Run], gpu: Gpu) -> dict[str, float]:
    """Return what all runs of a group need together. They differ only in their seeds, which do not change it."""
    estimate, ranks = estimate_run(group[0].config, group[0].phase, group[0].ranks, gpu), group[0].ranks
    hours = len(group) * estimate.seconds / 3600
    needs = {"runs": len(group), "hours": hours, "gpu_hours": ranks * hours}
    return {**needs, "peak": estimate.peak_bytes / 1e9, "disk": len(group) * estimate.disk_bytes / 1e9}


def format_needs(needs: Mapping[str, float], price: float | None) -> list[str]:
    """Return the columns of a line of the schedule, without the names."""
    seconds = round(3600 * needs["hours"])
    cost = [f"{needs['gpu_hours'] * price:,.2f}"] if price else []
    amounts = [f"{needs['gpu_hours']:,.2f}", *cost, f"{needs['peak']:,.3f}", f"{needs['disk']:,.3f}"]
    return [f"{needs['runs']:.0f}", f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}", *amounts]
