"""Measure how long an all-reduce takes, and fit the cost model of latency and bandwidth.

In a ring of N ranks, an all-reduce of n bytes has 2(N-1) steps, and a rank sends 2n(N-1)/N bytes (`predict_costs`). If
a step needs a fixed time alpha (the latency), and a byte needs a fixed time beta (one over the bandwidth), then

    time = alpha * steps + beta * volume

Notebook 2 measures the times with real ranks and fits alpha and beta.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workshop import collectives
from workshop.collectives import predict_costs

ALL_REDUCES: dict[str, Callable[[Tensor], object]] = {"by hand": collectives.all_reduce, "gloo": dist.all_reduce}


def measure_all_reduces(sizes: Sequence[int], times: int = 15) -> dict[str, list[float]]:
    """Return for each all-reduce its shortest time in seconds, for tensors of each size. Collective.

    The shortest of many times is the one that other programs on the machine disturb least. The two all-reduces
    alternate, so that a busy machine slows both of them.

    Args:
        sizes: bytes of the fp32 tensor; each a multiple of 4.
        times: number of calls of each all-reduce and size.
    """
    shortest: dict[str, list[float]] = {name: [] for name in ALL_REDUCES}
    for size in sizes:
        values = torch.zeros(size // 4)
        seconds: dict[str, list[float]] = {name: [] for name in ALL_REDUCES}
        for _ in range(times + 1):
            for name, all_reduce in ALL_REDUCES.items():
                dist.barrier()
                begin = time.perf_counter()
                all_reduce(values)
                seconds[name].append(time.perf_counter() - begin)
        for name, samples in seconds.items():
            shortest[name].append(min(samples[1:]))  # the first call connects the ranks
    return shortest


def fit_latency_and_bandwidth(sizes: Sequence[int], seconds: Sequence[float], ranks: int) -> tuple[float, float]:
    """Return alpha in seconds per step, and the bandwidth 1/beta in bytes per second.

    The fit minimizes the relative errors, so that the short times of small tensors count as much as the long ones.
    """
    costs = torch.tensor([predict_costs("all-reduce", size, ranks) for size in sizes], dtype=torch.float64)
    weights = 1 / torch.tensor(seconds, dtype=torch.float64)
    solution = torch.linalg.lstsq(costs * weights[:, None], torch.ones(len(sizes), 1, dtype=torch.float64)).solution
    alpha, beta = solution.flatten().tolist()
    return alpha, 1 / beta


def predict_seconds(size: int, ranks: int, alpha: float, bandwidth: float) -> float:
    """Return the time of an all-reduce of `size` bytes, by the cost model."""
    steps, volume = predict_costs("all-reduce", size, ranks)
    return alpha * steps + volume / bandwidth
