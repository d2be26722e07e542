"""Show a run while it trains: loss, throughput, memory, what each rank does, and the checkpoints.

    make watch RUN=out/my-run
    make watch                       # the newest run under out/

It only reads the files of the run, so it can be started and stopped at any time, also on another node that shares the
directory. It exits when the run ends, or when no rank has written a heartbeat for a minute.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from operate.run_files import find_newest_run, read_heartbeats, read_json_lines, read_json_object

PERIOD = 1.0  # seconds between two updates
SILENT_SECONDS = 10.0  # without a heartbeat, after which a rank is marked
DEAD_SECONDS = 60.0  # without a heartbeat of any rank, after which the command exits
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60  # characters
MAX_RANKS = 32  # rows of the table


def format_sparkline(values: list[float]) -> str:
    """Return a curve of at most CURVE_WIDTH characters; each shows the mean of its part of the values."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(CURVE_WIDTH, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def describe_metrics(lines: list[dict[str, Any]], max_iters: int | None) -> Text:
    """Return the last values of the metrics, and the curve of the loss."""
    trained = [line for line in lines if line.get("loss") is not None]
    if not trained:
        return Text("no step has been logged yet")
    last = trained[-1]
    losses = [line["loss"] for line in trained]
    evaluations = [line["val_loss"] for line in lines if line.get("val_loss") is not None]
    words = [f"step {last['step']}" + (f" of {max_iters}" if max_iters else ""), f"loss {last['loss']:.4f}"]
    words += [f"validation loss {evaluations[-1]:.4f}"] if evaluations else []
    words += [f"{last['tokens_per_second']:,.0f} tokens/s"] if last.get("tokens_per_second") else []
    words += [f"MFU {last['mfu']:.1%}"] if last.get("mfu") else []
    words += [f"peak memory {last['peak_memory_bytes'] / 1e9:.2f} GB"] if last.get("peak_memory_bytes") else []
    if max_iters and last.get("step_ms"):
        minutes = (max_iters - last["step"] - 1) * last["step_ms"] / 60_000
        words.append(f"{minutes:,.1f} min left")
    curve = f"{max(losses):.2f} {format_sparkline(losses)} {losses[-1]:.2f}"
    return Text("  ".join(words) + "\n" + curve)


def describe_ranks(folder: Path, now: float) -> Table:
    """Return a table with what each rank does, from its heartbeat."""
    table = Table("rank", "step", "stage", "waiting (%)", "last heartbeat", "line", box=None, pad_edge=False)
    beats = read_heartbeats(folder)
    for rank, beat in list(beats.items())[:MAX_RANKS]:
        age = now - beat["time"]
        state = "ended" if beat["ended"] else f"{age:.0f} s ago"
        is_silent = not beat["ended"] and age > SILENT_SECONDS
        waits = f"{100 * beat.get('waiting_beats', 0) / max(1, beat.get('beats', 1)):.0f}"
        line = "" if beat["ended"] else beat.get("line", "")
        cells = (str(rank), str(beat["step"]), beat["stage"], waits, state, line)
        table.add_row(*cells, style="bold red" if is_silent else None)
    if len(beats) > MAX_RANKS:
        table.add_row("...", f"and {len(beats) - MAX_RANKS} more ranks")
    return table


def describe_checkpoints(folder: Path) -> Text:
    """Return the names of the complete checkpoints, newest first."""
    names = [path.name for path in step_directories(folder)]
    return Text("checkpoints: " + (", ".join(names[:5]) if names else "none yet"))


def render(folder: Path) -> Panel:
    """Return a panel with the current state of a run."""
    environment = read_json_object(folder / "env.json")
    max_iters = environment.get("config", {}).get("max_iters")
    lines = read_json_lines(folder / "metrics.jsonl")
    parts = (describe_metrics(lines, max_iters), Text(), describe_ranks(folder, time.time()), Text())
    return Panel(Group(*parts, describe_checkpoints(folder)), title=str(folder), title_align="left")


def has_ended(folder: Path) -> bool:
    """Return whether every rank has written its last heartbeat, or has been silent for DEAD_SECONDS."""
    beats, now = read_heartbeats(folder).values(), time.time()
    return bool(beats) and all(beat["ended"] or now - beat["time"] > DEAD_SECONDS for beat in beats)


def main(run: Path | None = None) -> None:
    """Show a run while it trains.

    Args:
        run: the run's directory; None: the newest one under out/.
    """
    folder = run or find_newest_run()
    if not (folder / "heartbeat").is_dir():
        raise ConfigError(f"{folder} is not the directory of a run: give RUN=out/...")
    console = Console()
    with Live(render(folder), console=console, refresh_per_second=4) as live:
        while not has_ended(folder):
            time.sleep(PERIOD)
            live.update(render(folder))


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
