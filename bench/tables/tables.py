"""Generate the tables of the documents from the committed results, so that no number there is typed by hand.

    python -m bench.tables            # rewrite the tables
    python -m bench.tables --check    # only report the documents whose tables are stale

In a Markdown file, a table is between `<!-- table:NAME -->` and `<!-- /table -->`.
"""

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

from bench.kernels.costs import Shapes, list_kernel_costs
from bench.tables.deepspeed_tables import DEEPSPEED_TABLES
from bench.tables.expected_tables import EXPECTED_TABLES
from bench.tables.fsdp_tables import FSDP_TABLES
from bench.tables.gpu_tables import GPU_TABLES
from bench.tables.phase_tables import PHASE_TABLES
from bench.tables.plan_tables import PLAN_TABLES
from bench.tables.records import NOT_MEASURED, RESULTS, TRAINERS, format_table, hardware_of, read_results
from bench.tables.symptoms import SYMPTOM_TABLES
from bench.tables.zero1_tables import ZERO1_TABLES
from bench.trainer.throughput import quartile_spread
from nanoGPT.errors import ConfigError
from phase2_triton.kernels.core import Cost, record_launches
from workshop.imports import ROOT

NOTES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("phase*/IMPLEMENTATION.md"))
DOCUMENTS = ["README.md", "docs/results.md", "docs/running.md", *NOTES]
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
EMPTY = re.compile(r"^\| --- .*\n(?!\|)", re.M)  # a table with a header and no rows


def runs_table() -> str:
    """Return the commands with their times and losses: one table per hardware.

    The first six logged losses are those of steps 0, 10, ..., 50. They are compared with those of the first command.
    """
    parts = []
    for result in read_results("runs"):
        reference = result["samples"]["rows"][0]["losses"]
        rows = [
            [
                f"`make {row['target']} GPUS={row['ranks']}`",
                f"{row['seconds'] / 60:.1f}",
                f"{row['first_step_seconds']:.0f}",
                f"{row['first_loss']:.2f} to {row['last_loss']:.2f}",
                f"{row['val_loss']:.2f}",
                f"{max(abs(a - b) for a, b in list(zip(reference, row['losses'], strict=True))[:6]):.1e}",
            ]
            for row in result["samples"]["rows"]
        ]
        head = ["command", "total time (min)", "time to the first step (s)", "training loss", "validation loss"]
        head += ["max loss difference, steps 0 to 50"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows))
    return "\n".join(parts)


def phase2_runs_table() -> str:
    """Return the runs of phase 2, with the max loss difference from the baseline with the same configuration."""
    parts = []
    for result in read_results("phase2-runs"):
        base, *others = result["samples"]["rows"]
        rows = []
        for row in [base, *others]:
            difference = max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True))
            name = f"`make {row['target']} GPUS={row['ranks']}`" + (", same configuration" if row is base else "")
            minutes, losses = f"{row['seconds'] / 60:.1f}", f"{row['first_loss']:.2f} to {row['last_loss']:.4f}"
            cells = [minutes, losses, f"{row['val_loss']:.4f}", "-" if row is base else f"{difference:.1e}"]
            rows.append([name, *cells])
        head = ["command", "total time (min)", "training loss", "validation loss", "max loss difference"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows))
    return "\n".join(parts)


def throughput_table() -> str:
    """Return tokens/s, memory and MFU of every phase, eager and compiled, also from `bench.gpu`."""
    parts = []
    for result in [*read_results("throughput"), *read_results("gpu-throughput")]:
        rows = []
        for row in result["samples"]["rows"]:
            trainer, kernels = TRAINERS[row["phase"]], row.get("kernels", "none")
            name = trainer if kernels == "none" else f"{trainer}, kernels {kernels}"
            start = [row["size"], name, str(row["ranks"]), "compiled" if row["compiled"] else "eager"]
            if row["failed"]:
                rows.append([*start, row["failed"], *[""] * 4])
                continue
            rate, spread = statistics.median(row["tokens_per_second"]), quartile_spread(row["tokens_per_second"])
            mfu = "null" if row["mfu"] is None else f"{row['mfu']:.1%}"
            step, peak = f"{statistics.median(row['step_ms']):,.0f}", f"{row['peak_bytes'] / 1e6:,.1f}"
            rows.append([*start, f"{rate:,.0f}", f"{spread:.0%}", step, peak, mfu])
        head = ["model", "trainer", "ranks", "mode", "tokens/s", "spread", "step (ms)"]
        head += ["peak memory per rank (MB)", "MFU"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows))
    return "\n".join(parts)


def matrix_table(name: str = "matrix") -> str:
    """Return every cell of the matrix: loss difference, memory, communication and time."""
    parts = []
    for result in read_results(name):
        rows = []
        for row in result["samples"]["rows"]:
            options = " ".join(f"`{name}={value}`" for name, value in row["options"].items())
            state, peak = sum(row["state_bytes"].values()), sum(row["peak"].values())
            sizes = [f"{size / 1e6:.2f}" for size in (state, row["sent_bytes"], peak)]
            exact = "yes" if row["as_expected"] else "NO"
            speed = [f"{row['step_ms']:.0f}", f"{row['tokens_per_second']:,.0f}"]
            rows.append(
                [TRAINERS[row["phase"]], str(row["ranks"]), options, f"{row['gap']:.1e}", *sizes, exact, *speed]
            )
        head = ["trainer", "ranks", "options", "max loss difference", "state per rank (MB)"]
        head += ["communication per rank (MB)", "peak memory per rank (MB)", "matches the formula"]
        head += ["step (ms)", "tokens/s"]
        lead = f"Measured on {hardware_of(result)}, {result['settings']['steps']} steps each, bytes of rank 0:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


def four_ranks_table() -> str:
    """Return one row per phase on four ranks without options, from the first result of the matrix."""
    result = read_results("matrix")[0]
    rows = []
    for row in result["samples"]["rows"]:
        if row["ranks"] == 4 and not row["options"]:
            sizes = (sum(row["state_bytes"].values()), row["sent_bytes"], sum(row["peak"].values()))
            cells = [f"{size / 1e6:.2f}" for size in sizes]
            exact = "yes" if row["as_expected"] else "NO"
            rows.append([TRAINERS[row["phase"]], f"{row['gap']:.1e}", *cells, exact])
    head = ["trainer", "max loss difference", "state per rank (MB)", "communication per rank (MB)"]
    head += ["peak memory per rank (MB)", "matches the formula"]
    return f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows)


def published_table() -> str:
    """Return the planner's predicted tokens/s next to published measurements."""
    rows = []
    for result in read_results("published")[:1]:  # predictions do not depend on the hardware that computes them
        for row in result["samples"]["rows"]:
            rates = [f"{row[name]:,.0f}" for name in ("published", "planned")]
            rows.append([row["name"], row["mode"], *rates, f"{row['planned'] / row['published'] - 1:+.0%}"])
    head = ["run", "mode", "published (tokens/s per GPU)", "predicted (tokens/s per GPU)", "error"]
    return format_table(head, rows)


def kernel_costs_table() -> str:
    """Return the minimum memory traffic and FLOPs of one call of each kernel, from the kernel's `cost` function."""
    with record_launches("sm_90"):
        costs = list_kernel_costs(Shapes(16, 1024, 768, 12, 50304, 124_337_664, 148))
    rows = [[name, which, *format_cost(cost)] for name, passes in costs.items() for which, cost in passes.items()]
    return format_table(["kernel", "pass", "memory traffic (MB)", "GFLOPs", "FLOPs per byte", "workspace (MB)"], rows)


def format_cost(cost: Cost) -> list[str]:
    traffic = cost.read + cost.written
    cells = [f"{traffic / 1e6:,.0f}", f"{cost.flops / 1e9:,.1f}", f"{cost.flops / traffic:,.1f}"]
    return [*cells, f"{cost.workspace / 1e6:,.1f}" if cost.workspace else "-"]


def kernel_resources_table() -> str:
    """Return the registers and the shared memory of each compiled kernel on three architectures."""
    table = json.loads((RESULTS.parent / "kernels" / "resources.json").read_text())
    rows = []
    for name, cells in table["rows"].items():
        units = " ".join(dict.fromkeys(unit for _, _, *units in cells.values() for unit in units)) or "-"
        rows.append(
            [name, *(f"{registers}, {shared / 1024:.0f} KiB" for registers, shared, *_ in cells.values()), units]
        )
    return format_table(["call: kernel", *next(iter(table["rows"].values())), "tensor-core instructions"], rows)


def kernels_table() -> str:
    """Return the time of each kernel on each GPU, its share of the roofline limit, and other implementations."""
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
        for (kernel, shape, which), contenders in groups.items():
            if "ours" not in contenders:
                rows.append([kernel, shape, which, "failed", "", "", ""])
                continue
            times = {name: statistics.median(row["samples_ms"]) for name, row in contenders.items()}
            ours = contenders["ours"]
            floor = max(ours["bytes"] / limit["bytes_per_second"], ours["flops"] / limit["flops_per_second"])
            others = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items() if name != "ours")
            peak = f"{(ours['peak_bytes'] or 0) / 2**20:,.0f}"
            rows.append(
                [kernel, shape, which, f"{times['ours']:.3f}", f"{1e3 * floor / times['ours']:.0%}", peak, others]
            )
        copy, matmul = limit["bytes_per_second"] / 1e9, limit["flops_per_second"] / 1e12
        rates = f"copy {copy:,.0f} GB/s, matmul {matmul:,.0f} TFLOP/s"
        head = ["kernel", "shape", "pass", "time (ms)", "share of the roofline limit", "peak memory (MiB)"]
        head += ["other implementations (ms)"]
        parts.append(f"Measured on {hardware_of(result)}; {rates}:\n\n" + format_table(head, rows))
    return "\n".join(parts) or NOT_MEASURED


def kernel_ablation_table() -> str:
    """Return the trainer's tokens/s and memory with each kernel."""
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
            rows.append([*cells, f"{rate:,.0f}", f"{memory:.1f}", f"{row['loss']:.4f}"])
        head = ["model", "mode", "kernels", "tokens/s", "peak memory (GiB)", "last loss"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows))
    return "\n".join(parts) or NOT_MEASURED


TABLES: dict[str, Callable[[], str]] = {
    "runs": runs_table,
    "phase2_runs": phase2_runs_table,
    "throughput": throughput_table,
    "four_ranks": four_ranks_table,
    "matrix": matrix_table,
    "gpt2_matrix": lambda: matrix_table("gpt2-matrix"),
    "published": published_table,
    "kernel_costs": kernel_costs_table,
    "kernel_resources": kernel_resources_table,
    "kernels": kernels_table,
    "kernel_ablation": kernel_ablation_table,
    **GPU_TABLES,
    **DEEPSPEED_TABLES,
    **PHASE_TABLES,
    **PLAN_TABLES,
    **ZERO1_TABLES,
    **FSDP_TABLES,
    **EXPECTED_TABLES,
    **SYMPTOM_TABLES,
}


def render_document(text: str) -> str:
    """Return the text of a document with all its tables generated again.

    Raises:
        KeyError: a table has an unknown name.
        ConfigError: the results of a table are missing or damaged.
    """
    return BLOCK.sub(lambda match: match[1] + generate_table(match[2], TABLES[match[2]]) + match[3], text)


def generate_table(name: str, make: Callable[[], str]) -> str:
    """Return the table that `make` generates.

    Raises:
        ConfigError: its results are missing or damaged.
    """
    try:
        text = make()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise ConfigError(
            f"table {name} cannot be generated: its results in bench/results are damaged ({type(error).__name__}: "
            f"{error}); measure again, or restore them from git"
        ) from None
    if not text.strip() or EMPTY.search(text):
        raise ConfigError(f"table {name} has no rows in bench/results: measure again, or restore its results from git")
    return text


def main(check: bool = False) -> int:
    """Rewrite the tables of all documents. An error in any table leaves all documents unchanged.

    Args:
        check: write nothing; only report stale documents.

    Returns:
        Exit code: 1 if `check` finds a stale document, else 0.
    """
    texts = {name: (ROOT / name).read_text() for name in DOCUMENTS}
    stale = {name: new for name, text in texts.items() if (new := render_document(text)) != text}
    for name, text in stale.items():
        if not check:
            (ROOT / name).write_text(text)
    if stale:
        print(f"{'stale' if check else 'updated'}: {', '.join(stale)}")
    return 1 if check and stale else 0
