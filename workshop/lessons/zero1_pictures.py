"""Pictures of notebooks 3 and 3b: buckets and shards, and the timeline of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workshop.pictures import RANK_COLORS, STEP_COLORS


def draw_box(axes: Axes, y: float, begin: float, end: float, color: str, text: str = "", hatch: str = "") -> None:
    """Draw one box of a strip, with its text in front of the lines that cross it."""
    axes.add_patch(Rectangle((begin, y), end - begin, 0.8, facecolor=color, edgecolor="black", hatch=hatch, lw=0.8))
    background = {"facecolor": color, "edgecolor": "none", "pad": 0.8} if text else None
    axes.text((begin + end) / 2, y + 0.38, text, ha="center", va="center", fontsize=7.5, bbox=background)


def draw_buckets(layouts: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Draw each bucket as two strips: its parameters above, and the shards of all ranks below."""
    figure, grid = plt.subplots(len(layouts[0]), 1, figsize=(11, 6))
    for number, axes in enumerate(grid):
        draw_bucket(axes, [buckets[number] for buckets in layouts], number)
    grid[-1].set_xlabel("element of the bucket")
    figure.suptitle(f"Parameters (upper strips) and shards of {len(layouts)} ranks (lower strips) in each bucket")
    figure.tight_layout()
    plt.show()


def draw_bucket(axes: Axes, bucket_of_rank: Sequence[Mapping[str, Any]], number: int) -> None:
    """Draw the two strips of one bucket. The hatched part is padding, and dotted lines are slice boundaries."""
    length, begin = bucket_of_rank[0]["length"], 0
    for name, numel in bucket_of_rank[0]["params"]:
        draw_box(axes, 1, begin, begin + numel, "#eeeeee", name)
        begin += numel
    for y in (0, 1):
        if begin < length:
            draw_box(axes, y, begin, length, "white", hatch="//////")
    for rank, bucket in enumerate(bucket_of_rank):
        for _, _, left, right in bucket["shards"]:
            draw_box(axes, 0, left, right, RANK_COLORS[rank], f"rank {rank}" if right - left > 0.03 * length else "")
        axes.axvline(bucket["slice"][1], color="black", linestyle=":", linewidth=1.2)
    axes.set(xlim=(0, length), ylim=(-0.1, 1.9), yticks=[])
    axes.set_ylabel(f"bucket {number}", rotation=0, ha="right", va="center")
    axes.set_xticks([bucket["slice"][0] for bucket in bucket_of_rank] + [length])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_timeline(timeline: Mapping[str, Any]) -> None:
    """Draw the fastest of the later steps: one lane for the passes and one per bucket.

    Times are in milliseconds since the start of the forward pass.
    """
    buckets = timeline["buckets"]
    step = min(timeline["steps"][1:], key=lambda step: step["events"][-1][3] - step["events"][0][2])
    spans = {(name, number): (begin, end) for name, number, begin, end, _ in step["events"]}
    zero = spans["forward", None][0]
    figure, axes = plt.subplots(figsize=(9, 4))

    def draw_bar(lane: int, begin: float, end: float, color: str) -> None:
        axes.barh(lane, 1e3 * (end - begin), left=1e3 * (begin - zero), height=0.6, color=color)

    for name in ("forward", "backward", "step"):
        begin, end = spans[name, None]
        draw_bar(-1, begin, end, STEP_COLORS.get(name, "#eeeeee"))
        axes.text(500 * (begin + end) - 1e3 * zero, -1, name, ha="center", va="center", fontsize=8)
    for number in range(len(buckets)):
        reduced = spans["start_reduce", number][0], spans["finish_reduce", number][1]
        draw_bar(number, *reduced, STEP_COLORS["reduce-scatter"])
        draw_bar(number, *spans["update_shards", number], STEP_COLORS["update"])
        draw_bar(number, spans["start_gather", number][0], spans["step", None][1], STEP_COLORS["all-gather"])
    ready_times = [1e3 * (t - zero) for t in step["ready_times"]]
    axes.plot(ready_times, [-1.45] * len(ready_times), "kv", markersize=4)
    axes.axvline(1e3 * (spans["backward", None][1] - zero), color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(-1, len(buckets)), ["rank 0", *(f"bucket {n}: {p[0]}" for n, p in enumerate(buckets))])
    axes.set(xlabel="time since the start of the forward pass (ms)", ylim=(len(buckets) - 0.5, -1.8))
    kinds = ("reduce-scatter", "update", "all-gather")
    patches = (Rectangle((0, 0), 1, 1, facecolor=STEP_COLORS[kind]) for kind in kinds)
    handles = [*axes.plot([], [], "kv", markersize=4), *patches]
    labels = ["a gradient is ready", *(kind if kind == "update" else f"{kind}, until wait() returns" for kind in kinds)]
    figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    plt.show()
