"""No code reads the result of an asynchronous collective, or changes its input, before it has waited.

On a CPU a collective often ends before a missing wait matters. These tests therefore delay every result.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoGPT.train_config import TrainConfig
from phase1_zero1 import buckets
from phase3_fsdp import by_hand
from tests.helpers.training import call_train, losses, tiny, train
from tests.phase3.test_by_hand import train_by_hand
from workshop.ranks import run_on_ranks


class DelayedWork:
    """An asynchronous collective whose output is NaN, until `wait` writes the result into it."""

    def __init__(self, collective: Callable[..., Any], output: Tensor, source: Tensor, *args: Any) -> None:
        self.output, self.source, self.is_done = output.detach(), source.detach(), False
        self.sent, self.received = self.source.clone(), torch.empty_like(self.output)
        self.work = collective(self.received, self.sent, *args, async_op=True)
        write(self.output, torch.full_like(self.output, float("nan")))
        if len(self.output) > len(self.source):  # this rank's part of an all-gather is there already
            write(self.source, self.sent)

    def wait(self) -> None:
        if self.is_done:
            return
        self.work.wait()
        is_input = ~self.source.isnan()  # without the output of a reduce-scatter in place
        assert torch.equal(self.source[is_input], self.sent[is_input]), "the input has changed"
        write(self.output, self.received)
        self.is_done = True


def write(target: Tensor, values: Tensor) -> None:
    """Write values as a collective does: autograd does not notice it."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(values)


def delay(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective with a DelayedWork if it is called with `async_op=True`."""
    return lambda *args, async_op=False: DelayedWork(collective, *args) if async_op else collective(*args)


def train_with_delays(config: TrainConfig) -> None:
    buckets.all_gather, buckets.reduce_scatter = delay(buckets.all_gather), delay(buckets.reduce_scatter)
    call_train("phase1_zero1", config)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero1_waits_for_its_collectives(stage, tmp_path):
    """With delayed reduce-scatters and all-gathers, a run with evaluations and saves has the same losses."""
    fields = {"zero_stage": stage, "zero1_bucket_mb": 0.02}
    expected = train("phase1_zero1", 2, tiny("phase1_zero1", tmp_path / "plain", **fields))
    run_on_ranks(train_with_delays, 2, tiny("phase1_zero1", tmp_path / "delayed", **fields), show=False)
    assert losses(tmp_path / "delayed") == expected


def train_by_hand_with_delays() -> dict[str, Any]:
    by_hand.all_gather = delay(by_hand.all_gather)
    return train_by_hand("gpt", "none", torch.float32)


def test_fsdp_by_hand_waits_for_its_collectives():
    """With delayed all-gathers, `by_hand.py` has the losses of the full model."""
    for loss, norm, full_loss, full_norm in run_on_ranks(train_by_hand_with_delays, 2, show=False)[0]["results"]:
        assert loss == pytest.approx(full_loss, abs=1e-6) and norm == pytest.approx(full_norm, abs=1e-5)
