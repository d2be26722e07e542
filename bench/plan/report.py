"""Format a plan, or the largest models, as text."""

import math
from collections.abc import Mapping
from typing import Any

from bench.plan.planner import HOST_GIB, SAVED_PER_LOGIT
from bench.plan.speed import (
    ATTENTION_EFFICIENCY,
    GIB,
    GPUS,
    GPUS_PER_NODE,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
)
from nanoGPT.costs import tokens_to_hide

MAX_SPEED_ERROR = 0.25  # expected error of a predicted speed: docs/results.md compares it with published runs
COLUMN_WIDTHS = {"gradients": 10, "gathered": 9, "activations": 12, "other": 8}


def format_name(row: Mapping[str, Any]) -> str:
    """Return a row's phase and its options, in short form."""
    short = {k.removeprefix("fsdp_").removeprefix("activation_"): v for k, v in row["options"].items()}
    return " ".join([row["phase"], *(f"{name}={value}" for name, value in short.items())])


def format_plan(result: dict[str, Any]) -> str:
    """Return the text of a plan: a memory table, a speed table, and a recommendation."""
    shape = result["shape"]
    tokens = f"{result['batch_size']} sequence(s) of {shape['block_size']:,} tokens per micro-batch"
    space = f"{result['usable_bytes'] / GIB:.1f} GiB usable per GPU"
    offloaded = [row for row in result["rows"] if row.get("host_bytes")]
    lines = [
        f"{result['parameters']:,} parameters on {result['gpus']:,} x {result['gpu']}, {space}; {tokens}, "
        f"{result['dtype']}, {result['optimizer']}.",
        "Memory per rank in GiB: model state by the formula, and the peak of a training step with its parts",
        "(params+opt: parameters and optimizer state). max batch: the largest batch_size that fits.",
        "comm: communication per rank and step in GB.",
        *format_memory_table(result["rows"]),
        *describe_logits(result),
        *[
            f"Host memory per node: {row['host_bytes'] / GIB:,.1f} GiB of model state with {format_name(row)}."
            for row in offloaded
        ],
    ]
    if rows := [row for row in result["rows"] if row["speed"]]:
        lines += [
            "\nSpeed of the compiled model with the largest batch that fits, and tokens/s of the eager model.",
            "exposed: the share of the step in which the GPU waits for communication.",
            *format_speed_table(rows),
        ]
    return "\n".join([*lines, "", recommend(result), describe_overlap(result), *ASSUMPTIONS])


def describe_overlap(result: dict[str, Any]) -> str:
    """Return from how many tokens per micro-batch on FSDP's communication is hidden behind its computation."""
    gpu, itemsize = GPUS[result["gpu"]].with_dtype(result["dtype"]), 4 if result["dtype"] == "float32" else 2
    link = gpu.link if result["gpus"] <= GPUS_PER_NODE else min(gpu.link, gpu.network)
    flops, bandwidth = MATMUL_EFFICIENCY * gpu.peak, LINK_EFFICIENCY * link
    forward = tokens_to_hide(flops, bandwidth, itemsize, 2)
    backward = tokens_to_hide(flops, bandwidth, itemsize + 4, 4)  # gradients are reduced in fp32
    return (
        f"Phase 3 hides its communication from about {forward:,.0f} tokens per micro-batch in the forward pass, and "
        f"from {backward:,.0f} in a backward pass that also reduces gradients."
    )


def describe_logits(result: dict[str, Any]) -> list[str]:
    """Return how much less memory a compiled model needs, as a line; no line for fp32.

    On an H200 the corrected peaks were right within 1.2% (docs/results.md).
    """
    if result["dtype"] == "float32":
        return []
    logits = result["batch_size"] * result["shape"]["block_size"] * result["shape"]["vocab_size"]
    line = "The peaks are those of an eager model. A compiled one without the loss kernel needs up to"
    return [f"{line} {SAVED_PER_LOGIT * logits / GIB:,.2f} GiB less."]


ASSUMPTIONS = [
    f"Assumed efficiency: {MATMUL_EFFICIENCY:.0%} of the peak in matrix products, {ATTENTION_EFFICIENCY:.0%} in "
    f"attention, {MEMORY_EFFICIENCY:.0%} of the memory bandwidth, {LINK_EFFICIENCY:.0%} of the link",
    "bandwidth. Usable memory: 92% of the GPU's memory, minus 1 GiB. Comparison with published runs: docs/results.md",
]


def align_rows(rows: list[dict[str, Any]], head: str, cells: list[str]) -> list[str]:
    """Return the lines of a table whose first column has the names of the rows."""
    names = ["", *map(format_name, rows)]
    width = max(map(len, names)) + 1
    return [f"{name:<{width}}{line}" for name, line in zip(names, [head, *cells], strict=True)]


def format_memory_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the memory table."""
    head = f"{'state':>8}{'peak':>8} ={'params+opt':>11}"
    head += "".join(f"{category:>{width}}" for category, width in COLUMN_WIDTHS.items())
    return align_rows(rows, f"{head}  fits{'max batch':>10}{'comm':>9}", list(map(format_memory_row, rows)))


def format_memory_row(row: dict[str, Any]) -> str:
    """Return the cells of a row of the memory table."""
    if "cannot" in row:
        return f"  cannot run: {row['cannot']}"
    peak = row["bytes"]
    totals = [sum(row["state_bytes"].values()), row["total_bytes"]]
    cells = "".join(f"{n / GIB:>8.2f}" for n in totals)
    cells += f" ={(peak['parameters'] + peak['optimizer_state']) / GIB:>11.2f}"
    cells += "".join(f"{peak[category] / GIB:>{width}.2f}" for category, width in COLUMN_WIDTHS.items())
    fits = "yes" if row["fits"] else "no"
    return f"{cells}  {fits:<4}{format_batch_size(row):>10}{row['sent_bytes_per_step'] / 1e9:>9.2f}"


def format_batch_size(row: dict[str, Any]) -> str:
    """Return the largest batch size that fits; the planner tries at most 128."""
    largest = row["largest_batch_size"]
    return "128+" if largest == 128 else str(largest or "-")


def format_speed_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the speed table."""
    head = f"{'max batch':>10}{'ms per step':>13}{'exposed':>9}{'tokens/s':>13}{'MFU':>6}{'eager tokens/s':>16}"
    head += f"{'days':>10}" if rows[0]["speed"]["compiled"]["days"] is not None else ""
    return align_rows(rows, head, list(map(format_speed_row, rows)))


def format_speed_row(row: dict[str, Any]) -> str:
    """Return the cells of a row of the speed table."""
    compiled, eager = row["speed"]["compiled"], row["speed"]["eager"]
    exposed = compiled["waiting_seconds"] / compiled["step_seconds"]
    cells = f"{1e3 * compiled['step_seconds']:>13,.0f}{exposed:>9.0%}{compiled['tokens_per_second']:>13,.0f}"
    cells += f"{compiled['mfu']:>6.0%}{eager['tokens_per_second']:>16,.0f}"
    if compiled["days"] is not None:
        cells += f"{compiled['days']:>10,.2f}"
    return f"{format_batch_size(row):>10}{cells}"


def recommend(result: dict[str, Any]) -> str:
    """Return the simplest row that fits, a row that is clearly faster, and the options to enable first."""
    fitting = [row for row in result["rows"] if row["fits"]]
    if not fitting:
        return explain_nothing_fits(result)
    rates = [max(speed["tokens_per_second"] for speed in row["speed"].values()) for row in fitting]
    simplest, fastest = fitting[0], fitting[rates.index(max(rates))]
    text = f"Simplest row that fits: {format_name(simplest)}."
    if max(rates) > (1 + MAX_SPEED_ERROR) * rates[0]:
        text += f" Fastest row: {format_name(fastest)}."
    elif fastest is not simplest:
        text += f" It is about as fast as the fastest row, within the planner's error of {MAX_SPEED_ERROR:.0%}."
    if simplest["options"]:
        flags = ", then ".join(f"--{name}={value}" for name, value in simplest["options"].items())
        text += f" Enable first: {flags}."
    return text


def explain_nothing_fits(result: dict[str, Any]) -> str:
    """Return how many GPUs the model state needs, or which row is closest to fitting."""
    closest = min((row for row in result["rows"] if "cannot" not in row), key=lambda row: row["total_bytes"])
    sharded = next(row for row in result["rows"] if row["phase"] == "phase3")
    state = sum(sharded["state_bytes"].values())
    if state > result["usable_bytes"]:
        needed = math.ceil(state * result["gpus"] / result["usable_bytes"])
        text = f"Nothing fits: even fully sharded, the model state needs {needed:,} GPUs of this type."
    else:
        text = f"Nothing fits: {format_name(closest)} comes closest. Use a smaller --block_size or --batch_size, "
        text += "or more GPUs."
    return f"{text} --largest=True finds the largest model that fits."


def format_largest(found: dict[str, Any]) -> str:
    """Return the lines that `make plan ARGS=--largest=True` prints."""
    names = [format_name(row) for row in found["rows"]]
    width = max(map(len, names)) + 2
    space = f"{found['usable_bytes'] / GIB:.1f} GiB usable per GPU"
    lines = [
        f"The largest GPT on {found['gpus']:,} x {found['gpu']}, {space}: {found['batch_size']} sequence(s) of "
        f"{found['block_size']:,} tokens per micro-batch, {found['dtype']}, {found['optimizer']}.",
        f"{'':<{width}}{'parameters':>12}  blocks x channels",
    ]
    for name, row in zip(names, found["rows"], strict=True):
        shape = f"{row['k']} x {128 * row['k']}" if row["k"] else "nothing fits"
        lines.append(f"{name:<{width}}{row['parameters'] / 1e9:>11.2f}B  {shape}")
    if any("fsdp_cpu_offload" in row["options"] for row in found["rows"]):
        gib = HOST_GIB / GPUS_PER_NODE
        lines.append(f"With cpu_offload, the model state must also fit in {gib:.0f} GiB of host memory per GPU.")
    return "\n".join(lines)
