"""Choose what to draw on the page of each result file. WITHOUT_CHART has the reason why a result has no picture."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.tables.deepspeed_tables import name_run
from bench.tables.elastic_tables import WAYS
from book.charts import Chart, Timeline, draw_chart
from book.kernel_charts import (
    draw_goals,
    draw_ladder,
    draw_residual_dtype,
    draw_residual_fusion,
    draw_resources,
)
from nanoGPT.errors import ConfigError

MB = 1e6
SCALE_PAIRS = (  # parts of `bench.sharding.scale`, without and with the optimization
    ("start", "init_before", "init_after"),
    ("save on rank 0", "save_before", "save_layout"),
    ("resume, another rank than 0", "index_before", "index_after"),
)
Samples = dict[str, Any]
Drawing = Callable[[Samples], Sequence[Chart | Timeline]]


def render_charts(result: dict[str, Any]) -> str:
    """Return the pictures of a result file as HTML, the reason why it has none, or an empty string for a new result.

    Raises:
        ConfigError: the result is damaged.
    """
    name = result.get("name", "")
    if name not in CHARTS:
        return WITHOUT_CHART.get(name, "")
    try:
        charts = CHARTS[name](result["samples"])
        return "\n\n".join(draw_chart(chart, f"chart-{i}") for i, chart in enumerate(charts) if chart.rows)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the result {name} is damaged ({error!r}): restore it from git, or run {result['settings'].get('command')}"
        ) from None


def name_ranks(row: dict[str, Any], key: str = "phase") -> str:
    """Return the label of a row: its phase, or the value of another key, and its number of ranks."""
    return f"{row[key]}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}"


def name_options(options: dict[str, Any]) -> str:
    """Return options as flags, or "defaults"."""
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"


def draw_matrix(samples: Samples) -> list[Chart]:
    """Draw model state and communication of each phase on each number of ranks, without the rows of other options."""
    charts = []
    state: dict[str, dict[str, float]] = {}
    sent: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        if row["options"] and row["phase"] != "phase2":
            continue
        ranks = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        state.setdefault(row["phase"], {}).setdefault(ranks, sum(row["state_bytes"].values()) / MB)
        sent.setdefault(row["phase"], {}).setdefault(ranks, row["sent_bytes"] / MB)
    charts.append(Chart("model state per rank (MB)", state))
    charts.append(Chart("communication volume per rank and step, ring algorithm (MB)", sent))
    return charts


def draw_losses(samples: Samples) -> list[Chart]:
    """Draw the losses of all runs over the logged steps."""
    rows: dict[str, dict[str, float]] = {}
    for run in samples["rows"]:
        for step, loss in enumerate(run["losses"]):
            rows.setdefault(str(step), {})[name_ranks(run, "target")] = loss
    return [Chart("training loss; equal curves cover each other", rows, "number of the logged loss")]


def draw_wire(samples: Samples) -> list[Chart]:
    """Draw what gloo sends for each collective, next to a ring."""
    rows = {
        name_ranks(row, "kind"): {"gloo": row["sent_per_tensor_byte"], "ring": row["ring"]} for row in samples["rows"]
    }
    return [Chart("bytes sent per rank and byte of the tensor", rows)]


def draw_throughput(samples: Samples) -> list[Chart]:
    """Draw tokens per second of each phase, eager and compiled."""
    rows: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        if row["failed"]:
            continue
        series = "compiled" if row["compiled"] else "eager"
        rows.setdefault(f"{name_ranks(row)}: {row['size']}", {})[series] = statistics.median(row["tokens_per_second"])
    return [Chart("tokens per second, median", rows)]


def draw_backends(samples: Samples) -> list[Chart]:
    """Draw state and communication of each backend of ZeRO-1."""
    rows = samples["rows"]
    state = {name_ranks(row, "backend"): {"": max(row["state_bytes"]) / MB} for row in rows}
    sent = {name_ranks(row, "backend"): {"": row["ring_bytes"] / MB} for row in rows}
    return [
        Chart("model state, maximum over all ranks (MB)", state),
        Chart("communication volume per rank and step, ring algorithm (MB)", sent),
    ]


def draw_zero1_state(samples: Samples) -> list[Chart]:
    """Draw AdamW's moments for each number of ranks."""
    rows = {f"{row['ranks']} ranks": {"": max(row["moments"]) / MB} for row in samples["rows"]}
    return [Chart("AdamW's moments, maximum over all ranks (MB)", rows)]


def draw_published(samples: Samples) -> list[Chart]:
    """Draw published tokens per second next to the planner's."""
    rows = {
        f"{r['name']}, {r['mode']}": {"published": r["published"], "planned": r["planned"]} for r in samples["rows"]
    }
    return [Chart("tokens per second and GPU", rows)]


def draw_fsdp_memory(samples: Samples) -> list[Chart]:
    """Draw the measured peak memory of each set of options, next to the model state in it."""
    rows = {}
    for row in samples["rows"]:
        peak = row["ledger"]["memory"]["peak"]
        state = sum(peak[name] for name in ("parameters", "gradients", "optimizer_state"))
        label = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}: {name_options(row['options'])}"
        rows[label] = {"peak memory": sum(peak.values()) / MB, "model state in it": state / MB}
    return [Chart("memory of a rank (MB)", rows)]


def draw_generation(samples: Samples) -> list[Chart]:
    """Draw generated tokens per second of each way to spread the model."""
    rows: dict[str, dict[str, float]] = {}
    for way in samples["ways"]:
        rows.setdefault(way["spread"], {})[f"batch of {way['slots']}"] = way["tokens_per_second"]
    return [Chart("generated tokens per second; the batch is per rank, with tp in total", rows)]


def draw_muon(samples: Samples) -> list[Chart]:
    """Draw the time and the communication of an update with Muon."""
    rows = samples["rows"]
    return [
        Chart("update, median (ms)", {name_ranks(row, "name"): {"": statistics.median(row["ms"])} for row in rows}),
        Chart("bytes sent per rank and update (MB)", {name_ranks(r, "name"): {"": r["sent_bytes"] / MB} for r in rows}),
    ]


def draw_nanogpt(samples: Samples) -> list[Chart]:
    """Draw the step time of nanoGPT and of the baseline in each of the alternating runs."""
    rows: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    for row in samples["rows"]:
        counts[row["trainer"]] = counts.get(row["trainer"], 0) + 1
        rows.setdefault(f"run {counts[row['trainer']]}", {})[row["trainer"]] = statistics.median(row["step_ms"])
    return [Chart("step, median (ms)", rows)]


def draw_deepspeed(samples: Samples) -> list[Chart]:
    """Draw communication and memory of our trainers and of DeepSpeed."""
    names = [f"{name_run(row).replace('`', '')}, {row['ranks']} ranks" for row in samples["rows"][1:]]
    sent, alive = {}, {}
    for name, row in zip(names, samples["rows"][1:], strict=True):
        sent[name] = {"": sum(each["ring_bytes"] for each in row["collectives"]) / MB}
        alive[name] = {"": row["live_bytes"] / MB}
    return [
        Chart("communication volume per rank and step, ring algorithm (MB)", sent),
        Chart("tensors of rank 0 after a step (MB)", alive),
    ]


def draw_medians(title: str, unit: str) -> Drawing:
    """Return a function that draws the median of every list of samples whose name ends in a unit."""

    def draw(samples: Samples) -> list[Chart]:
        lists = {name: values for name, values in samples.items() if name.endswith(f"_{unit}")}
        rows = {name.removesuffix(f"_{unit}").replace("_", " "): values for name, values in lists.items()}
        return [Chart(title, {name: {"": statistics.median(values)} for name, values in rows.items()})]

    return draw


def draw_overhead(samples: Samples) -> list[Chart]:
    """Draw the medians of a step of DDP and of ZeRO-1, and of their collectives."""
    rows: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        for name, values in row["samples_ms"].items():
            rows.setdefault(name.replace("_", " "), {})[f"{row['ranks']} ranks"] = statistics.median(values)
    return [Chart("median (ms)", rows)]


def draw_diagnostics(samples: Samples) -> list[Chart]:
    """Draw the median of a step with a record of the diagnostics, next to a step without one."""
    rows = {
        name_ranks(row): {
            "without": statistics.median(row["plain_ms"]),
            "with a record": statistics.median(row["record_ms"]),
        }
        for row in samples["rows"]
    }
    return [Chart("step, median (ms)", rows)]


def draw_scale(samples: Samples) -> list[Chart]:
    """Draw the start, the save and the resume on many ranks, without and with the optimizations that are used."""
    rows: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        for part, without, with_it in SCALE_PAIRS:
            if with_it in row:
                label = f"{part}, {row['ranks']} ranks"
                rows[label] = {"without the optimization": row[without], "with it": row[with_it]}
    return [Chart("CPU time of a rank (s)", dict(sorted(rows.items(), reverse=True)))]


def draw_heartbeats(samples: Samples) -> list[Chart]:
    """Draw the operations on the shared directory with one file per rank, and with one file per node."""
    rows: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        for action in ("write", "check"):
            label = f"{'a second' if action == 'write' else 'a check of a stall'}, {row['ranks']} ranks"
            rows[label] = {
                design: row["designs"][f"{design}, {action}"]["operations"]
                for design in ("one file per rank", "one file per node")
            }
    return [Chart("operations on the shared directory", dict(sorted(rows.items(), reverse=True)))]


def draw_hybrid_zero1(samples: Samples) -> list[Chart]:
    """Draw the measured state and communication of hybrid FSDP, with and without ZeRO-1 across its replicas."""
    runs = samples["measured"]
    return [
        Chart(title, {way: {"": run[key] / MB} for way, run in runs.items()})
        for key, title in (
            ("state_bytes", "model state per rank (MB)"),
            ("sent_bytes", "communication volume per rank and step, ring algorithm (MB)"),
        )
    ]


def draw_startup(samples: Samples) -> list[Chart]:
    """Draw the peak memory in which a rank initialized its shard, next to the shard and to the full model."""
    rows = {}
    for row in samples["rows"]:
        shard, peak = (max(rank[key] for rank in row["ranks"]) / 1e9 for key in ("shard_bytes", "peak_bytes"))
        rows[row["name"]] = {"full model": 4 * row["parameters"] / 1e9, "shard": shard, "peak memory": peak}
    return [Chart("memory of a rank at the start of 8 ranks, maximum over all ranks (GB)", rows)]


def draw_torture(samples: Samples) -> list[Chart]:
    """Draw what the random kills of a save left."""
    rows = {left: {"": float(count)} for left, count in samples["random"]["left"].items()}
    return [Chart(f"what {samples['random']['kills']} random kills left (number of kills)", rows)]


def draw_twins(samples: Samples) -> list[Chart]:
    """Draw the losses of the scaled-down twins, and their peak memory next to the planner's."""
    losses: dict[str, dict[str, float]] = {}
    peaks = {}
    for row in samples["rows"]:
        for step in [*range(0, len(row["losses"]), 10), len(row["losses"]) - 1]:
            losses.setdefault(str(step), {})[row["name"]] = row["losses"][step]
        measured, planned = sum(row["peak_bytes"].values()) / MB, row["predicted_peak_bytes"] / MB
        peaks[row["name"]] = {"measured": measured, "planned": planned}
    return [Chart("training loss of the twins", losses, "step"), Chart("peak memory of rank 0 (MB)", peaks)]


def draw_sizes(samples: Samples) -> list[Chart]:
    """Draw the predicted peak memory of the named configurations, for each mode of activation checkpointing."""
    rows = {
        f"{row['name']}, {row['gpus']} x {row['gpu']}": {
            mode: sum(each["bytes"].values()) / 1e9 for mode, each in row["modes"].items()
        }
        for row in samples["rows"]
    }
    return [Chart("predicted peak memory per GPU (GB), by activation checkpointing", rows)]


def draw_largest(samples: Samples) -> list[Chart]:
    """Draw the size of the largest model that fits, with DDP and with the most options."""
    rows = {}
    for result in samples["results"]:
        first, last = result["rows"][0], result["rows"][-1]
        names = (f"{row['phase']}: {name_options(row['options'])}" for row in (first, last))
        rows[f"{result['gpus']} x {result['gpu']}"] = {
            name: row["parameters"] / 1e9 for name, row in zip(names, (first, last), strict=True)
        }
    return [Chart("parameters of the largest model that fits (billions)", rows)]


def draw_node_kills(samples: Samples) -> list[Chart]:
    """Draw how long a job needs to continue after a lost node, and its losses next to those of an uninterrupted run."""
    seconds: dict[str, list[float]] = {}
    for row in samples["rows"]:
        if row.get("interrupted", True):  # older results lack the key
            seconds.setdefault(row["kind"], []).append(row["seconds"])
    rows = {kind: {"median": statistics.median(each), "maximum": max(each)} for kind, each in seconds.items()}
    charts = [Chart("time until the job trains again (s), by what was killed", rows)]
    if curves := samples.get("curves"):  # older results have none
        charts.append(draw_both_curves(curves))
    return charts


def draw_both_curves(curves: dict[str, dict[str, float]]) -> Chart:
    """Draw the losses of a run that lost nodes, and over them those of an uninterrupted run."""
    steps = curves["uninterrupted"]
    losses = {step: {name: curve[step] for name, curve in curves.items() if step in curve} for step in steps}
    return Chart("training loss; the dashed curve is the uninterrupted run", losses, "step")


def draw_partitions(samples: Samples) -> list[Chart]:
    """Draw when the ranks of a node that was cut off had ended, and when the other nodes continued."""
    names = {"ranks_ended": "its ranks have ended", "others_started": "the other nodes start again"}
    rows = {
        f"node {row['node']}, {WAYS[row['way']]} ({number + 1})": {
            text: row["seconds"][key] for key, text in names.items()
        }
        for number, row in enumerate(samples["rows"])
    }
    return [Chart("seconds after a node was cut off", rows), draw_both_curves(samples["curves"])]


def draw_step_parts(samples: Samples) -> list[Chart]:
    """Draw where the time of a step goes in each trainer."""
    parts = {
        "computation": "computation_ms",
        "communication without computation": "exposed_ms",
        "Python and waiting": "rest_ms",
    }
    rows = {
        trainer: {name: parts_of_step[key] for name, key in parts.items()} for trainer, parts_of_step in samples.items()
    }
    return [Chart("parts of a step on rank 0 (ms)", rows)]


def draw_zero1_timeline(samples: Samples) -> list[Timeline]:
    """Draw the stages of a step of ZeRO-1 and its collectives on one axis."""
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, begin, end in samples["events_ms"]:
        kind, _, detail = name.partition(":")
        label = "stages of the step" if kind == "phase" else f"gloo: {detail.strip().replace('_', '-')}"
        kinds = rows.setdefault(label, {})
        kinds.setdefault("computation" if kind == "phase" else "communication", []).append((begin, end))
    return [Timeline(f"one step of ZeRO-1 on {samples['ranks']} ranks", rows)]


WITHOUT_CHART = {
    "fsdp-options": (
        "There is no picture. Each run has another combination of ten options, so no axis orders the runs. The result "
        "is that every measured number equals its formula, and a table shows two equal numbers better than two bars."
    ),
}
CHARTS: dict[str, Drawing] = {
    "matrix": draw_matrix,
    "gpt2-matrix": draw_matrix,
    "runs": draw_losses,
    "phase2-runs": draw_losses,
    "wire": draw_wire,
    "throughput": draw_throughput,
    "zero1-backends": draw_backends,
    "zero1-state": draw_zero1_state,
    "zero1-overhead": draw_overhead,
    "zero1-step": draw_medians("update, median (ms)", "ms"),
    "step-overhead": draw_medians("step or part of it, median (ms)", "ms"),
    "diagnostics-overhead": draw_diagnostics,
    "save-speed": draw_medians("part of a save, median (s)", "s"),
    "published": draw_published,
    "fsdp-memory": draw_fsdp_memory,
    "generation": draw_generation,
    "muon": draw_muon,
    "nanogpt": draw_nanogpt,
    "deepspeed": draw_deepspeed,
    "scale": draw_scale,
    "heartbeats": draw_heartbeats,
    "hybrid-zero1": draw_hybrid_zero1,
    "startup": draw_startup,
    "twins": draw_twins,
    "torture": draw_torture,
    "sizes": draw_sizes,
    "largest": draw_largest,
    "node-kills": draw_node_kills,
    "partitions": draw_partitions,
    "kernel-ladder": draw_ladder,
    "kernel-goals": draw_goals,
    "residual-fusion": draw_residual_fusion,
    "residual-dtype": draw_residual_dtype,
    "step-parts": draw_step_parts,
    "kernel-resources": draw_resources,
    "zero1-timeline": draw_zero1_timeline,
}
