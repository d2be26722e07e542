"""The metrics of a suite: values that are computed from the files of a finished run."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.suite.execution import Run, read_status

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """What a finished run has written.

    Attributes:
        lines: the lines of metrics.jsonl.
        ledger: the content of ledger.json; empty if there is none.
        run: the run.
        target_loss: the validation loss for the metrics that end with _to_loss.
    """

    lines: Lines
    ledger: dict[str, Any]
    run: Run
    target_loss: float


@dataclass(frozen=True)
class Metric:
    """A metric of a suite.

    Attributes:
        unit: for the headers of tables.
        compute: returns the value; infinity if the run did not reach the target loss.
        min_steps: steps that a run needs, at least.
        needs: configuration field that must be true; empty if there is none.
        needs_target: whether the suite must set target_loss.
    """

    unit: str
    compute: Callable[[Measured], float]
    min_steps: int = 1
    needs: str = ""
    needs_target: bool = False


def median_of(name: str) -> Callable[[Measured], float]:
    """Return a function that computes the median over a run's logged steps, without the first one."""
    return lambda measured: statistics.median([line[name] for line in measured.lines if line.get(name)][1:])


def last_of(name: str) -> Callable[[Measured], float]:
    """Return a function that reads the last logged value."""
    return lambda measured: float([line[name] for line in measured.lines if line.get(name) is not None][-1])


def read_peak_bytes(measured: Measured) -> float:
    """Return the peak memory of the step that the ledger measured, in bytes: the maximum over all ranks."""
    return max(sum(rank["memory"]["peak"].values()) for rank in measured.ledger["ranks"])


def compute_gpu_hours(measured: Measured) -> float:
    """Return the GPU-hours (on a CPU: hours of ranks) for a billion tokens."""
    return measured.run.ranks * 1e9 / median_of("tokens_per_second")(measured) / 3600


def count_steps_to_loss(measured: Measured) -> float:
    """Return the steps before the first evaluation with at most the target loss; infinity if there is none."""
    losses = {line["step"]: line["val_loss"] for line in measured.lines if line.get("val_loss") is not None}
    if not losses:
        raise ValueError("metrics.jsonl has no evaluation")
    return min((float(step) for step, loss in losses.items() if loss <= measured.target_loss), default=math.inf)


def sum_seconds_to_loss(measured: Measured) -> float:
    """Return the seconds of training steps, without evaluations and saves, until the target loss is reached."""
    target_step, seconds, next_step = count_steps_to_loss(measured), 0.0, 0
    if target_step == math.inf:
        return math.inf
    for line in measured.lines:
        if line.get("step_ms") is not None and line["step"] < target_step:
            # step_ms is the mean over the steps since the line before
            seconds += line["step_ms"] / 1000 * (line["step"] + 1 - next_step)
            next_step = line["step"] + 1
    return seconds


METRICS = {
    "tokens_per_second": Metric("tokens per second", median_of("tokens_per_second"), min_steps=2),
    "step_ms": Metric("ms per step", median_of("step_ms"), min_steps=2),
    "gpu_hours": Metric("GPU-hours per billion tokens", compute_gpu_hours, min_steps=2),
    "loss": Metric("nats per token", last_of("loss")),
    "val_loss": Metric("nats per token", last_of("val_loss")),
    "peak_bytes": Metric("bytes per rank", read_peak_bytes, min_steps=3, needs="ledger"),
    "steps_to_loss": Metric("steps", count_steps_to_loss, needs_target=True),
    "seconds_to_loss": Metric("seconds of training", sum_seconds_to_loss, needs_target=True),
}


def read_metric(run: Run, name: str, target_loss: float = 0.0) -> float | None:
    """Return a metric of a run that is done.

    Returns:
        None if the run is not done or its files have no such value; infinity if it did not reach the target loss.
    """
    if read_status(run.directory)["state"] != "done":
        return None
    path = run.out_dir / "ledger.json"
    try:
        lines = [json.loads(line) for line in (run.out_dir / "metrics.jsonl").read_text().splitlines()]
        ledger = json.loads(path.read_text()) if path.exists() else {}
        value = float(METRICS[name].compute(Measured(lines, ledger, run, target_loss)))
    except (OSError, ValueError, IndexError, KeyError, AttributeError, TypeError):
        return None
    is_unreached = METRICS[name].needs_target and value == math.inf
    return value if math.isfinite(value) or is_unreached else None


def explain_missing_metrics(run: Run, names: list[str], target_loss: float = 0.0) -> str:
    """Return why a run does not have all metrics; an empty string if it has."""
    status = read_status(run.directory)
    if status["state"] != "done":
        return ": ".join(filter(None, [status["state"], status["reason"]]))
    missing = [name for name in names if read_metric(run, name, target_loss) is None]
    return f"its files cannot be read, or have no {' and no '.join(missing)}" if missing else ""
