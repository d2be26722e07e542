"""Record the planner's formulas for a browser, and the planner's results for a test: the page "Will it fit?".

`formulas.py` turns the traces of a training step into formulas for its memory. The page also needs the parts of the
planner that are formulas already: model state and communication. The optimizer is AdamW.
`workshop/site/static/planner.js` implements them, and a test compares both for the recorded cases.
"""

import itertools
import json
import random
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from bench.plan import planner, speed
from bench.plan.models import MODELS
from bench.plan.plan import select_rows, start_workers
from bench.plan.planner import Job, Planner, Row
from bench.plan.report import format_name
from bench.plan.speed import GPUS
from bench.plan.trace import MEMORY_STAGES
from measure.tracker import CATEGORIES, STATE
from nanoGPT.checkpoint.starting_point import PADDED_VOCAB
from nanoGPT.costs import ring_bytes
from nanoGPT.distributed.runtime import DTYPES
from nanoGPT.model import GPTConfig
from phase1_zero1 import buckets
from phase2_triton.kernels import linear_cross_entropy
from phase2_triton.kernels.core import KernelError
from workshop.site.recordings.formulas import SEED, SIZES, TERMS, FitJob, fit_job, trace_shape

DTYPE_NAMES = ("bfloat16", "float32")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LEFT_OUT = ({"fsdp_reshard_after_forward": False}, {"kernels": "loss"})  # other rows include these options
ROWS = [row for row in select_rows(max(SIZES["gpus"])) if row[1] not in LEFT_OUT]
ZERO2 = {"zero_stage": 2}
# Below this width, how the buckets of ZeRO-2 divide the model depends on the model; above, each matrix is one bucket.
SMALLEST_UNIFORM_WIDTH = 1600
NUM_SIMPLE_CASES, NUM_CASES = 200, 100  # of one micro-batch in the rows without further options; of all options
# The question of the page, as a case without a row.
ASKED = {"model": "gpt2-xl", "gpu": "a100-40", "dtype": "bfloat16", "block_size": 1024, "batch_size": 4, "gpus": 8}


def find_source(row: Row) -> Row:
    """Return the row whose traces a row shares.

    With one replica per node, a rank stores what it stores on one node. With CPU offload, a trace also counts the model
    state, which is on the host; the planner subtracts it.
    """
    others = {key: value for key, value in row[1].items() if key not in ("fsdp_shard_size", "fsdp_cpu_offload")}
    return row[0], others


def is_possible(row: Row, model: tuple[int, int]) -> bool:
    """Return whether the kernels of a row accept a model of this many heads and channels."""
    if row[0] != "phase2" and "kernels" not in row[1]:
        return True
    try:
        trace_shape(FitJob(row, "bfloat16", False, 1, (model,)), (*model, 256, 1, 1), 3)
        return True
    except KernelError:
        return False


def list_jobs(row: Row, models: Sequence[tuple[int, int]]) -> dict[str, FitJob]:
    """Return the jobs of a row by dtype, "1" or "N" ranks and micro-batches; with ZeRO-2, small models have their own.

    In phase 1 a rank always stores gradient buffers, so two micro-batches need the formulas of one. With one rank,
    ZeRO-2 is ZeRO-1, so it has no separate formulas.
    """
    jobs = {}
    for dtype, ranks, micro_batches in itertools.product(DTYPE_NAMES, "1N", (1, 2)):
        key, is_sharded = f"{dtype} {ranks} {micro_batches}", ranks == "N"
        if row[0] == "phase1" and micro_batches > 1:
            continue
        if row[1] != ZERO2:
            jobs[key] = FitJob(row, dtype, is_sharded, micro_batches, tuple(models))
        elif is_sharded:
            large = tuple(model for model in models if model[1] >= SMALLEST_UNIFORM_WIDTH)
            jobs[key] = FitJob(row, dtype, is_sharded, micro_batches, large)
            small = {name: sizes for name, (_, *sizes) in MODELS.items() if sizes[1] < SMALLEST_UNIFORM_WIDTH}
            for (name, (heads, C)), T in itertools.product(small.items(), SIZES["block_size"]):
                jobs[f"{key} {name} {T}"] = FitJob(row, dtype, is_sharded, micro_batches, ((heads, C),), (T,))
    return jobs


def record_rows(pool: Executor) -> list[dict[str, Any]]:
    """Return all rows with their formulas by the keys of `list_jobs`. `source` is the row that has the formulas."""
    shapes = {name: (heads, C) for name, (_, heads, C) in MODELS.items()}
    rows: list[dict[str, Any]] = []
    futures: list[Any] = []
    for row in ROWS:
        accepted = dict(zip(shapes, pool.map(is_possible, itertools.repeat(row), shapes.values()), strict=True))
        models = [shapes[name] for name, is_accepted in accepted.items() if is_accepted]
        cannot = [name for name, is_accepted in accepted.items() if not is_accepted]
        name, source = format_name({"phase": row[0], "options": row[1]}), ROWS.index(find_source(row))
        recorded = {"name": name, "phase": row[0], "options": row[1], "cannot": cannot, "source": source}
        rows.append({**recorded, "formulas": {}})
        if ROWS[source] == row:
            futures += [
                (rows[-1]["formulas"], key, pool.submit(fit_job, job, layers))
                for key, job in list_jobs(row, models).items()
                for layers in planner.TRACED_LAYERS
            ]
    for formulas, key, future in futures:  # for each key, first the model with fewer blocks
        formulas.setdefault(key, []).append(future.result())
    return rows


class Shared:
    """Lists in which equal parts of the formulas are stored once. A part is replaced by its number in its list."""

    def __init__(self) -> None:
        self.lists: dict[str, dict[str, int]] = {"polynomials": {}, "moments": {}}

    def store(self, kind: str, value: Any) -> int:
        """Return the number of a part in a list, which grows if the part is new."""
        return self.lists[kind].setdefault(json.dumps(value), len(self.lists[kind]))

    def store_formulas(self, moments: dict[str, Any]) -> list[list[int]]:
        """Return the result of `fit_job` as one list per stage, with numbers in place of polynomials and moments."""
        return [
            [self.store("moments", [self.store("polynomials", each) for each in moment]) for moment in moments[stage]]
            for stage in MEMORY_STAGES
        ]

    def read(self) -> dict[str, list[Any]]:
        """Return the lists."""
        return {kind: [json.loads(key) for key in parts] for kind, parts in self.lists.items()}


def draw_cases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return inputs of the page: the question of the page for every row, and inputs that are drawn at random."""
    draw = random.Random(SEED)
    simple = [i for i, row in enumerate(rows) if row["options"] != ZERO2 and row["source"] == i]
    cases = draw_some_cases(rows, simple, NUM_SIMPLE_CASES, (1,), draw)
    cases += draw_some_cases(rows, list(range(len(rows))), NUM_CASES, MICRO_BATCHES, draw)
    asked = [{"row": i, **ASKED, "micro_batches": 1} for i in range(len(rows))]
    return [case for case in asked if is_valid(rows, case)] + cases


def draw_some_cases(
    rows: list[dict[str, Any]], numbers: Sequence[int], count: int, micro_batches: Sequence[int], draw: random.Random
) -> list[dict[str, Any]]:
    """Draw `count` cases from the rows with these numbers, and from these numbers of micro-batches."""
    cases: list[dict[str, Any]] = []
    while len(cases) < count:
        row, model = numbers[draw.randrange(len(numbers))], draw.choice(list(MODELS))
        case = {"row": row, "model": model, "gpu": draw.choice(list(GPUS)), "dtype": draw.choice(DTYPE_NAMES)}
        case |= {name: draw.choice(values) for name, values in SIZES.items()}
        case["micro_batches"] = draw.choice(micro_batches)
        cases += [case] if is_valid(rows, case) else []
    return cases


def is_valid(rows: list[dict[str, Any]], case: dict[str, Any]) -> bool:
    """Return whether the row of a case accepts its model and its number of GPUs."""
    row = rows[case["row"]]
    has_replicas = case["gpus"] > speed.GPUS_PER_NODE
    return case["model"] not in row["cannot"] and (has_replicas or "fsdp_shard_size" not in row["options"])


def plan_case(case: dict[str, Any], pool: Executor) -> dict[str, Any]:
    """Return the planner's results for one case.

    Returns:
        state_bytes in the order of STATE, sent_bytes per rank and step, and peak_bytes.
    """
    row, (layers, heads, C) = ROWS[case["row"]], MODELS[case["model"]]
    shape = GPTConfig(layers, heads, C, case["block_size"], False, PADDED_VOCAB)
    job = Job(shape, GPUS[case["gpu"]], case["gpus"], case["micro_batches"], dtype=case["dtype"])
    plan = Planner(job, pool)
    batch_size = case["batch_size"]
    traffic = plan.extrapolate("traffic", row, batch_size)
    return {
        "state_bytes": [round(plan.extrapolate("state", row, batch_size)[name]) for name in STATE],
        "sent_bytes": round(sum(ring_bytes(kind, size, n) for (kind, n), size in traffic.items())),
        "peak_bytes": round(plan.peak_bytes(row, batch_size)),
    }


def pack_cases(cases: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return cases as the names of their fields and one list of values for each, which is shorter in JSON."""
    return {"fields": list(cases[0]), "values": [list(case.values()) for case in cases]}


def list_constants() -> dict[str, Any]:
    """Return the constants of the planner that the page's formulas need."""
    return {
        "GPUS_PER_NODE": speed.GPUS_PER_NODE,
        "GIB": speed.GIB,
        "HOST_GIB": planner.HOST_GIB,
        "ALIGN": buckets.ALIGN,
        "CHUNK_BYTES": linear_cross_entropy.CHUNK_BYTES,
        "VOCAB": PADDED_VOCAB,
        "TRACED_LAYERS": list(planner.TRACED_LAYERS),
        "ZERO1_BUCKET_BYTES": 25 * 2**20,
    }


def record() -> dict[str, Any]:
    """Return the recording: formulas of every row, the tables of the planner, and the planner's results for cases."""
    with start_workers() as pool:
        rows = record_rows(pool)
        cases = draw_cases(rows)
        with ThreadPoolExecutor(4) as threads:  # keeps the workers busy
            results = list(threads.map(plan_case, cases, itertools.repeat(pool)))
    shared = Shared()
    for row in rows:
        row["formulas"] = {key: list(map(shared.store_formulas, both)) for key, both in row["formulas"].items()}
    return {
        "terms": TERMS,
        "categories": list(CATEGORIES),
        "memory_stages": MEMORY_STAGES,
        "sizes": {**{name: list(values) for name, values in SIZES.items()}, "micro_batches": list(MICRO_BATCHES)},
        "dtype_bytes": {name: DTYPES[name].itemsize for name in DTYPE_NAMES},
        "models": MODELS,
        "gpus": {name: {"gib": gpu.gib} for name, gpu in GPUS.items()},
        "constants": list_constants(),
        "rows": rows,
        **shared.read(),
        "cases": pack_cases([{**case, **result} for case, result in zip(cases, results, strict=True)]),
    }
