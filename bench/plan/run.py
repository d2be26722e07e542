"""Predict the memory and the time of one run, from its configuration and the hardware of this machine.

    predicted = predict_run(config, "phase3", ranks=4, gpu=detect_hardware(config.device))
    predicted.step_seconds, predicted.peak_bytes

The full model is traced (`bench/plan/trace.py`). `make plan` compares phases and batch sizes instead.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.plan.planner import (
    SAVED_PER_LOGIT,
    Job,
    estimate_loss_workspace,
    estimate_step,
    estimate_usable_bytes,
    find_peak,
    select_auto_kernels,
    summarize_trace,
)
from bench.plan.speed import GIB, GPUS, Gpu
from nanoGPT.checkpoint.starting_point import tokenizer_rows
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.environment import count_cores
from nanoGPT.model import make_shape
from nanoGPT.train_config import TrainConfig


@dataclass(frozen=True)
class RunPrediction:
    """The predicted time and memory of a run.

    Attributes:
        step_seconds: time of a training step.
        peak_bytes: peak memory of rank 0 in a step, without what is offloaded to the host.
    """

    step_seconds: float
    peak_bytes: int


def predict_run(config: TrainConfig, phase: str, ranks: int, gpu: Gpu) -> RunPrediction:
    """Predict memory and time of a run. The process must have no process group: a fake one is initialized.

    Args:
        config: of the phase.
        phase: baseline, phase1, phase2 or phase3.
        ranks: world size.
        gpu: the device of every rank. A `Gpu` that is not in GPUS stands for the CPU of this machine.
    """
    shape = make_shape({**vars(config), "vocab_size": vocabulary_size(config)})
    is_cpu = gpu not in GPUS.values()
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    micro_batches = max(1, config.gradient_accumulation_steps // ranks)
    job = Job(shape, gpu, ranks, micro_batches, config.optimizer, dtype)
    options = phase_options(config)
    if is_cpu:
        options.pop("fsdp_cpu_offload", None)  # the memory of a CPU is the host memory
    row = select_auto_kernels((phase, options), shape, "cpu" if is_cpu else "cuda", config.compile)
    kernels_field = {"kernels": row[1]["kernels"]} if "kernels" in row[1] else {}
    # The roofline of an eager trace has eager and compiled times.
    traced = summarize_trace(replace(config, compile=False, dtype=dtype, **kernels_field), job)
    works, kernels = (traced.compiled, None) if config.compile else (traced.eager, traced.kernels())
    seconds = traced.seconds(works, gpu.with_dtype(dtype), config.batch_size)
    _, step_seconds = estimate_step(row, job, seconds, kernels, traced.traffic)
    workspace = estimate_loss_workspace(row, job, config.batch_size)
    peak = sum(find_peak(traced.peaks(config.batch_size), workspace, row, micro_batches).values())
    is_eager = not config.compile or getattr(config, "ledger", False)  # the ledger measures an eager step
    if not (is_eager or workspace or dtype == "float32"):
        peak -= SAVED_PER_LOGIT * config.batch_size * shape.block_size * shape.vocab_size
    ranks_per_core = max(1.0, ranks / count_cores()) if is_cpu else 1.0
    return RunPrediction(ranks_per_core * step_seconds, round(peak))


def phase_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a configuration that only its phase has, and that differ from the phase's defaults."""
    common = {field.name for field in dataclasses.fields(TrainConfig)}
    default = type(config)()
    names = [field.name for field in dataclasses.fields(config) if field.name not in common]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def estimate_checkpoint_bytes(params: int, config: TrainConfig) -> int:
    """Return the approximate size of a checkpoint: fp32 parameters, and two fp32 moments; one moment with Muon."""
    return (8 if config.optimizer == "muon" else 12) * params


def vocabulary_size(config: TrainConfig) -> int:
    """Return the number of rows of the token embedding, from the configuration or from the dataset's tokenizer."""
    if config.vocab_size:
        return config.vocab_size
    return tokenizer_rows(TokenData(config).tokenizer)


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU of a run with this `--device`; None if it uses none, or if the planner does not know it."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    device_name = torch.cuda.get_device_name().lower().replace(" ", "")
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    matches = (gpu for name, gpu in GPUS.items() if name.split("-")[0] in device_name and abs(gpu.gib - gib) < 8)
    return next(matches, None)


def read_usable_bytes(gpu: Gpu) -> float:
    """Return the memory that a run can use on this machine's GPU, which may be one that the planner does not know."""
    return estimate_usable_bytes(replace(gpu, gib=torch.cuda.get_device_properties(0).total_memory / GIB))


def detect_hardware(device: str) -> Gpu:
    """Return the GPU of a run with this `--device`; a T4 if the planner does not know it.

    If the run uses no GPU, measure the CPU (0.5 s).
    """
    if device != "cpu" and torch.cuda.is_available():
        return find_gpu(device) or GPUS["t4"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank on a CPU uses one thread
    try:
        a, b = torch.rand(768, 768), torch.rand(8_000_000)
        flops = 2 * 768**3 / fastest_of(lambda: a @ a)
        bandwidth = 8 * b.numel() / fastest_of(lambda: b.clone())
    finally:
        torch.set_num_threads(threads)
    return Gpu(1.0, flops, bandwidth, bandwidth / 4, bandwidth / 4, flops)


def fastest_of(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of five calls."""
    durations = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return min(durations)
