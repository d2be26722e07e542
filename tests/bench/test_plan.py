"""The planner: what it traces is what a run holds, what it extends is what it would trace, and its speed is near to
what others have measured."""

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

from bench.matrix.cells import config_of, run_cell
from bench.plan import published
from bench.plan.plan import ROWS, PlanConfig, by_gpus, main, processes, rows_for, shape_of
from bench.plan.planner import (
    ADAMW,
    HOST,
    LAYERS,
    MOST,
    PCIE,
    Planner,
    capacity,
    end_with_parent,
    exchanges,
    extended,
    in_blocks,
    traced,
)
from bench.plan.report import (
    advice,
    describe,
    memory_line,
    memory_table,
    name_of,
    nothing_fits,
    plot,
    speed_line,
    speed_table,
)
from bench.plan.speed import (
    ATTENTION,
    GIB,
    GPUS,
    MEMORY,
    Exchange,
    Gpu,
    Roofline,
    collective_seconds,
    step_seconds,
    waiting,
)
from bench.plan.trace import MOMENTS, trace
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.memory.tracker import STATE
from nanoGPT.model import GPT, GPTConfig
from phase2_triton.kernels import attention
from tests.helpers.programs import wait_until

SMALL = GPTConfig(2, 2, 32, 16, False, 80)
CHOICES: dict[str, dict[str, list[Any]]] = {
    "baseline": {},
    "phase1": {"zero1_backend": ["flat"], "zero1_bucket_mb": [0.05, 25.0]},
    "phase3": {
        "fsdp_wrap": ["block", "block", "size"],
        "fsdp_reshard_after_forward": [True, False],
        "fsdp_shard_size": ["all", "2"],
        "fsdp_activation_checkpointing": ["none", "selective", "full"],
        "fsdp_sync_every_micro_batch": [False, True],
    },
}


def drawn(seed: int) -> tuple[str, int, dict[str, Any]]:
    """A phase, a number of ranks, and words of a configuration, at random."""
    draw = random.Random(seed)
    phase = draw.choice(["baseline", "phase1", "phase3", "phase3"])
    words = {name: draw.choice(values) for name, values in CHOICES[phase].items()}
    words |= {"n_layer": draw.choice([1, 2, 3]), "n_embd": draw.choice([32, 64]), "block_size": draw.choice([16, 32])}
    words |= {"batch_size": draw.choice([1, 3]), "dtype": draw.choice(["float32", "bfloat16"])}
    words |= {"fsdp_min_num_params": 2000} if words.get("fsdp_wrap") == "size" else {}
    return phase, draw.choice([2, 4]), words


@pytest.mark.parametrize("seed", range(12))
def test_a_trace_holds_what_a_run_holds(seed, tmp_path):
    """For twelve configurations at random: rank 0's state is traced to the byte, and the peak of a rank's memory to 5
    percent of what the ledger counts in a run."""
    phase, ranks, words = drawn(seed)
    words = {"dataset": "shakespeare_char", "device": "cpu", "n_head": 2, "vocab_size": 80, **words}
    config = config_of(phase, tmp_path / "run", **words, max_iters=3, eval_iters=1, eval_interval=100)
    found = run_cell(phase, ranks, config)
    planned = trace(config, GPTConfig.of(vars(config)), ranks)
    assert planned.costs.state == found.rank_0["state_bytes"], (phase, ranks, words)
    # A thread of gloo's may let go of a buffer late: what is needed is the least that a rank had.
    held = min(sum(each["memory"]["peak"].values()) for each in found.ledger["ranks"])
    assert sum(planned.memory.peak.values()) == pytest.approx(held, rel=0.05), (phase, ranks, words)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.heavy
def test_what_is_extended_is_what_would_be_traced(row):
    """From 3 and 4 blocks to 7: the peak of the whole trace to two thousandths (phase 1 pads its buckets), its traffic,
    and its time."""
    few = [traced(row, replace(SMALL, n_layer=layers), 4, 3, 2) for layers in LAYERS]
    full = traced(row, replace(SMALL, n_layer=7), 4, 3, 2)
    held = sum(extended([each.held for each in few], 7).values())
    assert held == pytest.approx(max(sum(part.values()) for part in full.held.values()), rel=0.002)
    for name in ("traffic", "state", "kernels", "eager", "compiled"):
        found = in_blocks([getattr(each, name) for each in few], 7)
        assert sum(found.values()) == pytest.approx(sum(getattr(full, name).values()), rel=0.005), name


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("phase", ["phase1", "phase3"])
@pytest.mark.heavy
def test_gpt2_124m_keeps_and_sends_what_the_formula_says(phase, ranks, tmp_path):
    """What a traced step of GPT-2 124M keeps, and its reduce-scatters and gatherings, to the byte."""
    words = {"batch_size": 1, "block_size": 64, "dtype": "float32", "device": "cpu"}
    shape = replace(shape_of(PlanConfig("gpt2")), block_size=64)
    found = trace(config_of(phase, tmp_path, **words, gradient_accumulation_steps=2 * ranks), shape, ranks)
    left, expected = found.memory.snapshot(), found.costs.state
    assert (left["parameters"], left["optimizer_state"]) == (expected["parameters"], expected["optimizer_state"])
    assert found.memory.peak_of_part()["update"]["gradients"] == expected["gradients"]
    for (kind, n), size in found.costs.traffic.items():
        if kind != "all-reduce" and n > 1:  # what ZeRO-1's ranks tell each other is left out of a trace
            assert found.traffic.rows[kind, n]["tensor_bytes"] == size, kind
    assert ranks == 1 or {"all-gather", "reduce-scatter"} <= {kind for kind, _ in found.traffic.rows}


class Here(Executor):
    """Does at once what it is given."""

    def submit(self, function, /, *args, **kwargs):
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


@pytest.mark.heavy
def test_the_largest_micro_batch_is_the_largest(monkeypatch):
    """One sequence more is traced not to fit; with more space than any needs, the plan's limit is told."""
    planner = Planner(SMALL, "t4", 4, 1, Here())
    for row in (ROWS[1], ("phase3", {"fsdp_activation_checkpointing": "full"})):
        for wanted in (7,) if row == ROWS[1] else (1, 50):
            space = planner.total(row, wanted) + 1
            monkeypatch.setattr("bench.plan.planner.capacity", lambda gpu, space=space: space)
            found = planner.largest(row)
            assert planner.total(row, found) <= space < planner.total(row, found + 1)
    monkeypatch.setattr("bench.plan.planner.capacity", lambda gpu: 1000)
    assert planner.largest(ROWS[1]) == 0
    monkeypatch.setattr("bench.plan.planner.capacity", capacity)
    assert planner.largest(ROWS[1]) == MOST


@pytest.mark.heavy
def test_state_is_that_of_the_formula_for_gpt2():
    """16P for DDP, 16P/N for FSDP, 8P + 8P/N for ZeRO-1 with what its buckets are filled up with, at N = 8."""
    shape = shape_of(PlanConfig("gpt2"))
    params = sum(p.numel() for p in GPT(shape).parameters())
    planner = Planner(shape, "h100", 8, 1, Here())
    assert planner.params == params
    for row, expected in ((ROWS[0], 16 * params), (ROWS[1], 9 * params), (ROWS[3], 2 * params)):
        state = in_blocks([each.state for each in planner.slices(row, 1)], shape.n_layer)
        assert sum(state.values()) == pytest.approx(expected, rel=1e-4)


def test_the_speed_is_that_of_the_trace():
    """A step on 16 GPUs is what is computed and what is waited for; its tokens and its MFU are those of the model."""
    planner, row = Planner(SMALL, "h100", 16, 3, Here()), ROWS[0]
    found = planner.speed(row, 5, compiled=True)
    parts = in_blocks([each.compiled for each in planner.slices(row, 5)], SMALL.n_layer)
    busy = 3 * (parts["forward"] + parts["backward"]) + parts["update"]
    assert found["step_seconds"] - found["waiting_seconds"] == pytest.approx(busy) and found["waiting_seconds"] > 0
    assert found["tokens_per_second"] == pytest.approx(16 * 3 * 5 * SMALL.block_size / found["step_seconds"])
    flops = found["tokens_per_second"] * GPT(SMALL).flops_per_token()
    assert found["mfu"] == pytest.approx(flops / 16 / GPUS["h100"].peak)
    alone = Planner(SMALL, "h100", 1, 3, Here())
    assert alone.speed(row, 5, compiled=True)["waiting_seconds"] == 0
    once = traced(row, replace(SMALL, n_layer=LAYERS[0]), 1, 5, 1)
    assert alone.slices(row, 5)[0].eager["forward"] == pytest.approx(once.eager["forward"])


def test_what_an_offloaded_step_takes():
    """No state on the GPU; AdamW runs at the rate of the host's memory, which the eight ranks of a node share."""
    planner, row = Planner(SMALL, "h100", 16, 1, Here()), ("phase3", {"fsdp_cpu_offload": True})
    assert [planner.held(row, 1)[name] for name in STATE] == [0, 0, 0]
    found = planner.speed(row, 1, compiled=True)
    parts = in_blocks([each.compiled for each in planner.slices(row, 1)], SMALL.n_layer)
    busy = parts["forward"] + parts["backward"] + ADAMW * planner.params / 16 * 8 / HOST
    assert found["step_seconds"] - found["waiting_seconds"] == pytest.approx(busy)


def test_what_the_fused_loss_takes_counts_at_the_head():
    """By hand: its workspace is there beside what the head holds, and at no other part's peak."""
    peaks = {part: {"parameters": 8, "other": 20 if part == "update" else 9} for part in MOMENTS}
    assert extended([peaks, peaks], 7)["other"] == 20 and extended([peaks, peaks], 7, workspace=10)["other"] == 20
    assert extended([peaks, peaks], 7, workspace=12)["other"] == 21


def test_the_units_of_the_tables():
    """By hand: GiB of memory, GB that are sent, ms of a step, and the part of it that is waited for."""
    held = ("parameters", "optimizer_state", "gradients", "gathered", "activations", "other")
    row = {"bytes": {name: (i + 1) * GIB for i, name in enumerate(held)}, "state_bytes": {"parameters": 6 * GIB}}
    row |= {"total_bytes": 21 * GIB, "fits": True, "largest_batch_size": 128, "sent_bytes_per_step": 7e9}
    assert " ".join(memory_line(row).split()) == "6.00 21.00 = 3.00 3.00 4.00 5.00 6.00 yes 128+ 7.00"
    speed = {"step_seconds": 2.0, "waiting_seconds": 0.5, "tokens_per_second": 1e3, "mfu": 0.4, "days": 3, "cost": 9}
    row["speed"] = {"compiled": speed, "eager": {**speed, "tokens_per_second": 900.0}}
    assert " ".join(speed_line(row).split()) == "128+ 2,000 25% 1,000 40% 900 3.00 9"
    large = {"phase": "phase3", "options": {}, "total_bytes": 120, "state_bytes": {"parameters": 100}}
    assert "needs 14 GPUs" in nothing_fits({"rows": [large], "gpus": 4, "usable_bytes": 30})


@pytest.mark.heavy
def test_a_plan(capsys, tmp_path):
    """A model fits, the table says so, JSON is the same plan, and a token count takes time and costs."""
    config = PlanConfig("gpt2", 16, "t4", block_size=64, n_layer=3, n_embd=96, n_head=3, tokens=1e9, price=2.0)
    main(replace(config, json=True))
    found = json.loads(capsys.readouterr().out)
    rows, text = rows_for(16), describe(found)
    names = [name_of({"phase": phase, "options": options}) for phase, options in rows]
    assert len(rows) == len(ROWS) + 1 and all(name in text for name in names)
    assert "The simplest that fits: baseline." in text and "12.4 GiB of each for tensors" in text  # 0.92 x 14.6 - 1
    days, sizes = next(line for line in text.splitlines() if line.endswith("cost")), memory_table(found["rows"])
    assert {len(line) for line in text.splitlines() if line.startswith(("phase", "baseline"))} == {
        len(days),
        len(sizes[0]),
    }
    assert [name_of(row) for row in found["rows"]] == names and rows_for(12) == rows_for(8) == ROWS
    assert found["rows"][0]["sent_bytes_per_step"] == round(2 * 4 * found["parameters"] * 15 / 16)
    for row in found["rows"]:
        assert row["fits"] and row["largest_batch_size"] > 8 and row["total_bytes"] == sum(row["bytes"].values())
        for speed in row["speed"].values():
            assert 0 < speed["mfu"] < 1 and speed["waiting_seconds"] >= 0
            hours = 1e9 / speed["tokens_per_second"] / 3600
            assert speed["days"] == pytest.approx(hours / 24) and speed["cost"] == pytest.approx(hours * 16 * 2)
    (offloaded,) = [row for row in found["rows"] if "fsdp_cpu_offload" in row["options"]]
    assert offloaded["host_bytes"] == 8 * sum(offloaded["state_bytes"].values()) and "GiB a node" in text
    assert sum(row["host_bytes"] for row in found["rows"]) == offloaded["host_bytes"]
    state = {row["phase"]: sum(row["state_bytes"].values()) for row in found["rows"]}
    assert state["phase3"] < state["phase1"] < state["baseline"]
    small = {**found, "usable_bytes": 1000, "rows": [{**row, "fits": False, "speed": None} for row in found["rows"]]}
    assert "the state alone needs" in nothing_fits(small) and "Nothing fits" in describe(small)
    plot(tmp_path / "plan.png", found, {"baseline": {1: 2e9, 2: 2e9}, "phase3": {1: 2e9, 2: 1e9}})
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_what_no_kernel_takes_is_told_in_its_row():
    """Heads wider than the kernels': phase 2 says so, in the table and in JSON, and the rest is planned without it."""
    planner = Planner(replace(SMALL, n_head=1, n_embd=256), "t4", 1, 1, Here())
    lines = [planner.line(row, 1) for row in (ROWS[2], ROWS[0])]
    assert lines[0]["cannot"] == "causal_attention: heads are 256 wide, above 128" and not lines[0]["fits"]
    assert "cannot run: causal_attention: heads are 256 wide" in memory_table(lines)[1] and lines[1]["fits"]
    found = {"rows": lines, "gpus": 1, "usable_bytes": 1e12}
    assert advice(found) == "The simplest that fits: baseline."
    lines[1].update(fits=False, phase="phase3")
    assert "Nothing fits: phase3 comes nearest" in advice(found)


def test_a_picture_leaves_out_what_cannot_run(monkeypatch):
    """A row of the plan that no kernel takes is not asked for on any number of GPUs."""
    monkeypatch.setattr(Planner, "start", lambda *_: [])
    monkeypatch.setattr(Planner, "total", lambda *_: 1.0)
    config = PlanConfig("gpt2", n_head=1)
    drawn = by_gpus(config, {"rows": [{"phase": "phase2", "options": {}, "cannot": "wide"}]})
    assert "phase2" not in drawn and "phase3" in drawn


def test_the_fastest_is_named_where_it_clearly_is():
    """Rows that are 20 percent apart are about as fast; and what compiling makes slower is told."""

    def row(phase: str, compiled: float, eager: float) -> dict[str, Any]:
        rates = {"compiled": compiled, "eager": eager}
        numbers = {"step_seconds": 1.0, "waiting_seconds": 0.5, "mfu": 0.5, "days": None, "cost": None}
        speed = {mode: {**numbers, "tokens_per_second": rate} for mode, rate in rates.items()}
        return {"phase": phase, "options": {}, "fits": True, "largest_batch_size": 1, "speed": speed}

    near = [row("baseline", 100.0, 90.0), row("phase1", 110.0, 120.0)]
    assert advice({"rows": near}).endswith("baseline. It is about as fast as the fastest: within the 25% by which a "
                                           "plan may be off.")  # fmt: skip
    assert "The fastest: phase1." in advice({"rows": [near[0], row("phase1", 90.0, 130.0)]})
    assert speed_table(near)[-1].startswith("Slower compiled than eager: phase1,")
    assert len(speed_table(near[:1])) == 2


def test_the_time_of_a_trace_does_not_grow_with_the_tokens():
    """The fused loss of 8 million tokens is traced as one chunk, not as 1,500."""
    started = time.process_time()
    traced(("phase3", {"kernels": "loss"}), replace(SMALL, block_size=2**16, vocab_size=50304), 1, 2, 1)
    few, started = time.process_time() - started, time.process_time()
    traced(("phase3", {"kernels": "loss"}), replace(SMALL, block_size=2**16, vocab_size=50304), 1, MOST, 1)
    assert time.process_time() - started < 2 * few + 0.5


@pytest.mark.heavy
def test_a_plan_that_is_stopped_waits_for_nobody(capsys, monkeypatch):
    """Ctrl-C ends the workers at once and is told in a word; a worker ends with its parent."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt), report_errors(), processes() as pool:
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

    class Killed:
        def join(self) -> None:
            pass

    ended: list[int] = []
    monkeypatch.setattr("multiprocessing.parent_process", Killed)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    end_with_parent()
    wait_until(lambda: ended)
    assert ended == [1]


def test_what_a_roofline_counts():
    """Bytes by hand: of a table its rows, of an expanded tensor what there is, of a pass what outlives it; and the
    arithmetic of attention, which is more in its backward."""
    slow = Gpu(1.0, 1e12, 1 / MEMORY, 1.0, 1.0)  # a byte takes a second
    table, ids, column, x = torch.ones(1000, 8), torch.arange(3), torch.ones(10, 1), torch.ones(50)
    with torch.no_grad():
        with Roofline(slow) as found:
            torch.nn.functional.embedding(ids, table)
        assert found.eager["forward"] == found.compiled["forward"] == pytest.approx(2 * 4 * 3 * 8)
        with Roofline(slow) as found:
            column.expand(10, 7).neg()
        assert found.eager["forward"] == pytest.approx(4 * 10 + 4 * 70)
        with Roofline(slow) as found:
            kept = x.neg().neg()
    assert found.eager["forward"] == pytest.approx(4 * x.nbytes) and found.kernels["forward"] == 2
    assert found.compiled["forward"] == pytest.approx(x.nbytes + kept.nbytes)
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    with Roofline(Gpu(1.0, 1 / ATTENTION, 1e30, 1.0, 1.0)) as found:  # a FLOP takes a second
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward, backward = (each.flops for each in attention.cost(1, 2, 16, 8, 2))
    assert (found.eager["forward"], found.eager["backward"]) == pytest.approx((forward, backward))
    assert backward > 2 * forward


@pytest.mark.heavy
def test_speed_near_published_runs(capsys):
    """Every published run is met within 25 percent."""
    published.main(write=False)
    lines = capsys.readouterr().out.splitlines()[1:]
    off = [float(line.rsplit(maxsplit=1)[1].rstrip("%")) for line in lines]
    assert len(off) == 6 and max(map(abs, off)) <= 25, lines


def test_a_step_waits_for_what_nothing_hides():
    """Communication longer than what hides it is waited for; else the last collective is."""
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5}
    assert step_seconds(parts, {}, {}, micro_batches=3) == 9.5
    assert step_seconds(parts, {}, {"backward": Exchange(1.5, 0.1)}) == pytest.approx(3.6)
    assert step_seconds(parts, {"forward": Exchange(4.0, 0.1)}, {"backward": Exchange(5.0, 0.1)}, 2) == pytest.approx(
        2 * 4.0 + 2.0 + 5.0 + 0.5
    )
    traffic = {("all-gather", 8): 8e9, ("reduce-scatter", 8): 8e9, ("all-reduce", 8): 8}
    every, once = exchanges(("phase3", {}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], True)
    away = exchanges(("phase3", {"fsdp_cpu_offload": True}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], True)
    assert away[0]["forward"].seconds - every["forward"].seconds == pytest.approx(4 * 2e9 / 8 / PCIE)
    assert away[1]["backward"].seconds > once["backward"].seconds > every["forward"].seconds > 0
    assert once["forward"].seconds == 0 and once["backward"].last < once["backward"].seconds / 5
    first = exchanges(("phase1", {}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], False)[1]["forward"]
    compiled = exchanges(("phase1", {}), traffic, 2 * 10**9, 10, 1, GPUS["h100"], True)[1]["forward"]
    assert first.exposed(1e9) < compiled.exposed(1e9) == compiled.seconds
    short, kernels = dict.fromkeys(parts, 0.001), {"forward": 0, "backward": 1000, "update": 10}
    assert waiting(short, kernels) == {**short, "backward": pytest.approx(1000 * 7e-6)}  # for Python
    slow, fast = GPUS["t4"], GPUS["h100"]
    assert collective_seconds(slow, "all-reduce", 1e9, 8) > 10 * collective_seconds(fast, "all-reduce", 1e9, 8)
    assert collective_seconds(fast, "all-gather", 0, 1024) == pytest.approx(896 * 3e-6 + 128 * 12e-6)
    together, apart = (collective_seconds(fast, "all-reduce", 1e9, 16, apart=apart) for apart in (False, True))
    assert 7 < apart / together < 9  # eight rings share the node's network
    assert collective_seconds(fast, "all-reduce", 0, 8) == pytest.approx(2 * 7 * 3e-6)
    hybrid = exchanges(("phase3", {"fsdp_shard_size": "8"}), {("all-reduce", 2): 1e9}, 1, 1, 1, fast, True)[1]
    assert hybrid["backward"].seconds == collective_seconds(fast, "all-reduce", 1e9, 2, apart=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu=h1000"], "unknown.*h100"),
        (["--gpu=A100"], "did you mean a100-"),
        (["--model=gpt3"], "unknown.*gpt2"),
        (["--gpus=0"], "give 1 or more, up to 1024"),
        (["--gpus=2000"], "up to 1024"),
        (["--n_embd=30"], "no multiple of --n_head"),
        (["--batch_size=-1"], "give 1 or more"),
        (["--batch_size=200"], "up to 128"),
        (["--tokens=nan"], "above 0"),
        (["--tokens=0"], "above 0"),
        (["--price=2"], "without --tokens"),
        (["--plot=/nowhere/plan.png"], "directory"),
        (["--plot=/tmp"], "is a directory: give a file"),
        (["--plot=/proc/plan.png"], "nothing can be written there"),
        (["--plot=plan.xyz"], "must end in .png"),
    ],
)
def test_wrong_requests_are_one_sentence(words, said):
    """An unknown GPU or model, or a number that cannot be, is refused with what would do."""
    with pytest.raises(ConfigError, match=said):
        shape_of(command_line(PlanConfig, words))
