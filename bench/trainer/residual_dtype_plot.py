"""Draw the losses of the precisions that `bench.trainer.residual_dtype` compares.

python -m bench.trainer.residual_dtype_plot     # bench/results/residual-dtype-*.json, into a .png of the same name
"""

import json
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.tables.records import RESULTS, hardware_of
from bench.tables.residual_tables import REFERENCE

COLORS = {"fp32": "#00798c", "autocast, bf16 residual": "#d1495b", "phase 3 in bf16": "#edae49"}
WINDOW = 10  # the curves are means over as many steps


def draw_results() -> None:
    """Draw how much each precision's training loss differs from that of autocast: a line per seed, and the mean."""
    for path in RESULTS.glob("residual-dtype-*.json"):
        result = json.loads(path.read_text())
        curves = {(row["variant"], row["seed"]): row["losses"] for row in result["samples"]["rows"]}
        seeds = sorted({seed for _, seed in curves})
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        for name, color in COLORS.items():
            lines = []
            for seed in seeds:
                pairs = zip(curves[name, seed], curves[REFERENCE, seed], strict=True)
                differences = [loss - reference for loss, reference in pairs]
                starts = range(0, len(differences), WINDOW)
                lines.append([statistics.fmean(differences[start : start + WINDOW]) for start in starts])
                axes.plot(list(starts), lines[-1], color=color, alpha=0.3, linewidth=0.8)
            means = [statistics.fmean(values) for values in zip(*lines, strict=True)]
            axes.plot(list(starts), means, color=color, label=name)
        axes.axhline(0, color="#333333", linewidth=0.8)
        axes.set(xlabel="step", ylabel=f"training loss minus that of {REFERENCE}", title=hardware_of(result))
        axes.legend(frameon=False)
        figure.savefig(path.with_suffix(".png"), dpi=150)
        plt.close(figure)
        print(f"wrote {path.with_suffix('.png')}")


if __name__ == "__main__":
    draw_results()
