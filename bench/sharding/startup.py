"""Measure the memory in which a rank initializes its shard: the 7B model on 8 ranks. Small gloo processes.

    python -m bench.sharding.startup             # two minutes on 2 cores, 7 GB of memory
    python -m bench.sharding.startup --write     # also write bench/results/startup-<hardware>.json

Every rank builds the model on the meta device, shards it, and allocates and fills its shard, as phase 3 does. The
ranks of the 7B model take turns, because few machines have memory for all shards: 8 x 3.3 GB. A rank frees its
shard before the next one begins. All ranks of GPT-2 XL start at the same time. The unit is peak resident memory
(VmHWM of Linux) above that before `init_shards`.
"""

import ctypes
import gc
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.tables.records import write_result
from nanoGPT.checkpoint.weights import PADDED_VOCAB
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.distributed.runtime import Runtime, create_runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.job.parse import parse
from nanoGPT.model import GPT, MAX_CHUNK_ELEMENTS, GPTConfig, draw_initial_rows
from phase3_fsdp.fsdp import FsdpConfig, init_context, init_shards, shard_model
from workshop.imports import ROOT
from workshop.ranks import run_on_ranks

RANKS = 8
CASES = (("train_7b", True), ("train_gpt2_xl", False))  # configuration of phase 3, and whether the ranks take turns
PROCESS = Path("/proc/self")


def reset_peak() -> int:
    """Return the bytes of this process that are in memory, and let its peak begin there. Linux only."""
    (PROCESS / "clear_refs").write_text("5")
    return read_status("VmHWM")


def read_status(key: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
    assert found, key
    return 1024 * int(found[1])


def measure_rank(model: GPT, config: FsdpConfig, run: Runtime) -> dict[str, Any]:
    """Initialize the shard of this rank; return its bytes, the peak memory above that at the start, and the seconds."""
    draw_initial_rows(torch.empty(2, 8), "warmup", torch.Size((2, 8)), 1, 0)  # libraries allocate at their first use
    start, begin = reset_peak(), time.perf_counter()
    init_shards(model, config, run)
    seconds, peak = time.perf_counter() - begin, read_status("VmHWM")
    shard_bytes = sum(4 * local_shard(p).numel() for p in model.parameters())
    return {"rank": run.rank, "shard_bytes": shard_bytes, "peak_bytes": peak - start, "seconds": seconds}


def build(config: FsdpConfig, shape: GPTConfig, run: Runtime) -> GPT:
    """Return the sharded model, without memory for its parameters."""
    with init_context(config, run):
        model = GPT(shape)
    return shard_model(model, config, run)


def measure_start(config: FsdpConfig, shape: GPTConfig, takes_turns: bool) -> dict[str, Any]:
    """Initialize the shard of this rank, in its turn or at the same time as all others, and free it. Collective."""
    run = create_runtime("cpu", "float32")
    model, result = build(config, shape, run), {}
    for turn in range(run.world_size if takes_turns else 1):
        dist.barrier()
        if turn == run.rank or not takes_turns:
            result = measure_rank(model, config, run)
            del model
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
    return result


def run_case(name: str, takes_turns: bool) -> dict[str, Any]:
    """Return the memory of every rank for a configuration of phase 3."""
    config = replace(parse(FsdpConfig, [f"config/{name}.py"], ROOT / "phase3_fsdp" / "train.py", RANKS), compile=False)
    shape = GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias, PADDED_VOCAB)
    row: dict[str, Any] = {"name": name, "parameters": shape.count_params(), "takes_turns": takes_turns}
    row["chunk_bytes"] = 4 * max(MAX_CHUNK_ELEMENTS, 4 * shape.n_embd)  # one row, if a row has more elements
    return row | {"ranks": run_on_ranks(measure_start, RANKS, config, shape, takes_turns, timeout=900, show=False)}


def main(write: bool = False) -> None:
    """Measure the start of both models.

    Args:
        write: also write bench/results/startup-<hardware>.json.
    """
    rows = []
    for case in CASES:
        rows.append(run_case(*case))
        for rank in rows[-1]["ranks"]:
            excess = rank["peak_bytes"] - rank["shard_bytes"]
            print(
                f"{case[0]}, rank {rank['rank']}: shard {rank['shard_bytes'] / 1e6:,.1f} MB, peak "
                f"{rank['peak_bytes'] / 1e6:,.1f} MB, {excess / 1e6:.2f} MB more, {rank['seconds']:.1f} s"
            )
    if write:
        settings = {"command": "python -m bench.sharding.startup --write", "ranks": RANKS}
        print(f"wrote {write_result('startup', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
