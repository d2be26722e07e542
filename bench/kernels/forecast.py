"""Forecast whether memory or instructions limit a kernel, from its machine code, before a GPU has measured it.

    python -m bench.kernels.forecast

A kernel that only moves data takes at least the time of its bytes, and at least the time in which an H100 can issue its
instructions. The forecast is the larger of the two. It assumes that enough programs run to hide the latency of memory,
so a measurement can only be slower. Both rates come from the vendor's data sheet.
"""

import json
from dataclasses import dataclass
from typing import Any

from bench.plan.speed import GPUS
from bench.tables.records import RESULTS, format_table

SM_COUNT, SCHEDULERS, WARP = 132, 4, 32  # of an H100; each scheduler issues one instruction for a warp per cycle
FLOPS_PER_CYCLE = 4096  # of the tensor cores of one SM, in bfloat16: with the peak rate, this gives the clock
CLOCK = GPUS["h100"].peak / (SM_COUNT * FLOPS_PER_CYCLE)
INSTRUCTIONS_PER_SECOND = SM_COUNT * SCHEDULERS * WARP * CLOCK  # of single threads
VOCABULARY = 50304


@dataclass(frozen=True)
class Stream:
    """A kernel that moves data.

    Attributes:
        name: in the table.
        call: the call and the kernel, as in kernel-resources.json.
        width: elements of a row.
        bytes_per_element: read and written, in bfloat16.
        is_loop: the kernel loops over tiles; otherwise a program computes one tile.
    """

    name: str
    call: str
    width: int
    bytes_per_element: int
    is_loop: bool


STREAMS = (
    Stream("LayerNorm, forward", "layer_norm 768: forward_kernel HAS_BIAS", 768, 4, False),
    Stream("LayerNorm, backward", "layer_norm 768: backward_kernel HAS_BIAS", 768, 6, True),
    Stream("cross-entropy with gradient", "linear_cross_entropy 768: forward_kernel GRADIENT", VOCABULARY, 4, True),
    Stream("bias + GELU, forward", "bias_gelu 3072: forward_kernel HAS_BIAS", 3072, 4, False),
    Stream("bias + GELU, backward", "bias_gelu 3072: backward_kernel HAS_BIAS SUM", 3072, 6, True),
)


def instructions_per_element(stream: Stream, resources: dict[str, Any]) -> float:
    """Return the instructions that one thread executes per element of the data, padding included."""
    constants, threads = resources["constants"], WARP * resources["num_warps"]
    rows, block = constants["ROWS"], constants["BLOCK"]
    if "TAIL" in constants:  # two passes over a row, each with a loop over full tiles and a loop over the rest
        passes = [resources["loops"][0:2], resources["loops"][2:4]]
        full_tiles, rest = divmod(stream.width, block)
        tails = -(-rest // constants["TAIL"])
        executed = sum(full * full_tiles + tail * tails for full, tail in passes)
        return executed * threads / (rows * stream.width)
    tiles = -(-stream.width // (block * constants.get("CHUNKS", 1)))
    executed = max(resources["loops"]) if stream.is_loop else resources["instructions"]
    return executed * threads * tiles / (rows * stream.width)


def read_newest_resources() -> dict[str, Any]:
    """Return the committed resources of each kernel on an H100, with the newest Triton."""
    reports = json.loads((RESULTS / "kernel-resources.json").read_text())
    newest = max(reports, key=lambda version: tuple(map(int, version.split("."))))
    kernels: dict[str, Any] = reports[newest]["kernels"]["sm_90"]
    return kernels


def forecast() -> list[dict[str, Any]]:
    """Return the forecast of each kernel on an H100, with the newest Triton, in picoseconds per element."""
    kernels = read_newest_resources()
    rows = []
    for stream in STREAMS:
        count = instructions_per_element(stream, kernels[stream.call])
        memory, issue = stream.bytes_per_element / GPUS["h100"].bandwidth, count / INSTRUCTIONS_PER_SECOND
        share = memory / max(memory, issue)
        rows.append({"name": stream.name, "instructions": count, "memory": memory, "issue": issue, "share": share})
    return rows


def forecast_table() -> str:
    """Return the forecast as a Markdown table."""
    rows = [
        [
            row["name"],
            f"{row['instructions']:.1f}",
            f"{1e12 * row['memory']:.2f}",
            f"{1e12 * row['issue']:.2f}",
            "memory" if row["share"] == 1 else f"instructions ({row['share']:.0%} of the bandwidth)",
        ]
        for row in forecast()
    ]
    head = ["kernel", "instructions per element", "time to transfer the bytes (ps per element)"]
    return format_table([*head, "time to issue the instructions (ps per element)", "limit"], rows)


if __name__ == "__main__":
    print(forecast_table())
