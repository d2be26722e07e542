"""Draw the pictures that several notebooks share: who stores what, bars of memory, loss curves and schedules.

    draw_who_holds_what({"between steps": ["0...", ".1..", "..2.", "...3"]}, "FSDP on 4 ranks")
    draw_memory_bars({"DDP": {"parameters": 4, "gradients": 4, "moments": 8}}, "Model state", "bytes per parameter")
    draw_schedule({"rank 0": ["F0", "F1", "", "B0", "B1"]}, "A pipeline", "time slot")

A rank, a kind of memory and a part of a step have the same color in every notebook. COLORS are colors of Okabe and Ito
(2008). Readers with a color vision deficiency can tell them apart. Every cell also has a text or a position, so that no
picture depends on color alone.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

COLORS = ("#56b4e9", "#009e73", "#e69f00", "#d55e00", "#999999")
STEP_COLORS = dict(zip(("forward", "backward", "all-gather", "reduce-scatter", "update"), COLORS, strict=True))
RANK_COLORS = ("#8ecae6", "#ffd166", "#f4978e", "#a7c957")  # of ranks 0 to 3: light, behind black text
MEMORY_COLORS = {
    "parameters": "#4c78a8",
    "gradients": "#e45756",
    "optimizer_state": "#b279a2",
    "gathered": "#f2a93b",
    "activations": "#54a24b",
    "other": "#9d9d9d",
    "model state": "#4c78a8",
    "copies of the weights": "#9ecae9",
    "fp32 master copy": "#9ecae9",
    "first moment": "#b279a2",
    "second moment": "#d6a5c9",
    "backward pass": "#bab0ac",
}
EMPTY = "."


def draw_who_holds_what(moments: Mapping[str, Sequence[str]], title: str) -> None:
    """Draw which parts of a tensor each rank stores, one row per moment and one column per rank.

    Args:
        moments: for each moment, one string per rank. Its characters are the parts: a digit is the number of a part
            of rank 0 to 3 that this rank stores, and a dot is a part that it does not store.
        title: of the figure.
    """
    ranks = len(next(iter(moments.values())))
    figure, axes = plt.subplots(figsize=(2.1 * ranks + 1.2, 0.55 * len(moments) + 1.1))
    for row, parts_of_ranks in enumerate(moments.values()):
        for rank, parts in enumerate(parts_of_ranks):
            width = 0.86 / len(parts)
            for place, part in enumerate(parts):
                color = "white" if part == EMPTY else RANK_COLORS[int(part)]
                draw_cell(axes, rank + place * width, row, width, 0.7, color, "" if part == EMPTY else part)
    axes.set(xlim=(-0.05, ranks), ylim=(len(moments), -0.1), title=title)
    axes.set_xticks([rank + 0.43 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.set_yticks([row + 0.35 for row in range(len(moments))], list(moments))
    finish(figure, axes)


def draw_memory_bars(
    bars: Mapping[str, Mapping[str, float]], title: str, unit: str, limit: tuple[str, float] | None = None
) -> None:
    """Draw one horizontal bar per name, divided into its parts.

    Args:
        bars: for each name, the size of each part, in `unit`. MEMORY_COLORS has the parts.
        title: of the figure.
        unit: of the sizes, such as "GB per rank".
        limit: the label and the size of a vertical line, such as the memory of a GPU.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    largest = max([sum(bar.values()) for bar in bars.values()] + ([limit[1]] if limit else []))
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(bars) + 1.6))
    for row, bar in enumerate(bars.values()):
        begin = 0.0
        for part, size in bar.items():
            text = f"{size:.3g}" if size > 0.07 * largest else ""
            draw_cell(axes, begin, row, size, 0.7, MEMORY_COLORS[part], text)
            begin += size
    for part in parts:
        axes.add_patch(Rectangle((0, 0), 0, 0, facecolor=MEMORY_COLORS[part], label=part.replace("_", " ")))
    if limit:
        axes.axvline(limit[1], color="black", linestyle="--", label=limit[0])
    axes.set(xlim=(0, 1.03 * largest), ylim=(len(bars), -0.1), title=title, xlabel=unit)
    axes.set_yticks([row + 0.35 for row in range(len(bars))], list(bars))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    finish(figure, axes, has_axis=True)


def draw_schedule(rows: Mapping[str, Sequence[str]], title: str, label: str, colors: str = "FB") -> None:
    """Draw a table of cells: one row per rank, and one column per moment or part.

    Args:
        rows: for each row, the texts of its cells; an empty text is an empty cell.
        title: of the figure.
        label: of the columns.
        colors: the first characters of the texts that get their own colors, in order.
    """
    columns = max(map(len, rows.values()))
    figure, axes = plt.subplots(figsize=(max(5.0, 0.62 * columns + 1.4), 0.5 * len(rows) + 1.3))
    for row, texts in enumerate(rows.values()):
        for column, text in enumerate(texts):
            color = COLORS[colors.index(text[0])] if text else "white"
            draw_cell(axes, column, row, 0.94, 0.8, color, text)
    axes.set(xlim=(-0.1, columns), ylim=(len(rows), -0.1), title=title, xlabel=label)
    axes.set_yticks([row + 0.4 for row in range(len(rows))], list(rows))
    axes.set_xticks([column + 0.47 for column in range(columns)], [str(column) for column in range(columns)])
    finish(figure, axes)


def draw_curves(curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the first loss curve, and below it the differences of the other curves, which almost coincide with it.

    Args:
        curves: for each name, the loss of every step in nats per token.
        title: of the figure.
    """
    (first, baseline), *others = curves.items()
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 4.5))
    above.plot(baseline, color="black")
    above.set(ylabel=f"loss, {first}\n(nats per token)", title=title)
    for (name, curve), color in zip(others, (COLORS[0], COLORS[3]), strict=False):
        differences = [loss - expected for loss, expected in zip(curve, baseline, strict=True)]
        below.plot(differences, "o-", markersize=4, color=color, label=name)
    below.axhline(0, color="black", linewidth=0.8)
    below.set(xlabel="step", ylabel=f"difference from\n{first}")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend(frameon=False)
    figure.tight_layout()
    plt.show()


def draw_cell(axes: Axes, x: float, y: float, width: float, height: float, color: str, text: str) -> None:
    """Draw a rectangle with a text in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="#444444", linewidth=0.7))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def finish(figure: plt.Figure, axes: Axes, has_axis: bool = False) -> None:
    """Remove the frame of a picture and show it."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_visible(has_axis)
    axes.tick_params(length=3 if has_axis else 0)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    plt.show()
