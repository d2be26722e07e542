"""Draw the figures of the documents.

    python -m bench.tables.pictures        # writes three figures into docs/images

The first figure shows the model state of four ranks in each phase. Heights are bytes per parameter in fp32 with AdamW:
4 for the parameter, 4 for its gradient, and 8 for the optimizer state. The second figure shows the timeline in
bench/results/zero1-timeline-*.json, and the third one what kernels read and write (`bench.tables.kernel_picture`).
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bench.tables.kernel_picture import draw_kernels
from bench.tables.records import read_results

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
RANKS = 4
PARTS = [("optimizer state", 8, "#d1495b"), ("gradients", 4, "#edae49"), ("parameters", 4, "#00798c")]
PHASES = [
    ("baseline: DDP", "no sharding\n16P bytes per rank", set()),
    ("phase 1: ZeRO-1", "optimizer state sharded\n8P + 8P/N bytes per rank", {"optimizer state"}),
    ("phase 2: Triton", "like the baseline, custom kernels\n16P bytes per rank", set()),
    (
        "phase 3: FSDP",
        "all model state sharded\n16P/N bytes per rank\n+ unsharded units",
        {name for name, _, _ in PARTS},
    ),
]


def draw_rank(axes: Axes, rank: int, sharded: set[str]) -> None:
    """Draw the column of a rank. Of a sharded part, only the shard of this rank is filled."""
    bottom = 0.0
    for name, height, color in PARTS:
        axes.add_patch(Rectangle((rank, bottom), 0.8, height, facecolor="white", edgecolor="#999999", linewidth=0.8))
        shards = [rank] if name in sharded else list(range(RANKS))
        for shard in shards:
            axes.add_patch(Rectangle((rank, bottom + shard * height / RANKS), 0.8, height / RANKS, facecolor=color))
        bottom += height


def draw_timeline(path: Path) -> None:
    """Draw one step of ZeRO-1 on rank 0: computation in the upper row, communication in the lower row."""
    samples = read_results("zero1-timeline")[0]["samples"]
    colors = {"phase: forward": "#9ad1d4", "phase: backward": "#00798c", "phase: step": "#edae49"}
    names = {"all_reduce": "reduce-scatter (gloo: all-reduce)", "all_gather": "all-gather", "step": "optimizer step"}
    collectives = {"all_reduce": "#d1495b", "_reduce_scatter_base": "#d1495b"}
    collectives |= {"all_gather": "#5b3758", "_allgather_base": "#5b3758"}
    figure, axes = plt.subplots(figsize=(10, 2.6))
    for name, begin, end in samples["events_ms"]:
        kind = name.split(":")[-1].strip()
        if name not in colors and kind not in collectives:
            continue
        color, row = (colors[name], 1) if name in colors else (collectives[kind], 0)
        axes.broken_barh([(begin, max(end - begin, 0.2))], (row, 0.8), facecolor=color, label=names.get(kind, kind))
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), ncols=5, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
    axes.set_yticks([0.4, 1.4], ["communication", "computation"])
    axes.set_xlabel(f"time (ms), rank 0 of {samples['ranks']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_phases(path: Path) -> None:
    """Draw the model state of all phases, side by side."""
    figure, grid = plt.subplots(1, len(PHASES), figsize=(12, 3.6), sharey=True)
    for axes, (title, note, sharded) in zip(grid, PHASES, strict=True):
        for rank in range(RANKS):
            draw_rank(axes, rank, sharded)
        axes.set(xlim=(-0.2, RANKS), ylim=(0, 16.4), title=title, xlabel=note)
        axes.set_xticks([rank + 0.4 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
        axes.set_yticks(range(0, 17, 4))
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("bytes per parameter")
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for _, _, color in PARTS]
    figure.legend(handles, [name for name, _, _ in PARTS], loc="upper center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_phases(IMAGES / "what_each_phase_shards.png")
    draw_timeline(IMAGES / "zero1_timeline.png")
    draw_kernels(IMAGES / "what_a_kernel_moves.png")
