"""Helpers of notebook 2: trace a ring, count the bytes that a rank sends, and fit the time of an all-reduce.

`workshop/lessons/collective_pictures.py` draws it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoGPT.costs import ring_bytes
from workshop import collectives
from workshop.collective_times import predict_seconds

Trace = Sequence[tuple[int, int]]  # for each step: the chunk that a rank sends, and the ranks in it as bits
Fits = Mapping[tuple[int, str], tuple[float, float]]  # latency and bandwidth, by number of ranks and all-reduce


def trace_reduce_scatter() -> list[tuple[int, int]]:
    """Return for each step the chunk that the calling rank sends, and the ranks in it as bits. Collective.

    Rank r fills its tensor with 2**r, so the bits of a sum tell which ranks are in it. A second row of values contains
    the number of the chunk.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent: list[tuple[int, int]] = []
    original = collectives.exchange

    def exchange(outgoing: Tensor, incoming: Tensor) -> None:
        bits, chunk = int(outgoing[0]), outgoing[1] / bin(int(outgoing[0])).count("1")
        sent.append((int(chunk), bits))
        original(outgoing, incoming)

    collectives.exchange = exchange
    full = torch.stack([torch.full((ranks,), 2.0**rank), torch.arange(float(ranks))], dim=1).flatten()
    collectives.reduce_scatter(full)
    collectives.exchange = original
    return sent


def count_bytes_of_sends(run_collective: Callable[[], Any]) -> int:
    """Run a function, and return the bytes that the calling rank sends with `dist.send` and `dist.isend`."""
    sent = 0
    originals = {name: getattr(dist, name) for name in ("send", "isend")}

    def count(name: str) -> Callable[..., Any]:
        def send(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += tensor.nbytes
            return originals[name](tensor, *args, **kwargs)

        return send

    for name in originals:
        setattr(dist, name, count(name))
    run_collective()
    for name, original in originals.items():
        setattr(dist, name, original)
    return sent


def print_sent_bytes(measured: Mapping[int, Sequence[Mapping[str, int]]], n: int) -> None:
    """Print the largest number of bytes that a rank sends, next to the formula, and check that they are equal.

    Args:
        measured: for each number of ranks, the bytes that each rank sends, by the name of the collective.
        n: bytes of the tensor.
    """
    print(f"largest number of bytes that a rank sends, in units of n = {n:,} bytes; in parentheses the formula")
    print("  N   all-reduce on rank 0   all-reduce      reduce-scatter  all-gather      broadcast")
    for ranks, results in measured.items():
        largest = {name: max(result[name] for result in results) for name in results[0]}
        columns = f"{largest['on rank 0'] / n:8.3f} ({ranks - 1:.3f})        "
        for name in ("all-reduce", "reduce-scatter", "all-gather", "broadcast"):
            _, volume = collectives.predict_costs(name, n, ranks)
            columns += f"{largest[name] / n:.3f} ({volume / n:.3f})   "
            assert largest[name] == volume
            if name != "broadcast":  # the ledger counts the mean over the ranks, n(N-1)/N
                assert volume == ring_bytes(name, n, ranks)  # the function of the planner and the ledger
        print(f"{ranks:3}  {columns}")


def print_fits(sizes: Sequence[int], seconds: Mapping[tuple[int, str], Sequence[float]], fits: Fits) -> None:
    """Print the time of the smallest and the largest all-reduce, the fitted latency and bandwidth, and their error.

    Args:
        sizes: bytes of the tensors.
        seconds: the measured times, one for each size.
        fits: latency and bandwidth of each all-reduce.
    """
    print("  N   all-reduce   256 bytes    4 MB      latency per    bandwidth    largest ratio of")
    print("                   (ms)         (ms)      step (us)      (GB/s)       measured and predicted time")
    for (ranks, name), (alpha, bandwidth) in fits.items():
        first, last = 1e3 * seconds[ranks, name][0], 1e3 * seconds[ranks, name][-1]
        predicted = [predict_seconds(size, ranks, alpha, bandwidth) for size in sizes]
        ratios = [a / b for a, b in zip(seconds[ranks, name], predicted, strict=True)]
        error = max(max(ratio, 1 / ratio) for ratio in ratios)
        print(
            f"{ranks:3}   {name:10} {first:11.2f} {last:8.1f} {1e6 * alpha:16.0f} {bandwidth / 1e9:12.2f} {error:16.1f}"
        )
        assert alpha > 0 and bandwidth > 0 and last > 2 * first
