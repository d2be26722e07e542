"""The metrics of a suite: values that are computed from the files of a finished run."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.suite.execution import Run, read_status

Lines = list[dict[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True)
class Metric:
    """A metric of a suite.

    Attributes:
        unit: for the headers of tables.
        compute: returns the value, from the lines of metrics.jsonl and the content of ledger.json (empty without one).
        min_steps: steps that a run needs, at least.
        needs: configuration field that must be true; empty if there is none.
    """

    unit: str
    compute: Callable[[Lines, dict[str, Any]], float]
    min_steps: int = 1
    needs: str = ""


def take_median(name: str) -> Callable[..., float]:
    """Return a function that computes the median over a run's logged steps, without the first one."""
    return lambda lines, _: statistics.median([line[name] for line in lines if line.get(name)][1:])


def take_last(name: str) -> Callable[..., float]:
    """Return a function that reads the last logged value."""
    return lambda lines, _: float([line[name] for line in lines if line.get(name) is not None][-1])


def read_peak_bytes(_: Lines, ledger: dict[str, Any]) -> float:
    """Return the peak memory of the step that the ledger measured, in bytes: the maximum over all ranks."""
    return max(sum(rank["memory"]["peak"].values()) for rank in ledger["ranks"])


METRICS = {
    "tokens_per_second": Metric("tokens per second", take_median("tokens_per_second"), min_steps=2),
    "step_ms": Metric("ms per step", take_median("step_ms"), min_steps=2),
    "loss": Metric("nats per token", take_last("loss")),
    "val_loss": Metric("nats per token", take_last("val_loss")),
    "peak_bytes": Metric("bytes per rank", read_peak_bytes, min_steps=3, needs="ledger"),
}


def read_metric(run: Run, name: str) -> float | None:
    """Return a metric of a run; None if the run is not done, or if its files have no such finite value."""
    if read_status(run.directory)["state"] != "done":
        return None
    path = run.out_dir / "ledger.json"
    try:
        lines = [json.loads(line) for line in (run.out_dir / "metrics.jsonl").read_text().splitlines()]
        ledger = json.loads(path.read_text()) if path.exists() else {}
        value = float(METRICS[name].compute(lines, ledger))
    except (OSError, ValueError, IndexError, KeyError, AttributeError, TypeError):
        return None
    return value if math.isfinite(value) else None


def explain_missing_metrics(run: Run, names: list[str]) -> str:
    """Return why a run does not have all metrics; an empty string if it has."""
    status = read_status(run.directory)
    if status["state"] != "done":
        return ": ".join(filter(None, [status["state"], status["reason"]]))
    missing = [name for name in names if read_metric(run, name) is None]
    return f"its files cannot be read, or have no {' and no '.join(missing)}" if missing else ""
