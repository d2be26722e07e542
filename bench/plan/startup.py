"""Predict how long a job takes to start, to save a checkpoint and to resume from one.

Rates of the CPU come from committed measurements, with one core per rank: those of the index on an Intel Xeon, all
others on an AMD EPYC.

    start     a rank draws the initial weights of its rows: all of them, or with FSDP its shard
              (bench/results/scale-*.json)
    save      a rank hashes what it writes and writes it; the ranks of a node share the bandwidth of the file system.
              Training waits for it, or with --async_save=True only for a copy (bench/results/save-speed-*.json).
              Rank 0 also writes the index, with one entry per shard of each tensor (bench/results/scale-*.json). The
              first save of a run takes longer, because rank 0 makes the index
    resume    a rank hashes its part of the files, and reads its part of the state: from memory, if it is still cached.
              Before that, rank 0 reads and checks the index, and the other ranks wait for it

The process group, imports and compilation take additional time, which does not depend on the model's size.
"""

from collections.abc import Mapping
from typing import Any

import torch

from bench.plan.speed import GPUS_PER_NODE
from nanoGPT.model import GPT, GPTConfig

DRAWN_PER_SECOND = 205e6  # elements
HASHED_PER_SECOND = 1.7e9  # bytes that SHA-256 hashes
INDEXED_PER_SECOND = 0.8e6  # shards whose entries in the index rank 0 writes, after the first save of a run
CHECKED_PER_SECOND = 22e3  # shards whose entries in the index rank 0 reads and checks
SAVED_TENSORS = 4  # per parameter tensor: the parameter, two moments and a step count; fewer with Muon


def estimate_startup(row: Mapping[str, Any], params: int, tensors: int, gpus: int, disk: float) -> dict[str, float]:
    """Return the bytes of a checkpoint, those that the busiest rank writes, and the seconds to start, save and resume.

    Args:
        row: of a plan, with its phase, its options, and the predicted bytes of model state per rank.
        params: parameters of the model.
        tensors: number of its parameter tensors.
        gpus: number of ranks.
        disk: bandwidth of the file system, in bytes per second and node.
    """
    saves_shards = row["phase"] in ("phase1", "phase3")
    shards = int(row["options"].get("fsdp_shard_size", gpus)) if saves_shards else 1
    total = 4 * params + row["state_bytes"]["optimizer_state"] * shards
    writers = gpus if saves_shards else 1
    busiest_rank, busiest_node = total / writers, total / writers * min(writers, GPUS_PER_NODE)
    transfer = busiest_rank / HASHED_PER_SECOND + busiest_node / disk
    entries = SAVED_TENSORS * tensors * shards if row["phase"] == "phase3" else 0  # phase 1 divides few tensors
    return {
        "checkpoint_bytes": total,
        "rank_bytes": busiest_rank,
        "start_seconds": params / (shards if row["phase"] == "phase3" else 1) / DRAWN_PER_SECOND,
        "save_seconds": transfer + entries / INDEXED_PER_SECOND,
        "resume_seconds": transfer + entries / CHECKED_PER_SECOND,  # the same bytes, read instead of written
    }


def count_tensors(shape: GPTConfig) -> int:
    """Return the number of parameter tensors of a model."""
    with torch.device("meta"):
        return len(list(GPT(shape).parameters()))
