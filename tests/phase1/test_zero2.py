"""ZeRO-2 in the trainer: the baseline's losses with a slice of the gradients, and what each rank stores and sends."""

import json
from pathlib import Path

import pytest
import torch

from bench.matrix.cells import matches_formula
from nanoGPT.model import GPT, GPTConfig
from phase1_zero1.zero1 import Zero1Optimizer
from tests.helpers.marks import mark_slow
from tests.helpers.training import gap, tiny, train
from workshop.ranks import run_on_ranks

# Every rank has several micro-batches per step.
STEPS = {"max_iters": 3, "lr_decay_iters": 3, "eval_interval": 3, "dtype": "float32", "compile": False}
STEPS |= {"gradient_accumulation_steps": 16, "eval_iters": 1}


@pytest.fixture(scope="module", params=["adamw", "muon"])
def baseline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, float]]:
    """An optimizer, and the losses of the baseline with it."""
    options = {**STEPS, "device": request.config.getoption("--device"), "optimizer": request.param}
    return request.param, train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("baseline"), **options))


def read_ledger(out_dir: Path) -> tuple[list[dict[str, int]], int, dict[str, int]]:
    """Return the bytes of state of every rank, the bytes of padding, and those of rank 0's collectives by kind."""
    ledger = json.loads((out_dir / "ledger.json").read_text())
    assert matches_formula(ledger)
    rows = ledger["ranks"][0]["collectives"]
    states = [rank["state_bytes"] for rank in ledger["ranks"]]
    return states, 4 * ledger["ranks"][0]["padding"], {row["kind"]: row["tensor_bytes"] for row in rows}


@pytest.mark.parametrize("ranks", [1, 2, 4, *mark_slow(8)])
def test_it_trains_like_the_baseline(ranks, baseline, tmp_path, device, need_ranks):
    """The losses match the baseline's. State and communication match the formula exactly.

    Gradients use 4P/N bytes per rank, and every micro-batch reduces them.
    """
    need_ranks(ranks)
    optimizer, expected = baseline
    options = {**STEPS, "device": device, "optimizer": optimizer, "zero_stage": 2, "zero1_bucket_mb": 0.01}
    curve = train("phase1_zero1", ranks, tiny("phase1_zero1", tmp_path, ledger=True, **options))
    assert gap(expected, curve) <= (1e-6 if optimizer == "adamw" else 1e-4)
    states, padding, collectives = read_ledger(tmp_path)
    full = states[0]["parameters"]
    assert all(state["parameters"] == full for state in states)
    assert full - padding <= sum(state["gradients"] for state in states) <= full
    if ranks == 1:
        assert collectives == {}
        return
    micro_batches = 16 // ranks
    if optimizer == "adamw":
        assert max(state["gradients"] for state in states) == full // ranks
        assert collectives["reduce-scatter"] == micro_batches * collectives["all-gather"] == micro_batches * full
    else:
        assert collectives["reduce"] == micro_batches * collectives["broadcast"]
        assert collectives["reduce-scatter"] == micro_batches * collectives["all-gather"]


def record_gradient_buffers() -> tuple[list[int], int]:
    """Run a backward pass of two micro-batches.

    Returns:
        The bytes of all buffers of full gradients whenever a gradient is complete, and at the end of a backward pass;
        and the bytes of the largest bucket.
    """
    model = GPT(GPTConfig(4, 2, 32, 16, False, 75))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, bucket_mb=0.03, stage=2)
    sizes: list[int] = []
    x = torch.zeros(1, 16, dtype=torch.int64)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: sizes.append(sum(b.flat_grads.nbytes for b in optimizer.buckets))
        )
    for _ in range(2):
        model(x, x).backward()
        assert not any(b.flat_grads.nbytes for b in optimizer.buckets)
        assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.buckets) > 6
    return sizes, max(b.flat_params.nbytes for b in optimizer.buckets)


def test_at_most_three_buckets_have_full_gradients():
    """One bucket is filling and two are being reduced. After a backward pass no full gradient is left."""
    for sizes, largest in run_on_ranks(record_gradient_buffers, 2):
        assert 0 < max(sizes) <= 3 * largest
