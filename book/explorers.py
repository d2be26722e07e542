"""Put a recording into an interactive page: the data for its script, and the same numbers as tables for everyone else.

A page contains the line `<!-- explorer: NAME -->`. In its place come the recording `docs/data/NAME.json`, which the
script `book/static/NAME.js` reads, and tables for browsers without scripts and for print.
"""

import json
from collections.abc import Callable
from typing import Any

from bench.tables.records import format_table, read_result
from book.sources import ROOT
from nanoGPT.errors import ConfigError

RECORDINGS = ROOT / "docs" / "data"
MB = 1e6


def render_explorer(name: str) -> str:
    """Return the block of an interactive page, in MyST Markdown.

    Raises:
        ConfigError: the recording is missing or damaged, or has no tables.
    """
    path = RECORDINGS / f"{name}.json"
    if not path.exists() or name not in TABLES:
        raise ConfigError(f"there is no recording {path}: run make record NAME={name}")
    result = read_result(path)
    try:
        tables = TABLES[name](result["samples"])
        origin = describe_recording(result)
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): run make record NAME={name}") from None
    data = json.dumps(result, separators=(",", ":")).replace("</", "<\\/")
    script = f'<script type="application/json">{data}</script>'
    return (
        f'<div class="explorer" data-explorer="{name}">{script}<div class="explorer-live"></div></div>\n\n'
        f"{origin}\n\n## The recorded run as tables\n\n{tables}"
    )


def describe_recording(result: dict[str, Any]) -> str:
    """Return a sentence with the command, the hardware and the commit of a recording."""
    return (
        f"`{result['settings']['command']}` recorded this run on {result['hardware']} with torch "
        f"{result['versions']['torch']} at commit {result['git_commit'][:10]} on {result['time'][:10]}."
    )


def tabulate_ring(samples: dict[str, Any]) -> str:
    """Return the bytes of each collective, and the sends of an all-reduce over 4 ranks."""
    rows = []
    for run in samples["runs"]:
        sent = sum(sends[0]["bytes"] for sends in run["steps"])
        cells = [run["ranks"], len(run["steps"]), run["tensor_bytes"], sent, round(run["predicted_bytes"])]
        rows.append([run["collective"], *(f"{cell:,}" for cell in cells)])
    header = ["collective", "ranks", "steps", "tensor (bytes)", "sent per rank (bytes)", "formula (bytes)"]
    example = next(run for run in samples["runs"] if run["collective"] == "all-reduce" and run["ranks"] == 4)
    sends = [
        [str(step), *(f"chunk {send['chunk']} to rank {send['to']}" for send in each)]
        for step, each in enumerate(example["steps"], start=1)
    ]
    title = "\nThe sends of the all-reduce over 4 ranks:\n\n"
    return format_table(header, rows) + title + format_table(["step", *(f"rank {r}" for r in range(4))], sends)


def tabulate_fsdp_step(samples: dict[str, Any]) -> str:
    """Return every event of the step, with the memory of rank 0 by category after it."""
    categories = samples["categories"]
    rows = []
    for number, (kind, unit, size) in enumerate(samples["events"], start=1):
        totals = [f"{value / MB:.2f}" for value in samples["memory"][0][number - 1]]
        rows.append([str(number), kind, unit, f"{size:,}" if size else "", *totals])
    header = [
        "event",
        "stage",
        "unit",
        "full tensor (bytes)",
        *(f"{name.replace('_', ' ')} (MB)" for name in categories),
    ]
    sent = samples["ring_bytes"]
    volumes = [[kind, f"{size:,}", f"{round(sent[kind]):,}"] for kind, size in samples["expected"].items()]
    volumes_header = ["collective", "full tensors (bytes)", "sent per rank, ring algorithm (bytes)"]
    return (
        f"The mean loss of the step is {samples['loss']:.6f}. Its collectives, from the formula `expected_traffic` of "
        f"`phase3_fsdp/costs.py`:\n\n{format_table(volumes_header, volumes)}\n"
        f"Every event of the step, with the memory of rank 0 when the event ends:\n\n{format_table(header, rows)}"
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"ring": tabulate_ring, "fsdp_step": tabulate_fsdp_step}
