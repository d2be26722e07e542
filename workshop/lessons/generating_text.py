"""The picture of notebook 8: the weight of one layer on two ranks."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle


def draw_weights_per_rank() -> None:
    """Draw the weight of one layer on two ranks, at rest and while it computes, for FSDP and tensor parallelism."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6))
    colors, titles = ("#3b78c2", "#e0862d"), ("FSDP: all-gather, compute, free", "tensor parallel: compute, all-reduce")
    for axis, title in zip(axes, titles, strict=True):
        for rank in range(2):
            for column, moment in enumerate(("at rest", "while it computes")):
                x, y = 1.6 * column, 1.2 * (1 - rank)
                for part in range(2):
                    is_here = part == rank or (title.startswith("FSDP") and column == 1)
                    color = colors[part] if is_here else "white"
                    axis.add_patch(Rectangle((x + 0.6 * part, y), 0.6, 0.9, facecolor=color, edgecolor="gray"))
                axis.text(x + 0.6, y + 0.95, f"rank {rank}, {moment}", ha="center", fontsize=8)
        axis.set(xlim=(-0.1, 3), ylim=(-0.1, 2.4), title=title)
        axis.axis("off")
    plt.show()
