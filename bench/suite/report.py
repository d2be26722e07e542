"""Write the results of a suite: results.json and report.md.

For each metric, a row has the mean over the seeds with its 95% confidence interval, and the difference from a reference
with the same number of ranks: the first variant of the same phase, or the first phase if there is only one variant. The
difference is paired: it compares runs with the same seed, which train on the same batches.
"""

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.suite.execution import Run, read_status
from bench.suite.file import Suite
from bench.suite.metrics import METRICS, explain_missing_metrics, read_metric
from bench.tables.records import format_table

Row = dict[str, Any]
HEADER = ["phase", "ranks", "variant", "mean", "95% interval", "difference from the reference", "its 95% interval"]
HEADER += ["reference", "not measured"]
# 97.5% quantiles of Student's t distribution for 1, 2, 3, ... degrees of freedom: a suite has at most 10 seeds.
T_QUANTILES = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622]


def compute_half_width(values: list[float]) -> float | None:
    """Return half the width of the 95% confidence interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def subtract_pairs(values: Mapping[int, float | None], reference: Mapping[int, float | None]) -> list[float]:
    """Return the differences from a reference for each seed that both have.

    Runs with the same seed train on the same batches, so their differences vary less than their values.
    """
    pairs = [(value, reference.get(seed)) for seed, value in values.items()]
    return [a - b for a, b in pairs if a is not None and b is not None]


def summarize_values(values: dict[int, float | None]) -> Row:
    """Return the mean of the measured values, None if there are none, and half the width of its 95% interval."""
    measured = [value for value in values.values() if value is not None]
    mean = statistics.fmean(measured) if measured else None
    return {"values": values, "mean": mean, "interval": compute_half_width(measured)}


def find_reference(row: Row, rows: list[Row]) -> Row | None:
    """Return the row that a row is compared with; None for a row that is itself a reference."""
    same_ranks = [each for each in rows if each["ranks"] == row["ranks"]]
    variants = [each for each in same_ranks if each["phase"] == row["phase"]]
    reference = variants[0] if len(variants) > 1 else same_ranks[0]
    return None if reference is row else reference


def group_runs(runs: list[Run], metric: str) -> list[Row]:
    """Return a row per phase, rank count and variant: the value of each seed, statistics, and a comparison."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.phase, run.ranks, run.variant), []).append(run)
    rows: list[Row] = []
    for (phase, ranks, variant), members in groups.items():
        values = {run.seed: read_metric(run, metric) for run in members}
        faults = {run.seed: explain_missing_metrics(run, [metric]) for run in members}
        row = {"phase": phase, "ranks": ranks, "variant": variant, **summarize_values(values)}
        rows.append({**row, "faults": {seed: fault for seed, fault in faults.items() if fault}})
    for row in rows:
        reference = find_reference(row, rows)
        differences = subtract_pairs(row["values"], reference["values"]) if reference else []
        row["reference"] = f"{reference['phase']} {reference['variant']}" if reference else None
        row["difference"] = statistics.fmean(differences) if differences else None
        row["difference_interval"] = compute_half_width(differences)
    return rows


def write_report(suite: Suite, runs: list[Run], directory: Path) -> Path:
    """Write results.json and report.md into a suite's directory. Return the path of report.md."""
    rows = {metric: group_runs(runs, metric) for metric in suite.metrics}
    environments = collect_environments(runs)
    result = {"name": suite.name, "environments": environments, "metrics": rows}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    hardware = dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in environments)
    source = f"Measured on {' and '.join(hardware)}." if hardware else "No run is done yet."
    parts = [f"# {suite.name}\n\n{suite.about} {source} Intervals are over the seeds.\n"]
    for metric in suite.metrics:
        parts.append(f"## {metric} ({METRICS[metric].unit})\n\n{format_rows(rows[metric])}")
    path = directory / "report.md"
    path.write_text("\n".join(parts))
    return path


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


def format_rows(rows: list[Row]) -> str:
    """Return the rows of a metric as a table. Columns in which no row has a value are left out."""
    lines = [format_row(row) for row in rows]
    columns = [i for i in range(len(HEADER)) if i < 4 or any(line[i] not in ("-", "") for line in lines)]
    return format_table([HEADER[i] for i in columns], [[line[i] for i in columns] for line in lines])


def format_row(row: Row) -> list[str]:
    """Return a row as text, in the order of HEADER. All its numbers have as many decimals as the mean."""
    decimals = ",.0f" if abs(row["mean"] or 0) >= 100 else ",.4f"

    def show(name: str, sign: str = "") -> str:
        value = row[name]
        return "-" if value is None else f"{sign}{value:{decimals}}"

    faults = "; ".join(f"seed {seed}, {fault}" for seed, fault in row["faults"].items())
    plus = "+" if (row["difference"] or 0) > 0 else ""
    numbers = [show("mean"), show("interval", "± "), show("difference", plus), show("difference_interval", "± ")]
    return [row["phase"], str(row["ranks"]), row["variant"], *numbers, row["reference"] or "-", faults]
