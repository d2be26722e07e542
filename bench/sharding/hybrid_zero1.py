"""Ask whether ZeRO-1 across the replicas of hybrid FSDP is worth its communication: on paper, and on 4 gloo ranks.

    python -m bench.sharding.hybrid_zero1             # ten minutes on 2 cores
    python -m bench.sharding.hybrid_zero1 --write     # also write bench/results/hybrid-zero1-<hardware>.json

With hybrid FSDP, R replicas store the same shard and the same optimizer state. With ZeRO-1 across the replicas, each of
them updates 1/R of the elements of its shard, so it needs 1/R of the optimizer state. The replicas then all-gather the
updated elements, after the update, when no computation is left to overlap with. FSDP has already all-reduced the
gradients between the replicas.

The first part asks the planner for the memory and the time of a step with this and with the alternatives that also save
memory: sharding over all ranks, CPU offload, and with several micro-batches their gradients as shards ("sync"). The
second part trains a small model on 2 x 2 ranks, with and without ZeRO-1 across the replicas, and compares time, bytes
and losses.
"""

import itertools
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch

from bench.plan.models import MODELS
from bench.plan.options import Row
from bench.plan.plan import start_workers
from bench.plan.planner import Job, Planner
from bench.plan.speed import GPUS, GPUS_PER_NODE, collective_seconds
from bench.sharding.replicated_shards import STEPS, train_hybrid
from bench.sharding.zero1 import TEN_MILLION
from bench.tables.fsdp_tables import ZERO1_WAY
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPTConfig
from workshop.ranks import run_on_ranks

NAMES = ("gpt2", "gpt2-xl", "6.7b")
NODES = (2, 8)
GPU = GPUS["h100"]
NETWORKS = (GPU.network, 25e9)  # bytes/s of a node: eight adapters of 400 Gbit/s, or two of 100 Gbit/s
BLOCK_SIZE, BATCH_SIZE = 1024, 4
HYBRID: Row = ("phase3", {"fsdp_shard_size": str(GPUS_PER_NODE)})
WAYS: dict[str, Row] = {
    "hybrid": HYBRID,
    "all ranks": ("phase3", {}),
    "hybrid, CPU offload": ("phase3", {"fsdp_shard_size": str(GPUS_PER_NODE), "fsdp_cpu_offload": True}),
    "hybrid, sync": ("phase3", {"fsdp_shard_size": str(GPUS_PER_NODE), "fsdp_sync_every_micro_batch": True}),
}
MICRO_BATCHES = (1, 4)  # of a rank and step


def measure_ranks() -> dict[str, Any]:
    """Return the measurements of rank 0 with and without ZeRO-1 across the replicas."""
    return {"hybrid": train_hybrid(False, TEN_MILLION), ZERO1_WAY: train_hybrid(True, TEN_MILLION)}


def predict(name: str, nodes: int, micro_batches: int) -> list[dict[str, Any]]:
    """Return memory per rank and time per step of every way, from the planner."""
    shape = GPTConfig(*MODELS[name], BLOCK_SIZE, False, 50304)
    job, rows = Job(shape, GPU, nodes * GPUS_PER_NODE, micro_batches), []
    with start_workers() as pool:
        first = Planner(job, pool)
        for row in WAYS.values():
            first.submit_traces(row, BATCH_SIZE)
        for network in NETWORKS:
            planner = Planner(replace(job, gpu=replace(GPU, network=network)), pool)
            planner.traces = first.traces  # a trace does not depend on the network
            fields = {"model": name, "nodes": nodes, "micro_batches": micro_batches, "network": network}
            rows += predict_ways(planner, nodes, fields)
    return rows


def predict_ways(planner: Planner, nodes: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row with these fields for every way."""
    predicted: dict[str, dict[str, float]] = {}
    for way, row in WAYS.items():
        seconds = planner.estimate_speed(row, BATCH_SIZE, compiled=True)["step_seconds"]
        predicted[way] = {"bytes": planner.peak_bytes(row, BATCH_SIZE), "seconds": seconds}
    shard_bytes = 4 * planner.params / GPUS_PER_NODE
    # A rank sends its part of the shard to the other nodes. No computation overlaps with it.
    extra_seconds = collective_seconds(planner.job.gpu, "all-gather", shard_bytes, nodes, one_per_node=True)
    saved = 2 * shard_bytes * (nodes - 1) / nodes
    hybrid = predicted["hybrid"]
    zero1 = {"bytes": hybrid["bytes"] - saved, "seconds": hybrid["seconds"] + extra_seconds}
    predicted = {"hybrid": hybrid, ZERO1_WAY: zero1} | predicted
    fields |= {
        "parameters": planner.params,
        "saved_bytes": saved,
        "extra_sent_bytes": shard_bytes * (nodes - 1) / nodes,
    }
    return [{**fields, "way": way, **numbers} for way, numbers in predicted.items()]


def main(write: bool = False) -> None:
    """Predict all ways, and measure two of them.

    Args:
        write: also write bench/results/hybrid-zero1-<hardware>.json.
    """
    measured = run_on_ranks(measure_ranks, 4, timeout=300, show=False)[0]
    for way, samples in measured.items():
        times = [statistics.median(samples[key]) for key in ("step_ms", "update_ms")]
        print(f"{way}: step {times[0]:.0f} ms, update {times[1]:.0f} ms, {samples['state_bytes']:,} bytes of state")
    rows = []
    for micro_batches, name, nodes in itertools.product(MICRO_BATCHES, NAMES, NODES):
        for row in predict(name, nodes, micro_batches):
            rows.append(row)
            sizes = f"{row['bytes'] / 1e9:.2f} GB, {row['seconds']:.4f} s"
            place = f"{name}, {nodes} nodes, {micro_batches} micro-batches, {row['network'] / 1e9:.0f} GB/s"
            print(f"{place}, {row['way']}: {sizes}", flush=True)
    if write:
        settings = {"command": "python -m bench.sharding.hybrid_zero1 --write", "block_size": BLOCK_SIZE}
        settings |= {"batch_size": BATCH_SIZE, "steps": STEPS, "parameters": TEN_MILLION.count_params()}
        samples = {"rows": rows, "measured": measured}
        print(f"wrote {write_result('hybrid-zero1', torch.device('cpu'), settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
