"""Predict how long a job takes to start, to save a checkpoint and to resume from one.

Rates of the CPU come from committed measurements on one core of an AMD EPYC, one core per rank:

    start     a rank draws the initial weights of its rows: all of them, or with FSDP its shard
              (bench/results/scale-*.json)
    save      a rank hashes what it writes and writes it; the ranks of a node share the bandwidth of the file system.
              Training waits for it, or with --async_save=True only for a copy (bench/results/save-speed-*.json)
    resume    a rank hashes its part of the files, and reads its part of the state: from memory, if it is still cached

The process group, imports and compilation take additional time, which does not depend on the model's size.
"""

from collections.abc import Mapping
from typing import Any

from bench.plan.speed import GPUS_PER_NODE

DRAWN_PER_SECOND = 205e6  # elements
HASHED_PER_SECOND = 1.7e9  # bytes of sha256


def estimate_startup(row: Mapping[str, Any], params: int, gpus: int, disk: float) -> dict[str, float]:
    """Return the bytes of a checkpoint, those that the busiest rank writes, and the seconds to start, save and resume.

    Args:
        row: of a plan, with its phase, its options, and the predicted bytes of model state per rank.
        params: parameters of the model.
        gpus: number of ranks.
        disk: bandwidth of the file system, in bytes per second and node.
    """
    saves_shards = row["phase"] in ("phase1", "phase3")
    shards = int(row["options"].get("fsdp_shard_size", gpus)) if saves_shards else 1
    total = 4 * params + row["state_bytes"]["optimizer_state"] * shards
    writers = gpus if saves_shards else 1
    busiest_rank, busiest_node = total / writers, total / writers * min(writers, GPUS_PER_NODE)
    save = busiest_rank / HASHED_PER_SECOND + busiest_node / disk
    return {
        "checkpoint_bytes": total,
        "rank_bytes": busiest_rank,
        "start_seconds": params / (shards if row["phase"] == "phase3" else 1) / DRAWN_PER_SECOND,
        "save_seconds": save,
        "resume_seconds": save,  # the same bytes are hashed, and read instead of written
    }
