"""The matrix as one picture: memory by category for every phase and rank count, all loss curves, and how far apart.

python -m bench.matrix.plot     # every bench/results/matrix-*.json, into a .png beside it
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.tables.records import RESULTS, hardware_of
from nanoGPT.memory.tracker import CATEGORIES

COLORS = dict(zip(CATEGORIES, ("#00798c", "#edae49", "#d1495b", "#5b3758", "#9ad1d4", "#bbbbbb"), strict=True))
MARKERS = {"baseline": "s", "phase1": "^", "phase2": "x", "phase3": "o"}


def draw_memory(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """What rank 0 holds at the peak of a step, one bar a phase and rank count."""
    plain = [row for row in rows if not row["options"]]
    places = [i + 0.8 * list(MARKERS).index(row["phase"]) for i, row in enumerate(plain)]
    bottom = [0.0] * len(plain)
    for name in CATEGORIES:
        heights = [row["peak"][name] / 1e6 for row in plain]
        axes.bar(places, heights, 0.8, bottom=bottom, color=COLORS[name], label=name.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [str(row["ranks"]) for row in plain])
    for phase in MARKERS:
        mine = [place for place, row in zip(places, plain, strict=True) if row["phase"] == phase]
        if mine:
            middle = sum(mine) / len(mine)
            axes.annotate(phase, (middle, -0.13), xycoords=("data", "axes fraction"), ha="center")
    axes.set(ylabel="MB on rank 0 at the peak of a step")
    axes.legend(frameon=False, fontsize=8, ncols=len(CATEGORIES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_losses(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Every curve; where all are one, one is to be seen."""
    for row in rows:
        axes.plot(row["losses"], color=plt.get_cmap("viridis")(row["ranks"] / 10), alpha=0.7)
    axes.set(ylabel="loss", title=f"{len(rows)} loss curves, laid over each other")
    axes.tick_params(labelbottom=False)


def draw_gaps(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """How far each curve is from the first, the baseline's on one rank, at every step; fp32 and bf16 in two colours."""
    named = set()
    for row in rows[1:]:
        exact = row["options"].get("dtype", "float32") == "float32"
        name = f"{row['phase']}{'' if exact else ', bf16'}"
        gaps = [abs(mine - first) for mine, first in zip(row["losses"], rows[0]["losses"], strict=True)]
        color = "#00798c" if exact else "#d1495b"
        label = None if name in named else name
        axes.plot(gaps, MARKERS[row["phase"]], color=color, markersize=4, fillstyle="none", label=label)
        named.add(name)
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set(xlabel="step", ylabel="off from the\nbaseline on 1 rank", ylim=(-5e-9, None))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw(path: Path) -> None:
    """Draw a result of the matrix into a picture beside it."""
    result = json.loads(path.read_text())
    rows = result["samples"]["rows"]
    figure, parts = plt.subplot_mosaic([["memory", "losses"], ["memory", "gaps"]], figsize=(13, 5), width_ratios=(3, 2))
    draw_memory(parts["memory"], rows)
    draw_losses(parts["losses"], rows)
    draw_gaps(parts["gaps"], rows)
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(hardware_of(result), fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    for each in [Path(word) for word in sys.argv[1:]] or sorted(RESULTS.glob("matrix-*.json")):
        draw(each)
