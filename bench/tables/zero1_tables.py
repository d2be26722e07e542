"""Generate the tables of phase 1 from the committed results. `bench.tables.tables` writes them into the documents."""

import statistics
from collections.abc import Callable

from bench.tables.records import format_table, hardware_of, read_results


def zero1_state_table() -> str:
    """Return the bytes of AdamW's moments for GPT-2 124M: the maximum over all ranks, next to 8P/N."""
    rows = []
    for result in read_results("zero1-state"):
        params = result["samples"]["parameters"]
        for row in result["samples"]["rows"]:
            expected, largest = 8 * params / row["ranks"], max(row["moments"])
            rows.append([str(row["ranks"]), f"{expected:,.0f}", f"{largest:,}", f"{largest / expected - 1:.3%}"])
    head = ["ranks", "8P/N (bytes)", "AdamW moments, maximum over all ranks (bytes)", "difference from 8P/N"]
    return format_table(head, rows)


def wire_table() -> str:
    """Return the bytes that gloo sends per tensor byte in each collective, next to those of a ring."""
    kinds, rows = ("all-reduce", "reduce-scatter", "all-gather"), []
    for result in read_results("wire"):
        samples = {(row["ranks"], row["kind"]): row for row in result["samples"]["rows"]}
        for ranks in sorted({row["ranks"] for row in samples.values()}):
            cells = [samples[ranks, kind] for kind in kinds]
            rows.append([str(ranks), *(f"{row['sent_per_tensor_byte']:.2f} ({row['ring']:.2f})" for row in cells)])
    return format_table(["ranks", *(f"{kind}: gloo (ring)" for kind in kinds)], rows)


def zero1_backends_table() -> str:
    """Return memory, communication, step time and loss difference of every backend in the same 50 steps."""
    parts = []
    for result in read_results("zero1-backends"):
        rows = []
        for row in result["samples"]["rows"]:
            params, ranks = row["parameters"], row["ranks"]
            unit = 4 * params * (ranks - 1) / ranks
            rows.append(
                [
                    f"{ranks}",
                    row["backend"],
                    f"{max(row['optimizer_state_bytes']):,}",
                    f"{max(row['state_bytes']) / params:.2f}P",
                    f"{row['ring_bytes'] / unit:.4f}" if unit else "0",
                    str(row["calls"]),
                    f"{row['step_ms']:.0f}",
                    f"{row['loss_gap']:.1e}",
                ]
            )
        head = ["ranks", "backend", "optimizer state per rank (bytes)", "model state per rank (bytes)"]
        head += ["communication per rank, in P(N-1)/N elements", "collective calls", "step (ms)", "max loss difference"]
        params = result["samples"]["rows"][0]["parameters"]
        lead = f"Measured on {hardware_of(result)}, P = {params:,}. State is the maximum over all ranks:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


def zero1_overhead_table() -> str:
    """Return the median times of training steps and of single collectives, which alternated on the same ranks."""
    parts = []
    names = ["ddp", "all_reduce", "reduce_scatter", "all_gather", "flat", "flat_forward"]
    for result in read_results("zero1-overhead"):
        rows = []
        for row in result["samples"]["rows"]:
            medians = [statistics.median(row["samples_ms"][name]) for name in names]
            rows.append([str(row["ranks"]), *(f"{median:.0f}" for median in medians), f"{row['ratio']:.3f}"])
        head = ["ranks", "DDP step (ms)", "all-reduce (ms)", "reduce-scatter (ms)", "all-gather (ms)", "flat step (ms)"]
        head += ["flat step, all-gather in the forward pass (ms)", "flat / (DDP - AR + RS + AG)"]
        params = result["samples"]["parameters"]
        lead = f"Measured on {hardware_of(result)}, {params:,} parameters:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


def zero1_speed_table() -> str:
    """Return the speed of flat relative to DDP on 2 ranks, from every result that has both."""
    backends = read_results("zero1-backends")[0]["samples"]["rows"]
    step_ms = {row["backend"]: row["step_ms"] for row in backends if row["ranks"] == 2}
    overhead = read_results("zero1-overhead")[0]["samples"]
    alternating = next(row for row in overhead["rows"] if row["ranks"] == 2)["samples_ms"]
    medians = {name: statistics.median(alternating[name]) for name in ("ddp", "flat", "flat_forward")}
    eager = [row for row in read_results("throughput")[0]["samples"]["rows"] if not row["compiled"]]
    speeds = {row["phase"]: row for row in eager if row["ranks"] == 2}
    rates = {phase: statistics.median(row["tokens_per_second"]) for phase, row in speeds.items()}
    gpt2 = {row["phase"]: row for row in read_results("gpt2-matrix")[0]["samples"]["rows"] if row["ranks"] == 2}
    params = gpt2["baseline"]["state_bytes"]["parameters"] // 4
    cases = [
        (backends[0]["parameters"], "`train.py`, micro-batches of 12 x 64 tokens", step_ms["DDP"] / step_ms["flat"]),
        (
            speeds["phase1"]["parameters"],
            "`train.py`, micro-batches of 4 x 64 tokens",
            rates["phase1"] / rates["baseline"],
        ),
        (overhead["parameters"], "bare loop, `step` waits for the all-gathers", medians["ddp"] / medians["flat"]),
        (
            overhead["parameters"],
            "bare loop, all-gathers in the forward pass",
            medians["ddp"] / medians["flat_forward"],
        ),
        (params, "`train.py`, micro-batches of 16 tokens", gpt2["baseline"]["step_ms"] / gpt2["phase1"]["step_ms"]),
    ]
    rows = [[f"{number:,}", case, f"{speed:.2f}"] for number, case, speed in cases]
    return format_table(["parameters", "what was measured on 2 ranks", "speed relative to DDP"], rows)


ZERO1_TABLES: dict[str, Callable[[], str]] = {
    "zero1_state": zero1_state_table,
    "wire": wire_table,
    "zero1_backends": zero1_backends_table,
    "zero1_overhead": zero1_overhead_table,
    "zero1_speed": zero1_speed_table,
}
