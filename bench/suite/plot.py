"""Draw a metric of a suite: a line per phase and variant against the number of ranks, or bars for one rank count."""

from pathlib import Path
from typing import Any

MARKERS = "os^vD<>pPX*h"
INTERVALS = "Vertical bars: 95% confidence intervals over the seeds"


def plot_lines(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plot a line per phase and variant. Each has a different marker and a small offset, so that equal lines show."""
    keys = list(dict.fromkeys((row["phase"], row["variant"]) for row in rows))
    for i, key in enumerate(keys):
        members = [row for row in rows if (row["phase"], row["variant"]) == key]
        positions = [row["ranks"] * 2 ** (0.3 * (i + 0.5) / len(keys) - 0.15) for row in members]
        means, intervals = [row["mean"] for row in members], [row["interval"] or 0.0 for row in members]
        style = {"marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none", "capsize": 3}
        axes.errorbar(positions, means, intervals, label=" ".join(key), **style)


def plot_bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plot a bar per phase and variant. The axis starts above 0 if small differences would not show."""
    names = [f"{row['phase']}\n{row['variant']}" for row in rows]
    intervals = [row["interval"] or 0.0 for row in rows]
    axes.bar(names, [row["mean"] for row in rows], yerr=intervals, capsize=4)
    if rows:
        low = min(row["mean"] - (row["interval"] or 0.0) for row in rows)
        high = max(row["mean"] + (row["interval"] or 0.0) for row in rows)
        if low > high / 2:
            margin = max(high - low, 0.01 * high)
            axes.set_ylim(max(0.0, low - 2 * margin), high + margin)


def plot_rows(rows: list[dict[str, Any]], label: str, path: Path) -> None:
    """Write the figure of a metric.

    Args:
        rows: one for each phase, rank count and variant, with a finite mean and half the width of its interval.
        label: the metric and its unit.
        path: of the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if len({row["ranks"] for row in rows}) > 1:
        plot_lines(axes, rows)
        axes.set_xscale("log", base=2)
        ranks = sorted({row["ranks"] for row in rows})
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.set_xlabel("ranks")
        figure.legend(loc="outside right upper", fontsize="small")
    else:
        plot_bars(axes, rows)
    axes.set_ylabel(label)
    axes.set_title(INTERVALS, loc="left", fontsize="small")
    if any(row["mean"] >= 1000 for row in rows):
        axes.yaxis.set_major_formatter(EngFormatter())
    figure.savefig(path)
