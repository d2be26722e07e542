"""Bytes of state and bytes on the wire, counted and compared with the formula."""

import json
from collections import Counter

import pytest

from bench.matrix.cells import as_expected
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.metrics.ledger import add_expected_bytes, describe
from nanoGPT.model import GPT, GPTConfig
from tests.helpers.training import tiny, train


def report(out) -> dict:
    return json.loads((out / "ledger.json").read_text())


def rows(found: dict) -> dict[str, dict]:
    return {row["kind"]: row for row in found["ranks"][0]["collectives"]}


def test_what_a_ring_sends():
    """An all-reduce sends (N-1)/N of its tensor twice, every other collective once, and one rank sends nothing."""
    assert [ring_bytes(kind, 100, 4) for kind in ("all-reduce", "all-gather", "reduce-scatter")] == [150, 75, 75]
    assert ring_bytes("all-reduce", 100, 1) == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ddp_costs_what_the_formula_says(ranks, tmp_path):
    """DDP holds 16 bytes a parameter on every rank and all-reduces each gradient once a step."""
    train("nanoGPT", ranks, tiny("nanoGPT", tmp_path, ledger=True, max_iters=3))
    found = report(tmp_path)
    assert as_expected(found)
    params = found["parameters"]
    scalars = 4 * (4 * 2 * 2 + 0)  # Adam's step counts: one fp32 a tensor
    for each in found["ranks"]:
        state = each["state_bytes"]
        assert state["parameters"] == state["gradients"] == 4 * params
        assert 8 * params < state["optimizer_state"] <= 8 * params + scalars
        memory = each["memory"]
        for moment in ("after_forward", "peak", "after_step"):
            assert {name: memory[moment][name] for name in ("parameters", "optimizer_state", "gathered")} == {
                "parameters": state["parameters"], "optimizer_state": state["optimizer_state"], "gathered": 0,
            }  # fmt: skip
        assert memory["after_forward"]["gradients"] == 4 * params  # of the micro-batches before the last
        assert sum(memory["after_forward"].values()) <= sum(memory["peak"].values())
        assert memory["allocator_peak_bytes"] is None  # no GPU
    if ranks > 1:
        assert rows(found).keys() == {"all-reduce"}
        assert rows(found)["all-reduce"]["tensor_bytes"] == 4 * params
        assert rows(found)["all-reduce"]["ring_bytes"] == pytest.approx(2 * 4 * params * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_costs_what_the_formula_says(ranks, tmp_path):
    """FSDP holds 1/N of 16 bytes a parameter; per step it gathers M(2P - P_root) and reduce-scatters P, and sums the
    squared norm in one scalar."""
    shape = {"vocab_size": 80, "n_embd": 32}  # every first dimension divides by 4: no padding
    train("phase3_fsdp", ranks, tiny("phase3_fsdp", tmp_path, ledger=True, max_iters=3, **shape))
    found = report(tmp_path)
    assert as_expected(found) and found["ranks"][0]["padding"] == 0
    params = found["parameters"]
    model = GPT(GPTConfig(2, 2, 32, 16, False, 80))
    root = params - sum(p.numel() for p in model.blocks.parameters())
    for each in found["ranks"]:
        state = each["state_bytes"]
        assert state["parameters"] == state["gradients"] == 4 * params // ranks
        assert state["optimizer_state"] == 8 * params // ranks + 4 * len(list(model.parameters()))
        assert each["memory"]["peak"]["parameters"] == state["parameters"]
        assert each["memory"]["after_forward"]["gradients"] == 4 * params  # whole until the last micro-batch
    # A thread of gloo's may let go of a buffer late: what is needed is the least that was found.
    assert min(each["memory"]["after_forward"]["gathered"] for each in found["ranks"]) == 4 * root
    micro_batches = 8 // ranks
    collectives = rows(found)
    assert collectives["all-gather"]["tensor_bytes"] == 4 * micro_batches * (2 * params - root)
    assert collectives["reduce-scatter"]["tensor_bytes"] == 4 * params
    assert collectives["all-gather"]["calls"] == 5 * micro_batches and collectives["reduce-scatter"]["calls"] == 3
    assert collectives["all-reduce"] == {
        "kind": "all-reduce", "ranks": ranks, "calls": 1, "tensor_bytes": 8, "ring_bytes": 2 * 8 * (ranks - 1) / ranks,
        "expected_bytes": 8,
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"fsdp_shard_size": "2"}], ids=str)
def test_padding_is_listed(options, tmp_path):
    """With 75 rows of vocabulary over 4 ranks a 76th is kept, gathered and reduced: the formula says how much, and what
    was counted is that to the byte."""
    train("phase3_fsdp", 4, tiny("phase3_fsdp", tmp_path, ledger=True, max_iters=3, **options))
    found = report(tmp_path)
    assert as_expected(found), found
    assert {each["padding"] for each in found["ranks"]} == {32}


def test_what_differs_from_the_formula_is_shown():
    """A row that only the formula or only the step has is no equality, and both numbers are printed."""
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
    each = {"state_bytes": state, "expected_state_bytes": {**state, "gradients": 6}, "padding": 3, "memory": memory}
    found = {"step": 2, "parameters": 1, "world_size": 2, "ranks": [{**each, "collectives": rows}] * 2}
    assert not as_expected(found)
    text = describe(found)
    assert "(formula 40 B)" in text and "gradients 4 B (formula 6 B)" in text and "padding 3 elements" in text
    assert "rank 1: parameters 4 B = formula" in text and "peak 10 B (activations 6)" in text


def test_the_ledger_is_off_by_default(tmp_path):
    """A run without --ledger writes no ledger.json, and its losses are those of one with it."""
    off = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "off", max_iters=3))
    assert not (tmp_path / "off" / "ledger.json").exists()
    assert off == train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "on", max_iters=3, ledger=True))
