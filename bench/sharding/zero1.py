"""ZeRO-1 measured: what a rank holds and sends, what a step costs, and whether sending overlaps with computing.

    python -m bench.sharding.zero1                      # all of it, about six minutes on 2 cores
    python -m bench.sharding.zero1 --write              # and bench/results/zero1-*.json, from which the tables are made
    python -m bench.sharding.zero1 overhead             # one of backends, overhead, timeline, state

`backends` trains 50 steps of the default model, dropout 0.2, with each backend: losses against the baseline's on one
rank, bytes from the ledger. `overhead` runs a step of DDP, one of flat and the bare collectives of the same
bytes in turn, in the same ranks. `timeline` is torch's profiler on rank 0. `state` counts GPT-2 124M's moments.
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

from bench.matrix.cells import config_of, run_cell
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


def kind() -> str:
    """What this machine measures on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def here() -> torch.device:
    """This rank's GPU, if the ranks were started for GPUs, or the CPU."""
    return torch.device("cuda", dist.get_rank()) if "nccl" in dist.get_backend_config() else torch.device("cpu")


def model_on(device: torch.device, shape: GPTConfig) -> GPT:
    model = GPT(shape)
    model.init_weights(0)
    return model.to(device)


# ---- backends: losses, bytes


def one_backend(name: str, ranks: int, steps: int) -> dict[str, Any]:
    """Losses, bytes of state, ring bytes and median milliseconds of a run of `steps` steps."""
    words = {"device": kind(), "dtype": "float32", "max_iters": steps, "dropout": 0.2, "eval_iters": 1}
    words |= {"batch_size": 12, "gradient_accumulation_steps": 8}
    with tempfile.TemporaryDirectory() as folder:
        found = run_cell("phase1", ranks, config_of("phase1", Path(folder) / "run", **words, **BACKENDS[name]))
    sent = found.rank_0["collectives"]
    return {
        "backend": name,
        "ranks": ranks,
        "parameters": found.ledger["parameters"],
        "optimizer_state_bytes": [each["state_bytes"]["optimizer_state"] for each in found.ledger["ranks"]],
        "state_bytes": [sum(each["state_bytes"].values()) for each in found.ledger["ranks"]],
        "ring_bytes": sum(row["ring_bytes"] for row in sent),
        "calls": sum(row["calls"] for row in sent),
        "step_ms": found.step_ms,
        "losses": found.curve,
    }


def measure_backends(steps: int, rank_counts: tuple[int, ...]) -> dict[str, Any]:
    """Every backend at every rank count; `loss_gap` is the largest difference from plain training on one rank."""
    reference = one_backend("DDP", 1, steps)["losses"]
    rows = []
    for ranks in rank_counts:
        for name in BACKENDS:
            row = one_backend(name, ranks, steps)
            curve = row.pop("losses")
            row["loss_gap"] = max(abs(curve[step] - reference[step]) for step in reference)
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if not isinstance(v, list)}), flush=True)
    return {"rows": rows}


# ---- overhead: a step of DDP, a step of flat, and the collectives alone, in turn


def seconds_of(work: Callable[[], None]) -> float:
    """From all ranks ready to the work done on this one."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    if here().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def collectives(optimizer: Zero1Optimizer) -> dict[str, Callable[[], None]]:
    """Each kind, of buckets as large as the optimizer's: all of them started, then all waited for."""
    buffers = [torch.zeros_like(bucket.flat_grads) for bucket in optimizer.buckets]
    slices = [buffer[bucket.mine] for buffer, bucket in zip(buffers, optimizer.buckets, strict=True)]

    def run(start: Callable[[Tensor, Tensor], Any]) -> None:
        for work in [start(buffer, mine) for buffer, mine in zip(buffers, slices, strict=True)]:
            work.wait()

    return {
        "all_reduce": lambda: run(lambda buffer, _: dist.all_reduce(buffer, async_op=True)),
        "reduce_scatter": lambda: run(
            lambda buffer, mine: reduce_scatter(mine, buffer, dist.ReduceOp.AVG, None, async_op=True)
        ),
        "all_gather": lambda: run(lambda buffer, mine: all_gather(buffer, mine, None, async_op=True)),
    }


def overhead_on_ranks(shape: GPTConfig, count: int) -> dict[str, list[float]]:
    """Milliseconds of each, raw: `ddp`, `flat`, `flat_forward` (gathering during the forward) and the collectives."""
    device = here()
    batch = torch.randint(shape.vocab_size, (2, shape.block_size), device=device)
    replica = DDP(model_on(device, shape), gradient_as_bucket_view=True)
    adamw = torch.optim.AdamW(param_groups(replica, 0.1), **ADAMW)
    model, lazy = model_on(device, shape), model_on(device, shape)
    flat = Zero1Optimizer(param_groups(model, 0.1), torch.optim.AdamW, **ADAMW)
    flat_forward = Zero1Optimizer(param_groups(lazy, 0.1), torch.optim.AdamW, **ADAMW)
    flat_forward.gather_during_forward(lazy)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _, loss = module(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works: dict[str, Callable[[], None]] = {
        "ddp": lambda: step(replica, adamw),
        "flat": lambda: step(model, flat),
        "flat_forward": lambda: step(lazy, flat_forward),
        **collectives(flat),
    }
    samples: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(count + 3):
        for name, work in works.items():
            milliseconds = 1000 * seconds_of(work)
            if turn >= 3:
                samples[name].append(milliseconds)
    return samples


def measure_overhead(shape: GPTConfig, rank_counts: tuple[int, ...], count: int, device: str) -> dict[str, Any]:
    """Rank 0's samples for each rank count, and the ratio of flat's median to what the collectives leave to expect."""
    rows = []
    for ranks in rank_counts:
        samples = run_on_ranks(overhead_on_ranks, ranks, shape, count, timeout=600, device=device)[0]
        middle = {name: statistics.median(values) for name, values in samples.items()}
        expected = middle["ddp"] - middle["all_reduce"] + middle["reduce_scatter"] + middle["all_gather"]
        rows.append({"ranks": ranks, "ratio": middle["flat"] / expected, "samples_ms": samples})
        print(f"{ranks} ranks: ratio {middle['flat'] / expected:.3f}", middle, flush=True)
    return {"parameters": sum(p.numel() for p in GPT(shape).parameters()), "rows": rows}


# ---- timeline: what runs when


def timeline_on_ranks(shape: GPTConfig) -> list[tuple[str, float, float]]:
    """Name, begin and end in milliseconds of the phases of a step and of its collectives, on this rank."""
    device = here()
    batch = torch.randint(shape.vocab_size, (2, shape.block_size), device=device)
    model = model_on(device, shape)
    optimizer = Zero1Optimizer(param_groups(model, 0.1), torch.optim.AdamW, bucket_mb=4, **ADAMW)

    def step() -> None:
        mark = torch.profiler.record_function
        with mark("phase: forward"):
            _, loss = model(batch, batch)
        with mark("phase: backward"):
            loss.backward()
        with mark("phase: step"):
            optimizer.step()

    for _ in range(3):
        step()
    dist.barrier()
    with torch.profiler.profile() as profile:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    kept = [e for e in profile.events() if e.name.startswith(("phase:", "gloo:", "nccl"))]
    zero = min(e.time_range.start for e in kept)
    return [(e.name, (e.time_range.start - zero) / 1000, (e.time_range.end - zero) / 1000) for e in kept]


def measure_timeline(shape: GPTConfig, ranks: int, device: str) -> dict[str, Any]:
    """Rank 0's events, and how many collectives start before the backward pass ends."""
    events = run_on_ranks(timeline_on_ranks, ranks, shape, timeout=300, device=device)[0]
    end = next(stop for name, _, stop in events if name == "phase: backward")
    early = [start for name, start, _ in events if not name.startswith("phase") and start < end]
    print(f"{len(early)} collectives start before backward ends at {end:.0f} ms, the first at {min(early):.0f} ms")
    return {"ranks": ranks, "bucket_mb": 4, "started_in_backward": len(early), "events_ms": events}


# ---- state: GPT-2 124M, counted


def state_on_ranks() -> tuple[int, int]:
    """Bytes of AdamW's moments on this rank, and of its flat parameters. The weights are never drawn."""
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=False))
    model.to_empty(device=here())
    model.lm_head.weight = model.transformer["wte"].weight  # type: ignore[assignment]  # to_empty unties them
    optimizer = Zero1Optimizer(param_groups(model, 0.1), torch.optim.AdamW, **ADAMW)
    for bucket in optimizer.buckets:
        if bucket.inner:
            allocate_state(bucket.inner)
    moments = storage_bytes(t for items in optimizer.state.values() for t in items.values() if t.dim())
    return moments, storage_bytes(bucket.flat_params for bucket in optimizer.buckets)


def measure_state(rank_counts: tuple[int, ...]) -> dict[str, Any]:
    """For each rank count every rank's bytes."""
    rows: list[dict[str, Any]] = []
    for ranks in rank_counts:
        found = run_on_ranks(state_on_ranks, ranks, timeout=300, device=kind())
        rows.append({"ranks": ranks, "moments": [m for m, _ in found], "flat_parameters": [f for _, f in found]})
        print(f"{ranks} ranks: at most {max(rows[-1]['moments']):,} bytes of moments", flush=True)
    with torch.device("meta"):
        return {"parameters": sum(p.numel() for p in GPT(GPTConfig(bias=False)).parameters()), "rows": rows}


MEASURES: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "backends": lambda ranks: measure_backends(50, ranks),
    "overhead": lambda ranks: measure_overhead(TEN_MILLION, tuple(n for n in ranks if n in (2, 4)), 25, kind()),
    "timeline": lambda ranks: measure_timeline(TEN_MILLION, 2, kind()),
    "state": lambda ranks: measure_state(ranks),
}


def main(names: list[str], write: bool) -> None:
    """Make the measurements of these names, or all of them, at as many ranks as there are GPUs, or up to 8 on a CPU."""
    gpus = torch.cuda.device_count()
    ranks = tuple(n for n in (1, 2, 4, 8) if not gpus or n <= gpus)
    for name in names or MEASURES:
        if name not in MEASURES:
            raise ConfigError(f"there is no measurement {name} (known: {', '.join(MEASURES)})")
        if name in ("overhead", "timeline") and ranks == (1,):
            print(f"{name} needs two GPUs: left out")
            continue
        samples = MEASURES[name](ranks)
        if write:
            device = torch.device("cuda", 0) if gpus else torch.device("cpu")
            settings = {"command": f"python -m bench.sharding.zero1 {name}"}
            print(f"wrote {write_result(f'zero1-{name}', device, settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        main([word for word in sys.argv[1:] if word != "--write"], "--write" in sys.argv)
