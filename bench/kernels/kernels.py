"""Each kernel against torch's ways of computing the same, in time, bytes, FLOPs and memory: `make bench-kernels`.

    python -m bench.kernels                                        # print; on a CPU reduced and interpreted
    python -m bench.kernels --kernels=attention,loss --widths=124M # some
    python -m bench.kernels --write                                # into bench/results/kernels-<hardware>.json

Contenders take turns, one call each a round, with the cache flushed before each call, so that a chip whose clock drifts
drifts for all. Beside the times stand the copy bandwidth and the matrix rate of this very device, measured first: a
kernel's percentage is of those, and no faster than the roofline allows.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.cases import GPT2_WIDTHS, MAKERS, Case, cases
from bench.tables.records import write_result
from nanoGPT.errors import ConfigError
from phase2_triton.kernels.core import Cost, interpreting


@dataclass
class Options:
    """What to measure."""

    kernels: str = "all"
    """all, or some of layernorm,add_layernorm,cross_entropy,loss,attention,gelu,linear_gelu,embedding,adamw"""
    widths: str = "all"
    """all, or some of 124M,350M,774M,1.5B; a CPU has one small size of its own"""
    rounds: int = 30
    """calls of each contender that are timed"""
    write: bool = False
    """write bench/results/kernels-<hardware>.json"""


def names(given: str, known: list[str]) -> list[str]:
    chosen = known if given == "all" else given.split(",")
    for name in chosen:
        if name not in known:
            raise ConfigError(f"{name!r} is not known: give all or some of {','.join(known)}")
    return chosen


class Stopwatch:
    """Milliseconds of a call: by events on a GPU, where calls are queued, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.flush = torch.empty(256 * 2**20 if self.cuda else 2**20, dtype=torch.int8, device=device)

    def time(self, call: Callable[[], Any]) -> float:
        """Run once, with nothing of it in the cache."""
        self.flush.zero_()
        if not self.cuda:
            begin = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - begin)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """Memory that a call takes beyond what was there; None on a CPU, which does not count it."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def limits(watch: Stopwatch, device: torch.device) -> dict[str, float]:
    """Bytes a second of a copy, which reads and writes, and FLOPs a second of a square matrix product."""
    size, n = (2**30, 8192) if watch.cuda else (2**24, 512)
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if watch.cuda else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    copying = min(watch.time(lambda: target.copy_(source)) for _ in range(20))
    multiplying = min(watch.time(lambda: a @ b) for _ in range(20))
    return {"bytes_per_second": 2 * size / copying * 1e3, "flops_per_second": 2 * n**3 / multiplying * 1e3}


def passes(case: Case, contender: str) -> dict[str, Callable[[], Any]]:
    """What is timed of a contender: its forward and its backward, or its one step."""
    function, wanted = case.contenders[contender], [x for x in case.inputs if x.requires_grad]
    if case.steps:
        return {"step": lambda: function(*case.inputs)}
    results = function(*case.inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.randn_like(result) for result in results]
    return {
        "forward": lambda: function(*case.inputs),
        "backward": lambda: torch.autograd.grad(results, wanted, gradients, retain_graph=True),
    }


def measure(case: Case, watch: Stopwatch, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender and pass, with its samples in milliseconds."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    rows = []
    for contender in case.contenders:
        try:
            with case.within(contender):
                found = passes(case, contender)
                for call in [call for call in found.values() for _ in range(3)]:
                    call()
            calls |= {(contender, name): call for name, call in found.items()}
        except Exception as error:  # a backend that this device or version lacks is a row without a time
            reason = str(error).strip().splitlines() or [type(error).__name__]
            rows.append({**facts(case, contender, "all", case.forward), "error": reason[0][:200]})
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for (contender, name), call in calls.items():
            with case.within(contender):
                samples[contender, name].append(watch.time(call))
    for (contender, name), call in calls.items():
        cost = case.backward if name == "backward" and case.backward else case.forward
        with case.within(contender):
            peak = watch.peak_bytes(call)
        rows.append({**facts(case, contender, name, cost), "samples_ms": samples[contender, name], "peak_bytes": peak})
    return rows


def facts(case: Case, contender: str, name: str, cost: Cost) -> dict[str, Any]:
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "pass": name,
        "contender": contender,
        "bytes": cost.read + cost.written,
        "flops": cost.flops,
    }


def line(row: dict[str, Any], limit: dict[str, float]) -> str:
    """A row for people: its time, and how near to the roofline that is."""
    head = f"{row['kernel']:24}{row['shape']:28}{row['pass']:10}{row['contender']:24}"
    if "error" in row:
        return f"{head}{row['error']}"
    ms = statistics.median(row["samples_ms"])
    roof = 1e3 * max(row["bytes"] / limit["bytes_per_second"], row["flops"] / limit["flops_per_second"])
    rates = f"{row['bytes'] / ms / 1e6:10.1f} GB/s{row['flops'] / ms / 1e9:10.2f} TFLOP/s"
    return f"{head}{ms:10.3f} ms{rates}{roof / ms:8.1%}"


def kernel_device() -> torch.device:
    """Where this process's kernels run: TRITON_INTERPRET=1 keeps them on the CPU of a machine with a GPU, too."""
    compiled = torch.cuda.is_available() and not interpreting()
    return torch.device("cuda", 0) if compiled else torch.device("cpu")


def main(options: Options) -> None:
    device = kernel_device()
    torch.manual_seed(0)
    watch, rounds = Stopwatch(device), options.rounds if device.type == "cuda" else min(options.rounds, 3)
    limit = limits(watch, device)
    if device.type == "cpu":
        print("No GPU: small sizes in Triton's interpreter. These times say nothing about a GPU.")
    rates = limit["bytes_per_second"] / 1e9, limit["flops_per_second"] / 1e12
    print("copy {:.0f} GB/s, matrix product {:.1f} TFLOP/s".format(*rates))
    rows = []
    widths = names(options.widths, list(GPT2_WIDTHS))
    for case in cases(device, set(names(options.kernels, list(MAKERS))), widths):
        for row in measure(case, watch, rounds):
            rows.append(row)
            print(line(row, limit), flush=True)
        if device.type == "cuda":
            del case
            torch.cuda.empty_cache()
    if options.write:
        settings = {"command": "python -m bench.kernels --write", "interpreted": device.type == "cpu", "rounds": rounds}
        print(f"wrote {write_result('kernels', device, settings, {'limits': limit, 'rows': rows})}")
