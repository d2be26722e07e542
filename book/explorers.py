"""Put a recording into an interactive page: the data for its script, and tables for everyone else.

A page contains the line `<!-- explorer: NAME -->`. The build replaces it with the recording
`docs/data/NAME.json`, which the script `book/static/NAME.js` reads, and with tables for browsers without scripts and
for print.
"""

import json
from collections.abc import Callable
from typing import Any

from bench.tables.records import format_table, read_result
from book.sources import ROOT
from nanoGPT.errors import ConfigError

RECORDINGS = ROOT / "docs" / "data"
MB, GIB = 1e6, 2**30
SHOWN_CASES = 24  # of the planner's results


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
        tables, origin = TABLES[name](result["samples"]), describe_recording(result)
    except (KeyError, TypeError, IndexError, AttributeError, StopIteration, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): run make record NAME={name}") from None
    data = json.dumps(result, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<div class="explorer" data-explorer="{name}"><script type="application/json">{data}</script>\n'
        '<div class="explorer-live"></div></div>\n\n'
        f"{origin}\n\n## The recorded run as tables\n\n{tables}"
    )


def describe_recording(result: dict[str, Any]) -> str:
    """Return a sentence with the command, the hardware and, if it is known, the commit of a recording."""
    commit = f" at commit {result['git_commit'][:10]}" if result["git_commit"] else ""
    return (
        f"`{result['settings']['command']}` recorded this run on {result['hardware']} with torch "
        f"{result['versions']['torch']}{commit} on {result['time'][:10]}."
    )


def tabulate_ring(samples: dict[str, Any]) -> str:
    """Return the bytes of each collective next to gloo's, and the sends of an all-reduce over 4 ranks on a ring."""
    gloo = {(row["kind"], row["ranks"]): row["sent_per_tensor_byte"] for row in samples["gloo"]}
    rows = []
    for run in samples["runs"]:
        sent = sum(sends[0].get("bytes", 0) for sends in run["steps"])
        cells = [run["ranks"], len(run["steps"]), run["tensor_bytes"], sent, round(run["predicted_bytes"])]
        measured = gloo.get((run["collective"], run["ranks"]))
        gloo_sent = f"{run['tensor_bytes'] * measured:,.0f}" if measured else "-"
        rows.append([run["collective"], run["algorithm"], *(f"{cell:,}" for cell in cells), gloo_sent])
    header = ["collective", "algorithm", "ranks", "steps", "tensor (bytes)", "sent by rank 0 (bytes)"]
    header += ["formula (bytes)", "gloo sends per rank (bytes)"]
    example = next(run for run in samples["runs"] if run["collective"] == "all-reduce" and run["ranks"] == 4)
    sends = [
        [str(step), *(f"chunk {send['chunk']} to rank {send['to']}" for send in each)]
        for step, each in enumerate(example["steps"], start=1)
    ]
    title = (
        "\nWhat gloo sends was measured with larger tensors, and is scaled to these. "
        "The sends of the all-reduce over 4 ranks on a ring:\n\n"
    )
    return format_table(header, rows) + title + format_table(["step", *(f"rank {r}" for r in range(4))], sends)


def tabulate_fsdp_step(samples: dict[str, Any]) -> str:
    """Return the costs of every run, and every event of the first one with the memory of rank 0 after it."""
    categories, first = samples["categories"], samples["runs"][0]
    costs = []
    for run in samples["runs"]:
        sizes = [*run["expected"].values(), *(round(run["ring_bytes"][kind]) for kind in run["expected"])]
        cells = [*map(str, run["options"].values()), *(f"{size:,}" for size in sizes)]
        costs.append([*cells, f"{max(map(sum, run['peak'])) / MB:.2f}", f"{run['loss']:.6f}"])
    costs_header = [f"`{name}`" for name in samples["switches"]]
    costs_header += [f"{kind}: full tensors (bytes)" for kind in first["expected"]]
    costs_header += [f"{kind}: sent per rank (bytes)" for kind in first["expected"]]
    rows = []
    for number, (kind, unit, size) in enumerate(first["events"], start=1):
        totals = [f"{value / MB:.2f}" for value in first["memory"][0][number - 1]]
        rows.append([str(number), kind, unit, f"{size:,}" if size else "", *totals])
    header = ["event", "stage", "unit", "full tensor (bytes)", *(f"{n.replace('_', ' ')} (MB)" for n in categories)]
    return (
        "The bytes are those of the formula `expected_traffic` of `phase3_fsdp/costs.py`, and what a rank sends for "
        "them with the ring algorithm. Peak memory is the maximum over all ranks.\n\n"
        f"{format_table([*costs_header, 'peak memory (MB)', 'loss'], costs)}\n"
        f"Every event of the first run, with the memory of rank 0 when the event ends:\n\n{format_table(header, rows)}"
    )


def read_cases(samples: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the planner's recorded cases as objects."""
    return [dict(zip(samples["cases"]["fields"], values, strict=True)) for values in samples["cases"]["values"]]


def tabulate_will_it_fit(samples: dict[str, Any]) -> str:
    """Return the planner's results for the question of the page, and for some of the other recorded cases."""
    names = ("model", "gpus", "gpu", "dtype", "batch_size", "block_size", "micro_batches")
    rows, cases = [], read_cases(samples)
    number = len(samples["rows"])
    for case in [*cases[:number], *cases[number :: len(cases) // SHOWN_CASES]]:
        memory = [f"{size / GIB:,.1f}" for size in (sum(case["state_bytes"]), case["peak_bytes"])]
        times = [f"{1e3 * case[mode]:,.1f}" for mode in ("compiled", "eager")]
        inputs = [f"{case[name]:,}" if isinstance(case[name], int) else case[name] for name in names]
        rows.append([f"`{samples['rows'][case['row']]['name']}`", *inputs, *memory, *times])
    header = ["row", "model", "GPUs", "GPU", "dtype", "sequences per micro-batch", "tokens per sequence"]
    header += ["micro-batches", "model state (GiB)", "peak memory (GiB)", "compiled step (ms)", "eager step (ms)"]
    text = f"The planner's results for {len(rows)} of the {len(cases)} cases with which a test compares the formulas:"
    return f"{text}\n\n{format_table(header, rows)}"


def tabulate_kill_save(samples: dict[str, Any]) -> str:
    """Return what every kill left, and which step opened."""
    rows = []
    for kill in samples["kills"]:
        folders = dict.fromkeys(name.partition("/")[0] for name, _ in kill["files"] if "/" in name)
        rows.append([kill["mode"], str(kill["rank"]), kill["point"], ", ".join(f"`{name}`" for name in folders)])
        rows[-1].append(f"step {kill['step']}")
    return format_table(["save", "killed rank", "moment", "directories after the kill", "opens"], rows)


def tabulate_flash_attention(samples: dict[str, Any]) -> str:
    """Return the running values of every query after each tile, and the results."""

    def list_values(values: list[float]) -> str:
        return ", ".join(f"{value:.3f}" for value in values)

    rows, tokens, tile = [], samples["tokens"], samples["tile"]
    for number, step in enumerate(samples["steps"], start=1):
        for i in range(min(tile, tokens - step["query"])):
            keys = f"{step['key']} to {min(step['key'] + tile, tokens) - 1}"
            values = [f"{step[name][i]:.3f}" for name in ("maximum", "correction", "sum")]
            output = list_values([value / step["sum"][i] for value in step["output"][i]])
            rows.append([str(number), str(step["query"] + i), keys, *values, output])
    header = ["tile", "query", "keys", "maximum", "factor of the old sums", "sum of weights", "output so far"]
    results = [
        [str(query), list_values(row), list_values(expected)]
        for query, (row, expected) in enumerate(zip(samples["output"], samples["expected"], strict=True))
    ]
    comparison = format_table(["query", "output of the kernel", "plain softmax in fp64"], results)
    return f"{format_table(header, rows)}\nThe results:\n\n{comparison}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "ring": tabulate_ring,
    "fsdp_step": tabulate_fsdp_step,
    "will_it_fit": tabulate_will_it_fit,
    "kill_save": tabulate_kill_save,
    "flash_attention": tabulate_flash_attention,
}
