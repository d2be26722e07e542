"""Helpers of notebook 2: compare the versions of data parallelism that are written by hand with torch's DDP."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from measure.ledger import CollectiveCounter
from workshop.ddp import OverlappedAverage, average_each, average_in_buffer

BUCKET_MB = 1  # of the third version and of DDP, so that a small model has several buckets
Result = dict[str, float]


def measure_versions(
    make_model: Callable[[], nn.Module], batches: Sequence[tuple[Tensor, Tensor]], times: int = 8
) -> dict[str, Result]:
    """Run backward passes with each version, and return its costs. Collective.

    The versions alternate, so that a busy machine slows all of them. The shortest of several times counts.

    Args:
        make_model: returns a model with the same weights on every rank; it takes (x, y) and returns the loss.
        batches: the micro-batch of each rank.
        times: number of steps of each version.

    Returns:
        For each version: collective `calls`, ring `bytes` per rank, `step` and `wait` in seconds, and the largest
        `difference` of a gradient from DDP's. A step is forward, backward and the averages; `wait` is the part of it
        after the backward pass.
    """
    x, y = batches[dist.get_rank()]
    models = {name: make_model() for name in ("each", "one buffer", "overlapped", "DDP")}
    ddp = DDP(models["DDP"], bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    overlapped = OverlappedAverage(models["overlapped"].parameters(), BUCKET_MB * 2**20)
    finish: dict[str, Callable[[], None]] = {
        "each": lambda: average_each(models["each"].parameters()),
        "one buffer": lambda: average_in_buffer(models["one buffer"].parameters()),
        "overlapped": overlapped.wait,
        "DDP": lambda: None,
    }
    results: dict[str, Result] = {name: {"step": float("inf"), "wait": float("inf")} for name in models}
    for _ in range(times):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            (ddp if name == "DDP" else model)(x, y).backward()
            end = time.perf_counter()
            finish[name]()
            now = time.perf_counter()
            results[name]["step"] = min(results[name]["step"], now - begin)
            results[name]["wait"] = min(results[name]["wait"], now - end)
    for name, model in models.items():
        model.zero_grad()
        with CollectiveCounter() as traffic:
            (ddp if name == "DDP" else model)(x, y).backward()
            finish[name]()
        rows = traffic.rows.values()
        results[name] |= {"calls": sum(row["calls"] for row in rows), "bytes": sum(row["ring_bytes"] for row in rows)}
    reference = [param.grad for param in models["DDP"].parameters()]
    for name, model in models.items():
        pairs = zip(model.parameters(), reference, strict=True)
        results[name]["difference"] = max((param.grad - grad).abs().max().item() for param, grad in pairs)  # type: ignore[operator]
    return results


def print_versions(results: Sequence[Mapping[str, Result]], gradient_bytes: int) -> None:
    """Print the costs of each version, the maximum over all ranks, and check the bytes and the gradients.

    Args:
        results: of each rank.
        gradient_bytes: n, the bytes of all gradients.
    """
    volume = 2 * gradient_bytes * (len(results) - 1) / len(results)
    print("version      collective  communication    step    after the backward    max gradient difference")
    print("             calls       per rank (MB)    (ms)    pass (ms)             from DDP")
    for name in results[0]:
        worst = {key: max(result[name][key] for result in results) for key in results[0][name]}
        print(
            f"{name:11} {worst['calls']:11.0f} {worst['bytes'] / 1e6:14.2f} {1e3 * worst['step']:8.1f} "
            f"{1e3 * worst['wait']:10.1f} {worst['difference']:25.1e}"
        )
        assert worst["bytes"] == volume and worst["difference"] < 1e-6
