"""Write the results of a suite: results.json with mean and spread over the seeds, a plot, and report.md."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.suite.execution import Run, read_status
from bench.tables.records import format_table

Lines = list[dict[str, Any]]
MARKERS = "os^vD<>pPX*h"
SPREAD = "Spread and vertical bars: the standard deviation over the seeds"


def median_metric(name: str) -> Callable[[Lines, dict[str, Any]], float]:
    """Return a function that computes the median over a run's logged steps, without the first one."""
    return lambda lines, ledger: statistics.median([line[name] for line in lines if line.get(name)][1:])


def last_metric(name: str) -> Callable[[Lines, dict[str, Any]], float]:
    """Return a function that reads the last logged value."""
    return lambda lines, ledger: float([line[name] for line in lines if line.get(name) is not None][-1])


def read_peak_bytes(lines: Lines, ledger: dict[str, Any]) -> float:
    """Return the peak memory of the step that the ledger measured, in bytes: the maximum over all ranks."""
    return max(sum(rank["memory"]["peak"].values()) for rank in ledger["ranks"])


METRICS: dict[str, Callable[[Lines, dict[str, Any]], float]] = {
    "tokens_per_second": median_metric("tokens_per_second"),
    "step_ms": median_metric("step_ms"),
    "loss": last_metric("loss"),
    "val_loss": last_metric("val_loss"),
    "peak_bytes": read_peak_bytes,
}
MIN_STEPS = {"tokens_per_second": 2, "step_ms": 2, "peak_bytes": 3}  # steps that a metric needs; the others need 1


def read_metric(run: Run, metric: str) -> float | None:
    """Return the metric of a run that is done; None if the run is not done or its files have no such value."""
    if read_status(run.directory)["state"] != "done":
        return None
    path = run.out_dir / "ledger.json"
    try:
        lines = [json.loads(line) for line in (run.out_dir / "metrics.jsonl").read_text().splitlines()]
        value = float(METRICS[metric](lines, json.loads(path.read_text()) if path.exists() else {}))
    except (OSError, ValueError, IndexError, KeyError, AttributeError, TypeError):
        return None
    return value if math.isfinite(value) else None


def explain_missing_metric(run: Run, metric: str) -> str:
    """Return why a run has no metric; an empty string if it has one."""
    status = read_status(run.directory)
    if status["state"] != "done":
        return f"{status['state']}: {status['reason']}"
    return "" if read_metric(run, metric) is not None else f"its files cannot be read, or have no {metric}"


def group_runs(runs: list[Run], metric: str) -> list[dict[str, Any]]:
    """Return a row per phase, rank count and variant: the value of each seed, their mean and standard deviation."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.phase, run.ranks, run.variant), []).append(run)
    rows = []
    for (phase, ranks, variant), members in groups.items():
        values = {run.seed: read_metric(run, metric) for run in members}
        measured = [value for value in values.values() if value is not None]
        rows.append(
            {
                "phase": phase,
                "ranks": ranks,
                "variant": variant,
                "values": values,
                "mean": statistics.fmean(measured) if measured else None,
                "spread": statistics.stdev(measured) if len(measured) > 1 else None,
                "faults": {run.seed: fault for run in members if (fault := explain_missing_metric(run, metric))},
                "states": {run.seed: read_status(run.directory) for run in members},
            }
        )
    return rows


def write_report(name: str, about: str, metric: str, runs: list[Run], directory: Path) -> Path:
    """Write results.json, NAME.png and report.md into a suite's directory. Return the path of report.md."""
    rows = group_runs(runs, metric)
    environments = collect_environments(runs)
    result = {"name": name, "metric": metric, "environments": environments, "rows": rows}
    hardware = dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in environments)
    (directory / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    plot_rows(rows, metric, directory / f"{name}.png")
    head = ["phase", "ranks", "variant", metric, "spread", "seeds measured", "not measured"]
    source = f"Measured on {' and '.join(hardware)}." if hardware else "No run is done yet."
    text = f"# {name}\n\n{about} {source}\n\n"
    text += f"![{metric}]({name}.png)\n\n{SPREAD}.\n\n" + format_table(head, [format_row(row) for row in rows])
    path = directory / "report.md"
    path.write_text(text)
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


def format_row(row: dict[str, Any]) -> list[str]:
    faults = [f"seed {seed}, {fault}" for seed, fault in row["faults"].items()]
    mean, spread = format_number(row["mean"], row["mean"]), format_number(row["spread"], row["mean"])
    measured = sum(value is not None for value in row["values"].values())
    return [row["phase"], str(row["ranks"]), row["variant"], mean, spread, str(measured), "; ".join(faults)]


def format_number(value: float | None, mean: float | None) -> str:
    """Return a number without decimals if the mean is 100 or more, else with 4 decimals; "-" if there is no number."""
    return "-" if value is None or mean is None else f"{value:,.{0 if abs(mean) >= 100 else 4}f}"


def plot_lines(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plot a line per phase and variant. Each has a different marker and a small offset, so that equal lines show."""
    keys = list(dict.fromkeys((row["phase"], row["variant"]) for row in rows))
    for i, key in enumerate(keys):
        members = [row for row in rows if (row["phase"], row["variant"]) == key]
        positions = [row["ranks"] * 2 ** (0.3 * (i + 0.5) / len(keys) - 0.15) for row in members]
        means, spreads = [row["mean"] for row in members], [row["spread"] or 0.0 for row in members]
        style = {"marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none", "capsize": 3}
        axes.errorbar(positions, means, spreads, label=" ".join(key), **style)


def plot_rows(rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    """Plot the metric against the number of ranks: a line per phase and variant. Plot bars for a single rank count."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    measured = [row for row in rows if row["mean"] is not None]
    if len({row["ranks"] for row in measured}) > 1:
        plot_lines(axes, measured)
        axes.set_xscale("log", base=2)
        ranks = sorted({row["ranks"] for row in measured})
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.set_xlabel("ranks")
        figure.legend(loc="outside right upper", fontsize="small")
    else:
        names = [f"{row['phase']}\n{row['variant']}" for row in measured]
        spreads = [row["spread"] or 0.0 for row in measured]
        axes.bar(names, [row["mean"] for row in measured], yerr=spreads, capsize=4)
        if measured:
            low = min(row["mean"] - (row["spread"] or 0.0) for row in measured)
            high = max(row["mean"] + (row["spread"] or 0.0) for row in measured)
            if low > high / 2:  # start the axis above 0, so that small differences show
                margin = max(high - low, 0.01 * high)
                axes.set_ylim(low - 2 * margin, high + margin)
    axes.set_ylabel(metric)
    axes.set_title(SPREAD, loc="left", fontsize="small")
    if any(row["mean"] >= 1000 for row in measured):
        axes.yaxis.set_major_formatter(EngFormatter("B" if metric.endswith("bytes") else ""))
    figure.savefig(path)
