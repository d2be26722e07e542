"""Compare a verified checkpoint with a bare `dcp.save` of the same bytes, and with an asynchronous save.

    make bench NAME=save                      # two ranks, 0.5 GB, fifteen saves of each kind in turn
    make bench NAME=save ARGS=--write         # also write bench/results/save-speed-<hardware>.json

The bare save writes the shards and calls fsync, nothing else. This repository's save also hashes the shards while it
writes them, writes a manifest and the LATEST file, flushes the directories and renames. It deletes old checkpoints
afterwards, concurrently with training. In an asynchronous save, training waits only for the copy of the state.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.tables.records import write_result
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.training_state import allocate_state
from nanoGPT.command_line import command_line
from nanoGPT.costs import storage_bytes
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from nanoGPT.program import report_errors
from operate.ranks import run_on_ranks
from phase3_fsdp.fsdp import FsdpConfig, init_shards, shard_model
from phase3_fsdp.minimal import put_parameters_on_meta
from phase3_fsdp.sharded_checkpoint import ShardWriter, training_state

Samples = dict[str, list[float]]


def measure(folder: str, rounds: int, shape: GPTConfig) -> tuple[int, Samples]:
    """Measure every kind of save on this rank; return the bytes that it writes, and the seconds by kind of save."""
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Runtime(rank, rank, ranks, ranks, torch.device("cpu"), torch.float32)
    config = FsdpConfig()
    with put_parameters_on_meta():
        model = GPT(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    optimizer = configure_optimizer(model, config)
    allocate_state(optimizer)
    state = training_state(model, optimizer)
    checkpoints, shard_writer = CheckpointDirectory(folder, run, keep_checkpoints=3), ShardWriter(model, optimizer)
    samples: Samples = {kind: [] for kind in ("bare_s", "ours_s", "deletion_s", "stop_s", "background_s")}

    def record_seconds(kind: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        samples[kind].append(time.perf_counter() - begin)

    def save_bare(number: int) -> None:
        target = Path(folder) / f"bare-{number}"

        def save() -> None:
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(target))
            dist.barrier()

        record_seconds("bare_s", save)
        if rank == 0:
            shutil.rmtree(target)

    def save_verified(number: int) -> None:
        record_seconds("ours_s", lambda: checkpoints.save(number, shard_writer.write, {"phase": "bench"}))
        record_seconds("deletion_s", checkpoints.drain)

    def save_async(number: int) -> None:
        record_seconds(
            "stop_s", lambda: checkpoints.save(number, shard_writer.write, {"phase": "bench"}, shard_writer.copy)
        )
        record_seconds("background_s", checkpoints.drain)

    kinds = [save_bare, save_verified, save_async]
    for i in range(rounds + 1):  # the first round is a warm-up and does not count
        for k in range(3):  # the order rotates, because a disk writes more slowly after other large writes
            wait_for_disk()
            kinds[(i + k) % 3](3 * i + k)
    return storage_bytes(state.values()), {name: values[1:] for name, values in samples.items()}


def wait_for_disk() -> None:
    """Wait until all data of earlier saves is on the disk, on every rank."""
    os.sync()
    dist.barrier()


def main(ranks: int = 2, rounds: int = 15, n_layer: int = 12, n_embd: int = 512, write: bool = False) -> None:
    """Measure on the file system of the current directory.

    Args:
        ranks: number of ranks that save together.
        rounds: number of saves of each kind.
        n_layer: layers of the model that is saved.
        n_embd: channels of the model that is saved.
        write: also write bench/results/save-speed-<hardware>.json.
    """
    shape = GPTConfig(n_layer, 8, n_embd, 256, False, 8192)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        results = run_on_ranks(measure, ranks, folder, rounds, shape, timeout=1200, show=False)
    size, samples = sum(bytes_ for bytes_, _ in results), results[0][1]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{size:,} bytes, {ranks} ranks: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    print(f"throughput of a verified save: {medians['bare_s'] / medians['ours_s']:.0%} of a bare save")
    print(f"an asynchronous save stops training for {medians['stop_s'] / medians['ours_s']:.1%} of a synchronous save")
    if write:
        settings = {
            "command": "make bench NAME=save ARGS=--write",
            "ranks": ranks,
            "rounds": rounds,
            "bytes": size,
            "shape": vars(shape),
        }
        print(f"wrote {write_result('save-speed', torch.device('cpu'), settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
