"""ZeRO-1 and ZeRO-2 read no result of an asynchronous collective, and change no input, before they have waited."""

import pytest

from nanoGPT.train_config import TrainConfig
from phase1_zero1 import buckets
from tests.helpers.delays import delay_results
from tests.helpers.training import call_train, losses, tiny, train
from workshop.ranks import run_on_ranks


def train_with_delays(config: TrainConfig) -> None:
    buckets.all_gather = delay_results(buckets.all_gather)
    buckets.reduce_scatter = delay_results(buckets.reduce_scatter)
    call_train("phase1_zero1", config)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero1_waits_for_its_collectives(stage, tmp_path):
    """With delayed reduce-scatters and all-gathers, a run with evaluations and saves has the same losses."""
    fields = {"zero_stage": stage, "zero1_bucket_mb": 0.02}
    expected = train("phase1_zero1", 2, tiny("phase1_zero1", tmp_path / "plain", **fields))
    run_on_ranks(train_with_delays, 2, tiny("phase1_zero1", tmp_path / "delayed", **fields), show=False)
    assert losses(tmp_path / "delayed") == expected
