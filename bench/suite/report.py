"""What a suite found: results.json with mean and spread over seeds, a picture, and report.md."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.suite.execution import Run, read_status
from bench.tables.records import table

Lines = list[dict[str, Any]]
MARKERS = "os^vD<>pPX*h"
SPREAD = "Spread and vertical bars: the standard deviation over the seeds"


def median_of(name: str) -> Callable[[Lines, dict[str, Any]], float]:
    """The median over a run's logged steps but the first."""
    return lambda lines, ledger: statistics.median([line[name] for line in lines if line.get(name)][1:])


def last_of(name: str) -> Callable[[Lines, dict[str, Any]], float]:
    return lambda lines, ledger: float([line[name] for line in lines if line.get(name) is not None][-1])


def ledger_peak(lines: Lines, ledger: dict[str, Any]) -> float:
    """Bytes at the peak of the fullest rank's watched step; needs ledger = true."""
    return max(sum(rank["memory"]["peak"].values()) for rank in ledger["ranks"])


METRICS: dict[str, Callable[[Lines, dict[str, Any]], float]] = {
    "tokens_per_second": median_of("tokens_per_second"),
    "step_ms": median_of("step_ms"),
    "loss": last_of("loss"),
    "val_loss": last_of("val_loss"),
    "peak_bytes": ledger_peak,
}
STEPS = {"tokens_per_second": 2, "step_ms": 2, "peak_bytes": 3}  # that a run needs for them; for the others 1


def value_of(run: Run, metric: str) -> float | None:
    """A finished run's figure; None where it has none."""
    if read_status(run.directory)["state"] != "done":
        return None
    path = run.out_dir / "ledger.json"
    try:
        lines = [json.loads(line) for line in (run.out_dir / "metrics.jsonl").read_text().splitlines()]
        value = float(METRICS[metric](lines, json.loads(path.read_text()) if path.exists() else {}))
    except (OSError, ValueError, IndexError, KeyError, AttributeError, TypeError):
        return None
    return value if math.isfinite(value) else None


def fault_of(run: Run, metric: str) -> str:
    """Why a run has no figure; nothing where it has one."""
    status = read_status(run.directory)
    if status["state"] != "done":
        return f"{status['state']}: {status['reason']}"
    return "" if value_of(run, metric) is not None else f"its files cannot be read, or have no {metric}"


def grouped(runs: list[Run], metric: str) -> list[dict[str, Any]]:
    """A row for each phase, rank count and variant: its seeds' figures, their mean, and their standard deviation."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.phase, run.ranks, run.variant), []).append(run)
    rows = []
    for (phase, ranks, variant), members in groups.items():
        values = {run.seed: value_of(run, metric) for run in members}
        found = [value for value in values.values() if value is not None]
        rows.append(
            {
                "phase": phase,
                "ranks": ranks,
                "variant": variant,
                "values": values,
                "mean": statistics.fmean(found) if found else None,
                "spread": statistics.stdev(found) if len(found) > 1 else None,
                "faults": {run.seed: fault for run in members if (fault := fault_of(run, metric))},
                "states": {run.seed: read_status(run.directory) for run in members},
            }
        )
    return rows


def report(name: str, about: str, metric: str, runs: list[Run], directory: Path) -> Path:
    """Write results.json, NAME.png and report.md into a suite's directory; returns the last."""
    rows = grouped(runs, metric)
    where = environments(runs)
    result = {"name": name, "metric": metric, "environments": where, "rows": rows}
    machine = " and ".join(dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in where))
    (directory / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, metric, directory / f"{name}.png")
    head = ["phase", "ranks", "variant", metric, "spread", "seeds", ""]
    text = f"# {name}\n\n{about} Measured on {machine or 'nothing yet'}.\n\n"
    text += f"![{metric}]({name}.png)\n\n{SPREAD}.\n\n" + table(head, [cells(row) for row in rows])
    path = directory / "report.md"
    path.write_text(text)
    return path


def environments(runs: list[Run]) -> list[dict[str, Any]]:
    """Hardware, versions and commit of the runs that are done, each combination once."""
    found = []
    for run in runs:
        try:
            said = json.loads((run.out_dir / "env.json").read_text())
            where = {name: said[name] for name in ("hardware", "versions", "git_commit")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if where not in found and read_status(run.directory)["state"] == "done":
            found.append(where)
    return found


def cells(row: dict[str, Any]) -> list[str]:
    faults = [f"seed {seed}, {fault}" for seed, fault in row["faults"].items()]
    mean, spread = shown(row["mean"], row["mean"]), shown(row["spread"], row["mean"])
    found = sum(value is not None for value in row["values"].values())
    return [row["phase"], str(row["ranks"]), row["variant"], mean, spread, str(found), "; ".join(faults)]


def shown(value: float | None, mean: float | None) -> str:
    """A number with as many digits as its mean has."""
    return "-" if value is None or mean is None else f"{value:,.{0 if abs(mean) >= 100 else 4}f}"


def draw_lines(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A line for each phase and variant, of a marker of its own and beside the others: what is equal is seen too."""
    keys = list(dict.fromkeys((row["phase"], row["variant"]) for row in rows))
    for i, key in enumerate(keys):
        own = [row for row in rows if (row["phase"], row["variant"]) == key]
        places = [row["ranks"] * 2 ** (0.3 * (i + 0.5) / len(keys) - 0.15) for row in own]
        means, spreads = [row["mean"] for row in own], [row["spread"] or 0.0 for row in own]
        look = {"marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none", "capsize": 3}
        axes.errorbar(places, means, spreads, label=" ".join(key), **look)


def draw(rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    """The figure against ranks, a line for each phase and variant; bars where there is one rank count."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    there = [row for row in rows if row["mean"] is not None]
    if len({row["ranks"] for row in there}) > 1:
        draw_lines(axes, there)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["ranks"] for row in there}), sorted({str(row["ranks"]) for row in there}, key=int))
        axes.set_xlabel("ranks")
        figure.legend(loc="outside right upper", fontsize="small")
    else:
        names = [f"{row['phase']}\n{row['variant']}" for row in there]
        axes.bar(names, [row["mean"] for row in there], yerr=[row["spread"] or 0.0 for row in there], capsize=4)
        if there:
            low = min(row["mean"] - (row["spread"] or 0.0) for row in there)
            high = max(row["mean"] + (row["spread"] or 0.0) for row in there)
            if low > high / 2:  # what differs little is looked at closely, with all of its spread
                margin = max(high - low, 0.01 * high)
                axes.set_ylim(low - 2 * margin, high + margin)
    axes.set_ylabel(metric)
    axes.set_title(SPREAD, loc="left", fontsize="small")
    if any(row["mean"] >= 1000 for row in there):
        axes.yaxis.set_major_formatter(EngFormatter("B" if metric.endswith("bytes") else ""))
    figure.savefig(path)
