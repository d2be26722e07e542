"""Draw the metrics of several runs in one figure, and print a summary.

    make plot RUN=out/a,out/b        # writes out/plot.png
    make plot                        # the newest run under out/

The figure has the training loss, the validation loss, the gradient norm, the throughput, MFU and the peak memory. All
values come from metrics.jsonl.
"""

import itertools
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from operate.run_files import find_newest_run, read_json_lines, read_json_object

if TYPE_CHECKING:  # matplotlib is slow to import, and only a drawing needs it
    from matplotlib.axes import Axes

Lines = list[dict[str, Any]]
PLOT = Path("out") / "plot.png"
STYLES = ("-", "--", ":", "-.")

# The key in metrics.jsonl, the label of the axis, and the factor for the values.
PANELS = (
    ("loss", "training loss (nats per token)", 1.0),
    ("val_loss", "validation loss (nats per token)", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("tokens_per_second", "tokens per second", 1.0),
    ("mfu", "MFU (%)", 100.0),
    ("peak_memory_bytes", "peak memory of rank 0 (GB)", 1e-9),
)


def read_runs(run: str) -> dict[str, Lines]:
    """Return the lines of metrics.jsonl of each run, by its name.

    Args:
        run: directories, separated by commas; empty: the newest run under out/.

    Raises:
        ConfigError: a directory has no metrics.
    """
    folders = [Path(name) for name in run.split(",") if name] or [find_newest_run()]
    runs = {}
    for folder in folders:
        lines = read_json_lines(folder / "metrics.jsonl")
        if not lines:
            raise ConfigError(f"{folder / 'metrics.jsonl'} has no metrics: give RUN=out/a,out/b")
        runs[str(folder)] = lines
    return runs


def select_values(lines: Lines, key: str, factor: float) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a metric, without the lines that do not have it."""
    pairs = [(line["step"], factor * line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def draw_metric(axes: "Axes", runs: dict[str, Lines], key: str, label: str, factor: float) -> None:
    """Draw one metric of all runs."""
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    for (name, lines), style in zip(runs.items(), itertools.cycle(STYLES), strict=False):
        axes.plot(*select_values(lines, key, factor), style, marker=".", label=name)
    if key in ("tokens_per_second", "mfu", "peak_memory_bytes"):
        axes.set_ylim(bottom=0)


def summarize(runs: dict[str, Lines]) -> Table:
    """Return a table with one row per run."""
    table = Table(
        "run", "ranks", "steps", "loss", "best validation loss", "tokens per second", "peak memory (GB)", box=None
    )
    for name, lines in runs.items():
        columns = {key: select_values(lines, key, factor)[1] for key, _, factor in PANELS}
        ranks = read_json_object(Path(name) / "env.json").get("world_size", "?")
        loss, best = (
            columns["loss"] and f"{columns['loss'][-1]:.4f}",
            columns["val_loss"] and f"{min(columns['val_loss']):.4f}",
        )
        rates, peaks = columns["tokens_per_second"], columns["peak_memory_bytes"]
        rate, peak = rates and f"{statistics.median(rates):,.0f}", peaks and f"{max(peaks):.2f}"
        table.add_row(name, *(str(cell or "-") for cell in (ranks, lines[-1].get("step"), loss, best, rate, peak)))
    return table


def main(run: str = "") -> None:
    """Draw the metrics of runs in one figure.

    Args:
        run: directories of runs, separated by commas; empty: the newest run under out/.
    """
    runs = read_runs(run)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for panel, (key, label, factor) in zip(axes.flat, PANELS, strict=True):
        draw_metric(panel, runs, key, label, factor)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    Console(width=1000).print(summarize(runs))  # wider than any name of a directory
    print(f"wrote {PLOT}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
