"""Turn traces of a training step into formulas that a browser can evaluate, for the page "Will it fit?".

`bench.plan` traces a training step on fake tensors. The bytes of a step are sums of a few terms, such as B T C or C^2,
with constant factors. This module traces a row of the plan for several shapes and computes these factors.

The formula of a stage is the maximum over its *moments*. A moment is a point of the step, for example just after the
logits were computed. Only the moments that can be the maximum are kept.

From two micro-batches on, every further one costs as much as the second, so the step is traced with one and with two.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import bench.plan.trace
from bench.matrix.cells import make_config
from bench.plan.planner import Row
from bench.plan.trace import MEMORY_STAGES, TracedStep, trace
from measure.tracker import CATEGORIES, MemoryTracker, Totals
from nanoGPT.checkpoint.starting_point import PADDED_VOCAB
from nanoGPT.model import GPTConfig

Shape = tuple[int, int, int, int, int]  # heads, C, T, B, ranks
Polynomial = list[list[float]]  # pairs of the number of a term and its factor

SIZES = {
    "block_size": (256, 512, 1024, 2048, 4096),
    "batch_size": (1, 2, 4, 8, 16, 32, 64, 128),
    "gpus": (1, 2, 4, 8, 16, 32, 64),
}
SEED = 1
MAX_ERROR = 1e-9  # relative, of a formula against the traces; rows with padding in their buckets: PADDED_ERROR
PADDED_ERROR = 5e-3

# The terms of the formulas. C, h: channels and heads; T: tokens per sequence; B: sequences; N: ranks.
PARAMETER_TERMS = ("1", "C", "C C", "T C", "T")
BATCH_TERMS = ("B T", "B T C", "B T h")
SHARDED_TERMS = ("1/N", "C/N", "C C/N", "T C/N")
TERMS = (*PARAMETER_TERMS, *BATCH_TERMS, *SHARDED_TERMS)


@dataclass(frozen=True)
class FitJob:
    """What one set of formulas is for.

    Attributes:
        row: of the plan.
        dtype: of the matrix products.
        is_sharded: formulas for two or more ranks; else for one.
        micro_batches: 1, or 2 for two and more.
        models: heads and channels of the models.
        block_sizes: tokens per sequence.
    """

    row: Row
    dtype: str
    is_sharded: bool
    micro_batches: int
    models: tuple[tuple[int, int], ...]
    block_sizes: tuple[int, ...] = SIZES["block_size"]

    def byte_terms(self) -> list[str]:
        """Return the terms of the bytes. With one model and one sequence length, only B and N are left."""
        if len(self.block_sizes) == 1:
            return ["1", "B T", "1/N"]
        return [term for term in TERMS if self.is_sharded or not term.endswith("/N")]


def evaluate_terms(shapes: Sequence[Shape]) -> np.ndarray:
    """Return the value of each of TERMS for each shape: (shapes, terms)."""
    rows = []
    for heads, C, T, B, N in shapes:
        values = {"B": B, "T": T, "C": C, "h": heads, "1": 1}
        products = []
        for term in TERMS:
            factors, _, divisor = term.partition("/")
            products.append(float(np.prod([float(values[each]) for each in factors.split()])) / (N if divisor else 1))
        rows.append(products)
    return np.array(rows)


class MomentTracker(MemoryTracker):
    """A memory tracker that keeps the bytes by category at every moment of the step.

    Attributes:
        moments: list of (stage, name of the operator, bytes by category).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moments: list[tuple[str, str, Totals]] = []
        self.operator = "resize"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operator = func.__name__
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.operator = "resize"

    def _record(self) -> None:
        super()._record()
        totals = dict(self._now)
        self.timeline.append((self._event, totals))  # the tracker corrects the categories of its timeline later
        self.moments.append((self.part, self.operator, totals))


def trace_shape(job: FitJob, shape: Shape, layers: int) -> TracedStep:
    """Trace a step of a model with `layers` blocks, and keep its moments.

    Raises:
        KernelError: a kernel of the row does not accept the model.
    """
    (phase, options), (heads, C, T, B, N) = job.row, shape
    fields = {"batch_size": B, "block_size": T, "dtype": job.dtype, "device": "cpu", "optimizer": "adamw"}
    fields["gradient_accumulation_steps"] = job.micro_batches * N
    config = make_config(phase, Path("out"), **fields, **options)
    with mock.patch.object(bench.plan.trace, "MemoryTracker", MomentTracker):
        return trace(config, GPTConfig(layers, heads, C, T, False, PADDED_VOCAB), N)


def fit_columns(shapes: Sequence[Shape], values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return the factors of the terms, (columns, terms), for values of (shapes, columns).

    Raises:
        RuntimeError: the values are no sums of these terms.
    """
    positions = [TERMS.index(name) for name in names]
    terms = evaluate_terms(shapes)[:, positions]
    weights = 1 / np.maximum(np.abs(values).max(axis=1, keepdims=True), 1)
    scale = np.abs(terms * weights).max(axis=0)
    solution = np.linalg.lstsq(terms * weights / scale, values * weights, rcond=None)[0] / scale[:, None]
    rounded = np.round(solution * 4) / 4
    largest = np.abs(values).max(axis=1, keepdims=True)
    if (np.abs(terms @ rounded - values) / largest).max() > MAX_ERROR:  # padding: keep the factors as they are
        error = (np.abs(terms @ solution - values) / largest).max()
        if error > PADDED_ERROR:
            raise RuntimeError(f"the formula has an error of {error:.1e}: add the missing term to TERMS")
        rounded = solution
    factors = np.zeros((values.shape[1], len(TERMS)))
    factors[:, positions] = rounded.T
    return factors


def to_polynomial(factors: np.ndarray) -> Polynomial:
    """Return the terms with a factor other than 0."""
    rounded = [float(f"{factor:.7g}") for factor in factors]
    return [[i, int(f) if f == int(f) else f] for i, f in enumerate(rounded) if abs(f) > 1e-9]


def draw_shapes(job: FitJob, count: int, draw: random.Random) -> list[Shape]:
    """Draw shapes at random. They contain each model at least once, if `count` permits."""
    gpus = [n for n in SIZES["gpus"] if (n > 1) == job.is_sharded]
    order = itertools.cycle(draw.sample(job.models, len(job.models)))
    return [
        (*next(order), draw.choice(job.block_sizes), draw.choice(SIZES["batch_size"]), draw.choice(gpus))
        for _ in range(count)
    ]


def grid_shapes(job: FitJob) -> list[Shape]:
    """Return every combination of sizes that the page offers."""
    gpus = [n for n in SIZES["gpus"] if (n > 1) == job.is_sharded]
    sizes = itertools.product(job.models, job.block_sizes, SIZES["batch_size"], gpus)
    return [(*model, T, B, N) for model, T, B, N in sizes]


def select_moments(traced: TracedStep, stage: str) -> list[tuple[str, list[int]]]:
    """Return the moments of a stage: the operator, and the bytes in the order of CATEGORIES."""
    assert isinstance(traced.memory, MomentTracker)
    moments = [(operator, totals) for part, operator, totals in traced.memory.moments if part == stage]
    return [(operator, [totals[name] for name in CATEGORIES]) for operator, totals in moments]


def align_moments(traces: Sequence[TracedStep], stage: str) -> np.ndarray:
    """Return the bytes of the moments of a stage that all traces have: (shapes, moments, categories)."""
    moments_of = [select_moments(traced, stage) for traced in traces]
    counts = [Counter(operator for operator, _ in each) for each in moments_of]
    # Operators on buckets: their number depends on the number of buckets, and so on the shape.
    is_aligned = {operator: all(count[operator] == counts[0][operator] for count in counts) for operator in counts[0]}
    columns = [[values for operator, values in each if is_aligned.get(operator)] for each in moments_of]
    return np.array(columns, dtype=float)


def fit_moments(
    traces: Sequence[TracedStep], shapes: list[Shape], grid: np.ndarray, names: list[str], stage: str
) -> list[Any]:
    """Return the moments of a stage that can be its memory peak: for each, one polynomial per category.

    If the buckets of the traces differ so much that their moments cannot be compared, the peak is the only moment.
    """
    values = align_moments(traces, stage)
    try:
        factors = fit_columns(shapes, values.reshape(len(shapes), -1), names)
    except RuntimeError:
        peaks = [traced.memory.peak_of_part()[stage] for traced in traces]
        values = np.array([[[peak[name] for name in CATEGORIES]] for peak in peaks], dtype=float)
        factors = fit_columns(shapes, values.reshape(len(shapes), -1), names)
    factors = factors.reshape(values.shape[1], len(CATEGORIES), -1)
    totals = grid @ factors.sum(axis=1).T
    return [[to_polynomial(each) for each in factors[i]] for i in sorted(set(totals.argmax(axis=1).tolist()))]


def fit_job(job: FitJob, layers: int) -> dict[str, list[Any]]:
    """Return the moments of each stage (`fit_moments`) for models with `layers` blocks. Run it in its own process."""
    names, draw = job.byte_terms(), random.Random(f"{SEED} {job.is_sharded}")
    count = 13 if job.is_sharded else 10
    shapes = draw_shapes(job, 2 * len(names) if len(names) < len(SHARDED_TERMS) else count, draw)
    traces = [trace_shape(job, shape, layers) for shape in shapes]
    grid = evaluate_terms(grid_shapes(job))
    return {stage: fit_moments(traces, shapes, grid, names, stage) for stage in MEMORY_STAGES}
