"""Turn the planner's traces into formulas that a browser can evaluate, and record the planner's results for a test.

`bench.plan` traces a training step on fake tensors. The bytes and FLOPs of a step are sums of a few terms, such as
B T C or C^2, with constant factors. This module traces each row of the plan for many shapes and computes these factors.

- Memory: the formula of a stage is the maximum over its *moments*. A moment is a point of the step, for example just
  after the logits were computed. Only the moments that can be the maximum are kept.
- Time: every matrix product has a formula for its FLOPs and one for its bytes. The bytes of all other operators are one
  sum per stage.

The page also needs the parts of the planner that are formulas already: model state, communication and their time.
`book/static/will_it_fit.js` implements them, and a test compares both for the recorded cases.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import bench.plan.trace
from bench.matrix.cells import make_config
from bench.plan import planner, speed
from bench.plan.options import Row
from bench.plan.plan import MODELS, start_workers
from bench.plan.plan import ROWS as ALL_ROWS
from bench.plan.planner import Job, Planner
from bench.plan.report import format_name
from bench.plan.speed import GPUS, STAGES
from bench.plan.trace import MEMORY_STAGES, TracedStep, trace
from nanoGPT.checkpoint.weights import PADDED_VOCAB
from nanoGPT.distributed.runtime import DTYPES
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.memory.tracker import CATEGORIES, MemoryTracker, Totals
from nanoGPT.model import GPTConfig
from phase1_zero1 import buckets
from phase2_triton.kernels import linear_cross_entropy
from phase2_triton.kernels.core import KernelError

Shape = tuple[int, int, int, int, int]  # heads, C, T, B, ranks
Polynomial = list[list[float]]  # pairs of the number of a term and its factor

SIZES = {
    "block_size": (256, 512, 1024, 2048, 4096),
    "batch_size": (1, 2, 4, 8, 16, 32, 64, 128),
    "gpus": (1, 2, 4, 8, 16, 32, 64),
}
DTYPE_NAMES = ("bfloat16", "float32")
# Not ZeRO-2, whose memory depends on how the buckets divide the model; not CPU offload, which needs other formulas; and
# not two rows that the others include.
LEFT_OUT = ({"zero_stage": 2}, {"fsdp_reshard_after_forward": False}, {"kernels": "loss"})
ROWS = [row for row in ALL_ROWS if row[1] not in LEFT_OUT and "fsdp_cpu_offload" not in row[1]]
NUM_CASES = 200
SEED = 1
MAX_ERROR = 1e-9  # relative, of a formula against the traces; rows with padding in their buckets: PADDED_ERROR
PADDED_ERROR = 5e-3

# The terms of the formulas. C, h: channels and heads; T: tokens per sequence; B: sequences; N: ranks.
PARAMETER_TERMS = ("1", "C", "C C", "T C", "T")
BATCH_TERMS = ("B T", "B T C", "B T h")
FLOP_TERMS = ("B T C C", "B T T C")
SHARDED_TERMS = ("1/N", "C/N", "C C/N", "T C/N")
TERMS = (*PARAMETER_TERMS, *BATCH_TERMS, *FLOP_TERMS, *SHARDED_TERMS)
BYTE_TERMS = tuple(term for term in TERMS if term not in FLOP_TERMS)


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


def trace_shape(row: Row, shape: Shape, layers: int, dtype: str) -> TracedStep:
    """Trace a step of a model with `layers` blocks, and keep its moments.

    Raises:
        KernelError: a kernel of the row does not accept the model.
    """
    (phase, options), (heads, C, T, B, N) = row, shape
    fields = {"batch_size": B, "block_size": T, "dtype": dtype, "device": "cpu", "gradient_accumulation_steps": N}
    config = make_config(phase, Path("out"), **fields, optimizer="adamw", **options)
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
    rounded = [float(f"{factor:.9g}") for factor in factors]
    return [[i, int(f) if f == int(f) else f] for i, f in enumerate(rounded) if abs(f) > 1e-9]


def draw_shapes(models: Sequence[tuple[int, int]], is_sharded: bool, count: int, draw: random.Random) -> list[Shape]:
    """Draw shapes at random. They contain each model at least once, if `count` permits."""
    gpus = [n for n in SIZES["gpus"] if (n > 1) == is_sharded]
    order = itertools.cycle(draw.sample(models, len(models)))
    return [
        (*next(order), draw.choice(SIZES["block_size"]), draw.choice(SIZES["batch_size"]), draw.choice(gpus))
        for _ in range(count)
    ]


def grid_shapes(models: Sequence[tuple[int, int]], is_sharded: bool) -> list[Shape]:
    """Return every combination of sizes that the page offers."""
    gpus = [n for n in SIZES["gpus"] if (n > 1) == is_sharded]
    sizes = itertools.product(models, SIZES["block_size"], SIZES["batch_size"], gpus)
    return [(*model, T, B, N) for model, T, B, N in sizes]


def select_moments(traced: TracedStep, stage: str) -> list[tuple[str, list[int]]]:
    """Return the moments of a stage: the operator, and the bytes in the order of CATEGORIES."""
    assert isinstance(traced.memory, MomentTracker)
    moments = [(operator, totals) for part, operator, totals in traced.memory.moments if part == stage]
    return [(operator, [totals[name] for name in CATEGORIES]) for operator, totals in moments]


def fit_moments(traces: Sequence[TracedStep], shapes: list[Shape], grid: np.ndarray, stage: str) -> list[Any]:
    """Return the moments of a stage that can be its memory peak: for each, one polynomial per category."""
    moments_of = [select_moments(traced, stage) for traced in traces]
    counts = [Counter(operator for operator, _ in each) for each in moments_of]
    # Operators on buckets: their number depends on the number of buckets, and so on the shape.
    is_aligned = {operator: all(count[operator] == counts[0][operator] for count in counts) for operator in counts[0]}
    columns = [[values for operator, values in each if is_aligned.get(operator)] for each in moments_of]
    values = np.array(columns, dtype=float)  # (shapes, moments, categories)
    shapes_count, moments, categories = values.shape
    factors = fit_columns(shapes, values.reshape(shapes_count, -1), BYTE_TERMS).reshape(moments, categories, -1)
    totals = grid @ factors.sum(axis=1).T
    return [[to_polynomial(each) for each in factors[i]] for i in sorted(set(totals.argmax(axis=1).tolist()))]


def fit_products(traces: Sequence[TracedStep], shapes: list[Shape]) -> list[Any]:
    """Return the distinct matrix products: stage, efficiency, polynomials of FLOPs and bytes, and their number."""
    products = [traced.roofline.products for traced in traces]
    flops = np.array([[each.flops for each in row] for row in products])
    traffic = np.array([[each.traffic for each in row] for row in products])
    flop_factors = fit_columns(shapes, flops, ("B T", "B T C", *FLOP_TERMS))
    byte_factors = fit_columns(shapes, traffic, BYTE_TERMS)
    kinds: Counter[str] = Counter()
    found: dict[str, list[Any]] = {}
    for each, work, size in zip(products[0], flop_factors, byte_factors, strict=True):
        entry = [each.stage, each.efficiency, to_polynomial(work), to_polynomial(size)]
        kinds[str(entry)] += 1
        found[str(entry)] = entry
    return [[*entry, kinds[key]] for key, entry in found.items()]


def fit_row(row: Row, dtype: str, is_sharded: bool, layers: int, models: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the formulas of a row for models with `layers` blocks. Run it in a separate process.

    Returns:
        moments by stage (`fit_moments`), products, eager_bytes and compiled_bytes by stage, and kernels by stage, in
        the order of `models`.
    """
    draw = random.Random(f"{SEED} {is_sharded}")
    shapes = draw_shapes(models, is_sharded, 13 if is_sharded else 10, draw)
    names = [term for term in BYTE_TERMS if is_sharded or not term.endswith("/N")]
    traces = [trace_shape(row, shape, layers, dtype) for shape in shapes]
    grid = evaluate_terms(grid_shapes(models, is_sharded))
    formulas: dict[str, Any] = {"moments": {}, "eager_bytes": {}, "compiled_bytes": {}, "kernels": {}}
    with mock.patch(f"{__name__}.BYTE_TERMS", tuple(names)):
        for stage in MEMORY_STAGES:
            formulas["moments"][stage] = fit_moments(traces, shapes, grid, stage)
        for name, stage in itertools.product(("eager_bytes", "compiled_bytes"), STAGES):
            values = np.array([[getattr(traced.roofline, name)[stage]] for traced in traces])
            formulas[name][stage] = to_polynomial(fit_columns(shapes, values, names)[0])
        formulas["products"] = fit_products(traces, shapes)
    for stage in STAGES:
        by_model = {shape[1]: traced.roofline.kernels[stage] for traced, shape in zip(traces, shapes, strict=True)}
        kernels = [round(by_model.get(C, traces[0].roofline.kernels[stage])) for _, C in models]
        formulas["kernels"][stage] = kernels[0] if len(set(kernels)) == 1 else kernels
    return formulas


def is_possible(row: Row, model: tuple[int, int]) -> bool:
    """Return whether the kernels of a row accept a model of this many heads and channels."""
    if row[0] != "phase2" and "kernels" not in row[1]:
        return True
    try:
        trace_shape(row, (*model, 256, 1, 1), 3, "bfloat16")
        return True
    except KernelError:
        return False


def record_rows(pool: Executor) -> list[dict[str, Any]]:
    """Return all rows with their formulas, by dtype and by whether the model state can be sharded ("1" or "N")."""
    shapes = {name: (heads, C) for name, (_, heads, C) in MODELS.items()}
    kinds = list(itertools.product(DTYPE_NAMES, ("1", "N")))
    rows: list[dict[str, Any]] = []
    futures: list[Any] = []
    for row in ROWS:
        accepted = dict(zip(shapes, pool.map(is_possible, itertools.repeat(row), shapes.values()), strict=True))
        models = [shapes[name] for name, is_accepted in accepted.items() if is_accepted]
        cannot = [name for name, is_accepted in accepted.items() if not is_accepted]
        name = format_name({"phase": row[0], "options": row[1]})
        rows.append({"name": name, "phase": row[0], "options": row[1], "cannot": cannot, "formulas": {}})
        futures += [
            (rows[-1]["formulas"], f"{dtype} {ranks}", pool.submit(fit_row, row, dtype, ranks == "N", layers, models))
            for dtype, ranks in kinds
            for layers in planner.TRACED_LAYERS
        ]
    for formulas, key, future in futures:  # for each key, first the model with fewer blocks
        formulas.setdefault(key, []).append(future.result())
    return rows


def share_polynomials(value: Any, pool: dict[str, int]) -> Any:
    """Return formulas in which each polynomial is replaced by its number in `pool`, which grows."""
    if isinstance(value, dict):
        return {key: share_polynomials(item, pool) for key, item in value.items()}
    if isinstance(value, list):
        if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], int) for item in value):
            return pool.setdefault(json.dumps(value), len(pool))
        return [share_polynomials(item, pool) for item in value]
    return value


def draw_cases(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Draw inputs of the page at random."""
    draw = random.Random(SEED)
    cases: list[dict[str, Any]] = []
    while len(cases) < count:
        row, model = draw.randrange(len(rows)), draw.choice(list(MODELS))
        case = {"row": row, "model": model, "gpu": draw.choice(list(GPUS)), "dtype": draw.choice(DTYPE_NAMES)}
        case |= {name: draw.choice(values) for name, values in SIZES.items()}
        if model not in rows[row]["cannot"]:
            cases.append(case)
    return cases


def plan_case(case: dict[str, Any], pool: Executor) -> dict[str, Any]:
    """Return the planner's results for one case.

    Returns:
        state_bytes by category, sent_bytes per rank and step, peak_bytes, and eager and compiled: seconds per step.
    """
    row, (layers, heads, C) = ROWS[case["row"]], MODELS[case["model"]]
    shape = GPTConfig(layers, heads, C, case["block_size"], False, PADDED_VOCAB)
    plan = Planner(Job(shape, GPUS[case["gpu"]], case["gpus"], dtype=case["dtype"]), pool)
    batch_size = case["batch_size"]
    traffic = plan.extrapolate("traffic", row, batch_size)
    seconds = {
        name: plan.estimate_speed(row, batch_size, name == "compiled")["step_seconds"] for name in ("eager", "compiled")
    }
    return {
        "state_bytes": {name: round(size) for name, size in plan.extrapolate("state", row, batch_size).items()},
        "sent_bytes": round(sum(ring_bytes(kind, size, n) for (kind, n), size in traffic.items())),
        "peak_bytes": round(plan.peak_bytes(row, batch_size)),
        **{name: float(f"{value:.9g}") for name, value in seconds.items()},
    }


def list_constants() -> dict[str, Any]:
    """Return the constants of the planner that the page's formulas need."""
    names = ("MATMUL_EFFICIENCY", "MEMORY_EFFICIENCY", "LINK_EFFICIENCY", "LAUNCH_SECONDS", "HOP_SECONDS")
    constants = {name: getattr(speed, name) for name in (*names, "NODE_HOP_SECONDS", "GPUS_PER_NODE", "GIB")}
    constants |= {name: getattr(planner, name) for name in ("BUCKET_BYTES", "SCALAR_BYTES")}
    constants |= {"ALIGN": buckets.ALIGN, "CHUNK_BYTES": linear_cross_entropy.CHUNK_BYTES, "VOCAB": PADDED_VOCAB}
    return constants | {"ZERO1_BUCKET_BYTES": 25 * 2**20, "TRACED_LAYERS": list(planner.TRACED_LAYERS)}


def record() -> dict[str, Any]:
    """Return the recording: formulas of every row, the tables of the planner, and the planner's results for cases."""
    with start_workers() as pool:
        rows = record_rows(pool)
        cases = draw_cases(rows, NUM_CASES)
        with ThreadPoolExecutor(4) as threads:  # keeps the workers busy
            results = list(threads.map(plan_case, cases, itertools.repeat(pool)))
    polynomials: dict[str, int] = {}
    for row in rows:
        row["formulas"] = share_polynomials(row["formulas"], polynomials)
    return {
        "terms": TERMS,
        "categories": list(CATEGORIES),
        "sizes": {name: list(values) for name, values in SIZES.items()},
        "dtype_bytes": {name: DTYPES[name].itemsize for name in DTYPE_NAMES},
        "models": MODELS,
        "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
        "constants": list_constants(),
        "rows": rows,
        "polynomials": [json.loads(key) for key in polynomials],
        "cases": [{**case, **result} for case, result in zip(cases, results, strict=True)],
    }
