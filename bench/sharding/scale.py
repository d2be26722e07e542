"""Measure costs that depend on the number of ranks: start-up, planning a save, agreeing to stop. Small gloo processes.

    python -m bench.sharding.scale             # four minutes on 2 cores
    python -m bench.sharding.scale --write     # also write bench/results/scale-<hardware>.json

More ranks than cores wait for each other, so the unit is CPU time of one process, without its waiting. Each part runs
without its optimization ("before") and with it ("after"). Saves have three ways: DCP ("before"), DCP with cached plans
("after"), and what the trainers use, the layout of the last save ("layout"):

    init    a rank draws the initial values of its rows, or of all rows
    save    the third save of a model with as many tensors as GPT-2 124M (`nanoGPT.checkpoint.shard_writer`); on rank 0,
            and the median of the other ranks
    index   a rank gets the index of this checkpoint: every rank reads and checks it, or rank 0 broadcasts it
    stop    a rank asks whether to stop after every step of 0.1 s; the ranks agree once a second, or after every step
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.tables.records import write_result
from nanoGPT.checkpoint.shard_writer import write_shards
from nanoGPT.checkpoint.shards import SafeReader
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.distributed.sharding import row_range
from nanoGPT.metrics.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig, draw_initial_rows
from workshop.ranks import run_on_ranks

RANKS = (8, 32, 64)
SHAPE = GPTConfig(bias=False)  # GPT-2 124M
NUM_TENSORS = 3 * 75 + 75  # parameters, two moments and a step count of its 75 parameters
STEPS = 60  # after which a rank asks whether to stop
STEP_SECONDS = 0.1
WAYS = ("before", "after", "layout")  # to save
MEDIANS = ("init_after", "index_before", "index_after", "stop_before", "stop_after")  # over the ranks
COUNTS = ("stop_before_collectives", "stop_after_collectives")


def measure_init(rank: int, ranks: int, draws_all: bool) -> float:
    """Return the CPU seconds in which a rank draws its rows, or all rows, of all parameters."""
    with torch.device("meta"):
        params = {name: p.shape for name, p in GPT(SHAPE).named_parameters()}
    begin = time.process_time()
    for name, shape in params.items():
        first, last = (0, shape[0]) if draws_all else row_range(shape[0], ranks, rank)
        draw_initial_rows(torch.empty(last - first, *shape[1:]), name, shape, SHAPE.n_layer, 1, first)
    return time.process_time() - begin


def measure_save(folder: str, mesh: DeviceMesh, way: str) -> float:
    """Return the CPU seconds of a rank in the third of three saves.

    Args:
        way: "before" (DCP), "after" (DCP with cached plans) or "layout" (`write_shards`).
    """
    tensors = {f"t{i}": DTensor.from_local(torch.zeros(1, 8), mesh, [Shard(0)]) for i in range(NUM_TENSORS)}
    layout = None
    for step in range(3):
        path = Path(folder) / f"{way}-{step}"
        path.mkdir(exist_ok=True)
        dist.barrier()
        begin = time.process_time()
        if way == "layout":
            files = NewFiles(path, layout=layout)
            write_shards(files, tensors)
            layout = files.layout
        else:
            planner = dcp.DefaultSavePlanner(enable_plan_caching=way == "after")
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, sync_files=False), planner=planner)
    return time.process_time() - begin


def measure_index(folder: str, is_shared: bool) -> float:
    """Return the CPU seconds in which a rank gets the index of a checkpoint."""
    dist.barrier()
    begin = time.process_time()
    SafeReader(Path(folder) / "layout-2", is_shared).read_metadata()
    return time.process_time() - begin


def measure_stop(agrees_every_step: bool) -> tuple[float, float]:
    """Return the CPU seconds of a rank per step for the agreement to stop, and the number of collectives per step."""
    run = create_runtime("cpu", "float32")
    run.barrier()
    seconds, collectives = 0.0, 0
    for _ in range(STEPS):
        time.sleep(STEP_SECONDS)
        with CollectiveCounter() as counter:
            begin = time.process_time()
            run.any(False, False) if agrees_every_step else run.exchange_requests(False)
            seconds += time.process_time() - begin
        collectives += sum(row["calls"] for row in counter.rows.values())
    return seconds / STEPS, collectives / STEPS


def measure(folder: str) -> dict[str, float]:
    """Return the CPU seconds of this rank for every part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    result = {"init_after": measure_init(rank, ranks, draws_all=False)}
    if rank == 0:  # the cost does not depend on the rank
        result["init_before"] = measure_init(rank, ranks, draws_all=True)
    dist.barrier()
    for name, agrees_every_step in (("stop_before", True), ("stop_after", False)):
        result[name], result[f"{name}_collectives"] = measure_stop(agrees_every_step)
    result |= {f"save_{way}": measure_save(folder, mesh, way) for way in WAYS}
    result |= {"index_before": measure_index(folder, False), "index_after": measure_index(folder, True)}
    return result


def main(write: bool = False) -> None:
    """Measure every part on 8, 32 and 64 ranks.

    Args:
        write: also write bench/results/scale-<hardware>.json.
    """
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            results = run_on_ranks(measure, ranks, folder, timeout=600, show=False)
            index_bytes = (Path(folder) / "layout-2" / ".metadata").stat().st_size
        row = {name: results[0][name] for name in ("init_before", *(f"save_{way}" for way in WAYS))}
        row |= {name: statistics.median(each[name] for each in results) for name in (*MEDIANS, *COUNTS)}
        for way in WAYS:
            row[f"other_{way}"] = statistics.median(each[f"save_{way}"] for each in results[1:])
        row["index_bytes"] = index_bytes
        rows.append({"ranks": ranks, **row})
        print(f"{ranks} ranks: " + ", ".join(f"{name} {value:.4f}" for name, value in row.items()))
    if write:
        settings = {"command": "python -m bench.sharding.scale --write", "parameters": SHAPE.count_params()}
        settings |= {"tensors": NUM_TENSORS}
        print(f"wrote {write_result('scale', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
