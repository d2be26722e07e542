"""The ledger: model state and communication volume per rank, measured and compared with the formula."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.matrix.cells import matches_formula
from measure.ledger import Ledger, add_expected_bytes, format_report
from measure.observer import Flags
from nanoGPT.costs import ring_bytes
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from tests.helpers.training import read_ledger, tiny, train_all
from workshop.ranks import losses


def rows_by_kind(ledger: dict) -> dict[str, dict]:
    return {row["kind"]: row for row in ledger["ranks"][0]["collectives"]}


def test_ring_bytes_match_the_formula():
    """With N ranks, an all-reduce communicates 2(N-1)/N of its tensor per rank, and every other collective (N-1)/N. One
    rank communicates nothing."""
    assert [ring_bytes(kind, 100, 4) for kind in ("all-reduce", "all-gather", "reduce-scatter")] == [150, 75, 75]
    assert ring_bytes("all-reduce", 100, 1) == 0


DIVISIBLE = {"vocab_size": 80, "n_embd": 32}  # every first dimension is divisible by 4: no padding
PADDED: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"fsdp_shard_size": "2"}]  # 75 rows of the vocabulary


def list_cells(ranks: int, folder: Path) -> list[tuple[str, TrainConfig]]:
    """Return the configurations that the tests of this file need on this number of ranks, each with its phase."""

    def cell(phase: str, name: str, **fields: Any) -> tuple[str, TrainConfig]:
        fields = {"ledger": True, "max_iters": 3, "eval_interval": 100, **fields}
        return phase, tiny(phase, folder / name, **fields)

    cells = [cell("nanoGPT", "ddp")]
    if ranks == 1:
        cells += [cell(phase, phase) for phase in ("phase1_zero1", "phase3_fsdp")]
    else:
        cells += [cell("phase3_fsdp", "fsdp", **DIVISIBLE)]
    if ranks == 2:
        cells += [cell("phase3_fsdp", "off", **DIVISIBLE, ledger=False)]
    if ranks == 4:
        cells += [cell("phase3_fsdp", str(options), **options) for options in PADDED]
    return cells


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that trains all configurations of `list_cells` once, and returns their directory."""

    @functools.cache
    def train_on(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        train_all(ranks, list_cells(ranks, folder))
        return folder

    return train_on


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ddp_matches_the_formula(ranks, runs):
    """DDP uses 16 bytes per parameter on every rank, and all-reduces each gradient once per step."""
    ledger = read_ledger(runs(ranks) / "ddp")
    params = ledger["parameters"]
    scalar_bytes = 4 * (4 * 2 * 2 + 0)  # Adam's step counts: one fp32 number per tensor
    for rank in ledger["ranks"]:
        state = rank["state_bytes"]
        assert state["parameters"] == state["gradients"] == 4 * params
        assert 8 * params < state["optimizer_state"] <= 8 * params + scalar_bytes
        memory = rank["memory"]
        for moment in ("after_forward", "peak", "after_step"):
            assert {name: memory[moment][name] for name in ("parameters", "optimizer_state", "gathered")} == {
                "parameters": state["parameters"], "optimizer_state": state["optimizer_state"], "gathered": 0,
            }  # fmt: skip
        buckets = 4 * params if ranks > 1 else 0  # besides the gradients that earlier micro-batches accumulated
        assert memory["after_forward"]["gradients"] == 4 * params + buckets
        assert sum(memory["after_forward"].values()) <= sum(memory["peak"].values())
        assert memory["allocator_peak_bytes"] is None  # no GPU
    if ranks > 1:
        assert rows_by_kind(ledger).keys() == {"all-reduce"}
        assert rows_by_kind(ledger)["all-reduce"]["tensor_bytes"] == 4 * params
        assert rows_by_kind(ledger)["all-reduce"]["ring_bytes"] == pytest.approx(2 * 4 * params * (ranks - 1) / ranks)


@pytest.mark.parametrize("phase", ["phase1_zero1", "phase3_fsdp"])
def test_one_rank_lists_no_communication(phase, runs):
    """Collectives of one rank communicate nothing, and the ledger has no rows for them."""
    ledger = read_ledger(runs(1) / phase)
    assert rows_by_kind(ledger) == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_matches_the_formula(ranks, runs):
    """FSDP uses 16/N bytes per parameter. Per step with M micro-batches, it all-gathers M(2P - P_root), reduce-scatters
    P, and all-reduces the squared gradient norm as one scalar."""
    ledger = read_ledger(runs(ranks) / "fsdp")
    assert ledger["ranks"][0]["padding"] == 0
    params = ledger["parameters"]
    model = GPT(GPTConfig(2, 2, 32, 16, False, 80))
    root = params - sum(p.numel() for p in model.blocks.parameters())
    for rank in ledger["ranks"]:
        state = rank["state_bytes"]
        assert state["parameters"] == state["gradients"] == 4 * params // ranks
        assert state["optimizer_state"] == 8 * params // ranks + 4 * len(list(model.parameters()))
        assert rank["memory"]["peak"]["parameters"] == state["parameters"]
        assert rank["memory"]["after_forward"]["gradients"] == 4 * params  # unsharded until the last micro-batch
    # A gloo thread may free a buffer late, so the minimum over all ranks is the memory that a step needs.
    assert min(rank["memory"]["after_forward"]["gathered"] for rank in ledger["ranks"]) == 4 * root
    micro_batches = 8 // ranks
    collectives = rows_by_kind(ledger)
    assert collectives["all-gather"]["tensor_bytes"] == 4 * micro_batches * (2 * params - root)
    assert collectives["reduce-scatter"]["tensor_bytes"] == 4 * params
    assert collectives["all-gather"]["calls"] == 5 * micro_batches and collectives["reduce-scatter"]["calls"] == 3
    assert collectives["all-reduce"] == {
        "kind": "all-reduce", "ranks": ranks, "calls": 1, "tensor_bytes": 8, "ring_bytes": 2 * 8 * (ranks - 1) / ranks,
        "expected_bytes": 8,
    }  # fmt: skip


@pytest.mark.parametrize("options", PADDED, ids=str)
def test_padding_is_listed(options, runs):
    """With 75 vocabulary rows on 4 ranks, a 76th row is stored, all-gathered and reduced. The formula includes this
    padding, and matches the ledger exactly."""
    ledger = read_ledger(runs(4) / str(options))
    assert {rank["padding"] for rank in ledger["ranks"]} == {32}


def test_differences_from_the_formula_are_printed():
    """A collective that appears only in the formula or only in the step is a mismatch. The report prints both
    numbers."""
    counted = {("broadcast", 2): {"kind": "broadcast", "ranks": 2, "calls": 1, "tensor_bytes": 8, "ring_bytes": 4.0}}
    rows = add_expected_bytes(counted, Counter({("all-reduce", 2): 40, ("all-gather", 1): 12}))
    assert [(row["kind"], row["tensor_bytes"], row["expected_bytes"]) for row in rows] == [
        ("broadcast", 8, 0), ("all-reduce", 0, 40),
    ]  # fmt: skip
    state = {"parameters": 4, "gradients": 4, "optimizer_state": 8}
    memory = {
        "after_forward": None,
        "peak": {"gradients": 4, "activations": 6},
        "after_step": {},
        "allocator_peak_bytes": None,
    }
    rank = {"state_bytes": state, "expected_state_bytes": {**state, "gradients": 6}, "padding": 3, "memory": memory}
    ledger = {"step": 2, "parameters": 1, "world_size": 2, "ranks": [{**rank, "collectives": rows}] * 2}
    assert not matches_formula(ledger)
    text = format_report(ledger)
    assert "(formula 40 B)" in text and "gradients 4 B (formula 6 B)" in text and "padding 3 elements" in text
    assert "rank 1: parameters 4 B = formula" in text and "peak 10 B (activations 6)" in text


def test_steps_after_the_measured_one_are_compiled(tmp_path):
    """The measured step of a compiled model runs in eager mode, and the later steps run compiled again."""
    calls = []
    torch.compiler.reset()  # another test may have compiled this model for another shape

    def compile_graph(graph, _):
        return lambda *inputs: calls.append(step) or graph(*inputs)

    model = GPT(GPTConfig(1, 2, 32, 16, False, 75))
    optimizer = torch.optim.AdamW(model.parameters())
    config = tiny("nanoGPT", tmp_path, ledger=True, compile=True)
    run = Runtime(0, 0, 1, 1, torch.device("cpu"), torch.float32)
    ledger = Ledger(config, run, 2, model, optimizer)
    compiled_model = torch.compile(model, backend=compile_graph)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    for step in range(5):
        with ledger.watch(step):
            compiled_model(tokens, tokens).backward()
            optimizer.step()
    assert calls == [0, 1, 3, 4]
    assert (tmp_path / "ledger.json").exists()


def test_the_ledger_is_off_by_default(runs):
    """A run without --ledger writes no ledger.json, and its losses are identical to those of a run with --ledger."""
    assert not Flags().ledger and not (runs(2) / "off" / "ledger.json").exists()
    assert losses(runs(2) / "off") == losses(runs(2) / "fsdp")
