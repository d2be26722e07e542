"""Measure how many bytes gloo sends for a collective, and compare them with the ring algorithm.

    python -m bench.sharding.wire             # half a minute
    python -m bench.sharding.wire --write     # also write bench/results/wire-<hardware>.json

All ranks run on this machine and communicate over its loopback interface. Linux counts the bytes of that interface.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.memory.costs import ring_bytes
from phase1_zero1.buckets import all_gather, reduce_scatter
from workshop.ranks import run_on_ranks

ELEMENTS, TIMES = 1 << 20, 10  # elements of the full fp32 tensor; calls of each collective
COUNTERS = Path("/proc/net/dev")


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has sent since the machine started."""
    line = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure_sent_bytes(kind: str) -> float:
    """Return the bytes that a rank sends for one collective, averaged over all ranks."""
    N = dist.get_world_size()
    full, shard = torch.ones(ELEMENTS), torch.ones(ELEMENTS // N)
    calls = {
        "all-reduce": lambda: dist.all_reduce(full),
        "reduce-scatter": lambda: reduce_scatter(shard, full),
        "all-gather": lambda: all_gather(full, shard),
    }
    calls[kind]()  # the first call connects the ranks
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    for _ in range(TIMES):
        calls[kind]()
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    return (after - before) / TIMES / N


def main(write: bool = False) -> None:
    """Measure each collective on 2, 4 and 8 ranks.

    Args:
        write: also write bench/results/wire-<hardware>.json.
    """
    rows = []
    for ranks in (2, 4, 8):
        for kind in ("all-reduce", "reduce-scatter", "all-gather"):
            measured = run_on_ranks(measure_sent_bytes, ranks, kind, timeout=120, show=False)[0] / (4 * ELEMENTS)
            ring = ring_bytes(kind, 1.0, ranks)
            rows.append({"ranks": ranks, "kind": kind, "sent_per_tensor_byte": measured, "ring": ring})
            print(f"{ranks} ranks, {kind}: bytes sent / tensor bytes = {measured:.3f}, in a ring {ring:.3f}")
    if write:
        settings = {"command": "python -m bench.sharding.wire --write", "tensor_bytes": 4 * ELEMENTS, "times": TIMES}
        print(f"wrote {write_result('wire', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
