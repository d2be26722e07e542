"""Draw the matrix as one figure: memory by category for each phase and rank count, loss curves and their differences.

python -m bench.matrix.plot     # every bench/results/matrix-*.json, into a .png of the same name
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.tables.records import RESULTS, hardware_of
from nanoGPT.memory.tracker import CATEGORIES

if TYPE_CHECKING:  # matplotlib is slow to import, and only a drawing needs it
    from matplotlib.axes import Axes

COLORS = dict(zip(CATEGORIES, ("#00798c", "#edae49", "#d1495b", "#5b3758", "#9ad1d4", "#bbbbbb"), strict=True))
LABELS = {name: name.replace("_", " ") for name in CATEGORIES} | {"gathered": "all-gathered"}
MARKERS = {"baseline": "s", "phase1": "^", "phase2": "x", "phase3": "o"}


def draw_memory(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    """Draw the memory of rank 0 at the peak of a step, as one stacked bar per phase and rank count."""
    plain = [row for row in rows if not row["options"]]
    places = [i + 0.8 * list(MARKERS).index(row["phase"]) for i, row in enumerate(plain)]
    bottom = [0.0] * len(plain)
    for name in CATEGORIES:
        heights = [row["peak"][name] / 1e6 for row in plain]
        axes.bar(places, heights, 0.8, bottom=bottom, color=COLORS[name], label=LABELS[name])
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [str(row["ranks"]) for row in plain])
    for phase in MARKERS:
        bars = [place for place, row in zip(places, plain, strict=True) if row["phase"] == phase]
        if bars:
            middle = sum(bars) / len(bars)
            axes.annotate(phase, (middle, -0.13), xycoords=("data", "axes fraction"), ha="center")
    axes.set_xlabel("number of ranks", labelpad=24)
    axes.set_ylabel("peak memory of rank 0 (MB)")
    axes.legend(frameon=False, fontsize=8, ncols=len(CATEGORIES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_losses(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    """Draw all loss curves over each other. Identical curves look like one curve."""
    from matplotlib import colormaps

    for row in rows:
        axes.plot(row["losses"], color=colormaps["viridis"](row["ranks"] / 10), alpha=0.7)
    axes.set(ylabel="loss", title=f"{len(rows)} loss curves, drawn over each other")
    axes.tick_params(labelbottom=False)


def draw_differences(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    """Draw the difference of each curve from the baseline on one rank, at every step. fp32 and bf16 have two colors."""
    labels = set()
    for row in rows[1:]:
        is_fp32 = row["options"].get("dtype", "float32") == "float32"
        name = f"{row['phase']}{'' if is_fp32 else ', bf16'}"
        differences = [abs(loss - first) for loss, first in zip(row["losses"], rows[0]["losses"], strict=True)]
        color = "#00798c" if is_fp32 else "#d1495b"
        label = None if name in labels else name
        axes.plot(differences, MARKERS[row["phase"]], color=color, markersize=4, fillstyle="none", label=label)
        labels.add(name)
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set(xlabel="step", ylabel="loss difference from\nthe baseline on 1 rank", ylim=(-5e-9, None))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw(path: Path) -> None:
    """Draw a result file of the matrix into a .png of the same name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads(path.read_text())
    rows = result["samples"]["rows"]
    figure, parts = plt.subplot_mosaic(
        [["memory", "losses"], ["memory", "differences"]], figsize=(13, 5), width_ratios=(3, 2)
    )
    draw_memory(parts["memory"], rows)
    draw_losses(parts["losses"], rows)
    draw_differences(parts["differences"], rows)
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(hardware_of(result), fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    for result_path in [Path(word) for word in sys.argv[1:]] or sorted(RESULTS.glob("matrix-*.json")):
        draw(result_path)
