"""Generate the tables about the residual stream: the addition in the next block's kernel, and its dtype."""

import statistics
from collections.abc import Callable
from typing import Any

from bench.tables.records import format_table, hardware_of, read_results

LAST_STEPS = 50  # the training loss is their mean
REFERENCE = "autocast"  # the losses of the other precisions are compared with it


def residual_fusion_table() -> str:
    """Return the bytes that a step moves and saves if a block adds the MLP's result itself, or if the next one does."""
    head = ["activation checkpointing", "the MLP's result is added", "loss", "moved (bytes per element and block)"]
    parts = []
    for result in read_results("residual-fusion"):
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
        parts.append(format_table([*head, "saved activations (bytes per element and block)"], rows))
    return "\n".join(parts)


def residual_dtype_table() -> str:
    """Return the losses and the activations of each precision: means over the seeds, and differences seed by seed."""
    head = ["precision", f"training loss, mean of the last {LAST_STEPS} steps", "validation loss"]
    head += [f"validation loss minus that of {REFERENCE}, for each seed", "activations at the peak (MB)"]
    parts = []
    for result in read_results("residual-dtype"):
        runs: dict[str, list[dict[str, Any]]] = {}
        for row in result["samples"]["rows"]:
            runs.setdefault(row["variant"], []).append(row)
        rows = []
        for name, own in runs.items():
            pairs = zip(own, runs[REFERENCE], strict=True)
            differences = [f"{row['val_loss'] - reference['val_loss']:+.4f}" for row, reference in pairs]
            cells = [
                statistics.fmean(statistics.fmean(row["losses"][-LAST_STEPS:]) for row in own),
                statistics.fmean(row["val_loss"] for row in own),
            ]
            compared = "-" if name == REFERENCE else ", ".join(differences)
            activations = f"{own[0]['activation_bytes'] / 1e6:.2f}"
            rows.append([name, *(f"{loss:.4f}" for loss in cells), compared, activations])
        seeds, steps = len(runs[REFERENCE]), result["settings"]["steps"]
        text = f"{steps} steps of the default run on a CPU, {seeds} seeds. Measured on {hardware_of(result)}:\n\n"
        parts.append(text + format_table(head, rows))
    return "\n".join(parts)


RESIDUAL_TABLES: dict[str, Callable[[], str]] = {
    "residual_fusion": residual_fusion_table,
    "residual_dtype": residual_dtype_table,
}
