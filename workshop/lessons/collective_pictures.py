"""Pictures of notebook 2: the chunks of a ring, and the time of an all-reduce."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from workshop.collective_times import predict_seconds
from workshop.lessons.collectives import Fits, Trace
from workshop.pictures import COLORS


def draw_traces(traces: Sequence[Trace]) -> None:
    """Draw which chunk each rank sends in each step of a ring, and whose values it contains.

    Args:
        traces: for each rank, the result of `trace_reduce_scatter`.
    """
    ranks = len(traces)
    figure, grid = plt.subplots(1, ranks - 1, figsize=(11, 3), sharey=True)
    for step, axes in enumerate(grid):
        for rank in range(ranks):
            chunk, bits = traces[rank][step]
            count = bin(bits).count("1")
            axes.add_patch(plt.Rectangle((chunk, rank), 1, 1, facecolor=plt.get_cmap("Blues")(0.25 * count)))
            names = "+".join(str(each) for each in range(ranks) if bits >> each & 1)
            color = "white" if count > 2 else "black"
            axes.text(chunk + 0.5, rank + 0.5, names, ha="center", va="center", fontsize=9, color=color)
        axes.set(xlim=(0, ranks), ylim=(ranks, 0), title=f"step {step}", xlabel="chunk")
        axes.set_xticks([i + 0.5 for i in range(ranks)], range(ranks))
        axes.set_yticks([i + 0.5 for i in range(ranks)], [f"rank {i}" for i in range(ranks)])
        axes.grid(False)
    figure.suptitle("The chunk that each rank sends in each step, and the ranks whose values it contains")
    figure.tight_layout()
    plt.show()


def draw_fits(sizes: Sequence[int], seconds: Mapping[tuple[int, str], Sequence[float]], fits: Fits) -> None:
    """Draw the measured times of each all-reduce, and the line of the cost model."""
    figure, grid = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axes, ranks in zip(grid, (2, 4), strict=True):
        for name, color in (("by hand", COLORS[3]), ("gloo", COLORS[0])):
            model = [1e3 * predict_seconds(size, ranks, *fits[ranks, name]) for size in sizes]
            axes.loglog(sizes, [1e3 * s for s in seconds[ranks, name]], "o", color=color, label=f"{name}, measured")
            axes.loglog(sizes, model, color=color, label=f"{name}, latency and bandwidth")
        axes.set(title=f"All-reduce on {ranks} ranks", xlabel="size of the tensor (bytes)")
    grid[0].set_ylabel("time (ms)")
    grid[0].legend(fontsize=8)
    figure.tight_layout()
    plt.show()
