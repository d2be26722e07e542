"""Generate the tables about the residual stream."""

from collections.abc import Callable

from bench.tables.records import format_table, read_results


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


RESIDUAL_TABLES: dict[str, Callable[[], str]] = {
    "residual_fusion": residual_fusion_table,
}
