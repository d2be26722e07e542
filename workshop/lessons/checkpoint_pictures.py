"""Pictures of notebook 7: the index of a checkpoint, the stages of a save, and asynchronous saves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from workshop.lessons.checkpoints import Chunk, Event, list_chunks, read_index, select_chunks, select_spans
from workshop.pictures import COLORS, RANK_COLORS

FILES = [f"__{rank}_0.distcp" for rank in range(4)]
SAVE_COLORS = {1: "#eeeeee", 2: "#e45756"}
EVENT_COLORS = dict(zip(("step", "copy", "stop", "write"), (COLORS[0], *COLORS[2:]), strict=True))
STAGES = ("create .tmp-", "files, hashes", "flush", "manifest", "flush", "rename", "LATEST", "delete old ones")
POSITIONS = (1.5, 3.0, 5.0, 6.0)  # of the kills, in units of a stage


def draw_index(checkpoint: Path, names: Sequence[str], hatched: str) -> None:
    """Draw some tensors, partitioned into the chunks of the ranks, and the byte ranges of all chunks in the files.

    Args:
        checkpoint: of four ranks.
        names: of the tensors, such as "h.0.mlp.c_fc".
        hatched: name of the tensor whose chunks are hatched.
    """
    chunks, index = list_chunks(checkpoint), read_index(checkpoint)
    figure, grid = plt.subplots(1, len(names) + 1, figsize=(11, 3.4), width_ratios=[1] * len(names) + [6])
    for axes, name in zip(grid, names, strict=False):
        key = f"model.transformer.{name}.weight"
        draw_tensor(axes, select_chunks(chunks, key), tuple(index[key][0]), "////" if name == hatched else "")
        axes.set_title(name, fontsize=8)
    grid[0].set_ylabel("row", fontsize=7)
    hatched_key = f"model.transformer.{hatched}.weight"
    draw_files(grid[-1], chunks, lambda chunk: RANK_COLORS[FILES.index(chunk["file"])], hatched_key)
    grid[-1].set_title("files of the 4 ranks: weights, then moments, then step counts", fontsize=8)
    figure.tight_layout()
    plt.show()


def draw_tensor(axes: Axes, chunks: Sequence[Chunk], shape: Sequence[int], hatch: str) -> None:
    """Draw the rows of a tensor from top to bottom, in the color of the rank that wrote them."""
    rows, columns = shape
    for chunk in chunks:
        box = ((0, chunk["first"][0]), columns, chunk["size"][0])
        color = RANK_COLORS[FILES.index(chunk["file"])]
        axes.add_patch(Rectangle(*box, facecolor=color, edgecolor="black", linewidth=0.8, hatch=hatch))
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[c["first"][0] for c in chunks])
    axes.set_xlabel("column", fontsize=7)
    axes.tick_params(labelsize=7, length=2)


def draw_files(axes: Axes, chunks: Sequence[Chunk], color_of: Callable[[Chunk], str], hatched: str = "") -> None:
    """Draw the files of all ranks, with every chunk at its byte range, in the color that `color_of(chunk)` returns."""
    names = sorted({chunk["file"] for chunk in chunks})
    for chunk in chunks:
        box = ((chunk["begin"], names.index(chunk["file"])), chunk["end"] - chunk["begin"], 0.8)
        hatch = "////" if chunk["key"] == hatched else ""
        axes.add_patch(Rectangle(*box, facecolor=color_of(chunk), edgecolor="black", linewidth=0.3, hatch=hatch))
    axes.set(xlim=(0, max(chunk["end"] for chunk in chunks)), ylim=(len(names), -0.2))
    axes.set_xlabel("position in the file (bytes)")
    axes.set_yticks([row + 0.4 for row in range(len(names))], names)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_saves(checkpoint: Path, find_save: Callable[[Chunk], int], title: str, hatched: str) -> None:
    """Draw which of two saves wrote each chunk of a checkpoint: gray for the first save, red for the second.

    Args:
        checkpoint: its directory.
        find_save: returns the number of the save that wrote a chunk: 1 or 2.
        title: of the figure.
        hatched: key of the tensor whose chunks are hatched.
    """
    figure, axes = plt.subplots(figsize=(9, 1.8))
    draw_files(axes, list_chunks(checkpoint), lambda chunk: SAVE_COLORS[find_save(chunk)], hatched)
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    plt.show()


def draw_stages(loaded_steps: Mapping[str, int]) -> None:
    """Draw the stages of saving step 3, and which step is loaded after each kill.

    Args:
        loaded_steps: the loaded step, by the moment of the kill.
    """
    figure, axes = plt.subplots(figsize=(10, 2.9))
    for number, stage in enumerate(STAGES):
        color = "#eeeeee" if number < 5 else COLORS[1]
        axes.add_patch(Rectangle((number, 0), 1, 1, facecolor=color, edgecolor="black"))
        axes.text(number + 0.5, 0.5, stage, ha="center", va="center", fontsize=9)
    arrow = {"arrowstyle": "->", "color": COLORS[3]}
    for number, ((point, step), x) in enumerate(zip(loaded_steps.items(), POSITIONS, strict=True)):
        height = 1.6 if number % 2 == 0 else 2.7  # neighboring texts do not overlap
        text = f"killed\n{point}:\nstep {step} is loaded"
        axes.annotate(text, (x, 1), (x, height), ha="center", fontsize=8, arrowprops=arrow)
    axes.set(xlim=(-0.1, len(STAGES) + 0.1), ylim=(-0.1, 3.8))
    axes.set_title("The stages of saving step 3: it can be loaded as soon as the directory is renamed", fontsize=9)
    axes.axis("off")
    figure.tight_layout()
    plt.show()


def draw_timelines(timelines: Mapping[str, Sequence[Event]]) -> None:
    """Draw the training and the writes to the disk of each run."""
    figure, grid = plt.subplots(len(timelines), 1, figsize=(10, 4.6), sharex=True)
    for axes, (name, events) in zip(grid, timelines.items(), strict=True):
        draw_training(axes, events)
        axes.set_title(name, fontsize=9, loc="left")
    grid[-1].set_xlabel("time since the first step (s), rank 0 of 2; the disk is slowed down on purpose")
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color in EVENT_COLORS.values()]
    labels = ("a step", "copying", "stopped for a save", "writing")
    figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    plt.show()


def draw_training(axes: Axes, events: Sequence[Event]) -> None:
    """Draw two lanes: the training, and the writes to the disk."""
    zero = select_spans(events, "step")[0][0]

    def draw_bars(kind: str, lane: int, edge: str = "none", width: float = 0) -> None:
        boxes = [(begin - zero, end - begin) for begin, end in select_spans(events, kind)]
        axes.broken_barh(boxes, (lane, 0.8), facecolor=EVENT_COLORS[kind], edgecolor=edge, linewidth=width)

    draw_bars("step", 0, "white", 0.5)
    draw_bars("stop", 0)
    draw_bars("copy", 0, EVENT_COLORS["copy"], 1.5)
    draw_bars("write", 1)
    axes.set(ylim=(1.9, -0.1), yticks=[0.4, 1.4], yticklabels=["training", "disk"])
    axes.spines[["top", "right"]].set_visible(False)
