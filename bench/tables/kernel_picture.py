"""Draw which tensors kernels read from GPU memory and write to it: separate operations next to a fused kernel.

`python -m bench.tables.pictures` calls `draw_kernels`, which writes docs/images/what_a_kernel_moves.png.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

NARROW, WIDE = "#56B4E9", "#E69F00"  # tensors of (tokens, channels) and of (tokens, vocabulary)
MEMORY, REGISTERS = 1.0, 0.0  # heights of the two rows of boxes


@dataclass(frozen=True)
class Panel:
    """One panel of the picture.

    Attributes:
        title: what the kernels compute; {moves} is replaced by the number of reads and writes.
        tensors: names of the tensors in memory, in order, with their colors.
        kernels: for each kernel its name, the tensors that it reads, and those that it writes.
    """

    title: str
    tensors: dict[str, str]
    kernels: list[tuple[str, list[str], list[str]]]


PANELS = (
    Panel(
        "residual add, then LayerNorm: {moves} reads and writes",
        {"x": NARROW, "branch": NARROW, "sum": NARROW, "y": NARROW},
        [("add", ["x", "branch"], ["sum"]), ("LayerNorm", ["sum"], ["y"])],
    ),
    Panel(
        "residual add + LayerNorm, fused: {moves} reads and writes",
        {"x": NARROW, "branch": NARROW, "sum": NARROW, "y": NARROW},
        [("add + LayerNorm", ["x", "branch"], ["sum", "y"])],
    ),
    Panel(
        "head, loss and gradient: all logits and their gradient are in memory",
        {"h": NARROW, "logits": WIDE, "dlogits": WIDE, "dh": NARROW},
        [
            ("matmul", ["h"], ["logits"]),
            ("loss", ["logits"], []),
            ("gradient", ["logits"], ["dlogits"]),
            ("matmul", ["dlogits"], ["dh"]),
        ],
    ),
    Panel(
        "the fused head: one chunk of logits at a time",
        {"h": NARROW, "a chunk": WIDE, "dh": NARROW},
        [
            ("matmul", ["h"], ["a chunk"]),
            ("loss + gradient", ["a chunk", "a chunk"], ["a chunk"]),
            ("matmul", ["a chunk"], ["dh"]),
        ],
    ),
)


def draw_box(axes: Axes, center: float, bottom: float, width: float, text: str, color: str) -> None:
    """Draw a box with a text in its middle."""
    axes.add_patch(Rectangle((center - width / 2, bottom), width, 0.3, facecolor=color, edgecolor="#444444"))
    axes.text(center, bottom + 0.15, text, ha="center", va="center", fontsize=9)


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw the tensors above, the kernels below, and an arrow for each read and write."""
    count = len(panel.tensors)
    places = {name: (index + 0.5) / count for index, name in enumerate(panel.tensors)}
    for name, color in panel.tensors.items():
        draw_box(axes, places[name], MEMORY, (0.4 if name == "a chunk" else 0.8) / count, name, color)
    moves = 0
    for index, (name, reads, writes) in enumerate(panel.kernels):
        center = (index + 0.5) / len(panel.kernels)
        draw_box(axes, center, REGISTERS, 0.86 / max(2, len(panel.kernels)), name, "#eeeeee")
        for shift, tensors, is_read in ((-0.03, reads, True), (0.03, writes, False)):
            for number, tensor in enumerate(tensors):
                apart = shift * (1 + 0.8 * number)  # so that two arrows between the same boxes are visible
                ends = [(places[tensor] + apart / 2, MEMORY), (center + apart, REGISTERS + 0.3)]
                begin, end = ends if is_read else reversed(ends)
                style = {"arrowstyle": "->", "color": "#0072B2" if is_read else "#D55E00", "lw": 1.6}
                axes.annotate("", xy=end, xytext=begin, arrowprops=style)
                moves += 1
    axes.set(xlim=(0, 1), ylim=(-0.1, 1.4), title=panel.title.format(moves=moves))
    axes.set_yticks([MEMORY + 0.15, REGISTERS + 0.15], ["GPU memory", "kernels"])
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def draw_kernels(path: Path) -> None:
    """Draw all panels into one figure."""
    figure, grid = plt.subplots(2, 2, figsize=(12, 5.4))
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        draw_panel(axes, panel)
    colors = ((NARROW, "(tokens, channels)"), (WIDE, "(tokens, vocabulary)"))
    handles: list = [Rectangle((0, 0), 1, 1, facecolor=color, label=label) for color, label in colors]
    handles += [plt.Line2D([], [], color="#0072B2", label="read"), plt.Line2D([], [], color="#D55E00", label="write")]
    figure.legend(handles=handles, loc="upper center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=110)
