"""Record the cost of Muon's update for the page "Will it fit?": formulas for full matrices, traces for FSDP.

Muon's update is not linear in the number of blocks, because each matrix belongs to one rank. A rank that orthogonalizes
full matrices needs memory for one of them, and its time is a sum over the matrices that it owns; the page assigns the
owners itself. FSDP exchanges the matrices in rounds. Its update is traced for each model and each number of ranks.
"""

from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from bench.matrix.cells import make_config
from bench.plan.models import MODELS
from bench.plan.options import Row
from bench.plan.trace import TracedStep, trace
from book.recordings.formulas import SIZES
from nanoGPT.checkpoint.weights import PADDED_VOCAB
from nanoGPT.model import GPTConfig

TRACED_TOKENS = 1024  # per sequence: they change only the position embeddings, which AdamW updates
MAX_ERROR = 0.01  # relative, of the formulas for full matrices
# Ranks, blocks, and the sizes of the matrices that rank 0 owns in phase 1, in units of the squared channels.
SINGLE = ((1, 3, (1, 3, 4, 4) * 3), (1, 5, (1, 3, 4, 4) * 5))
OWNED = ((4, 3, (4, 4, 1)), (4, 5, (4, 4, 4, 3)), (8, 3, (4, 1)), (8, 5, (4, 4)), (16, 5, (4,)))
WHOLE = {"baseline 1": ("baseline", SINGLE), "phase1 1": ("phase1", SINGLE), "phase1 N": ("phase1", OWNED)}
WIDTHS = ((12, 768), (25, 1600), (32, 4096))  # heads and channels


def trace_update(row: Row, sizes: tuple[int, int, int], ranks: int) -> TracedStep:
    """Trace an update of a model of this many blocks, heads and channels."""
    phase, options = row
    fields = {"batch_size": 1, "block_size": TRACED_TOKENS, "dtype": "bfloat16", "device": "cpu", "optimizer": "muon"}
    config = make_config(phase, Path("out"), **fields, gradient_accumulation_steps=ranks, **options)
    return trace(config, GPTConfig(*sizes, TRACED_TOKENS, False, PADDED_VOCAB), ranks, only_update=True)


def fit_whole_update(name: str) -> dict[str, Any]:
    """Return the factors of one of WHOLE, an update with full matrices.

    Returns:
        eager_bytes and compiled_bytes: bytes per element of the owned matrices, per squared channel and owned matrix,
        and per element of rank 0's share of AdamW's matrices; kernels: per owned matrix, and per step; other: bytes of
        memory per squared channel.

    Raises:
        RuntimeError: the traces do not follow these formulas.
    """
    terms, measured, others = [], [], set()
    phase, cases = WHOLE[name]
    for heads, C in WIDTHS:
        for ranks, layers, owned in cases:
            traced = trace_update((phase, {}), (layers, heads, C), ranks)
            adamw = (PADDED_VOCAB + TRACED_TOKENS) * C / ranks
            terms.append([sum(owned) * C * C, len(owned) * C * C, adamw, len(owned), 1.0])
            roofline = traced.roofline
            measured.append(
                [each["update"] for each in (roofline.eager_bytes, roofline.compiled_bytes, roofline.kernels)]
            )
            others.add(traced.memory.peak_of_part()["update"]["other"] / (C * C))
    x, y = np.array(terms), np.array(measured)
    factors = [fit_relative(x[:, columns], y[:, i]) for i, columns in enumerate(([0, 1, 2], [0, 1, 2], [3, 4]))]
    if len(others) != 1:
        raise RuntimeError(f"the memory of the update in {name} has different factors {others}: trace it instead")
    return {**dict(zip(("eager_bytes", "compiled_bytes", "kernels"), factors, strict=True)), "other": others.pop()}


def fit_relative(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Return the factors of the terms with the smallest relative errors.

    Raises:
        RuntimeError: an error is larger than MAX_ERROR.
    """
    relative = terms / values[:, None]
    factors = np.linalg.lstsq(relative, np.ones(len(values)), rcond=None)[0]
    error = np.abs(relative @ factors - 1).max()
    if error > MAX_ERROR:
        raise RuntimeError(f"the formula of Muon's update has an error of {error:.1e}: add the missing term")
    return [float(f"{factor:.6g}") for factor in factors]


def trace_sharded_update(name: str, ranks: int) -> list[float]:
    """Return the traced update of a model with FSDP: bytes of memory, eager and compiled bytes, and kernels."""
    traced = trace_update(("phase3", {}), MODELS[name], ranks)
    roofline, memory = traced.roofline, traced.memory.peak_of_part()["update"]["other"]
    return [
        memory,
        *(round(each["update"]) for each in (roofline.eager_bytes, roofline.compiled_bytes, roofline.kernels)),
    ]


def record_muon(pool: Executor) -> dict[str, Any]:
    """Return the formulas of updates with full matrices, and the sharded updates by model and number of ranks."""
    whole = {name: pool.submit(fit_whole_update, name) for name in WHOLE}
    sharded = {
        name: {str(ranks): pool.submit(trace_sharded_update, name, ranks) for ranks in SIZES["gpus"]} for name in MODELS
    }
    return {
        "whole": {name: future.result() for name, future in whole.items()},
        "sharded": {name: {n: each.result() for n, each in by_ranks.items()} for name, by_ranks in sharded.items()},
    }
