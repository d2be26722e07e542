"""Will it fit, and how fast will it go? Every phase for a model and a number of GPUs, planned with no GPU.

    make plan MODEL=gpt2-xl GPUS=8 GPU=h100
    make plan MODEL=70b GPUS=128 GPU=h100 ARGS="--block_size=4096 --price=2.5 --tokens=1.4e12"
    make plan MODEL=gpt2 GPUS=2 GPU=t4 ARGS="--n_layer=24 --batch_size=4 --plot=plan.png"

Memory is not estimated where code can be run: a step of each phase's own code is traced on fake tensors
(`bench/plan/trace.py`), with 3 and 4 blocks, and what each part of it holds is extended to all of them, in which it is
linear. Time is that of a roofline over the traced operators and of rings (`bench/plan/speed.py`). What is assumed:
bfloat16, no dropout, a fused attention, an eager model's memory; and that of a GPU's memory so much is left after CUDA,
NCCL and the allocator's gaps have had theirs: 92 percent, less 1 GiB.
"""

import json
import math
import multiprocessing
import multiprocessing.forkserver
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.plan.planner import MOST, Planner, Row, capacity, end_with_parent
from bench.plan.report import describe, name_of, plot
from bench.plan.speed import GPUS, GPUS_PER_NODE
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.model import GPTConfig
from workshop.ranks import PRELOADED

# Blocks, heads, channels: GPT-2 (Radford et al. 2019), GPT-3's sizes (Brown et al. 2020, table 2.1), OPT's 30B and 66B
# (Zhang et al. 2022); 70b is a GPT of as many parameters as Llama's.
MODELS = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "1.3b": (24, 16, 2048),
    "2.7b": (32, 32, 2560),
    "6.7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "66b": (64, 72, 9216),
    "70b": (86, 64, 8192),
    "175b": (96, 96, 12288),
}
FULL = {"fsdp_activation_checkpointing": "full"}
ROWS: list[Row] = [
    ("baseline", {}),
    ("phase1", {}),
    ("phase2", {}),
    ("phase3", {}),
    ("phase3", {"fsdp_reshard_after_forward": False}),
    ("phase3", {"kernels": "loss"}),
    ("phase3", {"fsdp_activation_checkpointing": "selective"}),
    ("phase3", FULL),
    ("phase3", {**FULL, "kernels": "loss"}),
    ("phase3", {**FULL, "kernels": "loss", "fsdp_cpu_offload": True}),
]


@dataclass
class PlanConfig:
    """What to plan for."""

    model: str = "gpt2"
    """gpt2, gpt2-medium, gpt2-large, gpt2-xl, 1.3b, 2.7b, 6.7b, 13b, 30b, 66b, 70b or 175b"""
    gpus: int = 1
    """ranks, one a GPU, up to 1024; eight share a node"""
    gpu: str = "h100"
    """a100-40, a100-80, h100, h200, b200, l40s, rtx4090, rtx6000ada or t4"""
    batch_size: int = 1
    """sequences per micro-batch, for the memory; the speed is that of as many as fit"""
    micro_batches: int = 1
    """of each rank, per step"""
    block_size: int = 1024
    """tokens per sequence"""
    n_layer: int | None = None
    """blocks, if not the model's"""
    n_head: int | None = None
    """heads, if not the model's"""
    n_embd: int | None = None
    """channels, if not the model's"""
    tokens: float | None = None
    """to train on: how long that takes"""
    price: float | None = None
    """of a GPU for an hour: what `tokens` cost"""
    json: bool = False
    """print JSON in place of the table"""
    plot: Path | None = None
    """also draw memory against the number of GPUs into this file"""


def shape_of(config: PlanConfig) -> GPTConfig:
    """The model to plan for.

    Raises:
        ConfigError: a model, a GPU or a number that cannot be.
    """
    for name, value, table in (("model", config.model, MODELS), ("gpu", config.gpu, GPUS)):
        if value not in table:
            raise ConfigError(f"--{name}={value} is unknown{did_you_mean(value, list(table)) or known(table)}")
    layers, heads, width = (
        given if given is not None else own
        for given, own in zip((config.n_layer, config.n_head, config.n_embd), MODELS[config.model], strict=True)
    )
    numbers = {"gpus": config.gpus, "batch_size": config.batch_size, "micro_batches": config.micro_batches}
    numbers |= {"block_size": config.block_size, "n_layer": layers, "n_head": heads, "n_embd": width}
    for name, number in numbers.items():
        most = {"gpus": 1024, "batch_size": MOST, "micro_batches": 1024}.get(name, 2**20)
        if not 1 <= number <= most:
            raise ConfigError(f"--{name}={number} cannot be: give 1 or more, up to {most}")
    if width % heads:
        raise ConfigError(f"--n_embd={width} is no multiple of --n_head={heads}")
    for name, amount in (("tokens", config.tokens), ("price", config.price)):
        check_amount(name, amount)
    if config.price is not None and config.tokens is None:
        raise ConfigError("--price says nothing without --tokens: give both, such as --tokens=3e11 --price=2.5")
    check_plot(config.plot)
    return GPTConfig(layers, heads, width, config.block_size, False, 50304)


def check_amount(name: str, amount: float | None) -> None:
    """Refuse what is not above 0."""
    if amount is not None and not 0 < amount < math.inf:
        raise ConfigError(f"--{name}={amount:g} cannot be: give a number above 0")


def check_plot(path: Path | None) -> None:
    """Refuse, before anything is traced, a picture that could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--plot={path} is a directory: give a file, such as {path / 'plan.png'}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot={path}: there is no directory {path.parent}; make it first")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--plot={path} must end in .png, .pdf or .svg")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"--plot={path}: nothing can be written there ({error.strerror}); give another") from None


def known(names: Iterable[str]) -> str:
    return ": give " + ", ".join(names)


def rows_for(gpus: int) -> list[Row]:
    """ROWS, and a copy of the model in each node where there are several."""
    several = gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE == 0
    hybrid: list[Row] = [("phase3", {"fsdp_shard_size": str(GPUS_PER_NODE)})]
    return ROWS[:4] + hybrid * several + ROWS[4:]


class Processes(ProcessPoolExecutor):
    """Shows in a terminal how many traces are done, of those asked for so far."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        tqdm.set_lock(threading.RLock())  # its own is one among processes, and leaks where this one is killed
        self.bar = tqdm(total=0, unit=" traces", leave=False, disable=None)

    def submit(self, *words: Any, **named: Any) -> Future[Any]:
        future = super().submit(*words, **named)
        self.bar.total += 1
        future.add_done_callback(lambda _: self.bar.update())
        return future


@contextmanager
def processes() -> Iterator[Executor]:
    """Processes that have loaded what a trace needs. After an error, or Ctrl-C, nobody waits for what they trace."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "bench.plan.planner"])  # where it does not run yet
    with Processes(mp_context=context, initializer=end_with_parent) as pool:
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
    """Every row for a model and GPUs.

    Raises:
        ConfigError: a model, a GPU or a number that cannot be.
    """
    shape = shape_of(config)
    rows = rows_for(config.gpus)
    with ThreadPoolExecutor(len(rows)) as threads, processes() as pool:  # whose end ends what the threads wait for
        planner = Planner(shape, config.gpu, config.gpus, config.micro_batches, pool)
        lines = list(threads.map(lambda row: planner.line(row, config.batch_size), rows))
    for line in lines:
        for speed in (line["speed"] or {}).values():
            seconds = config.tokens / speed["tokens_per_second"] if config.tokens else None
            hours = seconds / 3600 * config.gpus if seconds else None
            speed["days"] = seconds / 86400 if seconds else None
            speed["cost"] = hours * config.price if hours and config.price else None
    about = {"parameters": planner.params, "shape": vars(shape), "gpus": config.gpus, "gpu": config.gpu}
    request = {"batch_size": config.batch_size, "micro_batches": config.micro_batches, "tokens": config.tokens}
    return {**about, **request, "usable_bytes": round(capacity(config.gpu)), "rows": lines}


def by_gpus(config: PlanConfig, found: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Bytes on a rank for 1, 2, 4, ... 1,024 GPUs, of each row by its name.

    Args:
        found: the plan, which says what cannot run.
    """
    cannot = [(row["phase"], row["options"]) for row in found["rows"] if "cannot" in row]
    rows = [row for row in ROWS if "fsdp_reshard_after_forward" not in row[1] and row not in cannot]
    counts = [2**i for i in range(11)]
    with processes() as pool:
        shape = shape_of(config)
        planners = {n: Planner(shape, config.gpu, n, config.micro_batches, pool) for n in counts}
        for row in rows:
            for planner in planners.values():
                planner.start(row, config.batch_size)
        named = {name_of({"phase": row[0], "options": row[1]}): row for row in rows}
        return {
            name: {n: planner.total(row, config.batch_size) for n, planner in planners.items()}
            for name, row in named.items()
        }


def main(config: PlanConfig) -> None:
    """Plan, and print."""
    found = plan(config)
    print(json.dumps(found, indent=1) if config.json else describe(found))
    if config.plot:
        plot(config.plot, found, by_gpus(config, found))
