"""Draw the metrics of several runs in one figure, and print a summary.

    make plot RUN=out/a,out/b        # writes out/plot.png
    make plot                        # the newest run under out/

The figure has the training loss, the validation loss, the gradient norm, the throughput, MFU and the peak memory. All
values come from metrics.jsonl.
"""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.plan.plan import check_plot
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.job.heartbeat_files import read_json
from operate.run_files import find_newest_run, read_json_lines

if TYPE_CHECKING:  # matplotlib is slow to import, and only a drawing needs it
    from matplotlib.axes import Axes

Lines = list[dict[str, Any]]

# The key in metrics.jsonl, the label of the axis, and the factor for the values.
PANELS = (
    ("loss", "training loss (nats per token)", 1.0),
    ("val_loss", "validation loss (nats per token)", 1.0),
    ("grad_norm", "gradient norm", 1.0),
    ("tokens_per_second", "tokens per second", 1.0),
    ("mfu", "MFU (%)", 100.0),
    ("peak_memory_bytes", "peak memory of rank 0 (GB)", 1e-9),
)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # palette of Okabe and Ito
STYLES = ("-", "--", ":", "-.")


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
    for i, (name, lines) in enumerate(runs.items()):
        steps, values = select_values(lines, key, factor)
        marker = "o" if len(steps) < 25 else ""
        style = STYLES[i % len(STYLES)]
        axes.plot(steps, values, style, marker=marker, markersize=4, color=COLORS[i % len(COLORS)], label=name)
    if not any(select_values(lines, key, factor)[0] for lines in runs.values()):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="gray")
        axes.set(xticks=[], yticks=[])
    elif key in ("tokens_per_second", "mfu", "peak_memory_bytes"):
        axes.set_ylim(bottom=0)


def summarize(runs: dict[str, Lines]) -> Iterator[str]:
    """Yield a table with one row per run."""
    header = ("run", "ranks", "steps", "loss", "best validation loss", "tokens per second", "peak memory (GB)")
    rows = [header]
    for name, lines in runs.items():
        ranks = read_json(Path(name) / "env.json").get("world_size", "?")
        columns = {key: select_values(lines, key, factor)[1] for key, _, factor in PANELS}
        rows.append(
            (
                name,
                str(ranks),
                str(lines[-1]["step"]),
                f"{columns['loss'][-1]:.4f}" if columns["loss"] else "-",
                f"{min(columns['val_loss']):.4f}" if columns["val_loss"] else "-",
                f"{statistics.median(columns['tokens_per_second']):,.0f}" if columns["tokens_per_second"] else "-",
                f"{max(columns['peak_memory_bytes']):.2f}" if columns["peak_memory_bytes"] else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, *numbers = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([name.strip().ljust(widths[0]), *numbers])


def main(run: str = "", to: Path = Path("out/plot.png")) -> None:
    """Draw the metrics of runs in one figure.

    Args:
        run: directories of runs, separated by commas; empty: the newest run under out/.
        to: file of the figure.
    """
    runs = read_runs(run)
    check_plot(to)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for panel, (key, label, factor) in zip(axes.flat, PANELS, strict=True):
        draw_metric(panel, runs, key, label, factor)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    figure.savefig(to, dpi=120)
    print("\n".join(summarize(runs)))
    print(f"wrote {to}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
