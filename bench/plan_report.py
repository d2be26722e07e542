"""A plan as text and as a picture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.speed import ATTENTION, GIB, LINK, MATMUL, MEMORY

WIDTH = 52
PARTS = ("gradients", "gathered", "activations", "other")
HEAD = f"{'':<{WIDTH}}{'state':>9}{'peak':>9} ={'kept':>9}" + "".join(f"{part:>12}" for part in PARTS)
HEAD += f"  fits{'most':>6}{'sent':>9}"
SPEED = f"{'':<{WIDTH}}{'most':>6}{'ms a step':>12}{'waiting':>9}{'tokens/s':>13}{'MFU':>6}{'eager':>13}"


def name_of(row: Mapping[str, Any]) -> str:
    """A row's phase and options in short."""
    short = {k.removeprefix("fsdp_").removeprefix("activation_"): v for k, v in row["options"].items()}
    return " ".join([row["phase"], *(f"{name}={value}" for name, value in short.items())])


def describe(found: dict[str, Any]) -> str:
    """The plan as two tables, and the advice that follows from them."""
    shape = found["shape"]
    tokens = f"{found['batch_size']} sequence(s) of {shape['block_size']:,} tokens a micro-batch"
    space = f"{found['usable_bytes'] / GIB:.1f} GiB of each for tensors"
    lines = [
        f"{found['parameters']:,} parameters on {found['gpus']:,} x {found['gpu']}, {space}; {tokens}, bfloat16.",
        "GiB on a rank: state by the formula, and the peak of a step: parameters and optimizer state, and what comes",
        "and goes. The most sequences a micro-batch that fit, and GB that a rank sends in a step:",
        HEAD,
        *map(memory_line, found["rows"]),
    ]
    if any(row["speed"] for row in found["rows"]):
        paid = "; days, and cost" if found["tokens"] else ""
        lines += [f"\nSpeed with the most sequences, compiled; last, tokens/s of an eager model{paid}:", SPEED]
        lines += [speed_line(row) for row in found["rows"] if row["speed"]]
    return "\n".join([*lines, "", advice(found), *ASSUMED])


ASSUMED = [
    f"Assumed: {MATMUL:.0%} of the peak in matrix products, {ATTENTION:.0%} in attention, {MEMORY:.0%} of the memory's "
    f"bandwidth, {LINK:.0%} of the",
    "links'; 92% of the memory less 1 GiB for tensors. Beside runs that others measured: python -m bench.published",
]


def memory_line(row: dict[str, Any]) -> str:
    held = row["bytes"]
    numbers = [sum(row["state_bytes"].values()), row["total_bytes"]]
    cells = (
        "".join(f"{n / GIB:>9.2f}" for n in numbers) + f" ={(held['parameters'] + held['optimizer_state']) / GIB:>9.2f}"
    )
    cells += "".join(f"{held[part] / GIB:>12.2f}" for part in PARTS)
    fits = "yes" if row["fits"] else "no"
    return f"{name_of(row):<{WIDTH}}{cells}  {fits:<4}{most(row):>6}{row['sent_bytes_per_step'] / 1e9:>9.2f}"


def most(row: dict[str, Any]) -> str:
    """The most sequences that fit; a plan does not look beyond 128."""
    found = row["largest_batch_size"]
    return "128+" if found == 128 else str(found or "-")


def speed_line(row: dict[str, Any]) -> str:
    compiled, eager = row["speed"]["compiled"], row["speed"]["eager"]
    share = compiled["waiting_seconds"] / compiled["step_seconds"]
    cells = f"{1e3 * compiled['step_seconds']:>12,.0f}{share:>9.0%}{compiled['tokens_per_second']:>13,.0f}"
    cells += f"{compiled['mfu']:>6.0%}{eager['tokens_per_second']:>13,.0f}"
    if compiled["days"] is not None:
        cells += f"{compiled['days']:>10,.2f}"
    if compiled["cost"] is not None:
        cells += f"{compiled['cost']:>14,.0f}"
    return f"{name_of(row):<{WIDTH}}{most(row):>6}{cells}"


def advice(found: dict[str, Any]) -> str:
    """The first row that fits and the fastest, and what to turn on where the plain phases do not fit."""
    fitting = [row for row in found["rows"] if row["fits"]]
    if not fitting:
        return nothing_fits(found)
    first = fitting[0]
    said = f"The first that fits: {name_of(first)}."
    fastest = max(fitting, key=lambda row: row["speed"]["compiled"]["tokens_per_second"])
    if fastest is not first:
        said += f" The fastest: {name_of(fastest)}."
    if first["options"]:
        turned = ", then ".join(f"--{name}={value}" for name, value in first["options"].items())
        said += f" Turn on first: {turned}."
    return said


def nothing_fits(found: dict[str, Any]) -> str:
    """How many GPUs would do, or what else."""
    least = min(found["rows"], key=lambda row: row["total_bytes"])
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
    for name, totals in by_gpus.items():
        axes.plot(list(totals), [n / GIB for n in totals.values()], marker="o", markersize=3, label=name)
    axes.axhline(found["usable_bytes"] / GIB, color="grey", linestyle="--", label=f"usable on {found['gpu']}")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="GiB on a rank at the peak of a step")
    gpus = sorted({n for totals in by_gpus.values() for n in totals})
    axes.set_xticks(gpus, [f"{n:,}" for n in gpus])
    axes.minorticks_off()
    axes.set_title(
        f"{found['parameters'] / 1e9:,.2f} billion parameters, {found['batch_size']} sequence(s) a micro-batch"
    )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
