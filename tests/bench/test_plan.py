"""The planner: traces match real runs, extrapolations match traces, and speeds are near published measurements."""

import json
import os
import random
import sys
import time
from concurrent.futures import Executor, Future
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest

from bench.matrix.cells import make_config, run_cell
from bench.plan import cache, planner
from bench.plan.plan import (
    MAX_BLOCKS,
    ROWS,
    PlanConfig,
    find_largest,
    main,
    make_large_shape,
    resolve_shape,
    select_rows,
    start_workers,
)
from bench.plan.planner import (
    MAX_BATCH_SIZE,
    TRACED_LAYERS,
    Job,
    Planner,
    TraceSummary,
    estimate_loss_workspace,
    estimate_usable_bytes,
    extrapolate_peak,
    find_peak,
    trace_row,
)
from bench.plan.report import (
    explain_nothing_fits,
    format_memory_table,
    format_name,
    format_plan,
)
from bench.plan.run import predict_run
from bench.plan.speed import (
    GPUS,
)
from bench.plan.trace import MEMORY_STAGES, trace
from nanoGPT.costs import count_gpt2_params
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from tests.helpers.marks import mark_slow

SMALL = GPTConfig(2, 2, 32, 16, False, 80)
H100 = GPUS["h100"]
CHOICES: dict[str, dict[str, list[Any]]] = {
    "baseline": {"optimizer": ["adamw", "muon"]},
    "phase1": {"zero1_backend": ["flat"], "zero1_bucket_mb": [0.05, 25.0], "zero_stage": [1, 2]},
    "phase3": {
        "fsdp_wrap": ["block", "block", "2000"],
        "fsdp_reshard_after_forward": [True, False],
        "fsdp_shard_size": ["all", "2"],
        "fsdp_activation_checkpointing": ["none", "selective", "full"],
        "fsdp_sync_every_micro_batch": [False, True],
        "optimizer": ["adamw", "muon"],
    },
}


def draw_configuration(seed: int) -> tuple[str, int, dict[str, Any]]:
    """Draw a phase, a number of ranks, and fields of a configuration at random."""
    draw = random.Random(seed)
    phase = draw.choice(["baseline", "phase1", "phase3", "phase3"])
    fields = {name: draw.choice(values) for name, values in CHOICES[phase].items()}
    fields |= {"n_layer": draw.choice([1, 2, 3]), "n_embd": draw.choice([32, 64]), "block_size": draw.choice([16, 32])}
    fields |= {"batch_size": draw.choice([1, 3]), "dtype": draw.choice(["float32", "bfloat16"])}
    return phase, draw.choice([2, 4]), fields


NARROW = {"n_layer": 3, "n_embd": 64, "block_size": 32, "batch_size": 2}
FIXED_CONFIGURATIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("phase1", 4, {**NARROW, "zero_stage": 2, "zero1_bucket_mb": 0.05}),
    ("phase1", 4, {**NARROW, "zero_stage": 2, "optimizer": "muon"}),
    ("phase1", 2, {**NARROW, "optimizer": "muon"}),
    ("phase3", 4, {**NARROW, "optimizer": "muon", "fsdp_activation_checkpointing": "full", "fsdp_shard_size": "2"}),
]


QUICK_CONFIGURATIONS = [*map(draw_configuration, range(3)), *FIXED_CONFIGURATIONS]
OTHER_CONFIGURATIONS = [*map(draw_configuration, range(3, 12))]


@pytest.mark.parametrize("ranks", [4, *mark_slow(2)])
@pytest.mark.parametrize(
    "configurations", [QUICK_CONFIGURATIONS, *mark_slow(OTHER_CONFIGURATIONS)], ids=["quick", "others"]
)
def test_a_trace_matches_the_memory_of_a_run(configurations, ranks, tmp_path):
    """For twelve random configurations, and for Muon and ZeRO-2, the traced state of rank 0 is exact.

    The traced peak memory is within 2% of the peak that the ledger measures in a run.
    """
    selected = [(phase, fields) for phase, count, fields in configurations if count == ranks]
    configs = []
    for i, (phase, fields) in enumerate(selected):
        fields = {"dataset": "shakespeare_char", "device": "cpu", "n_head": 2, "vocab_size": 80, **fields}
        configs.append(make_config(phase, tmp_path / str(i), **fields, max_iters=3, eval_iters=1, eval_interval=100))
    for (phase, fields), config in zip(selected, configs, strict=True):
        measured = run_cell(phase, ranks, config)
        planned = trace(config, GPTConfig.from_dict(vars(config)), ranks)
        assert planned.costs.state == measured.rank_0["state_bytes"], (phase, ranks, fields)
        # A thread of gloo may free a buffer late, so the minimum over the ranks is the memory that a step needs.
        peak = min(sum(each["memory"]["peak"].values()) for each in measured.ledger["ranks"])
        assert sum(planned.memory.peak.values()) == pytest.approx(peak, rel=0.02), (phase, ranks, fields)


READERS = {
    "traffic": attrgetter("traffic"),
    "state": attrgetter("state"),
    "kernels": TraceSummary.kernels,
    "eager": lambda traced: traced.seconds(traced.eager, H100, 3),
    "compiled": lambda traced: traced.seconds(traced.compiled, H100, 3),
}


def find_traced_peak(traced, batch_size):
    """Return the bytes at the memory peak of a traced step."""
    return max(sum(totals.values()) for totals in traced.peaks(batch_size).values())


QUICK_ROWS = [ROWS[0], ROWS[2], ROWS[-1]]  # DDP, ZeRO-2, and FSDP with several options


@pytest.fixture(autouse=True)
def use_new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test trace for itself, and write nothing into `out`."""
    monkeypatch.setattr(cache, "FOLDER", tmp_path)


class InlineExecutor(Executor):
    """An executor that runs each function immediately, in this process."""

    def submit(self, function, /, *args, **kwargs):
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(monkeypatch):
    """The largest micro-batch fits, and one more sequence does not. The upper limit is MAX_BATCH_SIZE."""
    planner = Planner(Job(SMALL, GPUS["t4"], 4), InlineExecutor())
    for row, expected in ((ROWS[0], 1), (ROWS[1], 50), (("phase3", {"fsdp_activation_checkpointing": "full"}), 7)):
        space = planner.peak_bytes(row, expected) + 1
        monkeypatch.setattr("bench.plan.planner.estimate_usable_bytes", lambda gpu, space=space: space)
        largest = planner.largest_batch_size(row)
        assert planner.peak_bytes(row, largest) <= space < planner.peak_bytes(row, largest + 1)
    monkeypatch.setattr("bench.plan.planner.estimate_usable_bytes", lambda gpu: 1000)
    assert planner.largest_batch_size(ROWS[1]) == 0
    monkeypatch.setattr("bench.plan.planner.estimate_usable_bytes", estimate_usable_bytes)
    assert planner.largest_batch_size(ROWS[1]) == MAX_BATCH_SIZE


@pytest.mark.parametrize(
    "row",
    [("phase3", {"fsdp_cpu_offload": True, "kernels": "loss"}), *mark_slow((("phase1", {"zero_stage": 2}),))],
    ids=str,
)
def test_a_run_is_predicted_as_in_a_plan(row, tmp_path):
    """Preflight, gate and suite predict the memory and the time of a plan: offload, workspace and options count."""
    shape = replace(SMALL, n_layer=TRACED_LAYERS[0], vocab_size=5000)
    fields = {name: value for name, value in vars(shape).items() if name in TrainConfig.__dataclass_fields__}
    fields |= {"batch_size": 3, "gradient_accumulation_steps": 8, "dtype": "bfloat16", "device": "cpu"}
    predicted = predict_run(make_config(row[0], tmp_path, **fields, **row[1]), row[0], 4, H100)
    planner = Planner(Job(shape, H100, 4, 2), InlineExecutor())
    assert predicted.peak_bytes == planner.peak_bytes(row, 3)
    assert predicted.step_seconds == pytest.approx(planner.estimate_speed(row, 3, compiled=False)["step_seconds"])


@pytest.mark.parametrize("phase", ["phase2", mark_slow(("phase3",))[0]])
def test_kernels_auto_is_planned_as_its_selection(phase, tmp_path):
    """For an H100, an eager run is planned with all kernels and a compiled one with the loss; for a CPU with none.

    A compiled run without the loss kernel needs less memory for its logits than an eager one.
    """
    fields = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 16,
        "vocab_size": 75,
        "device": "cpu",
        "batch_size": 3,
        "ledger": False,
    }
    cpu = replace(H100, gib=1.0)
    every = {"phase2": "all", "phase3": "triton"}[phase]

    def predict(kernels, gpu, is_compiled):
        config = make_config(phase, tmp_path, **fields, kernels=kernels, compile=is_compiled)
        return predict_run(config, phase, 2, gpu)

    for expected, gpu, is_compiled in ((every, H100, False), ("loss", H100, True), ("none", cpu, False)):
        assert predict("auto", gpu, is_compiled) == predict(expected, gpu, is_compiled)
    eager, compiled = (predict("none", H100, is_compiled).peak_bytes for is_compiled in (False, True))
    assert eager - compiled == 10 * 3 * 16 * 75  # bytes per logit


def test_the_workspace_of_the_fused_loss_counts_at_the_head():
    """The workspace adds to the memory of the head, and to no other part. Expected values are computed by hand.

    With CPU offload, only gradients that are accumulated in full stay on the GPU.
    """
    peaks = {part: {"parameters": 8, "gradients": 0, "other": 20 if part == "update" else 9} for part in MEMORY_STAGES}
    assert [find_peak(peaks, size, ROWS[0], 1)["other"] for size in (0, 10, 12)] == [20, 20, 21]
    peaks["head"]["gradients"], offload = 12, {"fsdp_cpu_offload": True}
    found = [find_peak(peaks, 0, ("phase3", offload), count) for count in (1, 2)]
    found.append(find_peak(peaks, 0, ("phase3", {**offload, "fsdp_sync_every_micro_batch": True}), 2))
    assert [sum(peak.values()) for peak in found] == [20, 21, 20]
    job = Job(SMALL, H100, 1)
    sizes = {
        kernels: estimate_loss_workspace(("phase2", {"kernels": kernels}), job, 3)
        for kernels in ("loss", "gelu", "none")
    }
    assert sizes["gelu"] == sizes["none"] == 0 == estimate_loss_workspace(("phase3", {}), job, 3)
    by_default = estimate_loss_workspace(("phase2", {}), job, 3)
    assert sizes["loss"] == by_default > 2 * 3 * SMALL.block_size * SMALL.vocab_size


@pytest.mark.heavy
def test_a_plan_is_consistent(capsys, monkeypatch):
    """The table and the JSON output contain the same plan. --tokens adds the time of a run."""
    monkeypatch.setattr("bench.plan.planner.MAX_BATCH_SIZE", 1)
    config = PlanConfig("gpt2", 16, "t4", block_size=64, n_layer=3, n_embd=96, n_head=3, tokens=1e9)
    main(replace(config, json=True))
    plan = json.loads(capsys.readouterr().out)
    rows, text = select_rows(16), format_plan(plan)
    assert len(rows) == len(ROWS) + 1 and all(format_name(row) in text for row in plan["rows"])
    assert [(row["phase"], row["options"]) for row in plan["rows"]] == rows
    assert "Simplest row that fits: baseline." in text and "12.4 GiB usable per GPU" in text  # 0.92 x 14.6 - 1
    assert plan["rows"][0]["sent_bytes_per_step"] == round(2 * 4 * plan["parameters"] * 15 / 16)
    for row in plan["rows"]:
        assert row["fits"] and row["largest_batch_size"] == 1 and row["total_bytes"] == sum(row["bytes"].values())
        for speed in row["speed"].values():
            assert speed["days"] == pytest.approx(1e9 / speed["tokens_per_second"] / 86400)
    (offloaded,) = [row for row in plan["rows"] if row["host_bytes"]]
    assert offloaded["host_bytes"] == 8 * sum(offloaded["state_bytes"].values()) and "GiB of model state with" in text
    small = {**plan, "usable_bytes": 1000, "rows": [{**row, "fits": False, "speed": None} for row in plan["rows"]]}
    assert "the model state needs" in explain_nothing_fits(small) and "Nothing fits" in format_plan(small)


def test_a_shape_that_no_kernel_supports_is_reported_in_its_row():
    """If heads are too wide for the kernels, the row of phase 2 gives the reason. Other rows are planned as usual."""
    planner = Planner(Job(replace(SMALL, n_head=1, n_embd=256), GPUS["t4"], 1), InlineExecutor())
    rows = [planner.plan_row(row, 1) for row in (ROWS[3], ROWS[0])]
    assert (
        rows[0]["cannot"]
        == "--n_embd and --n_head make heads of 256 channels, and the attention kernel supports up to 128"
        and not rows[0]["fits"]
    )
    assert "cannot run: --n_embd and --n_head make heads of 256" in format_memory_table(rows)[1] and rows[1]["fits"]


def test_a_second_plan_traces_nothing(tmp_path):
    """A plan with another GPU uses the traces of the first one. A damaged file is traced again, and results of other
    code are deleted."""
    (tmp_path / "other code").mkdir()
    job, row, no_pool = Job(SMALL, H100, 2), ROWS[1], cast(Any, None)
    first = Planner(job, InlineExecutor()).plan_row(row, 1)
    (folder,) = tmp_path.iterdir()
    assert Planner(job, no_pool).plan_row(row, 1) == first
    assert Planner(replace(job, gpu=GPUS["t4"]), no_pool).plan_row(row, 1)["state_bytes"] == first["state_bytes"]
    file, *_ = folder.iterdir()
    file.write_bytes(file.read_bytes()[:9])
    for changed in (job, replace(job, gpus=4), replace(job, dtype="float32")):
        with pytest.raises(AttributeError, match="submit"):
            Planner(changed, no_pool).plan_row(row, 1)
    assert Planner(job, InlineExecutor()).plan_row(row, 1) == first


@pytest.mark.heavy
def test_a_stopped_plan_ends_immediately(capsys, monkeypatch):
    """Ctrl-C ends the workers immediately and prints one word."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt), report_errors(), start_workers() as pool:
        pool.submit(os.getpid).result()
        for _ in range(9):
            pool.submit(time.sleep, 1000)
        workers = list(pool._processes.values())
        raise KeyboardInterrupt
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "\nstopped\n"
    for worker in workers:
        worker.join(100)
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu=h1000"], "unknown.*h100"),
        (["--gpus=2000"], "--gpus=2000 is out of range: use a value from 1 to 1024"),
        (["--n_embd=30"], "not a multiple of --n_head"),
        (["--tokens=-1"], "--tokens=-1 is out of range: use a number above 0"),
    ],
)
def test_wrong_requests_are_refused_with_one_sentence(words, message):
    """An unknown GPU or model, or an invalid number, is refused. The error says what would work."""
    with pytest.raises(ConfigError, match=message):
        resolve_shape(command_line(PlanConfig, words))


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 9), (0.999, 8), (1e-6, 0)])
def test_the_search_finds_the_largest_model(fraction, expected, monkeypatch):
    """The search returns the largest model that fits, and 0 if none does."""
    needed = {k: 16 * count_gpt2_params(make_large_shape(k, 8)) for k in range(1, MAX_BLOCKS + 1)}
    monkeypatch.setattr(Planner, "peak_bytes", lambda self, *_: needed[self.shape.n_layer])
    monkeypatch.setattr(planner, "estimate_usable_bytes", lambda _: fraction * needed[9])
    job = Job(make_large_shape(1, 8), H100, 1)
    assert find_largest(("baseline", {}), job, 1, InlineExecutor()) == expected


MUON_ROWS = [(("phase1", {"zero_stage": 2}), "muon"), (("phase3", {}), "muon")]


@pytest.mark.parametrize(
    ("row", "optimizer"),
    [
        *((row, "adamw") for row in QUICK_ROWS),
        MUON_ROWS[0],
        *mark_slow(MUON_ROWS[1], *((row, "adamw") for row in ROWS if row not in QUICK_ROWS)),
    ],
    ids=str,
)
@pytest.mark.heavy
def test_an_extrapolation_matches_the_full_trace(row, optimizer):
    """Traces of 3 and 4 blocks for every batch size predict the memory, the communication and the time of a full model.

    The memory of 3 blocks with 3 sequences is exact. That of the full model has a tolerance of 0.2%, because phase 1
    pads its buckets. With Muon, the full update is traced alone. The compiled time is then not compared: it is 2% too
    long for this small model.
    """
    layers, tolerance = (9, 0.01) if optimizer == "muon" else (7, 0.002)
    job = Job(replace(SMALL, n_layer=layers), H100, 4, 2, optimizer)
    planner, full_trace = Planner(job, InlineExecutor()), trace_row(row, job, 3)
    traces, small = planner.get_traces(row), replace(job, shape=replace(SMALL, n_layer=TRACED_LAYERS[0]))
    assert traces[0].peaks(3) == trace_row(row, small, 3).peaks(3)
    stages = extrapolate_peak(
        [each.peaks(3) for each in traces], layers, planner.trace_update(row), row[1].get("zero_stage") == 2
    )
    peak = max(sum(part.values()) for part in stages.values())
    assert peak == pytest.approx(find_traced_peak(full_trace, 3), rel=tolerance)
    for name in READERS.keys() - ({"compiled"} if optimizer == "muon" else set()):
        read = READERS[name]
        total = sum(planner.extrapolate(read, row).values())
        assert total == pytest.approx(sum(read(full_trace).values()), rel=max(tolerance, 0.005)), name
