"""Compare the goals of the kernels with a forecast for an H100, and with measurements if there are any.

    python -m bench.kernels.goals            # print the table
    python -m bench.kernels.goals --write    # also write bench/results/kernel-goals-<hardware>.json

The forecast needs no GPU. It computes the time of the bytes, of the products on the tensor cores, of the exponentials
and of the instructions of a kernel, from its compiled code and the H100's data sheet. The largest of them limits the
kernel. A forecast is a range: the first number is cautious, the second one assumes that everything else overlaps with
the limiting resource. The time of another implementation, such as SDPA, is estimated with the efficiency of products or
attention that the planner uses for published runs. The data sheet has no rate of atomic additions: the forecast of
attention's backward pass with them assumes that the L2 cache keeps up.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.forecast import (
    CLOCK,
    FLOPS_PER_CYCLE,
    INSTRUCTIONS_PER_SECOND,
    SCHEDULERS,
    SM_COUNT,
    STREAMS,
    VOCABULARY,
    WARP,
    forecast,
    read_newest_resources,
)
from bench.plan.speed import ATTENTION_EFFICIENCY, GPUS, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY
from bench.tables.records import format_table, read_results, write_result
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from phase2_triton.kernels.core import hash_sources

TOKENS, T, WIDTH, HEAD = 16384, 1024, 768, 64  # of GPT-2 124M, as in bench/kernels/cases.py
EXPONENTIALS_PER_CYCLE = 16  # of an SM, by the CUDA programming guide for compute capability 9.0
ADAMW_BYTES = 28  # per parameter: read parameter, gradient and two moments; write all but the gradient
SIZE = "124M"  # the size that is compared in a measurement
NO_GPU = "no GPU yet"
Groups = dict[tuple[str, str], dict[str, float]]  # kernel and pass -> contender -> median time in ms


@dataclass(frozen=True)
class Forecast:
    """The forecast of one goal.

    Attributes:
        cautious: the number if nothing overlaps with the limiting resource. For the loss: with the peak rates of the
            data sheet.
        best: the number if everything overlaps with it. For the loss: with the planner's efficiencies.
        limit: the limiting resource.
    """

    cautious: float
    best: float
    limit: str


@dataclass(frozen=True)
class Goal:
    """A goal for the speed of a kernel.

    Attributes:
        name: what is compared.
        goal: the number to reach.
        is_minimum: whether a larger number is better.
        forecast: the function that computes the forecast.
        measure: the same number, from the times of a measurement and its copy bandwidth in bytes/ms; None if a time is
            missing.
    """

    name: str
    goal: float
    is_minimum: bool
    forecast: Callable[[], Forecast]
    measure: Callable[[Groups, float], float | None]


def forecast_stream(name: str) -> Forecast:
    """Return a kernel's share of the copy bandwidth. A copy is limited by its bytes only."""
    (row,) = (row for row in forecast() if row["name"] == name)
    memory, issue = row["memory"], row["issue"]
    limit = "memory" if row["share"] == 1 else "instructions"
    return Forecast(memory / (memory + issue), row["share"], limit)


def forecast_loss() -> Forecast:
    """Return the time of linear + cross-entropy in units of its three matrix products."""
    gpu, elements = GPUS["h100"], TOKENS * VOCABULARY
    (row,) = (row for row in forecast() if row["name"] == "cross-entropy with gradient")
    loss = elements * max(row["memory"], row["issue"])
    products = 6 * elements * WIDTH / gpu.peak
    planned = 1 + (loss / MEMORY_EFFICIENCY) / (products / MATMUL_EFFICIENCY)
    return Forecast(1 + loss / products, planned, "tensor cores")


def forecast_adamw() -> Forecast:
    """Return the time of AdamW in units of torch's fused AdamW, which moves the same bytes."""
    resources = read_newest_resources()["adamw: multi_tensor_kernel"]
    count = resources["instructions"] * WARP * resources["num_warps"] / resources["constants"]["BLOCK"]
    memory, issue = ADAMW_BYTES / GPUS["h100"].bandwidth, count / INSTRUCTIONS_PER_SECOND
    limit = "memory" if memory >= issue else "instructions"
    return Forecast((memory + issue) / memory, max(memory, issue) / memory, limit)


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel of a pass of attention.

    Attributes:
        name: the call and the kernel, as in kernel-resources.json.
        products: matrix products per tile of scores; 0: the kernel only moves data, a block of rows per program.
        moved: bytes read and written per element of q.
    """

    name: str
    products: int
    moved: int


# q, k and v are read and y is written, in bfloat16. Each kernel of the backward reads dy too, and writes gradients.
FORWARD = (AttentionKernel("causal_attention 768: forward_kernel SPLIT", 2, 8),)
BACKWARD = (
    AttentionKernel("causal_attention 768: backward_kernel DQ", 3, 12),
    AttentionKernel("causal_attention 768: backward_kernel", 4, 12),
)
ATOMIC_BACKWARD = (  # with a buffer of dq in fp32
    AttentionKernel("causal_attention_atomic 768: prepare_kernel", 0, 8),
    AttentionKernel("causal_attention_atomic 768: five_products_kernel", 5, 20),
    AttentionKernel("causal_attention_atomic 768: finish_kernel", 0, 6),
)


def count_tiles(rows: int, block: int, step: int) -> tuple[int, int]:
    """Return how many tiles of (block, step) scores of one head are below the diagonal, and how many are on it."""
    below = sum(first // step for first in range(0, rows, block))
    diagonal = sum(-(-(first + block) // step) - first // step for first in range(0, rows, block))
    return below, diagonal


def count_cycles(resources: dict[str, Any], products: int, tokens: int = T) -> dict[str, float]:
    """Return the cycles of an SM for one head, by resource.

    Args:
        resources: of an attention kernel. The longer of its loops handles the diagonal.
        products: matrix products per tile.
        tokens: of a sequence.
    """
    constants, warps = resources["constants"], resources["num_warps"]
    block, step = constants["BLOCK"], constants["STEP"]
    below, diagonal = count_tiles(tokens, block, step)
    full, masked = min(resources["loops"]), max(resources["loops"])
    scores = (below + diagonal) * block * step
    return {
        "tensor cores": 2 * products * scores * constants["HS"] / FLOPS_PER_CYCLE,
        "instructions": (below * full + diagonal * masked) * warps / SCHEDULERS,
        "exponentials": scores / EXPONENTIALS_PER_CYCLE,
    }


def count_kernel_cycles(
    kernel: AttentionKernel, resources: dict[str, Any], tokens: int
) -> tuple[dict[str, float], float]:
    """Return the cycles of an SM for one head, by resource, and their sum for a kernel without overlap.

    Products wait for loads only if memory is the limit, because the loads of the next tile run during products.
    """
    memory = tokens * HEAD * kernel.moved / (GPUS["h100"].bandwidth / (SM_COUNT * CLOCK))
    if kernel.products:
        cycles = count_cycles(resources, kernel.products, tokens)
        no_overlap = cycles["tensor cores"] + max(cycles["instructions"], cycles["exponentials"])
        return {**cycles, "memory": memory}, max(no_overlap, memory)
    programs = tokens / resources["constants"]["BLOCK"]
    issue = programs * resources["instructions"] * resources["num_warps"] / SCHEDULERS
    return {"instructions": issue, "memory": memory}, memory + issue


def forecast_attention(kernels: tuple[AttentionKernel, ...], products: int, tokens: int = T) -> Forecast:
    """Return the speed of attention in units of SDPA's.

    Args:
        kernels: the kernels of this pass.
        products: matrix products that the pass needs.
        tokens: of a sequence.
    """
    resources = read_newest_resources()
    counted = [count_kernel_cycles(kernel, resources[kernel.name], tokens) for kernel in kernels]
    needed = 2 * products * (tokens * (tokens + 1) // 2) * HEAD / FLOPS_PER_CYCLE
    reference = needed / ATTENTION_EFFICIENCY
    best = sum(max(cycles.values()) for cycles, _ in counted)
    longest = max((cycles for cycles, _ in counted), key=lambda cycles: max(cycles.values()))
    limit = max(longest, key=lambda name: longest[name])
    return Forecast(reference / sum(no_overlap for _, no_overlap in counted), reference / best, limit)


def measure_stream(kernel: str, which: str, bytes_moved: int) -> Callable[[Groups, float], float | None]:
    """Return a function that computes a kernel's share of the copy bandwidth from measured times."""

    def measure(times: Groups, bytes_per_ms: float) -> float | None:
        ours = times.get((kernel, which), {}).get("ours")
        return bytes_moved / bytes_per_ms / ours if ours else None

    return measure


def measure_loss_kernel(times: Groups, bytes_per_ms: float) -> float | None:
    """Return the share of one read and one write: the loss takes what the head needs beyond its products."""
    contenders = times.get(("linear + cross-entropy", "step"), {})
    ours, products = contenders.get("ours"), contenders.get("products")
    return 4 * TOKENS * VOCABULARY / bytes_per_ms / (ours - products) if ours and products else None


def compare_times(kernel: str, which: str, above: str, below: str) -> Callable[[Groups, float], float | None]:
    """Return a function that divides the measured time of one contender by that of another."""

    def measure(times: Groups, _: float) -> float | None:
        contenders = times.get((kernel, which), {})
        return contenders[above] / contenders[below] if {above, below} <= contenders.keys() else None

    return measure


def list_goals() -> list[Goal]:
    """Return all goals of the kernels."""
    forward, backward, loss = (stream.name for stream in STREAMS[:3])
    elements = TOKENS * WIDTH
    return [
        Goal("LayerNorm, forward: share of the copy bandwidth", 0.75, True, lambda: forecast_stream(forward),
             measure_stream("layernorm", "forward", 4 * elements)),
        Goal("LayerNorm, backward: share of the copy bandwidth", 0.60, True, lambda: forecast_stream(backward),
             measure_stream("layernorm", "backward", 6 * elements)),
        Goal("cross-entropy with gradient: share of one read and one write", 0.80, True,
             lambda: forecast_stream(loss), measure_loss_kernel),
        Goal("linear + cross-entropy: time / time of its three products", 1.25, False, forecast_loss,
             compare_times("linear + cross-entropy", "step", "ours", "products")),
        Goal("attention, forward: speed / speed of SDPA's flash attention", 1.0, True,
             lambda: forecast_attention(FORWARD, 2),
             compare_times("attention", "forward", "sdpa flash", "ours")),
        Goal("attention, deterministic backward: speed / speed of SDPA's flash attention", 0.7, True,
             lambda: forecast_attention(BACKWARD, 5),
             compare_times("attention", "backward", "sdpa flash", "ours")),
        Goal("attention, backward with atomic additions: speed / speed of SDPA's flash attention", 0.9, True,
             lambda: forecast_attention(ATOMIC_BACKWARD, 5),
             compare_times("attention, atomic", "backward", "sdpa flash", "ours")),
        Goal("AdamW: time / time of torch's fused AdamW", 1.05, False, forecast_adamw,
             compare_times("adamw", "step", "ours", "fused")),
    ]  # fmt: skip


def read_times(result: dict[str, Any]) -> Groups:
    """Return the median times of a measurement, for GPT-2 124M where a kernel has several sizes."""
    times: Groups = {}
    for row in result["samples"]["rows"]:
        has_size = row["shape"].partition(":")[0] in (SIZE, row["shape"]) and "width" not in row["shape"]
        if "error" not in row and (has_size or row["shape"].endswith(f"width {WIDTH}")):
            times.setdefault((row["kernel"], row["pass"]), {})[row["contender"]] = statistics.median(row["samples_ms"])
    return times


def measure_goals() -> list[tuple[str, list[float | None]]]:
    """Return, for each GPU that was measured, its name and one number for each goal."""
    return [
        (
            result["hardware"],
            [
                goal.measure(read_times(result), result["samples"]["limits"]["bytes_per_second"] / 1e3)
                for goal in list_goals()
            ],
        )
        for result in read_results("kernels")
        if not result["settings"]["interpreted"]
    ]


def compute_rows() -> list[dict[str, Any]]:
    """Return each goal with its forecast."""
    rows = []
    for goal in list_goals():
        computed = goal.forecast()
        rows.append(
            {
                "name": goal.name,
                "goal": goal.goal,
                "is_minimum": goal.is_minimum,
                "cautious": round(computed.cautious, 3),
                "best": round(computed.best, 3),
                "limit": computed.limit,
            }
        )
    return rows


def goals_table() -> str:
    """Return goals, committed forecasts and measurements as a Markdown table."""
    (result,) = read_results("kernel-goals")
    return format_rows(result["samples"]["rows"])


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Return goals, forecasts and measurements as a Markdown table."""
    measured = measure_goals()
    cells = []
    for index, row in enumerate(rows):
        values = [f"{number:.2f} ({name})" for name, numbers in measured if (number := numbers[index]) is not None]
        bound = "at least" if row["is_minimum"] else "at most"
        span = f"{row['cautious']:.2f} to {row['best']:.2f}"
        cells.append([row["name"], f"{bound} {row['goal']:.2f}", span, row["limit"], ", ".join(values) or NO_GPU])
    return format_table(["kernel", "goal", "forecast: cautious to best", "limiting resource", "measured"], cells)


def main(words: list[str]) -> None:
    if unknown := set(words) - {"--write"}:
        raise ConfigError(f"{min(unknown)} is unknown: use --write or no option")
    rows = compute_rows()
    print(format_rows(rows))
    if "--write" in words:
        settings: dict[str, Any] = {
            "command": "python -m bench.kernels.goals --write",
            "sources": hash_sources(),
            "gpu": "h100",
        }
        settings |= {"clock_hz": CLOCK, "multiprocessors": SM_COUNT}
        print(f"wrote {write_result('kernel-goals', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
