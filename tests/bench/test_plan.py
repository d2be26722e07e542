"""The planner: traces match real runs, extrapolations match traces, and speeds are near published measurements."""

import json
import os
import random
import signal
import sys
import time
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.matrix.cells import make_config, run_cell
from bench.plan import published
from bench.plan.inference import predict_inference
from bench.plan.plan import (
    ROWS,
    PlanConfig,
    find_largest_preset,
    main,
    plan_memory_by_gpus,
    resolve_shape,
    select_rows,
    start_workers,
)
from bench.plan.planner import (
    ADAMW_BYTES,
    HOST_BANDWIDTH,
    MAX_BATCH_SIZE,
    PCIE_BANDWIDTH,
    TRACED_LAYERS,
    Job,
    Planner,
    estimate_communication,
    exit_with_parent,
    extrapolate,
    extrapolate_peak,
    find_peak,
    loss_workspace,
    trace_row,
    usable_bytes,
)
from bench.plan.report import (
    explain_nothing_fits,
    format_memory_row,
    format_memory_table,
    format_name,
    format_plan,
    format_speed_row,
    format_speed_table,
    plot_memory,
    recommend,
)
from bench.plan.run import predict_run
from bench.plan.speed import (
    ATTENTION_EFFICIENCY,
    GIB,
    GPUS,
    MEMORY_EFFICIENCY,
    Communication,
    Gpu,
    Roofline,
    apply_launch_bound,
    collective_seconds,
    step_seconds,
)
from bench.plan.trace import MEMORY_STAGES, trace
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.memory.tracker import STATE
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from phase2_triton.kernels import attention
from tests.helpers.marks import mark_slow
from tests.helpers.programs import run_with_compiled_kernels, wait_until
from tests.helpers.training import train_all
from workshop.phases import find_package

SMALL = GPTConfig(2, 2, 32, 16, False, 80)
H100 = GPUS["h100"]
CHOICES: dict[str, dict[str, list[Any]]] = {
    "baseline": {"optimizer": ["adamw", "muon"]},
    "phase1": {"zero1_backend": ["flat"], "zero1_bucket_mb": [0.05, 25.0], "zero_stage": [1, 2]},
    "phase3": {
        "fsdp_wrap": ["block", "block", "size"],
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
    fields |= {"fsdp_min_num_params": 2000} if fields.get("fsdp_wrap") == "size" else {}
    return phase, draw.choice([2, 4]), fields


NARROW = {"n_layer": 3, "n_embd": 64, "block_size": 32, "batch_size": 2}
FIXED_CONFIGURATIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("phase1", 4, {**NARROW, "zero_stage": 2, "zero1_bucket_mb": 0.05}),
    ("phase1", 4, {**NARROW, "zero_stage": 2, "optimizer": "muon"}),
    ("phase1", 2, {**NARROW, "optimizer": "muon"}),
    ("phase3", 4, {**NARROW, "optimizer": "muon"}),
    ("phase3", 4, {**NARROW, "optimizer": "muon", "fsdp_activation_checkpointing": "full", "fsdp_shard_size": "2"}),
]


QUICK_CONFIGURATIONS = [*map(draw_configuration, range(3)), *FIXED_CONFIGURATIONS]
OTHER_CONFIGURATIONS = [*map(draw_configuration, range(3, 12))]


@pytest.mark.parametrize("ranks", [2, 4])
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
    train_all(ranks, [(find_package(phase), config) for (phase, _), config in zip(selected, configs, strict=True)])
    for (phase, fields), config in zip(selected, configs, strict=True):
        measured = run_cell(phase, ranks, config)  # reads the results
        planned = trace(config, GPTConfig.from_dict(vars(config)), ranks)
        assert planned.costs.state == measured.rank_0["state_bytes"], (phase, ranks, fields)
        # A thread of gloo may free a buffer late, so the minimum over the ranks is the memory that a step needs.
        peak = min(sum(each["memory"]["peak"].values()) for each in measured.ledger["ranks"])
        assert sum(planned.memory.peak.values()) == pytest.approx(peak, rel=0.02), (phase, ranks, fields)


@pytest.mark.parametrize("row", [*ROWS[::2], *(case for row in ROWS[1::2] for case in mark_slow((row,)))], ids=str)
@pytest.mark.heavy
def test_an_extrapolation_matches_the_full_trace(row):
    """Traces of 3 and 4 blocks predict the peak memory, the communication volume and the time of 7 blocks.

    The peak memory has a tolerance of 0.2%, because phase 1 pads its buckets.
    """
    traces = [trace_row(row, Job(replace(SMALL, n_layer=layers), H100, 4, 2), 3) for layers in TRACED_LAYERS]
    full_trace = trace_row(row, Job(replace(SMALL, n_layer=7), H100, 4, 2), 3)
    stages = extrapolate_peak([each.peaks for each in traces], 7)
    peak = max(sum(part.values()) for part in stages.values())
    assert peak == pytest.approx(max(sum(part.values()) for part in full_trace.peaks.values()), rel=0.002)
    for name in ("traffic", "state", "kernels", "eager", "compiled"):
        predicted = extrapolate([getattr(each, name) for each in traces], 7)
        assert sum(predicted.values()) == pytest.approx(sum(getattr(full_trace, name).values()), rel=0.005), name


@pytest.mark.parametrize(
    "row", [("baseline", {}), ("phase1", {}), ("phase1", {"zero_stage": 2}), ("phase3", {})], ids=str
)
@pytest.mark.heavy
def test_an_extrapolation_with_muon_matches_the_full_trace(row):
    """The planner traces Muon's update in full: its state, memory and time match the trace of a full step."""
    job = Job(replace(SMALL, n_layer=9), H100, 4, 2, "muon")
    planner, full_trace = Planner(job, InlineExecutor()), trace_row(row, job, 3)
    assert planner.extrapolate("state", row, 3) == pytest.approx(dict(full_trace.state), rel=0.005)
    peak = max(sum(part.values()) for part in full_trace.peaks.values())
    assert planner.peak_bytes(row, 3) == pytest.approx(peak, rel=0.01)
    for name in ("traffic", "kernels", "eager"):
        predicted = planner.extrapolate(name, row, 3)
        assert sum(predicted.values()) == pytest.approx(sum(getattr(full_trace, name).values()), rel=0.01), name


def test_an_all_to_all_between_nodes_uses_the_share_of_one_gpu():
    """In a ring a node sends once. In an all-to-all each of its 8 GPUs sends to other nodes."""
    assert collective_seconds(H100, "all-to-all", 1e9, 8) == collective_seconds(H100, "all-gather", 1e9, 8)
    within, between = (collective_seconds(H100, "all-to-all", 1e12, ranks) for ranks in (8, 16))
    assert between == pytest.approx(within * (15 / 16) / (7 / 8) * H100.link / (H100.network / 8), rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 8, *mark_slow(2, 4)])
@pytest.mark.parametrize("phase", ["phase1", "phase3"])
@pytest.mark.heavy
def test_the_trace_of_gpt2_124m_matches_the_formula(phase, ranks, tmp_path):
    """In a traced step of GPT-2 124M, model state, reduce-scatters and all-gathers match the formula exactly."""
    fields = {"batch_size": 1, "block_size": 64, "dtype": "float32", "device": "cpu"}
    shape = replace(resolve_shape(PlanConfig("gpt2")), block_size=64)
    traced = trace(make_config(phase, tmp_path, **fields, gradient_accumulation_steps=2 * ranks), shape, ranks)
    final, expected = traced.memory.snapshot(), traced.costs.state
    assert (final["parameters"], final["optimizer_state"]) == (expected["parameters"], expected["optimizer_state"])
    assert traced.memory.peak_of_part()["update"]["gradients"] == expected["gradients"]
    for (kind, n), size in traced.costs.traffic.items():
        if kind != "all-reduce" and n > 1:  # a trace leaves out the small all-reduces of ZeRO-1
            assert traced.traffic.rows[kind, n]["tensor_bytes"] == size, kind
    assert ranks == 1 or {"all-gather", "reduce-scatter"} <= {kind for kind, _ in traced.traffic.rows}


class InlineExecutor(Executor):
    """An executor that runs each function immediately, in this process."""

    def submit(self, function, /, *args, **kwargs):
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


@pytest.mark.heavy
def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(monkeypatch):
    """The largest micro-batch fits, and one more sequence does not. The upper limit is MAX_BATCH_SIZE."""
    planner = Planner(Job(SMALL, GPUS["t4"], 4), InlineExecutor())
    for row, expected in ((ROWS[0], 1), (ROWS[1], 50), (("phase3", {"fsdp_activation_checkpointing": "full"}), 7)):
        space = planner.peak_bytes(row, expected) + 1
        monkeypatch.setattr("bench.plan.planner.usable_bytes", lambda gpu, space=space: space)
        largest = planner.largest_batch_size(row)
        assert planner.peak_bytes(row, largest) <= space < planner.peak_bytes(row, largest + 1)
    monkeypatch.setattr("bench.plan.planner.usable_bytes", lambda gpu: 1000)
    assert planner.largest_batch_size(ROWS[1]) == 0
    monkeypatch.setattr("bench.plan.planner.usable_bytes", usable_bytes)
    assert planner.largest_batch_size(ROWS[1]) == MAX_BATCH_SIZE


def test_the_search_for_the_largest_micro_batch_needs_few_traces(monkeypatch):
    """Where memory hardly depends on the batch size, or not at all, the search traces at most 16 of 128 sizes."""
    monkeypatch.setattr("bench.plan.planner.usable_bytes", lambda gpu: 100)
    for limit in (1, 2, 77, 127):
        sizes: list[int] = []

        def measure(_planner: Planner, _row: object, size: int, limit: int = limit, sizes: list[int] = sizes) -> float:
            sizes.append(size)
            return 100 if size <= limit else 101

        monkeypatch.setattr(Planner, "peak_bytes", measure)
        assert Planner(Job(SMALL, H100, 1), InlineExecutor()).largest_batch_size(ROWS[0]) == limit
        assert len(set(sizes)) <= 16


def test_the_largest_preset_that_fits_is_found(monkeypatch):
    """If no row fits, the search returns the largest preset below the model that fits; None if none does."""
    job = Job(resolve_shape(PlanConfig("70b")), H100, 1)
    rows = [{"phase": "phase2", "options": {}, "cannot": "wide"}, {"phase": "phase3", "options": {}, "total_bytes": 9}]
    for limit, expected in ((7e9, "6.7b"), (1e6, None), (1e12, "66b")):
        monkeypatch.setattr(
            Planner, "peak_bytes", lambda self, *_, limit=limit: usable_bytes(H100) * self.params / limit
        )
        assert find_largest_preset(rows, job, 1, InlineExecutor()) == expected


TRACE_PHASE2 = """
from bench.plan.planner import Job, trace_row
from bench.plan.speed import GPUS
from nanoGPT.model import GPTConfig
print(trace_row(("phase2", {}), Job(GPTConfig(2, 2, 32, 16, False, 80), GPUS["h100"], 1), 3))
"""


def test_a_trace_applies_the_kernels_where_they_are_compiled():
    """With TRITON_INTERPRET=0 and no GPU, a trace of phase 2 gives the same results as with interpreted kernels."""
    done = run_with_compiled_kernels("-c", TRACE_PHASE2)
    row, job = ("phase2", {}), Job(SMALL, H100, 1)
    assert done.stdout == f"{trace_row(row, job, 3)}\n", done.stderr
    assert (
        trace_row(("phase2", {"kernels": "none"}), job, 3).kernels["forward"]
        != trace_row(row, job, 3).kernels["forward"]
    )


@pytest.mark.heavy
def test_the_state_of_gpt2_matches_the_formula():
    """For N = 8, the state is 16P for DDP, 16P/N for FSDP, and 8P + 8P/N plus padding for ZeRO-1."""
    shape = resolve_shape(PlanConfig("gpt2"))
    params = sum(p.numel() for p in GPT(shape).parameters())
    planner = Planner(Job(shape, H100, 8), InlineExecutor())
    assert planner.params == params
    for row, expected in ((ROWS[0], 16 * params), (ROWS[1], 9 * params), (ROWS[4], 2 * params)):
        state = extrapolate([each.state for each in planner.get_traces(row, 1)], shape.n_layer)
        assert sum(state.values()) == pytest.approx(expected, rel=1e-4)


def test_the_speed_follows_from_the_trace():
    """On 16 GPUs, the step time is the time of computation plus waiting. Tokens per second and MFU follow from it."""
    planner, row = Planner(Job(SMALL, H100, 16, 3), InlineExecutor()), ROWS[0]
    speed = planner.estimate_speed(row, 5, compiled=True)
    parts = extrapolate([each.compiled for each in planner.get_traces(row, 5)], SMALL.n_layer)
    computation_seconds = 3 * (parts["forward"] + parts["backward"]) + parts["update"]
    assert speed["step_seconds"] - speed["waiting_seconds"] == pytest.approx(computation_seconds)
    assert speed["waiting_seconds"] > 0
    assert speed["tokens_per_second"] == pytest.approx(16 * 3 * 5 * SMALL.block_size / speed["step_seconds"])
    flops = speed["tokens_per_second"] * SMALL.flops_per_token()
    assert speed["mfu"] == pytest.approx(flops / 16 / GPUS["h100"].peak)
    one_gpu = Planner(Job(SMALL, H100, 1, 3), InlineExecutor())
    assert one_gpu.estimate_speed(row, 5, compiled=True)["waiting_seconds"] == 0
    direct = trace_row(row, Job(replace(SMALL, n_layer=TRACED_LAYERS[0]), H100, 1), 5)
    assert one_gpu.get_traces(row, 5)[0].eager["forward"] == pytest.approx(direct.eager["forward"])


def test_an_offloaded_step_runs_adamw_on_the_host():
    """With CPU offload, the GPU stores no state. The 8 ranks of a node share the host bandwidth for AdamW."""
    planner, row = Planner(Job(SMALL, H100, 16), InlineExecutor()), ("phase3", {"fsdp_cpu_offload": True})
    assert [planner.peak_memory(row, 1)[name] for name in STATE] == [0, 0, 0]
    speed = planner.estimate_speed(row, 1, compiled=True)
    parts = extrapolate([each.compiled for each in planner.get_traces(row, 1)], SMALL.n_layer)
    computation_seconds = parts["forward"] + parts["backward"] + ADAMW_BYTES * planner.params / 16 * 8 / HOST_BANDWIDTH
    assert speed["step_seconds"] - speed["waiting_seconds"] == pytest.approx(computation_seconds)


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
    """For an H100, an eager run is planned with all kernels and a compiled one with the loss; for a CPU with none."""
    fields = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 75, "device": "cpu"}
    cpu = replace(H100, gib=1.0)
    every = {"phase2": "all", "phase3": "triton"}[phase]

    def predict(kernels, gpu, is_compiled):
        config = make_config(phase, tmp_path, **fields, kernels=kernels, compile=is_compiled)
        return predict_run(config, phase, 2, gpu)

    for expected, gpu, is_compiled in ((every, H100, False), ("loss", H100, True), ("none", cpu, False)):
        assert predict("auto", gpu, is_compiled) == predict(expected, gpu, is_compiled)
    job = Job(SMALL, H100, 1)
    workspaces = {kernels: loss_workspace((phase, {"kernels": kernels}), job, 3) for kernels in ("auto", "loss")}
    assert workspaces["auto"] == workspaces["loss"] > 0


def test_the_workspace_of_the_fused_loss_counts_at_the_head():
    """The workspace adds to the memory of the head, and to no other part. Expected values are computed by hand."""
    peaks = {part: {"parameters": 8, "other": 20 if part == "update" else 9} for part in MEMORY_STAGES}
    assert [find_peak(peaks, size, ROWS[0])["other"] for size in (0, 10, 12)] == [20, 20, 21]
    job = Job(SMALL, H100, 1)
    sizes = {kernels: loss_workspace(("phase2", {"kernels": kernels}), job, 3) for kernels in ("loss", "gelu", "none")}
    assert sizes["gelu"] == sizes["none"] == 0 == loss_workspace(("phase3", {}), job, 3)
    assert sizes["loss"] == loss_workspace(("phase2", {}), job, 3) > 2 * 3 * SMALL.block_size * SMALL.vocab_size


def test_the_tables_use_the_right_units():
    """Tables show memory in GiB, communication in GB, step time in ms and waiting in percent."""
    categories = ("parameters", "optimizer_state", "gradients", "gathered", "activations", "other")
    row = {"bytes": {name: (i + 1) * GIB for i, name in enumerate(categories)}, "state_bytes": {"parameters": 6 * GIB}}
    row |= {"total_bytes": 21 * GIB, "fits": True, "largest_batch_size": 128, "sent_bytes_per_step": 7e9}
    assert " ".join(format_memory_row(row).split()) == "6.00 21.00 = 3.00 3.00 4.00 5.00 6.00 yes 128+ 7.00"
    speed = {"step_seconds": 2.0, "waiting_seconds": 0.5, "tokens_per_second": 1e3, "mfu": 0.4, "days": 3, "cost": 9}
    row["speed"] = {"compiled": speed, "eager": {**speed, "tokens_per_second": 900.0}}
    assert " ".join(format_speed_row(row).split()) == "128+ 2,000 25% 1,000 40% 900 3.00 9"
    large = {"phase": "phase3", "options": {}, "total_bytes": 120, "state_bytes": {"parameters": 100}}
    result = {"rows": [large], "gpus": 4, "usable_bytes": 30, "largest_preset": None}
    assert "needs 14 GPUs of this type. No smaller MODEL fits" in explain_nothing_fits(result)


@pytest.mark.heavy
def test_a_plan_is_consistent(capsys, tmp_path, monkeypatch):
    """The table and the JSON output contain the same plan. --tokens and --price add the time and the cost of a run."""
    monkeypatch.setattr("bench.plan.planner.MAX_BATCH_SIZE", 1)  # the search would trace each row a second time
    config = PlanConfig("gpt2", 16, "t4", block_size=64, n_layer=3, n_embd=96, n_head=3, tokens=1e9, price=2.0)
    main(replace(config, json=True))
    plan = json.loads(capsys.readouterr().out)
    rows, text = select_rows(16), format_plan(plan)
    names = [format_name({"phase": phase, "options": options}) for phase, options in rows]
    assert len(rows) == len(ROWS) + 1 and all(name in text for name in names)
    assert "Simplest row that fits: baseline." in text and "12.4 GiB usable per GPU" in text  # 0.92 x 14.6 - 1
    speed_header = next(line for line in text.splitlines() if line.endswith("cost"))
    memory_header = format_memory_table(plan["rows"])[0]
    startup_header = next(line for line in text.splitlines() if line.endswith("resume (s)"))
    assert {len(line) for line in text.splitlines() if line.startswith(("phase", "baseline"))} == {
        len(speed_header),
        len(memory_header),
        len(startup_header),
    }
    checkpoints = [row["startup"]["checkpoint_bytes"] for row in plan["rows"]]
    assert checkpoints == pytest.approx([12 * plan["parameters"]] * len(rows), rel=0.01)
    assert [format_name(row) for row in plan["rows"]] == names and select_rows(12) == select_rows(8) == ROWS
    assert plan["rows"][0]["sent_bytes_per_step"] == round(2 * 4 * plan["parameters"] * 15 / 16)
    for row in plan["rows"]:
        assert row["fits"] and row["largest_batch_size"] == 1 and row["total_bytes"] == sum(row["bytes"].values())
        for speed in row["speed"].values():
            assert 0 < speed["mfu"] < 1 and speed["waiting_seconds"] >= 0
            hours = 1e9 / speed["tokens_per_second"] / 3600
            assert speed["days"] == pytest.approx(hours / 24) and speed["cost"] == pytest.approx(hours * 16 * 2)
    (offloaded,) = [row for row in plan["rows"] if "fsdp_cpu_offload" in row["options"]]
    assert offloaded["host_bytes"] == 8 * sum(offloaded["state_bytes"].values()) and "GiB of model state with" in text
    assert sum(row["host_bytes"] for row in plan["rows"]) == offloaded["host_bytes"]
    state = {row["phase"]: sum(row["state_bytes"].values()) for row in plan["rows"]}
    assert state["phase3"] < state["phase1"] < state["baseline"]
    small = {**plan, "usable_bytes": 1000, "rows": [{**row, "fits": False, "speed": None} for row in plan["rows"]]}
    assert "the model state needs" in explain_nothing_fits(small) and "Nothing fits" in format_plan(small)
    plot_memory(tmp_path / "plan.png", plan, {"baseline": {1: 2e9, 2: 2e9}, "phase3": {1: 2e9, 2: 1e9}})
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_shape_that_no_kernel_supports_is_reported_in_its_row():
    """If heads are too wide for the kernels, the row of phase 2 gives the reason. Other rows are planned as usual."""
    planner = Planner(Job(replace(SMALL, n_head=1, n_embd=256), GPUS["t4"], 1), InlineExecutor())
    rows = [planner.plan_row(row, 1) for row in (ROWS[3], ROWS[0])]
    assert (
        rows[0]["cannot"] == "causal_attention: heads have 256 channels, and the kernel supports up to 128"
        and not rows[0]["fits"]
    )
    assert "cannot run: causal_attention: heads have 256 channels" in format_memory_table(rows)[1] and rows[1]["fits"]
    assert rows[1]["largest_batch_size"] == MAX_BATCH_SIZE
    assert rows[1]["speed"]["eager"] == planner.estimate_speed(ROWS[0], MAX_BATCH_SIZE, compiled=False)
    plan = {"rows": rows, "gpus": 1, "usable_bytes": 1e12, "largest_preset": "gpt2"}
    assert recommend(plan) == "Simplest row that fits: baseline."
    rows[1].update(fits=False, phase="phase3")
    assert "Nothing fits: phase3 comes closest" in recommend(plan) and "MODEL=gpt2, with phase3." in recommend(plan)


def test_the_figure_leaves_out_rows_that_cannot_run(monkeypatch):
    """The figure does not plan a row that no kernel supports, for any number of GPUs."""
    monkeypatch.setattr(Planner, "submit_traces", lambda *_: [])
    monkeypatch.setattr(Planner, "peak_bytes", lambda *_: 1.0)
    config = PlanConfig("gpt2", n_head=1)
    memory = plan_memory_by_gpus(config, {"rows": [{"phase": "phase2", "options": {}, "cannot": "wide"}]})
    assert "phase2" not in memory and "phase3" in memory


def test_the_fastest_row_is_named_only_if_it_is_clearly_faster():
    """Rows within 25% are about as fast as each other. Rows that are slower compiled than eager are listed."""

    def make_row(phase: str, compiled: float, eager: float) -> dict[str, Any]:
        rates = {"compiled": compiled, "eager": eager}
        numbers = {"step_seconds": 1.0, "waiting_seconds": 0.5, "mfu": 0.5, "days": None, "cost": None}
        speed = {mode: {**numbers, "tokens_per_second": rate} for mode, rate in rates.items()}
        return {"phase": phase, "options": {}, "fits": True, "largest_batch_size": 1, "speed": speed}

    close = [make_row("baseline", 100.0, 90.0), make_row("phase1", 110.0, 120.0)]
    text = recommend({"rows": close})
    assert text.endswith("baseline. It is about as fast as the fastest row, within the planner's error of 25%.")
    assert "Fastest row: phase1." in recommend({"rows": [close[0], make_row("phase1", 90.0, 130.0)]})
    assert format_speed_table(close)[-1].startswith("Slower compiled than eager: phase1.")
    assert len(format_speed_table(close[:1])) == 2


def test_the_time_of_a_trace_does_not_grow_with_the_tokens():
    """The fused loss of 8 million tokens is traced as one chunk, not as 1,500 chunks."""
    row, job = ("phase3", {"kernels": "loss"}), Job(replace(SMALL, block_size=2**16, vocab_size=50304), H100, 1)
    started = time.process_time()
    trace_row(row, job, 2)
    short_seconds, started = time.process_time() - started, time.process_time()
    trace_row(row, job, MAX_BATCH_SIZE)
    assert time.process_time() - started < 2 * short_seconds + 0.5


@pytest.mark.heavy
def test_a_stopped_plan_ends_immediately(capsys, monkeypatch):
    """Ctrl-C ends the workers immediately and prints one word. A worker exits when its parent exits."""
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

    class KilledParent:
        def join(self) -> None:
            pass

    exit_codes: list[int] = []
    monkeypatch.setattr("multiprocessing.parent_process", KilledParent)
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    exit_with_parent()
    wait_until(lambda: exit_codes)
    assert exit_codes == [1]


def test_a_roofline_counts_bytes_and_flops():
    """An embedding reads only the rows that it uses, and an expanded tensor only its real elements.

    In a compiled pass, intermediate results cost nothing. Attention has more FLOPs in its backward pass than in its
    forward pass. Expected values are computed by hand.
    """
    slow_gpu = Gpu(1.0, 1e12, 1 / MEMORY_EFFICIENCY, 1.0, 1.0, 1e12)  # one byte takes one second
    table, ids, column, x = torch.ones(1000, 8), torch.arange(3), torch.ones(10, 1), torch.ones(50)
    with torch.no_grad():
        with Roofline(slow_gpu) as roofline:
            torch.nn.functional.embedding(ids, table)
        assert roofline.eager["forward"] == roofline.compiled["forward"] == pytest.approx(2 * 4 * 3 * 8)
        with Roofline(slow_gpu) as roofline:
            column.expand(10, 7).neg()
        assert roofline.eager["forward"] == pytest.approx(4 * 10 + 4 * 70)
        with Roofline(slow_gpu) as roofline:
            result = x.neg().neg()
    assert roofline.eager["forward"] == pytest.approx(4 * x.nbytes) and roofline.kernels["forward"] == 2
    assert roofline.compiled["forward"] == pytest.approx(x.nbytes + result.nbytes)
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    with Roofline(Gpu(1.0, 1 / ATTENTION_EFFICIENCY, 1e30, 1.0, 1.0, 1.0)) as roofline:  # one FLOP takes one second
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward, backward = (each.flops for each in attention.cost(1, 2, 16, 8, 2))
    assert (roofline.eager["forward"], roofline.eager["backward"]) == pytest.approx((forward, backward))
    assert backward > 2 * forward


@pytest.mark.heavy
def test_speed_is_near_published_runs(capsys):
    """The predicted speed is within 25% of every published run."""
    published.main(write=False)
    lines = capsys.readouterr().out.splitlines()[1:]
    errors = [float(line.rsplit(maxsplit=1)[1].rstrip("%")) for line in lines]
    assert len(errors) == 6 and max(map(abs, errors)) <= 25, lines


def test_a_step_waits_for_exposed_communication():
    """A step waits for communication that takes longer than the computation, otherwise only for the last collective."""
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5}
    assert step_seconds(parts, {}, {}, micro_batches=3) == 9.5
    assert step_seconds(parts, {}, {"backward": Communication(1.5, 0.1)}) == pytest.approx(3.6)
    per_micro_batch, per_step = {"forward": Communication(4.0, 0.1)}, {"backward": Communication(5.0, 0.1)}
    assert step_seconds(parts, per_micro_batch, per_step, 2) == pytest.approx(2 * 4.0 + 2.0 + 5.0 + 0.5)
    traffic = {("all-gather", 8): 8e9, ("reduce-scatter", 8): 8e9, ("all-reduce", 8): 8}
    per_micro_batch, per_step = estimate_communication(("phase3", {}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], True)
    row = ("phase3", {"fsdp_cpu_offload": True})
    offloaded = estimate_communication(row, traffic, 2 * 10**9, 10, 1, GPUS["h100"], True)
    added_seconds = offloaded[0]["forward"].seconds - per_micro_batch["forward"].seconds
    assert added_seconds == pytest.approx(4 * 2e9 / 8 / PCIE_BANDWIDTH)
    assert offloaded[1]["backward"].seconds > per_step["backward"].seconds > per_micro_batch["forward"].seconds > 0
    assert per_step["forward"].seconds == 0 and per_step["backward"].min_exposed < per_step["backward"].seconds / 5
    eager = estimate_communication(("phase1", {}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], False)[1]["forward"]
    compiled = estimate_communication(("phase1", {}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], True)[1]["forward"]
    assert eager.exposed_seconds(1e9) < compiled.exposed_seconds(1e9) == compiled.seconds
    short_parts, kernels = dict.fromkeys(parts, 0.001), {"forward": 0, "backward": 1000, "update": 10}
    # Python needs 7 microseconds per kernel of an eager step.
    assert apply_launch_bound(short_parts, kernels) == {**short_parts, "backward": pytest.approx(1000 * 7e-6)}
    slow_gpu, fast_gpu = GPUS["t4"], GPUS["h100"]
    assert collective_seconds(slow_gpu, "all-reduce", 1e9, 8) > 10 * collective_seconds(fast_gpu, "all-reduce", 1e9, 8)
    assert collective_seconds(fast_gpu, "all-gather", 0, 1024) == pytest.approx(896 * 3e-6 + 128 * 12e-6)
    all_ranks, one_rank = (
        collective_seconds(fast_gpu, "all-reduce", 1e9, 16, one_per_node=one) for one in (False, True)
    )
    assert 7 < one_rank / all_ranks < 9  # with one_per_node, eight rings share the network of a node
    assert collective_seconds(fast_gpu, "all-reduce", 0, 8) == pytest.approx(2 * 7 * 3e-6)
    row = ("phase3", {"fsdp_shard_size": "8"})
    hybrid = estimate_communication(row, {("all-reduce", 2): 1e9}, 1, 1, 1, fast_gpu, True)[1]
    assert hybrid["backward"].seconds == collective_seconds(fast_gpu, "all-reduce", 1e9, 2, one_per_node=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu=h1000"], "unknown.*h100"),
        (["--gpu=A100"], "did you mean a100-"),
        (["--model=gpt3"], "unknown.*gpt2"),
        (["--gpus=0"], "--gpus=0 is out of range: use a value from 1 to 1024"),
        (["--gpus=2000"], "from 1 to 1024"),
        (["--n_embd=30"], "not a multiple of --n_head"),
        (["--batch_size=-1"], "from 1 to 128"),
        (["--batch_size=200"], "from 1 to 128"),
        (["--tokens=nan"], "above 0"),
        (["--tokens=0"], "above 0"),
        (["--price=2"], "needs --tokens"),
        (["--plot=/nowhere/plan.png"], "directory"),
        (["--plot=/tmp"], "is a directory: use a file"),
        (["--plot=/proc/plan.png"], "cannot be written"),
        (["--plot=plan.xyz"], "ends in .png"),
    ],
)
def test_wrong_requests_are_refused_with_one_sentence(words, message):
    """An unknown GPU or model, or an invalid number, is refused. The error says what would work."""
    with pytest.raises(ConfigError, match=message):
        resolve_shape(command_line(PlanConfig, words))


def test_inference_is_planned_for_each_way():
    """20 billion parameters on two GPUs of 40 GB: tp comes first; without room for tp's weights, offload or nothing."""
    gpu = GPUS["a100-40"]
    shape = resolve_shape(PlanConfig(model="20b", gpus=2, gpu="a100-40"))
    found = predict_inference(shape, gpu, 2, 1, "bfloat16")
    ways, params = found["ways"], shape.count_params()
    assert found["choice"] == "tp" and all(way["fits"] for way in ways.values())
    assert ways["fsdp"]["network_bytes_per_round"] == params  # 2 bytes, half of them from the other rank
    assert ways["tp"]["weights_bytes"] == pytest.approx(params, rel=1e-3)
    assert ways["tp"]["tokens_per_second"] > ways["fsdp"]["tokens_per_second"] > ways["offload"]["tokens_per_second"]
    alone = predict_inference(shape, gpu, 1, 1, "bfloat16")
    assert alone["choice"] == "offload" and not alone["ways"]["fsdp"]["fits"] and "tp" not in alone["ways"]
    assert alone["ways"]["offload"]["host_bytes"] == 2 * params
    assert predict_inference(shape, gpu, 3, 1, "bfloat16")["choice"] == "fsdp"  # 64 heads
    assert predict_inference(shape, gpu, 2, 64, "bfloat16")["choice"] is None
    cache = 2 * 44 * 1024 * 6144 * 2  # keys and values of 44 blocks
    assert ways["fsdp"]["cache_bytes"] == cache == 2 * ways["tp"]["cache_bytes"]
