"""Tables of the documents, made from the committed results, so that no number there is typed by hand.

    python -m bench.tables            # write them anew between their markers
    python -m bench.tables --check    # or only say which are stale

A table stands between `<!-- table:NAME -->` and `<!-- /table -->` in a Markdown file.
"""

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

from bench.tables.fsdp_tables import FSDP_TABLES
from bench.tables.records import RESULTS, hardware_of, read_results, table
from bench.tables.zero1_tables import ZERO1_TABLES
from bench.trainer.throughput import quartile_spread
from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE
from phase2_triton.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
from phase2_triton.kernels.core import Cost, recording

ROOT = PACKAGE.parent
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("phase*/IMPLEMENTATION.md"))]
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
EMPTY = re.compile(r"^\| --- .*\n(?!\|)", re.M)  # a table of a head alone


def runs_table() -> str:
    """Commands with their minutes and losses, one table a machine."""
    parts = []
    for result in read_results("runs"):
        rows = [
            [
                f"`make {row['target']} GPUS={row['ranks']}`",
                f"{row['seconds'] / 60:.1f}",
                f"{row['first_step_seconds']:.0f} s",
                f"{row['first_loss']:.2f} to {row['last_loss']:.4f}",
                f"{row['val_loss']:.4f}",
            ]
            for row in result["samples"]["rows"]
        ]
        head = ["command", "minutes", "first step after", "loss", "validation loss"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table(head, rows))
    return "\n".join(parts)


def phase2_runs_table() -> str:
    """Phase 2's runs, and how far their losses are from the baseline's in the same configuration."""
    parts = []
    for result in read_results("phase2-runs"):
        base, *others = result["samples"]["rows"]
        rows = []
        for row in [base, *others]:
            off = max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True))
            name = f"`make {row['target']} GPUS={row['ranks']}`" + (", compiled" if "compile" in row["flags"] else "")
            if row is base:
                name += ", same configuration"
            minutes, losses = f"{row['seconds'] / 60:.1f}", f"{row['first_loss']:.2f} to {row['last_loss']:.4f}"
            rows.append([name, minutes, losses, f"{row['val_loss']:.4f}", "-" if row is base else f"{off:.1e}"])
        head = ["command", "minutes", "loss", "validation loss", "losses off by at most"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table(head, rows))
    return "\n".join(parts)


def overhead_table() -> str:
    """The trainer's step against the bare loop's, and against one that the ledger watches."""
    rows = []
    for result in read_results("step-overhead"):
        names = ("bare_ms", "trainer_ms", "data_ms", "unwatched_ms", "watched_ms")
        bare, trainer, data, unwatched, watched = (statistics.median(result["samples"][name]) for name in names)
        rows.append(
            [
                hardware_of(result),
                f"{bare:.1f} ms",
                f"{trainer:.1f} ms",
                f"{trainer / bare:.3f}",
                f"{data / trainer:.2%}",
                f"{watched / unwatched:.2f}",
            ]
        )
    head = ["hardware", "bare loop", "trainer", "ratio", "data loading", "a step under the ledger"]
    return table(head, rows)


def throughput_table() -> str:
    """Tokens a second, memory and MFU of every phase, eager and compiled."""
    parts = []
    for result in read_results("throughput"):
        rows = []
        for row in result["samples"]["rows"]:
            start = [row["size"], row["phase"], str(row["ranks"]), "compiled" if row["compiled"] else "eager"]
            if row["failed"]:
                rows.append([*start, row["failed"], *[""] * 4])
                continue
            rate, spread = statistics.median(row["tokens_per_second"]), quartile_spread(row["tokens_per_second"])
            mfu = "null" if row["mfu"] is None else f"{row['mfu']:.1%}"
            step, peak = f"{statistics.median(row['step_ms']):,.0f} ms", f"{row['peak_bytes'] / 1e6:,.1f} MB"
            rows.append([*start, f"{rate:,.0f}", f"{spread:.0%}", step, peak, mfu])
        head = ["size", "phase", "ranks", "", "tokens/s", "+-", "step", "peak memory of a rank", "MFU"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table(head, rows))
    return "\n".join(parts)


def matrix_table(name: str = "matrix") -> str:
    """Every cell of the matrix: losses, state, traffic, memory and time."""
    parts = []
    for result in read_results(name):
        rows = []
        for row in result["samples"]["rows"]:
            options = " ".join(f"`{name}={value}`" for name, value in row["options"].items())
            state, peak = sum(row["state_bytes"].values()), sum(row["peak"].values())
            sizes = [f"{size / 1e6:.2f}" for size in (state, row["sent_bytes"], peak)]
            exact = "to the byte" if row["as_expected"] else "NO"
            time_of = [f"{row['step_ms']:.0f} ms", f"{row['tokens_per_second']:,.0f}"]
            rows.append([row["phase"], str(row["ranks"]), options, f"{row['gap']:.1e}", *sizes, exact, *time_of])
        head = ["phase", "ranks", "", "losses off by", "state, MB", "sent, MB", "peak, MB", "as the formula says"]
        lead = f"Measured on {hardware_of(result)}, {result['settings']['steps']} steps each, bytes of rank 0:\n\n"
        parts.append(lead + table([*head, "step", "tokens/s"], rows))
    return "\n".join(parts)


def published_table() -> str:
    """The planner's tokens/s beside those of runs that others have measured."""
    rows = []
    for result in read_results("published")[:1]:  # the same on any hardware
        for row in result["samples"]["rows"]:
            off = row["planned"] / row["published"] - 1
            rows.append([row["name"], row["mode"], f"{row['published']:,.0f}", f"{row['planned']:,.0f}", f"{off:+.0%}"])
    return table(["run", "", "published, tokens/s of a GPU", "planned", "off by"], rows)


def kernel_costs_table() -> str:
    """What one call of each kernel must at least move and compute, by its own `cost`."""
    M, C, V, half = 16384, 768, 50304, 2
    with recording("sm_90"):
        costs = {
            "LayerNorm": layernorm.cost(M, C, half),
            "residual add + LayerNorm": layernorm.cost(M, C, half, branch=True),
            "cross-entropy of given logits": cross_entropy.cost(M, V, half),
            "linear + cross-entropy": (linear_cross_entropy.cost(M, C, V, half),),
            "attention": attention.cost(16, 12, 1024, 64, half),
            "bias + GELU": gelu.cost(M, 4 * C, half),
            "linear + GELU": gelu.linear_cost(M, 4 * C, C, half),
            "embedding, fp32": embedding.cost(16, 1024, V, C, 4),
            "AdamW, 124M parameters": (adamw.cost(124_337_664, 4, 148),),
        }
    rows = []
    for name, passes in costs.items():
        for which, cost in zip(("forward", "backward") if len(passes) == 2 else ("all",), passes, strict=True):
            rows.append([name, which, *cost_cells(cost)])
    return table(["kernel", "pass", "MB moved", "GFLOPs", "FLOPs a byte", "workspace"], rows)


def cost_cells(cost: Cost) -> list[str]:
    moved = cost.read + cost.written
    numbers = [f"{moved / 1e6:,.0f}", f"{cost.flops / 1e9:,.1f}", f"{cost.flops / moved:,.1f}"]
    return [*numbers, f"{cost.workspace / 1e6:,.1f} MB" if cost.workspace else "-"]


def kernel_resources_table() -> str:
    """What each launch compiles to on three architectures; a second width only where it makes a difference."""
    kernels = json.loads((RESULTS / "kernel-resources.json").read_text())["kernels"]
    architectures = list(kernels)
    rows: list[list[str]] = []
    for name in kernels[architectures[0]]:
        found = [kernels[architecture][name] for architecture in architectures]
        cells = [f"{f['registers']}, {f['shared_bytes'] / 1024:.0f} KiB, {f['instructions']:,}" for f in found]
        units = [f["tensor_cores"][0] if f["tensor_cores"] else "-" for f in found]
        if cells not in [row[1:-1] for row in rows]:
            rows.append([name, *cells, " ".join(dict.fromkeys(units))])
    return table(["call: kernel", *architectures, "tensor cores"], rows)


UNMEASURED = "Not measured on a GPU yet.\n"


def kernels_table() -> str:
    """Each kernel on each GPU: its time, how near to the limit, and the best of the others."""
    parts = []
    for result in read_results("kernels"):
        if result["settings"]["interpreted"]:
            continue
        limit = result["samples"]["limits"]
        rows: list[list[str]] = []
        groups: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in result["samples"]["rows"]:
            if "error" not in row:
                groups.setdefault((row["kernel"], row["shape"], row["pass"]), {})[row["contender"]] = row
        for (kernel, shape, which), found in groups.items():
            times = {name: statistics.median(row["samples_ms"]) for name, row in found.items()}
            ours = found["ours"]
            floor = max(ours["bytes"] / limit["bytes_per_second"], ours["flops"] / limit["flops_per_second"])
            others = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items() if name != "ours")
            peak = f"{(ours['peak_bytes'] or 0) / 2**20:,.0f} MiB"
            rows.append(
                [kernel, shape, which, f"{times['ours']:.3f}", f"{1e3 * floor / times['ours']:.0%}", peak, others]
            )
        copy, product = limit["bytes_per_second"] / 1e9, limit["flops_per_second"] / 1e12
        rates = f"copy {copy:,.0f} GB/s, products {product:,.0f} TFLOP/s"
        head = ["kernel", "shape", "pass", "ms", "of the limit", "memory", "others, ms"]
        parts.append(f"Measured on {hardware_of(result)}; {rates}:\n\n" + table(head, rows))
    return "\n".join(parts) or UNMEASURED


def kernel_ablation_table() -> str:
    """The trainer's tokens a second and memory with each kernel."""
    parts = []
    for result in read_results("kernel-ablation"):
        if result["settings"]["interpreted"]:
            continue
        rows = []
        for row in result["samples"]["rows"]:
            cells = [row["size"], "compiled" if row["compile"] else "eager", row["kernels"]]
            if "error" in row:
                rows.append([*cells, row["error"], "", ""])
                continue
            rate, memory = statistics.median(row["tokens_per_second"]), row["peak_memory_bytes"] / 2**30
            rows.append([*cells, f"{rate:,.0f}", f"{memory:.1f} GiB", f"{row['loss']:.4f}"])
        head = ["model", "mode", "kernels", "tokens/s", "peak memory", "last loss"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table(head, rows))
    return "\n".join(parts) or UNMEASURED


TABLES: dict[str, Callable[[], str]] = {
    "runs": runs_table,
    "overhead": overhead_table,
    "phase2_runs": phase2_runs_table,
    "throughput": throughput_table,
    "matrix": matrix_table,
    "gpt2_matrix": lambda: matrix_table("gpt2-matrix"),
    "published": published_table,
    "kernel_costs": kernel_costs_table,
    "kernel_resources": kernel_resources_table,
    "kernels": kernels_table,
    "kernel_ablation": kernel_ablation_table,
    **ZERO1_TABLES,
    **FSDP_TABLES,
}


def rendered(text: str) -> str:
    """A document with its tables made anew.

    Raises:
        KeyError: a table of unknown name.
        ConfigError: a table whose results are damaged.
    """
    return BLOCK.sub(lambda match: match[1] + made(match[2], TABLES[match[2]]) + match[3], text)


def made(name: str, make: Callable[[], str]) -> str:
    try:
        text = make()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise ConfigError(
            f"table {name} cannot be made, for its results in bench/results are damaged ({type(error).__name__}: "
            f"{error}): measure again, or restore them from git"
        ) from None
    if not text.strip() or EMPTY.search(text):
        raise ConfigError(f"table {name} has no rows in bench/results: measure again, or restore its results from git")
    return text


def main(check: bool = False) -> int:
    """Make all documents before the first is written; 1 if some are stale and were to be checked.

    Args:
        check: write nothing.
    """
    texts = {name: (ROOT / name).read_text() for name in DOCUMENTS}
    stale = {name: new for name, text in texts.items() if (new := rendered(text)) != text}
    for name, text in stale.items():
        if not check:
            (ROOT / name).write_text(text)
    if stale:
        print(f"{'stale' if check else 'renewed'}: {', '.join(stale)}")
    return 1 if check and stale else 0
