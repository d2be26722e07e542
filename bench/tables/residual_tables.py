"""Generate the tables about the residual stream: the addition in the next block's kernel, and its dtype."""

import statistics
from collections.abc import Callable
from typing import Any

from bench.tables.records import format_table, hardware_of, read_results

LAST_STEPS = 50  # the training loss is their mean
REFERENCE = "autocast"  # the losses of the other precisions are compared with it


def residual_fusion_table() -> str:
    """Return the bytes that a step moves and saves if a block adds the MLP's result itself, or if the next one does."""
    (result,) = read_results("residual-fusion")
    elements = result["settings"]["elements"]
    rows = [
        [
            row["checkpointing"],
            "in the kernel of the next LayerNorm" if row["is_deferred"] else "at the end of the block (used)",
            f"{row['loss']:.6f}",
            f"{row['moved_bytes'] / elements:.1f}",
            f"{row['saved_bytes'] / elements:.1f}",
        ]
        for row in result["samples"]["rows"]
    ]
    head = ["activation checkpointing", "the MLP's result is added", "loss", "moved (bytes per element and block)"]
    return format_table([*head, "saved activations (bytes per element and block)"], rows)


def residual_dtype_table() -> str:
    """Return the losses and the activations of each precision: means over the seeds, and differences seed by seed."""
    (result,) = read_results("residual-dtype")
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in result["samples"]["rows"]:
        runs.setdefault(row["variant"], []).append(row)
    rows = []
    for name, own in runs.items():
        differences = [
            row["val_loss"] - reference["val_loss"] for row, reference in zip(own, runs[REFERENCE], strict=True)
        ]
        rows.append(
            [
                name,
                f"{statistics.fmean(statistics.fmean(row['losses'][-LAST_STEPS:]) for row in own):.4f}",
                f"{statistics.fmean(row['val_loss'] for row in own):.4f}",
                "-" if name == REFERENCE else ", ".join(f"{difference:+.4f}" for difference in differences),
                f"{own[0]['activation_bytes'] / 1e6:.2f}",
            ]
        )
    seeds, steps = len(runs[REFERENCE]), result["settings"]["steps"]
    head = ["precision", f"training loss, mean of the last {LAST_STEPS} steps", "validation loss"]
    head += [f"validation loss minus that of {REFERENCE}, for each seed", "activations at the peak (MB)"]
    text = f"{steps} steps of the default run on a CPU, {seeds} seeds. Measured on {hardware_of(result)}:\n\n"
    return text + format_table(head, rows)


RESIDUAL_TABLES: dict[str, Callable[[], str]] = {
    "residual_fusion": residual_fusion_table,
    "residual_dtype": residual_dtype_table,
}
