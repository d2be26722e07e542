"""Predict memory and speed of every phase for a model and a number of GPUs, without a GPU.

    make plan MODEL=gpt2-xl GPUS=8 GPU=h100
    make plan MODEL=70b GPUS=128 GPU=h100 ARGS="--block_size=4096 --tokens=1.4e12"
    make plan GPUS=8 GPU=h100 ARGS=--largest=True           # the largest model that each phase can train
    make plan MODEL=gpt2 GPUS=2 GPU=t4 ARGS="--n_layer=24 --batch_size=4"

Memory comes from a trace, not from a formula. The planner runs a training step of each phase's own code on fake tensors
(`bench/plan/trace.py`), with 3 and with 4 blocks. Memory is linear in the number of blocks, so the planner extrapolates
it to the full model. Plans that differ only in the type of GPU, the batch size or `--tokens` use the same traces
(`bench/plan/cache.py`). Time comes from a roofline model of the traced operators and of ring collectives
(`bench/plan/speed.py`).

Muon's update is not linear in the number of blocks, because each matrix belongs to one rank, so it is traced in full.

The plan assumes no dropout, fused attention, and the memory of an eager model. CUDA, NCCL and fragmentation use part of
a GPU's memory: 92 percent of it, minus 1 GiB, is usable for tensors.
"""

import json
import math
import multiprocessing
import multiprocessing.forkserver
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from tqdm import tqdm

from bench.plan.models import LLAMAS, MODELS
from bench.plan.planner import MAX_BATCH_SIZE, Job, Planner, Row, estimate_usable_bytes, exit_with_parent
from bench.plan.report import format_largest, format_plan
from bench.plan.speed import GPUS, GPUS_PER_NODE, Gpu
from nanoGPT.costs import count_gpt2_params
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.model import GPTConfig, ModelConfig, make_shape
from operate.ranks import PRELOADED

HEAD_SIZE = 128  # of the models among which --largest searches, which are similar to the larger GPT-3 models
MAX_BLOCKS = 256  # of these models: 3.3e12 parameters
FULL_CHECKPOINTING = {"fsdp_activation_checkpointing": "full"}
ROWS: list[Row] = [
    ("baseline", {}),
    ("phase1", {}),
    ("phase1", {"zero_stage": 2}),
    ("phase2", {}),
    ("phase3", {}),
    ("phase3", {"fsdp_reshard_after_forward": False}),
    ("phase3", {"kernels": "loss"}),
    ("phase3", {"fsdp_activation_checkpointing": "selective"}),
    ("phase3", FULL_CHECKPOINTING),
    ("phase3", {**FULL_CHECKPOINTING, "kernels": "loss"}),
    ("phase3", {**FULL_CHECKPOINTING, "kernels": "loss", "fsdp_cpu_offload": True}),
]


@dataclass
class PlanConfig:
    """Command-line options of `make plan`."""

    model: str = "gpt2"
    """gpt2, gpt2-medium, gpt2-large, gpt2-xl, 1.3b, 2.7b, 6.7b, 13b, 20b, 30b, 66b, 70b, 175b, llama2-7b, llama3.2-1b,
    llama3-8b or llama3-70b"""
    gpus: int = 1
    """ranks, one per GPU, up to 1024; 8 GPUs per node"""
    gpu: str = "h100"
    """a100-40, a100-80, h100, h200, b200, l40s, rtx4090, rtx6000ada or t4"""
    batch_size: int = 1
    """sequences per micro-batch, for the memory table; the speed table uses the largest batch that fits"""
    micro_batches: int = 1
    """micro-batches per rank and step"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, AdamW for all other parameters"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """dtype of matrix products and all-gathers; parameters and optimizer state are always float32"""
    block_size: int = 1024
    """tokens per sequence"""
    n_layer: int | None = None
    """blocks; None: those of the model"""
    n_head: int | None = None
    """attention heads; None: those of the model"""
    n_embd: int | None = None
    """channels; None: those of the model"""
    link: float | None = None
    """bandwidth between the GPUs of a node in GB/s, in one direction; None: that of the GPU"""
    network: float | None = None
    """bandwidth between nodes in GB/s, of all adapters of a node together; None: that of the GPU"""
    tokens: float | None = None
    """tokens to train on, to estimate the training time in days"""
    largest: bool = False
    """instead of a plan, find the largest model that each phase can train; model, n_layer, ... have no effect"""
    json: bool = False
    """print JSON instead of tables"""


def resolve_shape(config: PlanConfig) -> ModelConfig:
    """Check the options and return the shape of the model to plan for.

    Raises:
        ConfigError: the model or the GPU is unknown, or a number is out of range.
    """
    models = {**MODELS, **{name: (each["n_layer"], each["n_head"], each["n_embd"]) for name, each in LLAMAS.items()}}
    for name, value, table in (("model", config.model, models), ("gpu", config.gpu, GPUS)):
        if value not in table:
            raise ConfigError(f"--{name}={value} is unknown{did_you_mean(value, list(table)) or list_choices(table)}")
    layers, heads, width = (
        override if override is not None else default
        for override, default in zip((config.n_layer, config.n_head, config.n_embd), models[config.model], strict=True)
    )
    numbers = {"gpus": config.gpus, "batch_size": config.batch_size, "micro_batches": config.micro_batches}
    numbers |= {"block_size": config.block_size, "n_layer": layers, "n_head": heads, "n_embd": width}
    for name, number in numbers.items():
        limit = {"gpus": 1024, "batch_size": MAX_BATCH_SIZE, "micro_batches": 1024}.get(name, 2**20)
        if not 1 <= number <= limit:
            raise ConfigError(f"--{name}={number} is out of range: use a value from 1 to {limit}")
    if width % heads:
        raise ConfigError(f"--n_embd={width} is not a multiple of --n_head={heads}: change one of them")
    amounts = {"tokens": config.tokens, "link": config.link, "network": config.network}
    for name, amount in amounts.items():
        check_amount(name, amount)
    if config.model not in LLAMAS:
        return GPTConfig(layers, heads, width, config.block_size, False, 50304)
    fields = {**LLAMAS[config.model], "n_layer": layers, "n_head": heads, "n_embd": width}
    if config.n_embd:
        fields["intermediate_size"] = None
    if config.n_head:
        fields["n_kv_head"] = None
    return make_shape({**fields, "block_size": config.block_size})


def resolve_gpu(config: PlanConfig) -> Gpu:
    """Return the GPU, with the links that the options give."""
    gpu = GPUS[config.gpu]
    link, network = (None if rate is None else 1e9 * rate for rate in (config.link, config.network))
    return replace(gpu, link=link or gpu.link, network=network or gpu.network)


def describe_job(config: PlanConfig) -> Job:
    """Return what all rows of the plan have in common.

    Raises:
        ConfigError: the model or the GPU is unknown, or a number is out of range.
    """
    shape = resolve_shape(config)
    gpu = resolve_gpu(config)
    return Job(shape, gpu, config.gpus, config.micro_batches, config.optimizer, config.dtype)


def check_amount(name: str, amount: float | None) -> None:
    """Check that an amount is finite and above 0, if it is given.

    Raises:
        ConfigError: it is not.
    """
    if amount is not None and not 0 < amount < math.inf:
        raise ConfigError(f"--{name}={amount:g} is out of range: use a number above 0")


def list_choices(names: Iterable[str]) -> str:
    """Return the end of an error message, which lists the values that work."""
    return ": use one of " + ", ".join(names)


def select_rows(gpus: int) -> list[Row]:
    """Return the rows of the plan: ROWS and, on two or more full nodes, FSDP with one model replica per node."""
    has_full_nodes = gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE == 0
    hybrid: list[Row] = [("phase3", {"fsdp_shard_size": str(GPUS_PER_NODE)})]
    return ROWS[:5] + hybrid * has_full_nodes + ROWS[5:]


class ProgressPool(ProcessPoolExecutor):
    """A process pool with a progress bar: traces done, of those submitted so far. The bar needs a terminal."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        tqdm.set_lock(threading.RLock())  # tqdm's default lock is a system semaphore: a kill of this process leaks it
        self.bar = tqdm(total=0, unit=" traces", leave=False, disable=None)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(*args, **kwargs)
        self.bar.total += 1
        future.add_done_callback(lambda _: self.bar.update())
        return future


@contextmanager
def start_workers() -> Iterator[Executor]:
    """Start worker processes that have imported what a trace needs. After an error or Ctrl-C, kill them at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "bench.plan.planner"])  # ignored if the fork server runs already
    with ProgressPool(mp_context=context, initializer=exit_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            workers = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()
            raise
        finally:
            pool.bar.close()


def plan(config: PlanConfig) -> dict[str, Any]:
    """Return the plan: one row per phase and set of options.

    Raises:
        ConfigError: the model or the GPU is unknown, or a number is out of range.
    """
    job = describe_job(config)
    rows = select_rows(config.gpus)
    # The worker pool exits before the threads: an error cancels the traces for which the threads wait.
    with ThreadPoolExecutor(len(rows)) as threads, start_workers() as pool:
        planner = Planner(job, pool)
        planned = list(threads.map(lambda row: planner.plan_row(row, config.batch_size), rows))
    for row in planned:
        for speed in (row["speed"] or {}).values():
            speed["days"] = config.tokens / speed["tokens_per_second"] / 86400 if config.tokens else None
    result = {"parameters": job.params, "shape": vars(job.shape), "gpus": config.gpus, "gpu": config.gpu}
    result |= {"optimizer": config.optimizer, "dtype": config.dtype, "tokens": config.tokens}
    result |= {"batch_size": config.batch_size, "micro_batches": config.micro_batches}
    return {**result, "usable_bytes": round(estimate_usable_bytes(job.gpu)), "rows": planned}


def make_large_shape(k: int, block_size: int) -> GPTConfig:
    """Return the shape with k blocks and k heads."""
    return GPTConfig(k, k, HEAD_SIZE * k, block_size, False, 50304)


def find_largest(row: Row, job: Job, batch_size: int, pool: Executor) -> int:
    """Return the largest k whose model fits, or 0. With CPU offload, its model state must also fit in host memory."""
    good, bad = 0, MAX_BLOCKS + 1
    while bad - good > 1:
        k = (good + bad) // 2
        shape = make_large_shape(k, job.shape.block_size)
        if Planner(replace(job, shape=shape), pool).fits(row, batch_size):
            good = k
        else:
            bad = k
    return good


def find_all_largest(config: PlanConfig) -> dict[str, Any]:
    """Return the largest model of every row of a plan: k blocks, k heads and 128 k channels.

    Raises:
        ConfigError: an option is out of range.
    """
    job = describe_job(config)
    rows = [row for row in select_rows(config.gpus) if "fsdp_reshard_after_forward" not in row[1]]
    with ThreadPoolExecutor(len(rows)) as threads, start_workers() as pool:
        sizes = list(threads.map(lambda row: find_largest(row, job, config.batch_size, pool), rows))
    counts = [count_gpt2_params(make_large_shape(k, config.block_size)) if k else 0 for k in sizes]
    found = [
        {"phase": phase, "options": options, "k": k, "parameters": count}
        for (phase, options), k, count in zip(rows, sizes, counts, strict=True)
    ]
    names = ("gpu", "gpus", "batch_size", "block_size", "optimizer", "dtype")
    request = {name: getattr(config, name) for name in names}
    return {**request, "usable_bytes": round(estimate_usable_bytes(job.gpu)), "rows": found}


def main(config: PlanConfig) -> None:
    """Make the plan, or find the largest models, and print the result."""
    result = find_all_largest(config) if config.largest else plan(config)
    text = format_largest(result) if config.largest else format_plan(result)
    print(json.dumps(result, indent=1) if config.json else text)
