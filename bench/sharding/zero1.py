"""Measure ZeRO-1: model state and communication volume per rank, step time, and overlap with computation.

    python -m bench.sharding.zero1                      # all measurements, about six minutes on 2 cores
    python -m bench.sharding.zero1 --write              # also write bench/results/zero1-*.json, for the tables
    python -m bench.sharding.zero1 overhead             # one measurement: backends, overhead, timeline or state

- `backends` trains the default model with dropout 0.2 for 50 steps with each backend. It compares the losses with the
  baseline on one rank, and reads bytes from the ledger.
- `overhead` alternates a step of DDP, a step of the flat backend, and the bare collectives of the same bytes, in the
  same ranks.
- `timeline` records a step on rank 0 with torch's profiler.
- `state` counts the bytes of AdamW's moments of GPT-2 124M.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from bench.matrix.cells import make_config, run_cell
from bench.tables.records import write_result
from nanoGPT.checkpoint.state import allocate_state
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.memory.costs import storage_bytes
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import param_groups
from phase1_zero1.buckets import all_gather, reduce_scatter
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.ranks import run_on_ranks

BACKENDS: dict[str, dict[str, Any]] = {
    "DDP": {"use_zero1": False},
    "naive": {"zero1_backend": "naive"},
    "torch": {"zero1_backend": "torch"},
    "flat": {"zero1_backend": "flat"},
}
TEN_MILLION = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=128, bias=False, vocab_size=128)
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "fused": True}


def device_type() -> str:
    """Return the device type for the measurements on this machine: cuda or cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    """Return this rank's GPU if the process group uses NCCL, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend_config() else torch.device("cpu")


def build_model(device: torch.device, shape: GPTConfig) -> GPT:
    model = GPT(shape)
    model.init_weights(0)
    return model.to(device)


# ---- backends: losses, bytes


def run_backend(name: str, ranks: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps; return losses, bytes of state, ring bytes and the median milliseconds of a step."""
    fields = {"device": device_type(), "dtype": "float32", "max_iters": steps, "dropout": 0.2, "eval_iters": 1}
    fields |= {"batch_size": 12, "gradient_accumulation_steps": 8}
    with tempfile.TemporaryDirectory() as folder:
        result = run_cell("phase1", ranks, make_config("phase1", Path(folder) / "run", **fields, **BACKENDS[name]))
    collectives = result.rank_0["collectives"]
    return {
        "backend": name,
        "ranks": ranks,
        "parameters": result.ledger["parameters"],
        "optimizer_state_bytes": [each["state_bytes"]["optimizer_state"] for each in result.ledger["ranks"]],
        "state_bytes": [sum(each["state_bytes"].values()) for each in result.ledger["ranks"]],
        "ring_bytes": sum(row["ring_bytes"] for row in collectives),
        "calls": sum(row["calls"] for row in collectives),
        "step_ms": result.step_ms,
        "losses": result.curve,
    }


def measure_backends(steps: int, rank_counts: tuple[int, ...]) -> dict[str, Any]:
    """Run every backend at every rank count; `loss_gap` is the max loss difference from plain training on one rank."""
    reference = run_backend("DDP", 1, steps)["losses"]
    rows = []
    for ranks in rank_counts:
        for name in BACKENDS:
            row = run_backend(name, ranks, steps)
            curve = row.pop("losses")
            row["loss_gap"] = max(abs(curve[step] - reference[step]) for step in reference)
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if not isinstance(v, list)}), flush=True)
    return {"rows": rows}


# ---- overhead: alternate a step of DDP, a step of the flat backend, and the collectives alone


def measure_seconds(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes on this rank. All ranks start it together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    if current_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def make_collectives(optimizer: Zero1Optimizer) -> dict[str, Callable[[], None]]:
    """Return one function for each kind of collective. It runs the collective on buckets of the optimizer's sizes.

    The function starts the collectives of all buckets, then waits for all of them.
    """
    buffers = [torch.zeros_like(bucket.flat_grads) for bucket in optimizer.buckets]
    shards = [buffer[bucket.local_slice] for buffer, bucket in zip(buffers, optimizer.buckets, strict=True)]

    def run(start: Callable[[Tensor, Tensor], Any]) -> None:
        for work in [start(buffer, shard) for buffer, shard in zip(buffers, shards, strict=True)]:
            work.wait()

    return {
        "all_reduce": lambda: run(lambda buffer, _: dist.all_reduce(buffer, async_op=True)),
        "reduce_scatter": lambda: run(
            lambda buffer, shard: reduce_scatter(shard, buffer, dist.ReduceOp.AVG, None, async_op=True)
        ),
        "all_gather": lambda: run(lambda buffer, shard: all_gather(buffer, shard, None, async_op=True)),
    }


def measure_overhead_on_rank(shape: GPTConfig, count: int) -> dict[str, list[float]]:
    """Return `count` samples in milliseconds of every kind of step and of each collective alone.

    The kinds of step are `ddp`, `flat` and `flat_forward`, which all-gathers the parameters during the forward pass.
    """
    device = current_device()
    batch = torch.randint(shape.vocab_size, (2, shape.block_size), device=device)
    parallel_model = DDP(build_model(device, shape), gradient_as_bucket_view=True)
    adamw = torch.optim.AdamW(param_groups(parallel_model, 0.1), **ADAMW)
    model, model_forward = build_model(device, shape), build_model(device, shape)
    flat = Zero1Optimizer(param_groups(model, 0.1), torch.optim.AdamW, **ADAMW)
    flat_forward = Zero1Optimizer(param_groups(model_forward, 0.1), torch.optim.AdamW, **ADAMW)
    flat_forward.gather_during_forward(model_forward)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = module(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works: dict[str, Callable[[], None]] = {
        "ddp": lambda: step(parallel_model, adamw),
        "flat": lambda: step(model, flat),
        "flat_forward": lambda: step(model_forward, flat_forward),
        **make_collectives(flat),
    }
    samples: dict[str, list[float]] = {name: [] for name in works}
    for i in range(count + 3):
        for name, work in works.items():
            milliseconds = 1000 * measure_seconds(work)
            if i >= 3:
                samples[name].append(milliseconds)
    return samples


def measure_overhead(shape: GPTConfig, rank_counts: tuple[int, ...], count: int, device: str) -> dict[str, Any]:
    """Return rank 0's samples for each rank count, and the ratio of the flat backend's median to the expected time.

    The expected time is the DDP step, with its all-reduce replaced by a reduce-scatter and an all-gather.
    """
    rows = []
    for ranks in rank_counts:
        samples = run_on_ranks(measure_overhead_on_rank, ranks, shape, count, timeout=600, device=device)[0]
        medians = {name: statistics.median(values) for name, values in samples.items()}
        expected = medians["ddp"] - medians["all_reduce"] + medians["reduce_scatter"] + medians["all_gather"]
        rows.append({"ranks": ranks, "ratio": medians["flat"] / expected, "samples_ms": samples})
        print(f"{ranks} ranks: ratio {medians['flat'] / expected:.3f}", medians, flush=True)
    return {"parameters": sum(p.numel() for p in GPT(shape).parameters()), "rows": rows}


# ---- timeline: begin and end of the stages of a step and of its collectives


def record_timeline_on_rank(shape: GPTConfig) -> list[tuple[str, float, float]]:
    """Return name, begin and end (ms) of the stages of a step and of its collectives, on this rank.

    The names of the stages begin with "phase:", as in the committed result files.
    """
    device = current_device()
    batch = torch.randint(shape.vocab_size, (2, shape.block_size), device=device)
    model = build_model(device, shape)
    optimizer = Zero1Optimizer(param_groups(model, 0.1), torch.optim.AdamW, bucket_mb=4, **ADAMW)

    def step() -> None:
        record = torch.profiler.record_function
        with record("phase: forward"):
            loss = model(batch, batch)
        with record("phase: backward"):
            loss.backward()
        with record("phase: step"):
            optimizer.step()

    for _ in range(3):
        step()
    dist.barrier()
    with torch.profiler.profile() as profile:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = [e for e in profile.events() if e.name.startswith(("phase:", "gloo:", "nccl"))]
    start = min(e.time_range.start for e in events)
    return [(e.name, (e.time_range.start - start) / 1000, (e.time_range.end - start) / 1000) for e in events]


def measure_timeline(shape: GPTConfig, ranks: int, device: str) -> dict[str, Any]:
    """Return rank 0's events, and how many collectives start before the backward pass ends."""
    events = run_on_ranks(record_timeline_on_rank, ranks, shape, timeout=300, device=device)[0]
    end = next(stop for name, _, stop in events if name == "phase: backward")
    early = [start for name, start, _ in events if not name.startswith("phase") and start < end]
    print(f"{len(early)} collectives start before the backward pass ends at {end:.0f} ms: first at {min(early):.0f} ms")
    return {"ranks": ranks, "bucket_mb": 4, "started_in_backward": len(early), "events_ms": events}


# ---- state: bytes of the optimizer state of GPT-2 124M


def count_state_on_rank() -> tuple[int, int]:
    """Return the bytes of AdamW's moments and of the flat parameters of GPT-2 124M on this rank.

    The weights are not initialized.
    """
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=False))
    model.to_empty(device=current_device())
    model.lm_head.weight = model.transformer["wte"].weight  # type: ignore[assignment]  # to_empty unties them
    return count_state(model)


def count_state(model: GPT, fused: bool = True) -> tuple[int, int]:
    """Create the optimizer of a model. Return the bytes of its moments and of the flat parameters on this rank."""
    optimizer = Zero1Optimizer(param_groups(model, 0.1), torch.optim.AdamW, **{**ADAMW, "fused": fused})
    for bucket in optimizer.buckets:
        if bucket.inner:
            allocate_state(bucket.inner)
    moments = storage_bytes(t for items in optimizer.state.values() for t in items.values() if t.dim())
    return moments, storage_bytes(bucket.flat_params for bucket in optimizer.buckets)


def measure_state(rank_counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the bytes of every rank, for each rank count."""
    rows: list[dict[str, Any]] = []
    for ranks in rank_counts:
        sizes = run_on_ranks(count_state_on_rank, ranks, timeout=300, device=device_type())
        rows.append({"ranks": ranks, "moments": [m for m, _ in sizes], "flat_parameters": [f for _, f in sizes]})
        print(f"{ranks} ranks: {max(rows[-1]['moments']):,} bytes of moments (maximum over all ranks)", flush=True)
    with torch.device("meta"):
        return {"parameters": sum(p.numel() for p in GPT(GPTConfig(bias=False)).parameters()), "rows": rows}


MEASURES: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "backends": lambda ranks: measure_backends(50, ranks),
    "overhead": lambda ranks: measure_overhead(TEN_MILLION, tuple(n for n in ranks if n in (2, 4)), 25, device_type()),
    "timeline": lambda ranks: measure_timeline(TEN_MILLION, 2, device_type()),
    "state": lambda ranks: measure_state(ranks),
}


def main(names: list[str], write: bool) -> None:
    """Run the named measurements, or all of them, on 1 to 8 ranks. On a machine with GPUs, each rank needs a GPU.

    Raises:
        ConfigError: a name is unknown.
    """
    gpus = torch.cuda.device_count()
    ranks = tuple(n for n in (1, 2, 4, 8) if not gpus or n <= gpus)
    for name in names or MEASURES:
        if name not in MEASURES:
            raise ConfigError(f"unknown measurement {name}: use one of {', '.join(MEASURES)}")
        if name in ("overhead", "timeline") and ranks == (1,):
            print(f"skipped {name}: it needs two GPUs")
            continue
        samples = MEASURES[name](ranks)
        if write:
            device = torch.device("cuda", 0) if gpus else torch.device("cpu")
            settings = {"command": f"python -m bench.sharding.zero1 {name} --write"}
            print(f"wrote {write_result(f'zero1-{name}', device, settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        main([word for word in sys.argv[1:] if word != "--write"], "--write" in sys.argv)
