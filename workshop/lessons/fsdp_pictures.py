"""Pictures of notebook 6: shards, initial weights and gathered bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from workshop.lessons.fsdp import find_max_gathered_bytes
from workshop.pictures import MEMORY_COLORS, RANK_COLORS, STEP_COLORS


def draw_layout(layout: Sequence[Mapping[str, Any]]) -> None:
    """Draw the parameters of the root unit and of block 0, and the shards of each rank.

    Args:
        layout: for each rank, the result of `describe_layout`.
    """
    figure, grid = plt.subplots(2, 1, figsize=(11, 3.8))
    for axes, number, title in ((grid[0], 0, "root unit"), (grid[1], 1, "block 0")):
        draw_unit(axes, [each["units"][number] for each in layout])
        axes.set_ylabel(title)
    grid[-1].set_xlabel("elements")
    figure.suptitle(f"FSDP shards every parameter by rows over {len(layout)} ranks")
    figure.tight_layout()
    plt.show()


def draw_unit(axes: Axes, unit_of_rank: Sequence[Sequence[tuple[str, int, int, int]]]) -> None:
    """Draw one unit as two strips: its parameters above, and the shards of all ranks below."""
    begin = 0
    for index, (name, rows, _, width) in enumerate(unit_of_rank[0]):
        axes.add_patch(Rectangle((begin, 1), rows * width, 0.8, facecolor="#eeeeee", edgecolor="black", lw=0.8))
        if rows * width > 1000:
            label = f"{name.removeprefix('h.0.')}\n{rows} × {width}"
            axes.text(begin + rows * width / 2, 1.38, label, ha="center", va="center", fontsize=7.5)
        for rank, unit in enumerate(unit_of_rank):
            elements = unit[index][2] * width
            axes.add_patch(Rectangle((begin, 0), elements, 0.8, facecolor=RANK_COLORS[rank], edgecolor="black", lw=0.4))
            if rows * width > 1000:
                axes.text(begin + elements / 2, 0.4, str(rank), ha="center", va="center", fontsize=8)
            begin += elements
    axes.set(xlim=(0, begin), ylim=(-0.1, 1.9))
    axes.set_yticks([0.4, 1.4], ["rank", "parameter"], fontsize=8)
    axes.set_xticks([0, begin], ["0", f"{begin:,}"])
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_similarity_of_rows(weights: Mapping[str, Tensor]) -> None:
    """Draw the absolute cosine similarity of all pairs of rows of each weight."""
    figure, grid = plt.subplots(1, 2, figsize=(8.6, 4.3), layout="constrained")
    for axes, (title, weight) in zip(grid, weights.items(), strict=True):
        rows = nn.functional.normalize(weight)
        image = axes.imshow((rows @ rows.T).abs(), cmap="Blues", vmin=0, vmax=1)
        axes.set(title=title, xticks=[0, 19, 38, 57], yticks=[0, 19, 38, 57], xlabel="row of wte", ylabel="row of wte")
    figure.colorbar(image, ax=grid, label="absolute cosine similarity", shrink=0.8)
    figure.suptitle("Similarity of the rows of wte, initialized on 4 ranks")
    plt.show()


def compute_spans(marks: Sequence[tuple[str, int | None, int]]) -> list[tuple[str, int, int, int]]:
    """Return (pass, block, first event, last event) for each block's forward and backward pass."""
    return [
        (what, block, begin, marks[number + 1][2])
        for number, (what, block, begin) in enumerate(marks)
        if what in ("forward", "backward") and block is not None
    ]


def draw_gathered_bytes(variants: Sequence[Mapping[str, Any]]) -> None:
    """Draw the gathered bytes through one step for each variant, in units of one block.

    Args:
        variants: for each rank, what `measure_fsdp_steps` returned for each variant.
    """
    root_bytes, block_bytes = variants[0]["default"]["bytes"][:2]
    figure, grid = plt.subplots(len(variants[0]), 1, figsize=(11, 10))
    for axes, name in zip(grid, variants[0], strict=True):
        step = min((step for rank in variants for step in rank[name]["steps"]), key=find_max_gathered_bytes)
        events = [event for event, _ in step["timeline"]]
        sizes_in_blocks = [usage["gathered"] / block_bytes for _, usage in step["timeline"]]
        axes.step(events, sizes_in_blocks, where="post", color=MEMORY_COLORS["gathered"])
        for what, block, begin, end in compute_spans(step["marks"]):
            axes.axvspan(begin, end, color=STEP_COLORS[what], alpha=0.15, lw=0)
            axes.axvline(end, color="white", linewidth=1.5)
            axes.text((begin + end) / 2, 6.45, f"{what}\nblock {block}", ha="center", va="center", fontsize=7)
        axes.axhline(root_bytes / block_bytes, color="black", linestyle=":", linewidth=0.8)
        axes.text(events[-1], root_bytes / block_bytes, " root", fontsize=8, va="center")
        axes.set(xlim=(0, events[-1]), ylim=(0, 7), yticks=range(7), ylabel="gathered (blocks)", title=name)
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1].set_xlabel("events (operators and resizes)")
    figure.suptitle("Gathered bytes through one step on one of 4 ranks, in units of one block")
    figure.tight_layout()
    plt.show()
