"""Record the cost of every kernel for many shapes, the peak rates of GPUs, and the times that GPUs have measured.

The costs are those of the kernels' `cost` functions. The measured times come from the committed results of
`make bench-kernels` on a GPU. Results of Triton's interpreter are left out, because they say nothing about a GPU.
"""

import statistics
from typing import Any

from bench.kernels.costs import Shapes, list_kernel_costs
from bench.plan.plan import MODELS
from bench.plan.speed import GPUS
from bench.tables.records import read_results
from nanoGPT.checkpoint.weights import PADDED_VOCAB
from nanoGPT.model import GPTConfig
from phase2_triton.kernels.core import record_launches

MODEL_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SEQUENCES, TOKENS = (1, 4, 16, 64), (256, 1024, 4096)


def make_shapes(model: str, batch_size: int, block_size: int) -> Shapes:
    """Return the shapes of the kernels' calls for a model of the planner."""
    layers, heads, width = MODELS[model]
    params = GPTConfig(layers, heads, width, block_size, False, PADDED_VOCAB).count_params()
    return Shapes(batch_size, block_size, width, heads, PADDED_VOCAB, params)


def record_costs(model: str, batch_size: int, block_size: int) -> dict[str, Any]:
    """Return the costs for one shape.

    Returns:
        model, batch_size, block_size, and costs: kernel, pass, bytes and FLOPs of each call.
    """
    with record_launches("sm_90"):  # tile sizes of a GPU; they change only the workspace
        kernels = list_kernel_costs(make_shapes(model, batch_size, block_size))
    costs = [
        [name.partition(", ")[0], which, cost.read + cost.written, cost.flops]
        for name, passes in kernels.items()
        for which, cost in passes.items()
    ]
    return {"model": model, "batch_size": batch_size, "block_size": block_size, "costs": costs}


def list_measurements() -> list[dict[str, Any]]:
    """Return the measured kernels of this repository: hardware, kernel, shape, pass, bytes, flops and median ms."""
    return [
        {
            "hardware": result["hardware"],
            **{name: row[name] for name in ("kernel", "shape", "pass", "bytes", "flops")},
            "ms": statistics.median(row["samples_ms"]),
        }
        for result in read_results("kernels")
        if not result["settings"]["interpreted"]
        for row in result["samples"]["rows"]
        if row["contender"] == "ours" and "error" not in row
    ]


def record() -> dict[str, Any]:
    """Return the recording.

    Returns:
        gpus: peak (FLOP/s in bfloat16) and bandwidth (bytes/s) by name; shapes: see `record_costs`; and measured: see
        `list_measurements`.
    """
    gpus = {name: {"peak": gpu.peak, "bandwidth": gpu.bandwidth} for name, gpu in GPUS.items()}
    shapes = [record_costs(model, B, T) for model in MODEL_NAMES for B in SEQUENCES for T in TOKENS]
    return {"gpus": gpus, "shapes": shapes, "measured": list_measurements()}
