"""Draw the results about kernels: the bytes and the registers of each, and what was tried for the residual stream."""

from typing import Any

from book.charts import Chart

MB = 1e6
DRAWN_WIDTH, DRAWN_GPU = 768, "sm_90"  # of the kernels whose registers are drawn


def draw_ladder(samples: dict[str, Any]) -> list[Chart]:
    """Draw the bytes that each step of a kernel reads and writes, next to the smallest possible number."""
    rows = {
        f"{row['kernel']}, step {row['step']}: {row['idea']}": {
            "read": row["loaded"] / MB,
            "written": row["stored"] / MB,
            "smallest possible sum": row["minimum_bytes"] / MB,
        }
        for row in samples["rows"]
    }
    return [Chart("memory traffic of one call (MB)", rows)]


def draw_resources(samples: dict[str, Any]) -> list[Chart]:
    """Draw the registers of the kernels of GPT-2's width on one GPU, for each version of Triton."""
    rows: dict[str, dict[str, float]] = {}
    for version in sorted(samples):
        for name, kernel in samples[version]["kernels"][DRAWN_GPU].items():
            if f" {DRAWN_WIDTH}:" in name:
                rows.setdefault(name, {})[f"Triton {version}"] = kernel["registers"]
    return [Chart(f"registers per thread on {DRAWN_GPU}, {DRAWN_WIDTH} channels; the limit is 255", rows)]


def draw_goals(samples: dict[str, Any]) -> list[Chart]:
    """Draw the goal of each kernel next to its forecast, as ratios."""
    rows = {row["name"]: {name: row[name] for name in ("goal", "cautious", "best")} for row in samples["rows"]}
    return [Chart("goals of the kernels, and cautious and best forecasts for an H100 (ratios)", rows)]


def draw_residual_fusion(samples: dict[str, Any]) -> list[Chart]:
    """Draw the bytes of a step with the addition at the end of a block, and in the next block's kernel."""
    moved: dict[str, dict[str, float]] = {}
    saved: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        place = "in the next block's LayerNorm" if row["is_deferred"] else "at the end of the block"
        label = f"activation checkpointing: {row['checkpointing']}"
        moved.setdefault(label, {})[place] = row["moved_bytes"] / MB
        saved.setdefault(label, {})[place] = row["saved_bytes"] / MB
    return [Chart("memory traffic of a step (MB)", moved), Chart("saved activations (MB)", saved)]


def draw_residual_dtype(samples: dict[str, Any]) -> list[Chart]:
    """Draw the validation loss of each precision of the residual stream, for each seed."""
    rows: dict[str, dict[str, float]] = {}
    for row in samples["rows"]:
        rows.setdefault(row["variant"], {})[f"seed {row['seed']}"] = row["val_loss"]
    return [Chart("validation loss", rows)]
