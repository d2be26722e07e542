"""Check what needs all ranks: collectives, their speed, and the file system that the nodes share.

python -m bench.preflight.ranks phase3 RESULTS BYTES OUT_DIR     # `bench.preflight` starts it on every rank

The arguments are the phase, the file into which rank 0 writes the checks as JSON, the size of a
checkpoint, and the directory of the run.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bench.checks import Check
from bench.phases import load_config_class
from bench.plan.run import find_gpu
from bench.plan.speed import GPUS_PER_NODE, Gpu
from bench.preflight.node import find_existing_parent
from nanoGPT.costs import ring_bytes
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import RunError
from nanoGPT.files import unique_name
from nanoGPT.job.parse import config_from_launcher
from nanoGPT.job.start import report_job_errors, start
from operate.agreement import check_agreement
from operate.run_description import describe_run

LARGE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # of an all-reduce that measures the bandwidth
SMALL_REPEATS, LARGE_REPEATS = 30, 5
MIN_BANDWIDTH = 0.3  # fraction of the link of the data sheet
MAX_SLOWNESS = {"cpu": 2.0, "cuda": 1.2}  # of the slowest rank, compared with the median
WARMUP_PRODUCTS = {"cpu": 1, "cuda": 500}  # about 0.1 s on an H100, in which an idle GPU raises its clock
WRITE_BYTES = 64 << 20  # per node, to measure the speed of the disk
SHARE_SECONDS = 5.0  # in which all nodes must see a new file
MAX_SAVE_SECONDS = 120.0
TIMEOUT = timedelta(seconds=60)  # of a collective of the checks


def time_calls(work: Callable[[], object], repeats: int, device: torch.device, warmup: int = 1) -> float:
    """Return the median duration of a call in seconds, after `warmup` calls. All ranks must call it equally often."""
    synchronize = torch.get_device_module(device).synchronize  # on a CPU, it does nothing
    durations = []
    for _ in range(warmup + repeats):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[warmup:])


def check_collectives(run: Runtime) -> Check:
    """Check the results of an all-reduce, a reduce-scatter and an all-gather of tensors with known sums."""
    ranks = run.world_size
    mine = torch.full((ranks, 1024), run.rank + 1.0, device=run.device)
    expected_sum = ranks * (ranks + 1) / 2
    total, shard, every = mine.clone(), torch.empty(1024, device=run.device), torch.empty_like(mine)
    dist.all_reduce(total)
    dist.reduce_scatter(shard, list(mine.clone().unbind()))
    dist.all_gather(list(every.unbind()), mine[0].contiguous())
    numbers = torch.arange(1.0, ranks + 1, device=run.device)
    is_right = bool((total == expected_sum).all() and (shard == expected_sum).all() and (every.mT == numbers).all())
    wrong = [rank for rank, each in enumerate(run.gather(is_right)) if not each]
    if wrong:
        remedy = "the network or a GPU corrupts data: run with NCCL_DEBUG=INFO, and exclude the nodes of these ranks"
        return Check("collectives", "fail", f"wrong results on ranks {wrong}", remedy)
    return Check("collectives", "pass", "all-reduce, reduce-scatter and all-gather return the expected values")


def check_bandwidth(run: Runtime, gpu: Gpu | None) -> Check:
    """Measure the latency and the bandwidth of an all-reduce over all ranks."""
    small = torch.ones(2, device=run.device)
    large = torch.ones(LARGE_BYTES[run.device.type] // 4, device=run.device)
    latency = time_calls(lambda: dist.all_reduce(small), SMALL_REPEATS, run.device)
    seconds = max(run.gather(time_calls(lambda: dist.all_reduce(large), LARGE_REPEATS, run.device)))
    rate = ring_bytes("all-reduce", 4 * large.numel(), run.world_size) / seconds
    finding = f"all-reduce of {4 * large.numel() >> 20} MiB: {rate / 1e9:.2f} GB/s per rank (ring), "
    finding += f"latency {1e6 * latency:.0f} us"
    is_multi_node = run.local_world_size < run.world_size
    if gpu is None:
        return Check("bandwidth", "pass", finding)
    network = gpu.network * min(1.0, run.local_world_size / GPUS_PER_NODE)  # NCCL has a ring over each adapter
    link = min(gpu.link, network) if is_multi_node else gpu.link
    finding += f"; link in the data sheet: {link / 1e9:.0f} GB/s"
    if rate < MIN_BANDWIDTH * link:
        remedy = "check NCCL_DEBUG=INFO for the transport that NCCL uses, and the links with `nvidia-smi topo -m`"
        return Check("bandwidth", "warn", finding, remedy)
    return Check("bandwidth", "pass", finding)


def check_slowest_rank(run: Runtime) -> Check:
    """Measure a matrix product on every rank at the same time, and compare the slowest rank with the median."""
    size = 4096 if run.device.type == "cuda" else 512
    a = torch.rand(size, size, device=run.device, dtype=run.dtype)
    run.barrier()
    times = run.gather(time_calls(lambda: a @ a, 10, run.device, WARMUP_PRODUCTS[run.device.type]))
    median, slowest = statistics.median_low(times), max(range(run.world_size), key=times.__getitem__)
    ratio = times[slowest] / median
    finding = f"a {size} x {size} matrix product takes {1e3 * median:.2f} ms; rank {slowest} takes {ratio:.2f} x that"
    if ratio > MAX_SLOWNESS[run.device.type]:
        return Check("slowest rank", "warn", finding, "every step waits for this rank: check its device and its node")
    return Check("slowest rank", "pass", finding)


def check_shared_directory(run: Runtime, out_dir: Path) -> Check:
    """Check that all ranks see a file that rank 0 writes into the parent of out_dir."""
    path = Path(run.call_on_rank0(lambda: str(out_dir / unique_name("preflight"))))
    if run.is_main:
        path.write_text("complete")
    run.barrier()
    deadline = time.monotonic() + SHARE_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    states = run.gather(path.exists() and path.read_text() == "complete")
    run.call_on_rank0(path.unlink)
    if blind := [rank for rank, is_visible in enumerate(states) if not is_visible]:
        remedy = "use an --out_dir on a file system that all nodes share"
        return Check("shared directory", "fail", f"ranks {blind} do not see a file that rank 0 wrote", remedy)
    return Check("shared directory", "pass", "all ranks see a file of rank 0")


def check_write_speed(run: Runtime, out_dir: Path, bytes_per_save: int) -> Check:
    """Write a file on every rank at the same time, as a sharded save does, and predict the duration of a save."""
    path = out_dir / unique_name(f"preflight-{run.rank}")
    size = max(1, WRITE_BYTES // run.local_world_size >> 20) << 20
    run.barrier()
    begin, problem = time.perf_counter(), ""
    try:
        with open(path, "wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"rank {run.rank}: {error.strerror}"
    path.unlink(missing_ok=True)
    results = run.gather((time.perf_counter() - begin, problem))
    if problems := [text for _, text in results if text]:
        return Check("write speed", "fail", "; ".join(problems), "use --out_dir on a disk that all ranks can write to")
    rate = run.world_size * size / max(seconds for seconds, _ in results)
    seconds = bytes_per_save / rate
    finding = f"{rate / 1e6:,.0f} MB/s on all ranks together: a save takes {seconds:,.1f} s"
    if seconds > MAX_SAVE_SECONDS:
        return Check("write speed", "warn", finding, "save less often: use a larger --eval_interval")
    return Check("write speed", "pass", finding)


def run_checks(run: Runtime, out_dir: Path, bytes_per_save: int) -> list[Check]:
    """Run all checks. Collective."""
    folder = Path(run.call_on_rank0(lambda: str(find_existing_parent(out_dir).absolute())))
    checks = []
    if run.world_size > 1:
        checks += [check_collectives(run), check_bandwidth(run, find_gpu(run.device.type)), check_slowest_rank(run)]
        checks.append(check_shared_directory(run, folder))
    return [*checks, check_write_speed(run, folder, bytes_per_save)]


def main(phase: str, results: str, bytes_per_save: str, out_dir: str) -> int:
    """Join the other ranks, run the checks, and write them on rank 0.

    Raises:
        RunError: a collective timed out.
    """
    config = config_from_launcher(load_config_class(phase))
    assert config, "this program needs a launcher: run `make preflight`"
    try:
        with start(config, reads_only=True) as run:
            dist.distributed_c10d._set_pg_timeout(TIMEOUT)
            check_agreement(run, describe_run(config, run))
            checks = run_checks(run, Path(out_dir), int(bytes_per_save))
            if run.is_main:
                Path(results).write_text(json.dumps([dataclasses.asdict(check) for check in checks]))
    except Exception as error:
        if isinstance(error, RunError) or "timed out" not in str(error).lower():
            raise
        raise RunError(
            f"a rank or the network did not answer a collective within {TIMEOUT.seconds} seconds: run with "
            "NCCL_DEBUG=INFO, and exclude one node at a time",
            on_one_rank=True,
        ) from error
    return 0


if __name__ == "__main__":
    os._exit(report_job_errors(lambda: main(*sys.argv[1:])))
