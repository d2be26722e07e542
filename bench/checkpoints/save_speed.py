"""What a verified checkpoint costs: beside a bare `dcp.save` with fsync of the same bytes, and in the background.

    make bench-save                      # two ranks, 0.5 GB, fifteen saves of each kind in turn
    make bench-save ARGS=--write         # and bench/results/save-speed-<hardware>.json

The bare save writes and flushes the shards, nothing else. Ours hashes them on the way, writes a manifest and a
signpost, flushes the directories and renames; what is too old is deleted after it, beside the training. Of a save in
the background only the copy is waited for.
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
from nanoGPT.checkpoint.state import allocate_state
from nanoGPT.cli.command_line import command_line
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory.costs import storage_bytes
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from phase3_fsdp.fsdp import FsdpConfig, init_device, init_shards, shard_model
from phase3_fsdp.sharded_checkpoint import ShardWriter, training_state
from workshop.ranks import run_on_ranks

Samples = dict[str, list[float]]


def measure(folder: str, rounds: int, shape: GPTConfig) -> tuple[int, Samples]:
    """Seconds of each kind of save on this rank, and the bytes that it writes."""
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Runtime(rank, rank, ranks, ranks, torch.device("cpu"), torch.float32)
    config = FsdpConfig()
    with init_device(config, run):
        model = GPT(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    optimizer = configure_optimizer(model, config)
    allocate_state(optimizer)
    state = training_state(model, optimizer)
    box, shards = CheckpointDirectory(folder, run, keep=3), ShardWriter(model, optimizer)
    samples: Samples = {kind: [] for kind in ("bare_s", "ours_s", "deletion_s", "stop_s", "background_s")}

    def took(kind: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        samples[kind].append(time.perf_counter() - begin)

    def bare(number: int) -> None:
        target = Path(folder) / f"bare-{number}"
        took("bare_s", lambda: (dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(target)), dist.barrier()))
        if rank == 0:
            shutil.rmtree(target)

    def ours(number: int) -> None:
        took("ours_s", lambda: box.save(number, shards.write, {"phase": "bench"}))
        took("deletion_s", box.drain)

    def background(number: int) -> None:
        took("stop_s", lambda: box.save(number, shards.write, {"phase": "bench"}, shards.copy))
        took("background_s", box.drain)

    kinds = [bare, ours, background]
    for i in range(rounds + 1):  # the first round touches everything for the first time, and does not count
        for k in range(3):  # in turn: a disk is slower to take what follows on much else
            settle()
            kinds[(i + k) % 3](3 * i + k)
    return storage_bytes(state.values()), {name: values[1:] for name, values in samples.items()}


def settle() -> None:
    """Wait for all ranks, and until nothing of an earlier save is left to write."""
    os.sync()
    dist.barrier()


def main(ranks: int = 2, rounds: int = 15, n_layer: int = 12, n_embd: int = 512, write: bool = False) -> None:
    """Measure on the file system of the current directory.

    Args:
        ranks: that save together.
        rounds: of each kind of save.
        n_layer: of the model that is saved.
        n_embd: its channels.
        write: also write bench/results/save-speed-<hardware>.json.
    """
    shape = GPTConfig(n_layer, 8, n_embd, 256, False, 8192)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = run_on_ranks(measure, ranks, folder, rounds, shape, timeout=1200, show=False)
    size, samples = sum(bytes_ for bytes_, _ in found), found[0][1]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{size:,} bytes, {ranks} ranks: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    print(f"throughput of a bare save: {medians['bare_s'] / medians['ours_s']:.0%}")
    print(f"stop of a save in the background: {medians['stop_s'] / medians['ours_s']:.1%} of a save")
    if write:
        settings = {"command": "make bench-save", "ranks": ranks, "rounds": rounds, "bytes": size, "shape": vars(shape)}
        print(f"wrote {write_result('save-speed', torch.device('cpu'), settings, samples)}")


if __name__ == "__main__":
    command_line(main, sys.argv[1:])
