"""The recordings in docs/data agree with the formulas and with the planner of today. Times are not compared."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.checkpoints.fault_points import POINTS_OF_EVERY_RANK, POINTS_OF_RANK_0
from bench.plan.models import MODELS
from bench.plan.plan import select_rows
from bench.plan.planner import Job, Planner
from bench.plan.speed import GPUS
from bench.tables.records import read_results
from measure.tracker import STATE
from nanoGPT.checkpoint.starting_point import PADDED_VOCAB
from nanoGPT.costs import ring_bytes
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from workshop.site.explorers import RECORDINGS, render_explorer

MAX_BYTES = 300_000  # of one file: a page contains its recording
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))


def read_samples(name):
    return json.loads((RECORDINGS / f"{name}.json").read_text())["samples"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_small_and_names_its_origin(name):
    """A recording is smaller than the limit, and contains its command, commit and hardware."""
    content = (RECORDINGS / f"{name}.json").read_bytes()
    recording = json.loads(content)
    assert len(content) <= MAX_BYTES
    assert recording["settings"]["command"].startswith(".venv/bin/python -m workshop.site.recordings")
    assert len(recording["git_commit"]) == 40 and recording["hardware"] and recording["versions"]["torch"]


def test_the_recorded_collectives_match_the_formulas():
    """In every recorded run, steps and bytes of rank 0 are the formula's, and the end is complete.

    What gloo sends is the committed measurement.
    """
    samples = read_samples("ring")
    for run in samples["runs"]:
        kind, algorithm, ranks = run["collective"], run["algorithm"], run["ranks"]
        everything = 2**ranks - 1  # an element of rank r is 2^r, so a sum names the ranks that it contains
        sent = [sum(sends[rank].get("bytes", 0) for sends in run["steps"]) for rank in range(ranks)]
        assert sent[0] == run["predicted_bytes"] == max(sent) and len(run["steps"]) == run["predicted_steps"]
        if algorithm == "ring" and kind != "broadcast":
            assert set(sent) == {ring_bytes(kind, run["tensor_bytes"], ranks)}
        contents = {"all-reduce": [everything] * ranks, "all-gather": [2**owner for owner in range(ranks)]}
        if kind == "reduce-scatter":
            assert [run["end"][rank][rank] for rank in range(ranks)] == [everything] * ranks
        else:
            assert run["end"] == [contents.get(kind, [1] * ranks)] * ranks
    (gloo,) = read_results("wire")
    assert samples["gloo"] == [{"hardware": gloo["hardware"], **row} for row in gloo["samples"]["rows"]]


def test_the_recorded_fsdp_steps_match_the_formula():
    """In every recorded run, each kind of collective has the bytes of the formula, and the loss is that of all runs."""
    samples = read_samples("fsdp_step")
    for run in samples["runs"]:
        moved = {name: sum(size for kind, _, size in run["events"] if kind == name) for name in run["expected"]}
        assert moved == run["expected"]
        assert run["ring_bytes"] == {kind: ring_bytes(kind, size, samples["ranks"]) for kind, size in moved.items()}
        assert run["loss"] == pytest.approx(samples["runs"][0]["loss"], abs=1e-6)


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
            state, traffic = (planner.extrapolate(name, row, batch_size) for name in ("state", "traffic"))
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


def test_the_recorded_tiles_give_the_output_of_softmax():
    """The output of the recorded kernel is that of plain softmax, which was computed in fp64."""
    recorded = read_samples("flash_attention")
    assert len(recorded["steps"]) == 6
    for row, expected in zip(recorded["output"], recorded["expected"], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


def test_a_missing_recording_is_reported(tmp_path, monkeypatch):
    """A missing recording leads to one sentence that names its file."""
    monkeypatch.setattr("workshop.site.explorers.RECORDINGS", tmp_path)
    with pytest.raises(ConfigError, match="ring.json: restore it from git"):
        render_explorer("ring")
