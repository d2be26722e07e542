"""The recordings in docs/data agree with the code: its order, bytes and losses. Times are not compared."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoGPT.costs import ring_bytes
from nanoGPT.errors import ConfigError
from tests.helpers.marks import mark_slow
from workshop.site.explorers import describe_recording, render_explorer
from workshop.site.recordings import flash_attention, fsdp_step, kill_save, ring, will_it_fit
from workshop.site.recordings.__main__ import FOLDER, MAX_BYTES, RECORDERS, write_recordings


def read_samples(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["samples"]


@pytest.mark.parametrize("name", RECORDERS)
def test_a_recording_is_small_and_names_its_origin(name):
    """A recording is smaller than the limit, and contains its command, commit and hardware; a commit may be unknown."""
    content = (FOLDER / f"{name}.json").read_bytes()
    recording = json.loads(content)
    assert len(content) <= MAX_BYTES
    assert recording["settings"]["command"] == f".venv/bin/python -m workshop.site.recordings --name={name}"
    assert len(recording["git_commit"]) == 40 and recording["hardware"] and recording["versions"]["torch"]
    assert "at commit" not in describe_recording({**recording, "git_commit": None})


CASES = [(kind, "ring") for kind in ring.COLLECTIVES] + [(kind, "tree") for kind in ring.TREE_COLLECTIVES]


@pytest.mark.parametrize(("kind", "algorithm"), [("all-reduce", "ring"), ("broadcast", "ring"), ("all-reduce", "tree")])
def test_a_collective_still_sends_what_was_recorded(kind, algorithm):
    """On 3 ranks, a new run sends the recorded chunks in the recorded order, and its chunks have the same contents."""
    new = ring.record_collective(kind, 3, algorithm)
    assert [new] == [run for run in read_samples("ring")["runs"] if name_run(run) == (kind, algorithm, 3)]


def name_run(run):
    return run["collective"], run["algorithm"], run["ranks"]


def test_the_recorded_collectives_match_the_formulas():
    """In every recorded run, steps and bytes of rank 0 are the formula's, and the end is complete.

    What gloo sends is the committed measurement.
    """
    samples = read_samples("ring")
    runs = samples["runs"]
    assert {name_run(run) for run in runs} == {(*case, ranks) for case in CASES for ranks in ring.WORLD_SIZES}
    for run in runs:
        kind, algorithm, ranks = name_run(run)
        everything = 2**ranks - 1
        sent = [sum(sends[rank].get("bytes", 0) for sends in run["steps"]) for rank in range(ranks)]
        assert sent[0] == run["predicted_bytes"] == max(sent) and len(run["steps"]) == run["predicted_steps"]
        if algorithm == "ring" and kind != "broadcast":
            assert set(sent) == {ring_bytes(kind, run["tensor_bytes"], ranks)}
        contents = {"all-reduce": [everything] * ranks, "all-gather": [2**owner for owner in range(ranks)]}
        if kind == "reduce-scatter":
            assert [run["end"][rank][rank] for rank in range(ranks)] == [everything] * ranks
        else:
            assert run["end"] == [contents.get(kind, [2**ring.SOURCE] * ranks)] * ranks
    assert samples["gloo"] == ring.read_gloo_bytes(), "run .venv/bin/python -m workshop.site.recordings --name=ring"


OPTIONS = fsdp_step.list_options()


@pytest.mark.parametrize("options", [OPTIONS[:: len(OPTIONS) - 1], *mark_slow(OPTIONS[1:-1])], ids=len)
def test_the_fsdp_step_still_runs_as_recorded(options):
    """With all switches off, and with all on, a new run has the recorded events, bytes and state, and the same loss."""
    samples = read_samples("fsdp_step")
    names = samples["categories"]
    exact = [names.index(name) for name in ("parameters", "gradients", "optimizer_state")]
    full = names.index("gathered")
    for new in json.loads(json.dumps(fsdp_step.record_runs(options))):
        recorded = next(run for run in samples["runs"] if run["options"] == new["options"])
        for key in ("events", "expected", "ring_bytes"):
            assert new[key] == recorded[key], key
        assert new["loss"] == pytest.approx(recorded["loss"], abs=1e-6)
        for rank in range(samples["ranks"]):
            for position in exact:  # gloo frees its copies at any time, so the other categories vary
                assert new["memory"][rank][-1][position] == recorded["memory"][rank][-1][position]
            assert max(m[full] for m in new["memory"][rank]) == max(m[full] for m in recorded["memory"][rank])


def test_the_recorded_fsdp_steps_match_the_formulas():
    """Collectives move the bytes of `expected_traffic`, the switches change what they should; the loss is the same."""
    samples = read_samples("fsdp_step")
    assert [run["options"] for run in samples["runs"]] == OPTIONS
    for run in samples["runs"]:
        is_checkpointed, reshards = (value not in ("none", False) for value in run["options"].values())
        for kind, expected in run["expected"].items():
            assert sum(size for each, _, size in run["events"] if each == kind) == expected
            assert run["ring_bytes"][kind] == ring_bytes(kind, expected, samples["ranks"])
        middle = ["free", "all-gather"] if reshards else []
        end = [*["recompute"] * is_checkpointed, "backward", "free", "reduce-scatter"]
        for unit in samples["units"][1:]:
            kinds = [kind for kind, each, _ in run["events"] if each == unit]
            assert kinds == ["all-gather", "forward", *middle, *end]
        assert run["loss"] == pytest.approx(samples["runs"][0]["loss"], abs=1e-6)


@pytest.mark.heavy
def test_the_planner_still_gives_the_recorded_results():
    """For a case of ZeRO-1 and one of FSDP, the planner returns the recorded bytes and seconds."""
    recorded = read_samples("will_it_fit")
    assert [(row["phase"], row["options"]) for row in recorded["rows"]] == will_it_fit.ROWS
    assert recorded["constants"] == json.loads(json.dumps(will_it_fit.list_constants()))
    assert recorded["rows"][6]["source"] == 6 and recorded["rows"][5]["source"] == 4
    cases = [dict(zip(recorded["cases"]["fields"], values, strict=True)) for values in recorded["cases"]["values"]]
    sharded = [case for case in cases if case["row"] >= 4]
    smallest = min(sharded, key=lambda case: list(recorded["models"]).index(case["model"]))
    with ThreadPoolExecutor(1) as pool:  # a trace needs a process group, so one at a time
        for case in (next(case for case in cases if case["row"] == 1), smallest):
            planned = will_it_fit.plan_case(case, pool)
            assert {name: case[name] for name in planned} == planned


def test_a_kill_leaves_the_recorded_files():
    """A kill before the final rename leaves the recorded files. The rename decides which step opens."""
    kills = read_samples("kill_save")["kills"]
    new = kill_save.record_kill("before the final rename", 0, "synchronous")
    recorded = next(kill for kill in kills if (kill["point"], kill["mode"]) == (new["point"], new["mode"]))
    assert {**new, "files": [name for name, _ in new["files"]]} == {
        **recorded,
        "files": [name for name, _ in recorded["files"]],
    }
    for kill in kills:
        is_renamed = kill_save.POINTS[0].index(kill["point"]) >= kill_save.POINTS[0].index("after the final rename")
        assert kill["step"] == (3 if is_renamed else 2), kill
    counted = {(kill["mode"], kill["rank"], kill["point"]) for kill in kills}
    assert len(counted) == len(kills) == 2 * sum(len(points) for points in kill_save.POINTS.values())


def test_flash_attention_still_computes_the_recorded_tiles():
    """A new run of the kernel has the recorded values, and its results are those of plain softmax."""
    recorded, new = read_samples("flash_attention"), flash_attention.record()
    assert len(recorded["steps"]) == 6
    for step, again in zip(recorded["steps"], new["steps"], strict=True):
        assert all(step[key] == again[key] for key in ("query", "key", "scores", "maximum"))
        assert step["sum"] == pytest.approx(again["sum"], abs=1e-5)
    for row, expected, again in zip(recorded["output"], recorded["expected"], new["expected"], strict=True):
        assert row == pytest.approx(expected, abs=1e-5) and expected == pytest.approx(again, abs=1e-6)


def test_unusable_recordings_are_reported(tmp_path, monkeypatch):
    """An unknown name, and a missing recording, lead to one sentence with the command to run."""
    with pytest.raises(ConfigError, match="--name=rung is unknown; did you mean ring"):
        write_recordings("rung")
    monkeypatch.setattr("workshop.site.explorers.RECORDINGS", tmp_path)
    with pytest.raises(ConfigError, match="run .venv/bin/python -m workshop.site.recordings --name=ring"):
        render_explorer("ring")
