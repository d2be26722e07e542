"""Helpers of notebook 6: compare FSDP by hand with PyTorch's `fully_shard`."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from measure.ledger import CollectiveCounter
from measure.tracker import MemoryTracker
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp import minimal
from phase3_fsdp.by_hand import HandmadeFSDP

STEPS = 5  # that are measured


def compare_with_fully_shard(shape: GPTConfig) -> dict[str, dict[str, float]]:
    """Train a GPT with `by_hand.py` and with `fully_shard`, two micro-batches per rank, and return the costs of a step.

    The smallest peak of five steps counts, because gloo may free a tensor late, and the shortest time of five. The
    timed steps alternate, so that a busy machine slows both. Collective.

    Returns:
        For each version the bytes that are all-gathered and reduce-scattered, the peak memory of this rank in bytes,
        the time of a step in seconds, and the loss of the first step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(shape.vocab_size, (ranks, 2, 2, 4, shape.block_size), generator=torch.Generator())
    batches, models = [(x, y) for x, y in tokens[rank]], [GPT(shape), GPT(shape)]
    for model in models:
        model.init_weights(0)
    by_hand = HandmadeFSDP(models[0], list(models[0].blocks))
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*models[1].blocks, models[1]):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.AdamW(params, 1e-3) for params in (by_hand.parameters(), models[1].parameters())]
    versions: dict[str, tuple[GPT, torch.optim.Optimizer, Callable[[], tuple[float, float]]]] = {
        "by hand": (models[0], optimizers[0], lambda: by_hand.train_step(optimizers[0], batches, 1.0)),
        "fully_shard": (models[1], optimizers[1], lambda: minimal.train_step(models[1], optimizers[1], batches, 1.0)),
    }
    results: dict[str, dict[str, float]] = {}
    for name, (model, optimizer, step) in versions.items():
        loss, _ = step()
        peaks = []
        for _ in range(STEPS):
            with CollectiveCounter() as traffic, MemoryTracker(model, optimizer) as memory:
                step()
            peaks.append(sum(memory.peak.values()))
        sent = {kind: row["tensor_bytes"] for (kind, _), row in traffic.rows.items()}
        results[name] = {"loss": loss, "peak": min(peaks), "seconds": float("inf"), **sent}
    for _ in range(STEPS):
        for name, (_, _, step) in versions.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            results[name]["seconds"] = min(results[name]["seconds"], time.perf_counter() - begin)
    return results


def print_versions(results: Mapping[str, Mapping[str, float]]) -> None:
    """Print the costs of FSDP by hand and of `fully_shard`, and check that both send the same bytes."""
    print("version        all-gathered (MB)   reduce-scattered (MB)   peak memory (MB)   step (ms)   first loss")
    for name, row in results.items():
        print(
            f"{name:12} {row['all-gather'] / 1e6:19.2f} {row['reduce-scatter'] / 1e6:23.2f} {row['peak'] / 1e6:18.2f} "
            f"{1e3 * row['seconds']:11.0f} {row['loss']:12.6f}"
        )
    by_hand, by_torch = results.values()
    assert all(by_hand[kind] == by_torch[kind] for kind in ("all-gather", "reduce-scatter"))
    assert abs(by_hand["peak"] / by_torch["peak"] - 1) < 0.05 and abs(by_hand["loss"] - by_torch["loss"]) < 1e-6
