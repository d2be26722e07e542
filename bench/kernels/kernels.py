"""Compare each kernel with torch's implementations in time, bytes, FLOPs and memory: `make bench NAME=kernels`.

In each round, every contender is called once, with a flushed cache. If the GPU's clock drifts, it therefore drifts for
all contenders. The copy bandwidth and the matrix rate of the device are measured first. The percentage of a kernel is
the shortest time that these two rates allow (the roofline), divided by its measured time. The time that Python needs to
start a call is not part of its time on a GPU.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from bench.kernels.cases import Case
from nanoGPT.errors import ConfigError
from phase2_triton.kernels.core import Cost, is_interpreted


def parse_names(value: str, known: list[str]) -> list[str]:
    """Return the names in a comma-separated list, or all known names for `all`.

    Raises:
        ConfigError: a name is not known.
    """
    names = known if value == "all" else value.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is unknown: use all or some of {','.join(known)}")
    return names


class Stopwatch:
    """A timer of calls: it uses CUDA events on a GPU, where calls are queued, and the clock on a CPU.

    On a GPU, a sleeping kernel runs before the first event. Meanwhile the host queues the kernels of the call, so the
    time between the events contains no waiting for Python. If the host needs longer, the call is timed again with
    twice the sleep. A call for which MAX_SLEEP_MS are too short waits for the GPU itself, and gets no sleep at all.
    """

    MAX_SLEEP_MS = 256
    CYCLES_PER_MS = 2_000_000  # of the fastest GPU; on a slower one the sleep is longer

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.sleep_ms: WeakKeyDictionary[Callable[[], Any], int] = WeakKeyDictionary()
        self.flush_buffer = torch.empty(256 * 2**20 if self.cuda else 2**20, dtype=torch.int8, device=device)

    def time(self, call: Callable[[], Any]) -> float:
        """Flush the cache, run the call once, and return its time in ms.

        On a GPU, this is the time from its first to its last kernel.
        """
        self.flush_buffer.zero_()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - start)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_ms = self.sleep_ms.get(call, 4)
        torch.cuda._sleep(sleep_ms * self.CYCLES_PER_MS)
        start_event.record()
        call()
        end_event.record()
        has_waited = start_event.query()  # the sleep ended before the host had queued everything
        end_event.synchronize()
        if has_waited and sleep_ms:
            self.sleep_ms[call] = 2 * sleep_ms if sleep_ms < self.MAX_SLEEP_MS else 0
            return self.time(call)
        return start_event.elapsed_time(end_event)

    def check_device(self) -> None:
        """Raise the error of an earlier kernel if it made the CUDA context unusable: later times would mean nothing."""
        if self.cuda:
            torch.cuda.synchronize()

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """Return how many bytes a call allocates at its peak, or None on a CPU, where this is not counted."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated


def measure_limits(watch: Stopwatch, device: torch.device) -> dict[str, float]:
    """Measure the device: bytes per second (read and written) of a copy, FLOPs per second of a matrix product."""
    size, n = (2**30, 8192) if watch.cuda else (2**24, 512)
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if watch.cuda else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    copy_ms = min(watch.time(lambda: target.copy_(source)) for _ in range(20))
    product_ms = min(watch.time(lambda: a @ b) for _ in range(20))
    return {"bytes_per_second": 2 * size / copy_ms * 1e3, "flops_per_second": 2 * n**3 / product_ms * 1e3}


def build_passes(case: Case, contender: str) -> dict[str, Callable[[], Any]]:
    """Return the calls to time: the contender's forward and backward, or its single step."""
    function = case.contenders[contender]
    leaves = [x for x in case.inputs if x.requires_grad]
    if case.is_step:
        return {"step": lambda: function(*case.inputs)}
    results = function(*case.inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.randn_like(result) for result in results]
    return {
        "forward": lambda: function(*case.inputs),
        "backward": lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True),
    }


def measure(case: Case, watch: Stopwatch, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contender and pass, with its times in milliseconds, or with an error."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    rows = []
    for contender in case.contenders:
        try:
            with case.context_of(contender):
                passes = build_passes(case, contender)
                for call in [call for call in passes.values() for _ in range(3)]:  # warm up
                    call()
            calls |= {(contender, name): call for name, call in passes.items()}
        except Exception as error:  # this device or version may lack a backend: its row has an error and no times
            watch.check_device()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            rows.append({**describe_row(case, contender, "all", case.forward), "error": reason})
    timings: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for (contender, name), call in calls.items():
            with case.context_of(contender):
                timings[contender, name].append(watch.time(call))
    for (contender, name), call in calls.items():
        cost = case.backward if name == "backward" and case.backward else case.forward
        with case.context_of(contender):
            peak = watch.peak_bytes(call)
        samples = {"samples_ms": timings[contender, name], "peak_bytes": peak}
        rows.append({**describe_row(case, contender, name, cost), **samples})
    return rows


def describe_row(case: Case, contender: str, name: str, cost: Cost) -> dict[str, Any]:
    """Return the fields of a row that are not measured."""
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "pass": name,
        "contender": contender,
        "bytes": cost.read + cost.written,
        "flops": cost.flops,
    }


def compute_roofline_share(row: dict[str, Any], limits: dict[str, float]) -> float:
    """Return the time that the limits of the device allow, as a fraction of the measured time of a row."""
    seconds = max(row["bytes"] / limits["bytes_per_second"], row["flops"] / limits["flops_per_second"])
    return 1000 * seconds / statistics.median(row["samples_ms"])


def find_kernel_device() -> torch.device:
    """Return the device of this process's kernels. With TRITON_INTERPRET=1 it is the CPU, even if there is a GPU."""
    is_compiled = torch.cuda.is_available() and not is_interpreted()
    return torch.device("cuda", 0) if is_compiled else torch.device("cpu")
