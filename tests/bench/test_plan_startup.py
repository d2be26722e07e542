"""The planner's times to start, to save and to resume, and the memory of a real start."""

from statistics import median
from typing import Any

import pytest

from bench.plan.startup import count_tensors, estimate_startup
from bench.tables.records import read_results
from nanoGPT.model import GPTConfig


def read_scale() -> dict[str, Any]:
    """Return the result of the machine that the planner's rates are from."""
    return next(result for result in read_results("scale") if "AMD" in result["hardware"])


def test_startup_and_save_times_match_measurements():
    """The time to draw weights is within 10% of the measured CPU time, and the time of a save within 30%.

    The bandwidth of the measured disk is that of a save without hashes and without the rename.
    """
    scale, (save,) = read_scale(), read_results("save-speed")
    params = scale["settings"]["parameters"]
    bare, ours = (median(save["samples"][name]) for name in ("bare_s", "ours_s"))
    row: dict[str, Any] = {"phase": "phase1", "options": {}, "state_bytes": {"optimizer_state": 8 * params}}
    measured = median(each["init_before"] for each in scale["samples"]["rows"])
    assert estimate_startup(row, params, 75, 1, 1e9)["start_seconds"] == pytest.approx(measured, rel=0.1)
    ranks, size = save["settings"]["ranks"], save["settings"]["bytes"]
    row["state_bytes"] = {"optimizer_state": 8 * size / 12 / ranks}
    predicted = estimate_startup(row, size // 12, 75, ranks, size / bare)
    assert predicted["checkpoint_bytes"] == pytest.approx(size) and predicted["rank_bytes"] == pytest.approx(size / 2)
    assert predicted["save_seconds"] == pytest.approx(ours, rel=0.3)


def test_the_index_of_a_checkpoint_takes_the_measured_time():
    """From 8 to 64 ranks, the predicted times of a save and of a resume grow as the CPU time of rank 0 does, to 30%."""
    scale = next(result for result in read_results("scale") if "save_layout" in result["samples"]["rows"][0])
    first, *_, last = scale["samples"]["rows"]
    row: dict[str, Any] = {"phase": "phase3", "options": {}, "state_bytes": {"optimizer_state": 0}}
    few, many = (estimate_startup(row, 0, 75, each["ranks"], 1e9) for each in (first, last))
    assert count_tensors(GPTConfig(bias=False)) == 75
    for predicted, part in (("save_seconds", "save_layout"), ("resume_seconds", "index_before")):
        assert many[predicted] - few[predicted] == pytest.approx(last[part] - first[part], rel=0.3)


def test_a_rank_saves_its_share():
    """DDP saves on one rank, sharded phases on all. With hybrid FSDP, a rank draws the shard of its node."""
    base: dict[str, Any] = {"options": {}, "state_bytes": {"optimizer_state": 800}}
    ddp = estimate_startup({**base, "phase": "baseline"}, 100, 75, 16, 1.0)
    assert (ddp["checkpoint_bytes"], ddp["rank_bytes"]) == (1200, 1200)
    fsdp = {**base, "phase": "phase3", "state_bytes": {"optimizer_state": 50}}
    full = estimate_startup(fsdp, 100, 0, 16, 1.0)
    assert (full["checkpoint_bytes"], full["rank_bytes"]) == (1200, 75)
    assert full["save_seconds"] == pytest.approx(8 * 75, rel=1e-6)  # eight ranks share the disk of their node
    hybrid = {**fsdp, "options": {"fsdp_shard_size": "8"}, "state_bytes": {"optimizer_state": 100}}
    shared = estimate_startup(hybrid, 100, 0, 16, 1.0)
    assert shared["rank_bytes"] == 75 and shared["start_seconds"] == 2 * full["start_seconds"]
