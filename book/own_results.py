"""Let a reader compare a result file with the committed ones, on the page of the result files.

The page contains the numbers of every committed result. A script reads the reader's file in the browser, and shows the
numbers of both next to each other. Nothing is sent anywhere.
"""

import json
import statistics
from typing import Any

MAX_NUMBERS = 150  # of one result
LABELS = ("ranks", "gpus", "batch_size")  # numbers that name a row; all texts do too

Numbers = dict[str, float]


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def label_items(items: list[dict[str, Any]]) -> list[str]:
    """Return a label for each object of a list: its texts, the numbers in LABELS, and what is true.

    A label that repeats gets the position of the object, and an empty label becomes the position.
    """
    labels = []
    for item in items:
        words = [value for value in item.values() if isinstance(value, str) and value]
        words += [f"{key} {value}" for key, value in item.items() if key in LABELS and is_number(value)]
        labels.append(", ".join([*words, *(key for key, value in item.items() if value is True)]))
    return [
        label if label and labels.count(label) == 1 else f"{label} {position}".strip()
        for position, label in enumerate(labels, start=1)
    ]


def collect_numbers(value: Any, name: str = "") -> Numbers:
    """Return the numbers in the samples of a result by name. A list of numbers becomes its median.

    `collectNumbers` in own_results.js does the same, and a test compares them.
    """
    if is_number(value):
        return {name: value}
    if isinstance(value, dict):
        prefix = f"{name}." if name else ""
        parts = [collect_numbers(item, f"{prefix}{key}") for key, item in value.items()]
    elif isinstance(value, list) and value and all(map(is_number, value)):
        return {f"{name} (median)": statistics.median(value)}
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        parts = [
            collect_numbers(item, f"{name}[{label}]") for item, label in zip(value, label_items(value), strict=True)
        ]
    else:
        return {}
    return {key: number for part in parts for key, number in part.items()}


def render_own_results(results: list[dict[str, Any]]) -> str:
    """Return the block in which a reader opens a result file, in Markdown.

    Args:
        results: the committed results that have a name.
    """
    committed = []
    for result in results:
        numbers = collect_numbers(result["samples"])
        kept = dict(list(numbers.items())[:MAX_NUMBERS])
        facts = {key: result.get(key) or "" for key in ("name", "hardware", "git_commit", "time")}
        committed.append({**facts, "command": result["settings"].get("command", ""), "numbers": kept})
    samples = {"committed": committed, "labels": LABELS, "max_numbers": MAX_NUMBERS}
    data = json.dumps({"samples": samples}, separators=(",", ":")).replace("</", "<\\/")
    return (
        "## Your own results\n\n"
        "A command with `--write`, such as `python -m bench.trainer.throughput --write`, writes a result file into "
        "`bench/results/`. Open it here to compare its numbers with the committed ones. Your browser reads the file, "
        "and sends it nowhere.\n\n"
        f'<div class="explorer" data-explorer="own_results" data-remedy="run &quot;make book&quot; again">'
        f'<script type="application/json">{data}</script><div class="explorer-live"></div></div>\n'
    )
