"""Draw the roofline of the kernels and the ablation of the trainer from the results of `make bench-kernels`.

    python -m bench.kernels.plots                 # draw every result into bench/results/*.png
    python -m bench.kernels.plots a.json b.json   # draw only these results

A result of interpreted kernels gets a note in its title.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from bench.tables.records import RESULTS

COLORS = {"ours": "#d1495b", "eager": "#9ad1d4", "sdpa": "#9ad1d4", "compile": "#00798c"}
NOTE = " (interpreted on a CPU: not comparable with a GPU)"


def draw_roofline(result: dict[str, Any], path: Path) -> None:
    """Draw each kernel's FLOPs per second over its FLOPs per byte, under the limits of memory and matrix units."""
    limits = result["samples"]["limits"]
    figure, axes = plt.subplots(figsize=(9, 5))
    intensity = np.logspace(-2, 4, 200)
    roof = np.minimum(intensity * limits["bytes_per_second"], limits["flops_per_second"]) / 1e12
    axes.loglog(intensity, roof, color="#555555", label="measured limits: copy bandwidth, matrix rate")
    for row in result["samples"]["rows"]:
        if row["contender"] not in COLORS or "error" in row:
            continue
        rate = row["flops"] / statistics.median(row["samples_ms"]) / 1e9
        marker = {"forward": "^", "backward": "v", "step": "o"}[row["pass"]]
        axes.loglog(row["flops"] / row["bytes"], rate, marker, color=COLORS[row["contender"]], alpha=0.8)
    for name in ("ours", "eager", "compile"):
        axes.plot([], [], "o", color=COLORS[name], label=name)
    axes.set(xlabel="FLOPs per byte read or written", ylabel="TFLOP/s")
    axes.set_title(f"{result['hardware']}{NOTE if result['settings']['interpreted'] else ''}", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ablation(result: dict[str, Any], path: Path) -> None:
    """Draw tokens per second and peak memory with each kernel, in percent of the same run without kernels."""
    rows = [row for row in result["samples"]["rows"] if "error" not in row]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    kernels = [name for name in dict.fromkeys(row["kernels"] for row in rows) if name != "none"]
    figure, grid = plt.subplots(2, len(sizes), figsize=(4 * len(sizes) + 2, 6), squeeze=False, sharey="row")
    for column, size in enumerate(sizes):
        for compiled, color, shift in ((False, "#9ad1d4", -0.2), (True, "#00798c", 0.2)):
            runs = {row["kernels"]: row for row in rows if row["size"] == size and row["compile"] is compiled}
            if "none" not in runs:
                continue
            measured = [name for name in kernels if name in runs]
            positions = [kernels.index(name) + shift for name in measured]
            base_rate = statistics.median(runs["none"]["tokens_per_second"])
            base_memory = runs["none"]["peak_memory_bytes"] or 1
            rates = [100 * statistics.median(runs[name]["tokens_per_second"]) / base_rate for name in measured]
            memory = [100 * runs[name]["peak_memory_bytes"] / base_memory for name in measured]
            for row, values in enumerate((rates, memory)):
                grid[row][column].bar(positions, values, 0.4, color=color, label="compiled" if compiled else "eager")
        for row in range(2):
            grid[row][column].axhline(100, color="#555555", linewidth=0.8)
            grid[row][column].set_xticks(range(len(kernels)), kernels, rotation=40, ha="right", fontsize=8)
            grid[row][column].spines[["top", "right"]].set_visible(False)
        grid[0][column].set_title(size)
    grid[0][0].set_ylabel("tokens/s (% of the run without kernels)")
    grid[1][0].set_ylabel("peak memory (% of the run without kernels)")
    grid[0][0].legend(frameon=False)
    figure.suptitle(f"{result['hardware']}{NOTE if result['settings']['interpreted'] else ''}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(paths: list[Path]) -> None:
    for path in paths:
        result = json.loads(path.read_text())
        draw = {"kernels": draw_roofline, "kernel-ablation": draw_ablation}.get(result.get("name"))
        if draw:
            draw(result, path.with_suffix(".png"))
            print(f"wrote {path.with_suffix('.png')}")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]] or sorted(RESULTS.glob("kernel*.json")))
