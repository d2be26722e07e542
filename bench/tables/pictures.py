"""The pictures of the documents.

    python -m bench.tables.pictures        # writes what_each_phase_shards.png and zero1_timeline.png into docs/images

The first is the README's: what each of four ranks holds in each phase. Heights are bytes a parameter in fp32 with
AdamW: 4 of the parameter, 4 of its gradient, 8 of the optimizer's state. The second is drawn from
bench/results/zero1-timeline-*.json.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bench.tables.records import read_results

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
RANKS = 4
PARTS = [("optimizer state", 8, "#d1495b"), ("gradients", 4, "#edae49"), ("parameters", 4, "#00798c")]
PHASES = [
    ("baseline: DDP", "everything everywhere\n16P bytes a rank", set()),
    ("phase 1: ZeRO-1", "the optimizer is sharded\n8P + 8P/N", {"optimizer state"}),
    ("phase 2: Triton", "as the baseline,\nwith kernels of our own: 16P", set()),
    ("phase 3: FSDP", "everything is sharded\n16P/N, and one block gathered", {name for name, _, _ in PARTS}),
]


def draw_rank(axes: Axes, rank: int, sharded: set[str]) -> None:
    """One column: a part that is sharded is filled in this rank's slice only."""
    bottom = 0.0
    for name, height, color in PARTS:
        axes.add_patch(Rectangle((rank, bottom), 0.8, height, facecolor="white", edgecolor="#999999", linewidth=0.8))
        slices = [rank] if name in sharded else list(range(RANKS))
        for piece in slices:
            axes.add_patch(Rectangle((rank, bottom + piece * height / RANKS), 0.8, height / RANKS, facecolor=color))
        bottom += height


def draw_timeline(path: Path) -> None:
    """One step of ZeRO-1 on rank 0: what it computes, above what is on the wire."""
    samples = read_results("zero1-timeline")[0]["samples"]
    colors = {"phase: forward": "#9ad1d4", "phase: backward": "#00798c", "phase: step": "#edae49"}
    names = {"all_reduce": "reduce-scatter (gloo does it by an all-reduce)", "all_gather": "all-gather"}
    wire = {"all_reduce": "#d1495b", "all_gather": "#5b3758"}
    figure, axes = plt.subplots(figsize=(10, 2.6))
    for name, begin, end in samples["events_ms"]:
        kind = name.split(":")[-1].strip()
        color, row = (colors[name], 1) if name in colors else (wire[kind], 0)
        axes.broken_barh([(begin, max(end - begin, 0.2))], (row, 0.8), facecolor=color, label=names.get(kind, kind))
    labelled = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(labelled.values(), labelled.keys(), ncols=5, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
    axes.set_yticks([0.4, 1.4], ["on the wire", "computing"])
    axes.set_xlabel(f"milliseconds, rank 0 of {samples['ranks']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_phases(path: Path) -> None:
    """Draw all phases side by side."""
    figure, grid = plt.subplots(1, len(PHASES), figsize=(12, 3.6), sharey=True)
    for axes, (title, note, sharded) in zip(grid, PHASES, strict=True):
        for rank in range(RANKS):
            draw_rank(axes, rank, sharded)
        axes.set(xlim=(-0.2, RANKS), ylim=(0, 16.4), title=title, xlabel=note)
        axes.set_xticks([rank + 0.4 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
        axes.set_yticks(range(0, 17, 4))
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("bytes a parameter")
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for _, _, color in PARTS]
    figure.legend(handles, [name for name, _, _ in PARTS], loc="upper center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_phases(IMAGES / "what_each_phase_shards.png")
    draw_timeline(IMAGES / "zero1_timeline.png")
