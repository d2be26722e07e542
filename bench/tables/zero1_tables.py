"""Phase 1's tables, made from the committed results; `bench.tables.tables` puts them into the documents."""

import statistics
from collections.abc import Callable

from bench.tables.records import hardware_of, read_results, table


def zero1_state_table() -> str:
    """GPT-2 124M: the bytes of AdamW's moments that the fullest rank holds, beside 8P/N."""
    rows = []
    for result in read_results("zero1-state"):
        params = result["samples"]["parameters"]
        for row in result["samples"]["rows"]:
            share, most = 8 * params / row["ranks"], max(row["moments"])
            rows.append([str(row["ranks"]), f"{share:,.0f}", f"{most:,}", f"{most / share - 1:.3%}"])
    return table(["ranks", "8P/N bytes", "fullest rank holds", "over"], rows)


def wire_table() -> str:
    """What gloo sends for each collective, in tensors, beside a ring."""
    kinds, rows = ("all-reduce", "reduce-scatter", "all-gather"), []
    for result in read_results("wire"):
        found = {(row["ranks"], row["kind"]): row for row in result["samples"]["rows"]}
        for ranks in sorted({row["ranks"] for row in found.values()}):
            cells = [found[ranks, kind] for kind in kinds]
            rows.append([str(ranks), *(f"{row['sent_per_tensor_byte']:.2f} ({row['ring']:.2f})" for row in cells)])
    return table(["ranks", *kinds], rows)


def zero1_backends_table() -> str:
    """What the backends hold, send, take and reach in the same 50 steps."""
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
                    f"{row['step_ms']:.0f} ms",
                    f"{row['loss_gap']:.1e}",
                ]
            )
        head = ["ranks", "backend", "optimizer state, fullest rank", "all state", "sent, x P(N-1)/N", "calls", "step"]
        params = result["samples"]["rows"][0]["parameters"]
        parts.append(f"Measured on {hardware_of(result)}, P = {params:,}:\n\n" + table([*head, "loss off by"], rows))
    return "\n".join(parts)


def zero1_overhead_table() -> str:
    """Medians of steps and of bare collectives that ran in turn, in the same ranks."""
    parts = []
    names = ["ddp", "all_reduce", "reduce_scatter", "all_gather", "flat", "flat_forward"]
    for result in read_results("zero1-overhead"):
        rows = []
        for row in result["samples"]["rows"]:
            medians = [statistics.median(row["samples_ms"][name]) for name in names]
            rows.append([str(row["ranks"]), *(f"{m:.0f} ms" for m in medians), f"{row['ratio']:.3f}"])
        head = ["ranks", "DDP step", "all-reduce", "reduce-scatter", "all-gather", "flat step"]
        head += ["flat, gathering in the forward", "flat / (DDP - AR + RS + AG)"]
        params = result["samples"]["parameters"]
        parts.append(f"Measured on {hardware_of(result)}, {params:,} parameters:\n\n" + table(head, rows))
    return "\n".join(parts)


def zero1_step_table() -> str:
    """`step` alone, at one rank."""
    rows = []
    for result in read_results("zero1-step"):
        samples = result["samples"]
        adamw, flat = (statistics.median(samples[name]) for name in ("adamw_ms", "flat_ms"))
        name = f"{samples['parameters']:,}"
        rows.append([hardware_of(result), name, f"{adamw:.2f} ms", f"{flat:.2f} ms", f"{samples['ratio']:.3f}"])
    return table(["hardware", "parameters", "AdamW(fused=True)", "flat", "ratio"], rows)


ZERO1_TABLES: dict[str, Callable[[], str]] = {
    "zero1_state": zero1_state_table,
    "wire": wire_table,
    "zero1_backends": zero1_backends_table,
    "zero1_overhead": zero1_overhead_table,
    "zero1_step": zero1_step_table,
}
