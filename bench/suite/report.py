"""Write the results of a suite: results.json, a figure per metric, and report.md.

For each metric, a row has the mean over the seeds with its 95% confidence interval, and the difference from a reference
with the same number of ranks: the first variant of the same phase, or the first phase if there is only one variant. The
difference is paired: it compares runs with the same seed, which train on the same batches.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from bench.suite.execution import Run, read_status
from bench.suite.file import Suite
from bench.suite.intervals import half_width, paired_differences
from bench.suite.metrics import METRICS, explain_missing_metrics, read_metric
from bench.suite.plot import INTERVALS, plot_rows
from bench.tables.records import format_table

Row = dict[str, Any]


def summarize_values(values: dict[int, float | None]) -> Row:
    """Return the mean of the measured values, their standard deviation, and half the width of the 95% interval.

    The mean is infinite if a run did not reach the target loss, and None if nothing was measured.
    """
    measured = [value for value in values.values() if value is not None]
    is_finite = all(map(math.isfinite, measured))
    return {
        "values": values,
        "mean": (statistics.fmean(measured) if is_finite else math.inf) if measured else None,
        "spread": statistics.stdev(measured) if len(measured) > 1 and is_finite else None,
        "interval": half_width(measured),
    }


def find_reference(row: Row, rows: list[Row]) -> Row | None:
    """Return the row that a row is compared with; None for a row that is itself a reference."""
    same_ranks = [each for each in rows if each["ranks"] == row["ranks"]]
    variants = [each for each in same_ranks if each["phase"] == row["phase"]]
    reference = variants[0] if len(variants) > 1 else same_ranks[0]
    return None if reference is row else reference


def compare_rows(rows: list[Row]) -> None:
    """Add to each row the name of its reference, the mean paired difference, and half the width of its interval."""
    for row in rows:
        reference = find_reference(row, rows)
        differences = paired_differences(row["values"], reference["values"]) if reference else []
        row["reference"] = f"{reference['phase']} {reference['variant']}" if reference else None
        row["difference"] = statistics.fmean(differences) if differences else None
        row["difference_interval"] = half_width(differences)


def group_runs(runs: list[Run], metric: str, target_loss: float = 0.0) -> list[Row]:
    """Return a row per phase, rank count and variant: the value of each seed, statistics, and a comparison."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.phase, run.ranks, run.variant), []).append(run)
    rows = []
    for (phase, ranks, variant), members in groups.items():
        values = {run.seed: read_metric(run, metric, target_loss) for run in members}
        faults = {run.seed: explain_missing_metrics(run, [metric], target_loss) for run in members}
        rows.append(
            {
                "phase": phase,
                "ranks": ranks,
                "variant": variant,
                **summarize_values(values),
                "faults": {seed: fault for seed, fault in faults.items() if fault},
                "states": {run.seed: read_status(run.directory) for run in members},
            }
        )
    compare_rows(rows)
    return rows


def write_report(suite: Suite, runs: list[Run], directory: Path, price: float | None = None) -> Path:
    """Write results.json, a figure per metric and report.md into a suite's directory. Return the path of report.md.

    Args:
        suite: names the metrics.
        runs: the runs to report.
        directory: of the suite.
        price: of a GPU per hour, for the cost of training on a billion tokens.
    """
    rows = {metric: group_runs(runs, metric, suite.target_loss) for metric in suite.metrics}
    environments = collect_environments(runs)
    result = {
        "name": suite.name,
        "target_loss": suite.target_loss or None,
        "environments": environments,
        "metrics": replace_infinity(rows),
    }
    (directory / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    hardware = dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in environments)
    source = f"Measured on {' and '.join(hardware)}." if hardware else "No run is done yet."
    parts = [f"# {suite.name}\n\n{suite.about} {source}\n"]
    for metric in suite.metrics:
        unit = METRICS[metric].unit
        finite = [row for row in rows[metric] if row["mean"] is not None and math.isfinite(row["mean"])]
        figure = f"{suite.name}-{metric}.png"
        plot_rows(finite, f"{metric} ({unit})", directory / figure)
        parts.append(f"## {metric} ({unit}){describe_target(suite, metric)}\n\n![{metric}]({figure})\n")
        parts.append(f"{INTERVALS}.\n\n{format_rows(rows[metric])}")
    if "gpu_hours" in suite.metrics:
        parts.append(f"## The cheapest number of ranks\n\n{describe_cheapest(rows['gpu_hours'], price)}")
    path = directory / "report.md"
    path.write_text("\n".join(parts))
    return path


def describe_target(suite: Suite, metric: str) -> str:
    return f" to a validation loss of {suite.target_loss:g}" if METRICS[metric].needs_target else ""


def replace_infinity(value: Any) -> Any:
    """Return a copy of a JSON value in which null stands for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: replace_infinity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [replace_infinity(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def describe_cheapest(rows: list[Row], price: float | None) -> str:
    """Return a table with the cheapest and the fastest number of ranks of each phase and variant.

    Args:
        rows: of the metric gpu_hours.
        price: of a GPU per hour; None: unknown.
    """

    def describe(row: Row) -> str:
        cost = f", cost {row['mean'] * price:,.2f}" if price else ""
        return f"{row['ranks']} rank(s), {row['mean']:,.2f} GPU-hours in {row['mean'] / row['ranks']:,.2f} hours{cost}"

    lines = []
    for phase, variant in dict.fromkeys((row["phase"], row["variant"]) for row in rows):
        members = [row for row in rows if (row["phase"], row["variant"]) == (phase, variant) and row["mean"]]
        if members:
            cheapest = min(members, key=lambda row: row["mean"])
            fastest = min(members, key=lambda row: row["mean"] / row["ranks"])
            lines.append([phase, variant, describe(cheapest), describe(fastest)])
    header = ["phase", "variant", "cheapest, for a billion tokens", "fastest, for a billion tokens"]
    return format_table(header, lines) if lines else "No run is done yet.\n"


def collect_environments(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the distinct combinations of hardware, versions and commit of the runs that are done."""
    environments = []
    for run in runs:
        try:
            values = json.loads((run.out_dir / "env.json").read_text())
            environment = {name: values[name] for name in ("hardware", "versions", "git_commit")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if environment not in environments and read_status(run.directory)["state"] == "done":
            environments.append(environment)
    return environments


HEADER = ["phase", "ranks", "variant", "mean", "95% interval", "difference from the reference", "its 95% interval"]
HEADER += ["reference", "standard deviation", "seeds measured", "not measured"]


def format_rows(rows: list[Row]) -> str:
    """Return the rows of a metric as a table. Columns in which no row has a value are left out."""
    lines = [format_row(row) for row in rows]
    columns = [i for i in range(len(HEADER)) if i < 4 or any(line[i] not in ("-", "") for line in lines)]
    return format_table([HEADER[i] for i in columns], [[line[i] for i in columns] for line in lines])


def format_row(row: Row) -> list[str]:
    """Return a row as text, in the order of HEADER."""
    mean, scale = row["mean"], row["mean"]
    interval = difference = difference_interval = "-"
    if row["interval"] is not None:
        interval = f"± {format_number(row['interval'], scale)}"
    if row["difference"] is not None:
        difference = f"{'+' if row['difference'] > 0 else ''}{format_number(row['difference'], scale)}"
    if row["difference_interval"] is not None:
        difference_interval = f"± {format_number(row['difference_interval'], scale)}"
    measured = sum(value is not None for value in row["values"].values())
    faults = [f"seed {seed}, {fault}" for seed, fault in row["faults"].items()]
    return [
        row["phase"],
        str(row["ranks"]),
        row["variant"],
        format_number(mean),
        interval,
        difference,
        difference_interval,
        row["reference"] or "-",
        format_number(row["spread"], scale),
        str(measured),
        "; ".join(faults),
    ]


def format_number(value: float | None, scale: float | None = None) -> str:
    """Return a number as text.

    Args:
        value: the number; None: nothing was measured; infinity: the target loss was not reached.
        scale: the number has as many decimals as this one would have; None: as `value`.
    """
    if value is None:
        return "-"
    if math.isinf(value):
        return "not reached"
    size = abs(value if scale is None else scale)
    if size >= 1e9:
        return f"{value:.3e}"
    return f"{value:,.{0 if size >= 100 else 4}f}"
