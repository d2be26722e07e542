"""Compare three updates of sharded Muon: torch's Muon on DTensors, phase 3's, and phase 1's. One machine, gloo.

    python -m bench.sharding.muon             # a minute
    python -m bench.sharding.muon --write     # also write bench/results/muon-<hardware>.json

All have the same gradients. torch's Muon runs every matrix product on DTensors, and most of these need a collective.
Phase 1's update also reduces the gradients and broadcasts the parameters, which phase 3 does elsewhere.
"""

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from bench.sharding.wire import loopback_bytes
from bench.sharding.zero1 import TEN_MILLION
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPT
from nanoGPT.optim import muon_groups
from nanoGPT.train_config import TrainConfig
from phase1_zero1.muon import Zero1Muon
from phase3_fsdp.muon import ShardedMuon
from workshop.ranks import run_on_ranks

RANKS = (1, 2, 4)
TURNS = 5  # timed updates, after one that is not timed
NAMES = ("torch", "phase3", "phase1")


def build_muon(name: str) -> tuple[Optimizer, list[Tensor]]:
    """Return an optimizer over the matrices of a model with 10 million parameters, and these matrices."""
    config = TrainConfig(optimizer="muon")
    model = GPT(TEN_MILLION)
    model.init_weights(0)
    if name == "phase1":
        for module in (*model.transformer.values(), model.lm_head):  # only the matrices of the blocks are trained
            if module is not model.transformer["h"]:
                module.requires_grad_(False)
        return Zero1Muon(model, config, fused=True), muon_groups(model, config)[0]["params"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    matrices = muon_groups(model, config)[0]
    muon = {"torch": torch.optim.Muon, "phase3": ShardedMuon}[name]
    return muon([matrices]), matrices["params"]


def measure_updates() -> dict[str, dict[str, Any]]:
    """Return, for each update, the milliseconds of every turn, and the bytes that a rank sent per update."""
    samples: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        optimizer, matrices = build_muon(name)
        times, sent = [], 0
        for turn in range(1 + TURNS):
            for param in matrices:
                param.grad = torch.full_like(param, 1e-3)
            dist.barrier()
            before, begin = loopback_bytes(), time.perf_counter()
            dist.barrier()
            optimizer.step()
            dist.barrier()
            if turn:
                times.append(1000 * (time.perf_counter() - begin))
                sent += loopback_bytes() - before
        samples[name] = {"ms": times, "sent_bytes": sent / TURNS / dist.get_world_size()}
    return samples


def main(write: bool = False) -> None:
    """Measure all updates on 1, 2 and 4 ranks.

    Args:
        write: also write bench/results/muon-<hardware>.json.
    """
    rows = []
    for ranks in RANKS:
        for name, samples in run_on_ranks(measure_updates, ranks, timeout=300, show=False)[0].items():
            rows.append({"ranks": ranks, "name": name, **samples})
            ms = statistics.median(samples["ms"])
            print(f"{ranks} ranks, {name}: {ms:,.0f} ms, {samples['sent_bytes'] / 1e6:,.1f} MB sent per rank")
    if write:
        matrices = TEN_MILLION.n_layer * 12 * TEN_MILLION.n_embd**2
        settings = {"command": "python -m bench.sharding.muon --write", "elements": matrices}
        print(f"wrote {write_result('muon', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
