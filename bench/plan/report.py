"""A plan as text and as a picture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.plan.speed import ATTENTION, GIB, LINK, MATMUL, MEMORY

ERROR = 0.25  # by which a planned speed may be off; tests/bench/test_plan.py holds published runs to it
COLUMNS = {"gradients": 10, "gathered": 9, "activations": 12, "other": 8}  # with the width of each column


def name_of(row: Mapping[str, Any]) -> str:
    """A row's phase and options in short."""
    short = {k.removeprefix("fsdp_").removeprefix("activation_"): v for k, v in row["options"].items()}
    return " ".join([row["phase"], *(f"{name}={value}" for name, value in short.items())])


def describe(found: dict[str, Any]) -> str:
    """The plan as two tables, and the advice that follows from them."""
    shape = found["shape"]
    tokens = f"{found['batch_size']} sequence(s) of {shape['block_size']:,} tokens a micro-batch"
    space = f"{found['usable_bytes'] / GIB:.1f} GiB of each for tensors"
    offloaded = [row for row in found["rows"] if row.get("host_bytes")]
    lines = [
        f"{found['parameters']:,} parameters on {found['gpus']:,} x {found['gpu']}, {space}; {tokens}, bfloat16.",
        "GiB on a rank: state by the formula, and the peak of a step: parameters and optimizer state, and what comes",
        "and goes. The most sequences a micro-batch that fit, and GB that a rank sends in a step:",
        *memory_table(found["rows"]),
        *[f"The host has the state of {name_of(row)}: {row['host_bytes'] / GIB:,.1f} GiB a node." for row in offloaded],
    ]
    if fast := [row for row in found["rows"] if row["speed"]]:
        lines += ["\nSpeed with the most sequences, compiled; then tokens/s of an eager model:", *speed_table(fast)]
    return "\n".join([*lines, "", advice(found), *ASSUMED])


ASSUMED = [
    f"Assumed: {MATMUL:.0%} of the peak in matrix products, {ATTENTION:.0%} in attention, {MEMORY:.0%} of the memory's "
    f"bandwidth, {LINK:.0%} of the",
    "links'; 92% of the memory less 1 GiB for tensors. "
    "Beside runs that others measured: python -m bench.plan.published",
]


def in_columns(rows: list[dict[str, Any]], head: str, cells: list[str]) -> list[str]:
    """A table whose first column has the rows' names."""
    names = ["", *map(name_of, rows)]
    width = max(map(len, names)) + 1
    return [f"{name:<{width}}{line}" for name, line in zip(names, [head, *cells], strict=True)]


def memory_table(rows: list[dict[str, Any]]) -> list[str]:
    head = f"{'state':>8}{'peak':>8} ={'kept':>8}" + "".join(f"{part:>{width}}" for part, width in COLUMNS.items())
    return in_columns(rows, f"{head}  fits{'most':>6}{'sent':>9}", list(map(memory_line, rows)))


def memory_line(row: dict[str, Any]) -> str:
    if "cannot" in row:
        return f"  cannot run: {row['cannot']}"
    held = row["bytes"]
    numbers = [sum(row["state_bytes"].values()), row["total_bytes"]]
    cells = (
        "".join(f"{n / GIB:>8.2f}" for n in numbers) + f" ={(held['parameters'] + held['optimizer_state']) / GIB:>8.2f}"
    )
    cells += "".join(f"{held[part] / GIB:>{width}.2f}" for part, width in COLUMNS.items())
    fits = "yes" if row["fits"] else "no"
    return f"{cells}  {fits:<4}{most(row):>6}{row['sent_bytes_per_step'] / 1e9:>9.2f}"


def most(row: dict[str, Any]) -> str:
    """The most sequences that fit; a plan does not look beyond 128."""
    found = row["largest_batch_size"]
    return "128+" if found == 128 else str(found or "-")


def speed_table(rows: list[dict[str, Any]]) -> list[str]:
    """The speed of rows that fit, and which of them compiling makes slower."""
    head = f"{'most':>6}{'ms a step':>12}{'waiting':>9}{'tokens/s':>13}{'MFU':>6}{'eager':>13}"
    asked = rows[0]["speed"]["compiled"]
    head += (f"{'days':>10}" if asked["days"] is not None else "") + (
        f"{'cost':>14}" if asked["cost"] is not None else ""
    )
    lines = in_columns(rows, head, list(map(speed_line, rows)))
    rates = {name_of(row): [row["speed"][mode]["tokens_per_second"] for mode in ("compiled", "eager")] for row in rows}
    if slower := [name for name, (compiled, eager) in rates.items() if compiled < eager]:
        lines.append(
            f"Slower compiled than eager: {', '.join(slower)}, which gathers its parameters beside the first forward, "
            "but before it where that is compiled."
        )
    return lines


def speed_line(row: dict[str, Any]) -> str:
    compiled, eager = row["speed"]["compiled"], row["speed"]["eager"]
    share = compiled["waiting_seconds"] / compiled["step_seconds"]
    cells = f"{1e3 * compiled['step_seconds']:>12,.0f}{share:>9.0%}{compiled['tokens_per_second']:>13,.0f}"
    cells += f"{compiled['mfu']:>6.0%}{eager['tokens_per_second']:>13,.0f}"
    if compiled["days"] is not None:
        cells += f"{compiled['days']:>10,.2f}"
    if compiled["cost"] is not None:
        cells += f"{compiled['cost']:>14,.0f}"
    return f"{most(row):>6}{cells}"


def advice(found: dict[str, Any]) -> str:
    """The simplest row that fits, one that is clearly faster, and what to turn on where the plain phases do not fit."""
    fitting = [row for row in found["rows"] if row["fits"]]
    if not fitting:
        return nothing_fits(found)
    rates = [max(speed["tokens_per_second"] for speed in row["speed"].values()) for row in fitting]
    simplest, fastest = fitting[0], fitting[rates.index(max(rates))]
    said = f"The simplest that fits: {name_of(simplest)}."
    if max(rates) > (1 + ERROR) * rates[0]:
        said += f" The fastest: {name_of(fastest)}."
    elif fastest is not simplest:
        said += f" It is about as fast as the fastest: within the {ERROR:.0%} by which a plan may be off."
    if simplest["options"]:
        turned = ", then ".join(f"--{name}={value}" for name, value in simplest["options"].items())
        said += f" Turn on first: {turned}."
    return said


def nothing_fits(found: dict[str, Any]) -> str:
    """How many GPUs would do, or what else."""
    least = min((row for row in found["rows"] if "cannot" not in row), key=lambda row: row["total_bytes"])
    sharded = next(row for row in found["rows"] if row["phase"] == "phase3")
    state = sum(sharded["state_bytes"].values())
    if state > found["usable_bytes"]:
        needed = math.ceil(state * found["gpus"] / found["usable_bytes"])
        return f"Nothing fits: sharded over all, the state alone needs {needed:,} GPUs of this kind."
    return f"Nothing fits: {name_of(least)} comes nearest; give a smaller --block_size or --batch_size, or more GPUs."


def plot(path: Path, found: dict[str, Any], by_gpus: Mapping[str, Mapping[int, float]]) -> None:
    """Draw bytes on a rank against the number of GPUs.

    Args:
        by_gpus: bytes by the number of GPUs, of each row by its name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, totals) in enumerate(by_gpus.items()):
        numbers, style = [n / GIB for n in totals.values()], ("-", "--", ":")[i % 3]  # of lines on one another all show
        axes.plot(list(totals), numbers, label=name, linewidth=5 - 4 * i / len(by_gpus), linestyle=style)
    axes.axhline(found["usable_bytes"] / GIB, color="black", linewidth=0.8, label=f"usable on {found['gpu']}")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="GiB on a rank at the peak of a step")
    gpus = sorted({n for totals in by_gpus.values() for n in totals})
    axes.set_xticks(gpus, [f"{n:,}" for n in gpus])
    axes.minorticks_off()
    tokens = f"{found['batch_size']} sequence(s) of {found['shape']['block_size']:,} tokens a micro-batch"
    axes.set_title(f"{found['parameters'] / 1e9:,.2f} billion parameters, {tokens}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
