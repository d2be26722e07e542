"""Record computation and communication of DDP, ZeRO-1 and FSDP over time, with buckets of several sizes.

The runs are real: torch's profiler records steps of the phases' own code on 2 processes. All runs are repeated in
rounds, and the fastest one of each is kept, because other programs on the machine can only make a step slower. Compare
the times with each other and not with a GPU: on a CPU, computation and communication use the same cores.

FSDP has no buckets. It communicates one unit at a time, so the size is the smallest size of a unit.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from bench.plan.trace import TrainingSetup, run_update, set_up_fsdp, set_up_zero1
from bench.sharding.zero1 import TEN_MILLION as SHAPE
from bench.trainer.profile_step import collect_spans, merge, summarize, wait_for_collectives
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT
from nanoGPT.optim import configure_optimizer
from nanoGPT.train_config import TrainConfig
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.zero1 import Zero1Optimizer
from phase3_fsdp.fsdp import FsdpConfig, find_units, init_shards
from workshop.ranks import run_on_ranks

RANKS, STEPS, ROUNDS = 2, 2, 2
WARM_UP = 2  # steps: the first one creates the optimizer state, and the second one DDP's final buckets
SIZES_MB = (2, 6, 16, 64)  # in 2^20 bytes; a block of the model has 6.75
BATCH = (4, SHAPE.block_size)
METHODS = ("DDP", "ZeRO-1", "FSDP")
MIN_GAP_MS = 0.1  # a shorter pause is not drawn
Run = dict[str, Any]


def set_up(method: str, bucket_mb: int) -> tuple[TrainingSetup, TrainConfig, int]:
    """Set up a model and its optimizer on this rank. Collective.

    Returns:
        The setup, its configuration, and the number of buckets, or with FSDP the number of units. DDP decides on its
        buckets after its first step, so their number is 0 here.
    """
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": SHAPE.block_size}
    run = create_runtime("cpu", "float32")
    if method == "ZeRO-1":
        zero1_config = Zero1Config(**common, zero1_bucket_mb=bucket_mb)
        setup = set_up_zero1(zero1_config, SHAPE, run)
        assert isinstance(setup.optimizer, Zero1Optimizer)
        return setup, zero1_config, len(setup.optimizer.buckets)
    if method == "FSDP":
        fsdp_config = FsdpConfig(**common, fsdp_min_num_params=bucket_mb * 2**20 // 4)
        setup = set_up_fsdp(fsdp_config, SHAPE, run)
        init_shards(setup.model, fsdp_config, run)  # type: ignore[arg-type]
        with torch.device("meta"):
            return setup, fsdp_config, 1 + len(find_units(GPT(SHAPE), fsdp_config))
    config, model = TrainConfig(**common), GPT(SHAPE)
    parallel_model = DDP(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer, params = configure_optimizer(model, config), list(model.parameters())

    def get_grads() -> list[Tensor]:
        return [p.grad for p in params if p.grad is not None]

    return TrainingSetup(parallel_model, optimizer, lambda _: None, get_grads, None), config, 0


def train_step(setup: TrainingSetup, config: TrainConfig, batch: Tensor) -> None:
    """Train one step, with a name in the profile for each stage."""
    mark = torch.profiler.record_function
    setup.set_sync(True)
    with mark("stage forward"):
        loss = setup.model(batch, batch)
    with mark("stage backward"):
        loss.backward()
    with mark("stage update"):
        run_update(setup, config)
        setup.optimizer.zero_grad()


@contextmanager
def hide_stderr() -> Iterator[None]:
    """Hide what the profiler logs to stderr when it starts and stops."""
    before = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def record_method(method: str, bucket_mb: int, batch_shape: tuple[int, int]) -> Run:
    """Train with one method, and return the profile of this rank. Collective."""
    setup, config, buckets = set_up(method, bucket_mb)
    batch = torch.randint(SHAPE.vocab_size, batch_shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(WARM_UP):
        train_step(setup, config, batch)
    wait_for_collectives()
    with hide_stderr(), torch.profiler.profile() as profiler:
        for step in range(STEPS):
            with torch.profiler.record_function(f"step {step}"):
                train_step(setup, config, batch)
        wait_for_collectives()
    profile = describe_profile(profiler.events())
    buckets = buckets or profile["collectives"]["all_reduce"] // STEPS
    return {"method": method, "bucket_mb": bucket_mb, "buckets": buckets, **profile}


def describe_profile(events: Any) -> Run:
    """Return the summary, the number of collectives by name, and the spans (begin and end in ms) of a profile."""
    spans = collect_spans(events)
    spans["communication"] = [span for span in spans["communication"] if span[0] != "gloo:barrier"]  # after the steps
    zero = min(event.time_range.start for event in events if event.name.startswith("step "))
    names = Counter(name.partition(":")[2] for name, _, _ in spans["communication"])
    stages = []
    for event in events:
        if event.name.startswith("stage "):
            times = event.time_range.start, event.time_range.end
            stages.append([event.name.removeprefix("stage "), *(round((at - zero) / 1e3, 2) for at in times)])
    return {
        "summary": {name: round(value, 4) for name, value in summarize(spans).items()},
        "collectives": dict(sorted(names.items())),
        "stages": stages,
        **{name: compress(merge(spans[name])) for name in ("computation", "communication")},
    }


def compress(spans: list[tuple[float, float]]) -> list[list[float]]:
    """Return merged spans with two digits, without the pauses that are shorter than MIN_GAP_MS."""
    compressed: list[list[float]] = []
    for begin, end in spans:
        if compressed and begin - compressed[-1][1] < MIN_GAP_MS:
            compressed[-1][1] = round(end, 2)
        else:
            compressed.append([round(begin, 2), round(end, 2)])
    return compressed


def record_on_rank(sizes: tuple[int, ...], methods: tuple[str, ...], batch_shape: tuple[int, int]) -> list[Run]:
    """Return the runs of this rank, for each size and each method. Collective."""
    torch.set_num_threads(1)
    return [record_method(method, size, batch_shape) for size in sizes for method in methods]


def record() -> dict[str, Any]:
    """Return the recording.

    Returns:
        ranks, steps, sizes_mb, methods, and runs of rank 0: method, bucket_mb, buckets, summary (`summarize`),
        collectives: calls by name, and stages, computation and communication: spans in ms.
    """
    arguments = SIZES_MB, METHODS, BATCH
    rounds = [run_on_ranks(record_on_rank, RANKS, *arguments, show=False, timeout=600)[0] for _ in range(ROUNDS)]
    runs = [min(same, key=lambda run: run["summary"]["step_ms"]) for same in zip(*rounds, strict=True)]
    return {"ranks": RANKS, "steps": STEPS, "sizes_mb": list(SIZES_MB), "methods": list(METHODS), "runs": runs}
