"""The recordings in docs/data agree with the planner and with the points of a save of today."""

import json
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import pytest

from bench.checkpoints.fault_points import POINTS_OF_EVERY_RANK, POINTS_OF_RANK_0
from bench.plan.models import MODELS
from bench.plan.plan import select_rows
from bench.plan.planner import Job, Planner
from bench.plan.speed import GPUS
from measure.tracker import STATE
from nanoGPT.checkpoint.starting_point import PADDED_VOCAB
from nanoGPT.costs import ring_bytes
from nanoGPT.model import GPTConfig
from workshop.site.explorers import RECORDINGS


def read_samples(name):
    return json.loads((RECORDINGS / f"{name}.json").read_text())["samples"]


@pytest.mark.heavy
def test_the_planner_still_gives_the_recorded_results():
    """For a case of ZeRO-1 and one of FSDP, the planner returns the recorded bytes.

    If it does not, bring `workshop/site/recordings` back from commit 6472289 and record the page again.
    """
    recorded = read_samples("will_it_fit")
    rows = [(row["phase"], row["options"]) for row in recorded["rows"]]
    left_out = ({"fsdp_reshard_after_forward": False}, {"kernels": "loss"})  # other rows include these options
    assert rows == [row for row in select_rows(64) if row[1] not in left_out]
    cases = [dict(zip(recorded["cases"]["fields"], values, strict=True)) for values in recorded["cases"]["values"]]
    sharded = [case for case in cases if case["row"] >= 4]
    smallest = min(sharded, key=lambda case: list(recorded["models"]).index(case["model"]))
    with ThreadPoolExecutor(1) as pool:  # a trace needs a process group, so one at a time
        for case in (next(case for case in cases if case["row"] == 1), smallest):
            shape = GPTConfig(*MODELS[case["model"]], case["block_size"], False, PADDED_VOCAB)
            job = Job(shape, GPUS[case["gpu"]], case["gpus"], case["micro_batches"], dtype=case["dtype"])
            planner, row, batch_size = Planner(job, pool), rows[case["row"]], case["batch_size"]
            state, traffic = (planner.extrapolate(attrgetter(name), row) for name in ("state", "traffic"))
            assert case["state_bytes"] == [round(state[name]) for name in STATE]
            assert case["sent_bytes"] == round(sum(ring_bytes(kind, size, n) for (kind, n), size in traffic.items()))
            assert case["peak_bytes"] == round(planner.peak_bytes(row, batch_size))


def test_the_recorded_kills_are_those_of_today():
    """Each point of a save at which today's code is killed was recorded. The rename decides which step opens."""
    kills = read_samples("kill_save")["kills"]
    points = {0: (*POINTS_OF_EVERY_RANK, *POINTS_OF_RANK_0), 1: POINTS_OF_EVERY_RANK}
    for kill in kills:
        is_renamed = points[0].index(kill["point"]) >= points[0].index("after the final rename")
        assert kill["step"] == (3 if is_renamed else 2), kill
    modes = ("synchronous", "asynchronous")
    expected = [(mode, rank, point) for mode in modes for rank in points for point in points[rank]]
    assert [(kill["mode"], kill["rank"], kill["point"]) for kill in kills] == expected
