"""Find the largest GPT that each phase can train on given GPUs. `make plan ARGS=--largest=True` does this.

The models have k blocks, k heads and 128·k channels, similar to the larger GPT-3 models. The search finds the largest k
whose training step fits in the memory of the GPUs, as the planner predicts. With CPU offload, 16 bytes per parameter
must also fit in host memory: HOST_GIB for every 8 GPUs.
"""

import json
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench.plan.options import Row
from bench.plan.plan import PlanConfig, describe_job, select_rows, start_workers
from bench.plan.planner import HOST_GIB, Job, Planner, usable_bytes
from bench.plan.report import format_name
from bench.plan.speed import GIB, GPUS_PER_NODE
from nanoGPT.model import GPTConfig

HEAD_SIZE = 128
LIMIT = 256  # blocks: 3.3e12 parameters


def make_shape(k: int, block_size: int) -> GPTConfig:
    """Return the shape with k blocks and k heads."""
    return GPTConfig(k, k, HEAD_SIZE * k, block_size, False, 50304)


def find_largest(row: Row, job: Job, batch_size: int, pool: Executor) -> int:
    """Return the largest k whose model fits, or 0."""
    good, bad = 0, LIMIT + 1
    while bad - good > 1:
        k = (good + bad) // 2
        shape = make_shape(k, job.shape.block_size)
        if Planner(replace(job, shape=shape), pool).fits(row, batch_size):
            good = k
        else:
            bad = k
    return good


def find_all_largest(config: PlanConfig) -> dict[str, Any]:
    """Return the largest model of every row of a plan.

    Raises:
        ConfigError: an option is out of range.
    """
    job = describe_job(config)
    rows = [row for row in select_rows(config.gpus) if "fsdp_reshard_after_forward" not in row[1]]
    with ThreadPoolExecutor(len(rows)) as threads, start_workers() as pool:
        sizes = list(threads.map(lambda row: find_largest(row, job, config.batch_size, pool), rows))
    found = [
        {"phase": phase, "options": options, "k": k, "parameters": count_params(k, config.block_size)}
        for (phase, options), k in zip(rows, sizes, strict=True)
    ]
    request = {"gpu": config.gpu, "gpus": config.gpus, "batch_size": config.batch_size}
    request |= {"block_size": config.block_size, "optimizer": config.optimizer, "dtype": config.dtype}
    return {**request, "usable_bytes": round(usable_bytes(job.gpu)), "rows": found}


def count_params(k: int, block_size: int) -> int:
    """Return the number of parameters of the model with k blocks; 0 for k = 0."""
    return make_shape(k, block_size).count_params() if k else 0


def format_largest(found: dict[str, Any]) -> str:
    """Return the lines that `make plan ARGS=--largest=True` prints."""
    names = [format_name(row) for row in found["rows"]]
    width = max(map(len, names)) + 2
    space = f"{found['usable_bytes'] / GIB:.1f} GiB usable per GPU"
    lines = [
        f"The largest GPT on {found['gpus']:,} x {found['gpu']}, {space}: {found['batch_size']} sequence(s) of "
        f"{found['block_size']:,} tokens per micro-batch, {found['dtype']}, {found['optimizer']}.",
        f"{'':<{width}}{'parameters':>12}  blocks x channels",
    ]
    for name, row in zip(names, found["rows"], strict=True):
        shape = f"{row['k']} x {HEAD_SIZE * row['k']}" if row["k"] else "nothing fits"
        lines.append(f"{name:<{width}}{row['parameters'] / 1e9:>11.2f}B  {shape}")
    if any("fsdp_cpu_offload" in row["options"] for row in found["rows"]):
        gib = HOST_GIB / GPUS_PER_NODE
        lines.append(f"With cpu_offload, the model state must also fit in {gib:.0f} GiB of host memory per GPU.")
    return "\n".join(lines)


def print_largest(config: PlanConfig) -> None:
    """Find the largest models and print them."""
    found = find_all_largest(config)
    print(json.dumps(found, indent=1) if config.json else format_largest(found))
