"""The matrix as one picture: memory by category for every phase and rank count, and all loss curves over each other.

python -m bench.matrix_plot     # every bench/results/matrix-*.json, into a .png beside it
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.results import RESULTS, hardware_of
from nanoGPT.memory import CATEGORIES

COLORS = dict(zip(CATEGORIES, ("#00798c", "#edae49", "#d1495b", "#5b3758", "#9ad1d4", "#bbbbbb"), strict=True))
LINES = {"baseline": "-", "phase1": "--", "phase2": ":", "phase3": "-."}


def draw_memory(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """What rank 0 holds at the peak of a step, one bar a phase and rank count."""
    plain = [row for row in rows if not row["options"]]
    places = [i + 0.8 * list(LINES).index(row["phase"]) for i, row in enumerate(plain)]
    bottom = [0.0] * len(plain)
    for name in CATEGORIES:
        heights = [row["peak"][name] / 1e6 for row in plain]
        axes.bar(places, heights, 0.8, bottom=bottom, color=COLORS[name], label=name.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [str(row["ranks"]) for row in plain])
    for phase in LINES:
        mine = [place for place, row in zip(places, plain, strict=True) if row["phase"] == phase]
        if mine:
            middle = sum(mine) / len(mine)
            axes.annotate(phase, (middle, -0.13), xycoords=("data", "axes fraction"), ha="center")
    axes.set(ylabel="MB on rank 0 at the peak of a step")
    axes.legend(frameon=False, fontsize=8, ncols=len(CATEGORIES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_losses(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Every curve; where all are one, one is to be seen."""
    for row in rows:
        color = plt.get_cmap("viridis")(row["ranks"] / 10)
        axes.plot(row["losses"], LINES[row["phase"]], color=color, alpha=0.7)
    for phase, line in LINES.items():
        axes.plot([], [], line, color="#555555", label=phase)
    exact = [row["gap"] for row in rows if row["options"].get("dtype", "float32") == "float32"]
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(f"{len(rows)} loss curves; in fp32 at most {max(exact):.0e} apart")
    axes.legend(frameon=False)


def draw(path: Path) -> None:
    """Draw a result of the matrix into a picture beside it."""
    result = json.loads(path.read_text())
    rows = result["samples"]["rows"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    draw_memory(left, rows)
    draw_losses(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(hardware_of(result), fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    for each in [Path(word) for word in sys.argv[1:]] or sorted(RESULTS.glob("matrix-*.json")):
        draw(each)
