"""Check one node before a run: its devices, its disk, its settings, and what the planner predicts."""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.checks import Check
from bench.plan.run import detect_hardware, estimate_checkpoint_bytes, find_gpu, predict_run, read_usable_bytes
from bench.plan.speed import GPUS
from measure.memory_limits import format_bytes, host_limits
from nanoGPT.train_config import TrainConfig

MIN_FREE_GPU_MEMORY = 0.95  # fraction of a GPU's memory that must be free
MAX_TEMPERATURE, MAX_UTILIZATION = 80, 10  # degrees Celsius and percent of an idle GPU
MIN_OPEN_FILES = 1024
GPU_FIELDS = (  # of nvidia-smi. uuid identifies the GPU, also with CUDA_VISIBLE_DEVICES
    "uuid",
    "memory.free",
    "memory.total",
    "temperature.gpu",
    "utilization.gpu",
    "ecc.errors.uncorrected.volatile.total",
)
SLOWDOWNS = ("clocks_event_reasons.hw_slowdown", "clocks_throttle_reasons.hw_slowdown")  # since driver 535, and before


def read_available_memory() -> int | None:
    """Return the bytes of CPU memory that new programs can use; None if the system is not Linux."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    limit = min(size for _, size, _ in host_limits())
    return min(1024 * int(fields["MemAvailable"].split()[0]), limit)


def check_gpus(ranks: int) -> Iterator[Check]:
    """Check that every GPU of this node's ranks is idle, cool and without memory errors.

    This process creates no CUDA context on the GPUs, because another context would disturb the ranks.
    """
    states = {state["uuid"].removeprefix("GPU-"): state for state in query_gpus()}
    for index in range(ranks):
        gpu = torch.cuda.get_device_properties(index)
        if (state := states.get(str(gpu.uuid))) is None:
            yield Check(f"GPU {index}", "skip", f"{gpu.name}, which nvidia-smi does not list", "check it by hand")
            continue
        finding = ", ".join([gpu.name, *(f"{name} {value}" for name, value in state.items() if name != "uuid")])
        problems = find_gpu_problems(state)
        remedy = "; ".join(remedy for _, remedy in problems)
        result = "fail" if any(is_fatal for is_fatal, _ in problems) else "warn" if problems else "pass"
        yield Check(f"GPU {index}", result, finding, remedy)  # type: ignore[arg-type]


def query_gpus() -> list[dict[str, str]]:
    """Return GPU_FIELDS and "slowdown" of every GPU, from nvidia-smi; an empty list if it gives no answer."""
    for slowdown in SLOWDOWNS:
        command = ["nvidia-smi", f"--query-gpu={','.join((*GPU_FIELDS, slowdown))}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            names = (*GPU_FIELDS, "slowdown")
            return [dict(zip(names, line.split(", "), strict=False)) for line in done.stdout.splitlines()]
    return []


def find_gpu_problems(state: dict[str, str]) -> list[tuple[bool, str]]:
    """Return the problems of a GPU: whether each is fatal, and its remedy.

    Args:
        state: from `query_gpus`. A value that nvidia-smi does not know is in brackets.
    """
    known = {name: int(value) for name, value in state.items() if value.isdigit()}
    limits = (
        ("temperature.gpu", MAX_TEMPERATURE, False, "it is hot: check the cooling"),
        ("utilization.gpu", MAX_UTILIZATION, False, "it is busy: find the process with nvidia-smi"),
        ("ecc.errors.uncorrected.volatile.total", 0, True, "its memory has uncorrected errors: replace the GPU"),
    )
    problems = [(is_fatal, text) for name, limit, is_fatal, text in limits if known.get(name, 0) > limit]
    free_fraction = known.get("memory.free", 1) / known.get("memory.total", 1)  # both are known, or neither
    if free_fraction < MIN_FREE_GPU_MEMORY:
        problems.append((free_fraction < 0.5, "another process uses its memory: find it with nvidia-smi"))
    if state.get("slowdown") == "Active":
        problems.append((False, "its clock is reduced: check power and cooling"))
    return problems


def check_disk(config: TrainConfig, params: int) -> Check:
    """Check that the disk has space for the newest checkpoints, the best one, and one that the run is writing."""
    folder = find_existing_parent(Path(config.out_dir))
    free = shutil.disk_usage(folder).free
    size, count = estimate_checkpoint_bytes(params, config), config.keep_checkpoints + 2
    finding = f"{format_bytes(free)} free in {folder.resolve()}; {count} checkpoints need {format_bytes(count * size)}"
    if free < count * size:
        return Check("disk", "fail", finding, "free some space, or use --out_dir on another disk")
    if free < 2 * count * size:
        return Check("disk", "warn", finding, "the free space is less than twice what the run needs: free some space")
    return Check("disk", "pass", finding)


def find_existing_parent(path: Path) -> Path:
    """Return the path itself, or its closest parent that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def check_plan(config: TrainConfig, phase: str, ranks: int, local_ranks: int) -> Check:
    """Compare the memory that the planner predicts with the memory of the devices, and report the predicted time."""
    gpu = detect_hardware(config.device)
    predicted = predict_run(config, phase, ranks, gpu)
    tokens = config.gradient_accumulation_steps * config.batch_size * config.block_size
    hours = config.max_iters * predicted.step_seconds / 3600
    rate = tokens / predicted.step_seconds
    finding = f"{format_bytes(predicted.peak_bytes)} per rank, {rate:,.0f} tokens per second, "
    finding += f"{hours:.2g} hours for {config.max_iters} steps"
    if gpu in GPUS.values():
        space: float | None = read_usable_bytes(gpu)
        needed = predicted.peak_bytes
        finding += "" if find_gpu(config.device) else " (speed of a T4: the planner does not know this GPU)"
    else:
        space, needed = read_available_memory(), local_ranks * predicted.peak_bytes
    if space is not None and needed > space:
        remedy = "use activation checkpointing, a smaller --batch_size or more ranks: make plan compares them"
        return Check("plan", "fail", f"{finding}; {format_bytes(space)} are usable", remedy)
    return Check("plan", "pass", finding)


def check_settings(on_gpu: bool, is_multi_node: bool) -> Iterator[Check]:
    """Check limits of the operating system, and environment variables of NCCL and of CUDA."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problems = {
        f"ulimit -n is {files}: raise it to {MIN_OPEN_FILES} or more": 0 <= files < MIN_OPEN_FILES,
        "if NCCL chooses the wrong network interface, set NCCL_SOCKET_IFNAME": on_gpu
        and is_multi_node
        and "NCCL_SOCKET_IFNAME" not in os.environ,
    }
    slow = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING")
    problems |= {f"{name}=1 slows a run down: unset it": on_gpu and os.environ.get(name) == "1" for name in slow}
    advice = "; ".join(text for text, is_found in problems.items() if is_found)
    yield Check("settings", "warn" if advice else "pass", f"ulimit -n {files}", advice)
