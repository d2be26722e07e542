"""The recordings in docs/data agree with the code: its order, bytes and losses. Times are not compared."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from book.explorers import describe_recording, read_cases, render_explorer
from book.recordings import flash_attention, fsdp_step, kill_save, ring, will_it_fit
from book.recordings.__main__ import FOLDER, MAX_BYTES, RECORDERS, write_recordings
from nanoGPT.errors import ConfigError
from nanoGPT.memory.costs import ring_bytes
from tests.helpers.marks import mark_slow


def read_samples(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["samples"]


@pytest.mark.parametrize("name", RECORDERS)
def test_a_recording_is_small_and_names_its_origin(name):
    """A recording is smaller than the limit, and contains its command, commit and hardware; a commit may be unknown."""
    content = (FOLDER / f"{name}.json").read_bytes()
    recording = json.loads(content)
    assert len(content) <= MAX_BYTES
    assert recording["settings"]["command"] == f"make record NAME={name}"
    assert len(recording["git_commit"]) == 40 and recording["hardware"] and recording["versions"]["torch"]
    assert "at commit" not in describe_recording({**recording, "git_commit": None})


CASES = [(kind, "ring") for kind in ring.COLLECTIVES] + [(kind, "tree") for kind in ring.TREE_COLLECTIVES]


@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_a_collective_still_sends_what_was_recorded(kind, algorithm):
    """On 3 ranks, a new run sends the recorded chunks in the recorded order, and its chunks have the same contents."""
    new = ring.record_collective(kind, 3, algorithm)
    assert [new] == [run for run in read_samples("ring")["runs"] if name_run(run) == (kind, algorithm, 3)]


def name_run(run):
    return run["collective"], run["algorithm"], run["ranks"]


def test_the_recorded_collectives_match_the_formulas():
    """In every recorded run, steps, bytes of rank 0 and predicted time are the formula's, and the end is complete.

    What gloo sends is the committed measurement.
    """
    samples = read_samples("ring")
    runs = samples["runs"]
    assert {name_run(run) for run in runs} == {(*case, ranks) for case in CASES for ranks in ring.WORLD_SIZES}
    for run in runs:
        kind, algorithm, ranks = name_run(run)
        everything, levels = 2**ranks - 1, math.ceil(math.log2(ranks))
        sent = [sum(sends[rank].get("bytes", 0) for sends in run["steps"]) for rank in range(ranks)]
        assert sent[0] == run["predicted_bytes"] == max(sent) and len(run["steps"]) == run["predicted_steps"]
        seconds = ring.predict_seconds(run, 1e6, 3e-6, 1e9)
        if algorithm == "tree":
            assert seconds == pytest.approx((2 if kind == "all-reduce" else 1) * levels * (3e-6 + 1e-3))
        elif kind == "broadcast":
            assert seconds == pytest.approx((ranks - 1) * (3e-6 + 1e-3))
        else:
            assert set(sent) == {ring_bytes(kind, run["tensor_bytes"], ranks)}
            assert seconds == pytest.approx(len(run["steps"]) * 3e-6 + 1e-3 * ring_bytes(kind, 1, ranks))
        if algorithm == "ring":
            links = {(rank, send["to"]) for each in run["steps"] for rank, send in enumerate(each) if "to" in send}
            assert links <= {(rank, (rank + 1) % ranks) for rank in range(ranks)}
        contents = {"all-reduce": [everything] * ranks, "all-gather": [2**owner for owner in range(ranks)]}
        if kind == "reduce-scatter":
            assert [run["end"][rank][rank] for rank in range(ranks)] == [everything] * ranks
        else:
            assert run["end"] == [contents.get(kind, [2**ring.SOURCE] * ranks)] * ranks
    assert samples["gloo"] == ring.read_gloo_bytes(), "run make record NAME=ring"


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
    """Collectives move the bytes of `expected_traffic`, the switches change what they should, and the loss is the same.

    A unit computes only while it is gathered, and each rank begins its events in order.
    """
    samples = read_samples("fsdp_step")
    assert [run["options"] for run in samples["runs"]] == OPTIONS
    for run in samples["runs"]:
        is_checkpointed, reshards, ahead = (value not in ("none", False) for value in run["options"].values())
        for kind, expected in run["expected"].items():
            assert sum(size for each, _, size in run["events"] if each == kind) == expected
            assert run["ring_bytes"][kind] == ring_bytes(kind, expected, samples["ranks"])
        middle = ["free", "all-gather"] if reshards else []
        end = [*["recompute"] * is_checkpointed, "backward", "free", "reduce-scatter"]
        for unit in samples["units"][1:]:
            kinds = [kind for kind, each, _ in run["events"] if each == unit]
            assert kinds == ["all-gather", "forward", *middle, *end]
        gathered: list[str] = []
        largest = 0  # units that are gathered during a forward of a block
        for kind, unit, _ in run["events"]:
            gathered += [unit] if kind == "all-gather" else []
            assert unit in gathered or kind in ("reduce-scatter", "update")
            largest = max(largest, len(gathered)) if (kind, unit) == ("forward", "h.1") else largest
            gathered = [each for each in gathered if (kind, each) != ("free", unit)]
        assert gathered == [] and largest == 1 + (1 if reshards else 2) + 2 * (run["options"]["fsdp_prefetch"] == 2)
        assert all(begins == sorted(begins) for begins in run["begin_ms"])
        assert run["loss"] == pytest.approx(samples["runs"][0]["loss"], abs=1e-6)
    peaks = [max(map(sum, run["peak"])) for run in samples["runs"]]
    assert max(peaks[4:]) < 0.6 * min(peaks[:4]), "activation checkpointing saves memory"
    for first, second in zip(samples["runs"][::2], samples["runs"][1::2], strict=True):  # without and with prefetching
        assert first["ring_bytes"] == second["ring_bytes"] and first["events"] != second["events"]


@pytest.mark.heavy
def test_the_planner_still_gives_the_recorded_results():
    """For a case of ZeRO-1 and one of FSDP, the planner returns the recorded bytes and seconds."""
    recorded = read_samples("will_it_fit")
    assert [(row["phase"], row["options"]) for row in recorded["rows"]] == will_it_fit.ROWS
    assert recorded["constants"] == json.loads(json.dumps(will_it_fit.list_constants()))
    assert recorded["rows"][6]["source"] == 6 and recorded["rows"][5]["source"] == 4
    cases = read_cases(recorded)
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
        position = kill_save.POINTS[0].index(kill["point"])
        is_renamed = position >= kill_save.POINTS[0].index("after the final rename")
        assert kill["step"] == (3 if is_renamed else 2), kill
        names = {name.partition("/")[0] for name, _ in kill["files"]}
        assert ("step-00000003" in names) == is_renamed and "step-00000002" in names
    counted = {(kill["mode"], kill["rank"], kill["point"]) for kill in kills}
    assert len(counted) == len(kills) == 2 * sum(len(points) for points in kill_save.POINTS.values())


def test_flash_attention_still_computes_the_recorded_tiles():
    """A new run of the kernel has the recorded values, and they are those of softmax over the keys so far."""
    recorded, new = read_samples("flash_attention"), flash_attention.record()
    order = [(step["query"], step["key"]) for step in recorded["steps"]]
    assert order == [(step["query"], step["key"]) for step in new["steps"]]
    assert order == [(8, 0), (8, 4), (8, 8), (4, 0), (4, 4), (0, 0)]
    q, k, v = (x[0, 0].double() for x in flash_attention.draw_inputs())
    scores = (q @ k.T * recorded["channels"] ** -0.5 / math.log(2)).tolist()
    for step, again in zip(recorded["steps"], new["steps"], strict=True):
        assert step["scores"] == again["scores"]
        for i in range(min(recorded["tile"], recorded["tokens"] - step["query"])):
            query = step["query"] + i
            visible = scores[query][: min(step["key"] + recorded["tile"], query + 1)]
            weights = [2 ** (score - max(visible)) for score in visible]
            assert step["maximum"][i] == pytest.approx(max(visible), abs=1e-5)
            assert step["sum"][i] == pytest.approx(sum(weights), abs=1e-5) == pytest.approx(again["sum"][i], abs=1e-5)
            total = [sum(w * x for w, x in zip(weights, column, strict=False)) for column in v.T.tolist()]
            assert step["output"][i] == pytest.approx(total, abs=1e-5)
    for row, expected, again in zip(recorded["output"], recorded["expected"], new["expected"], strict=True):
        assert row == pytest.approx(expected, abs=1e-5) and expected == pytest.approx(again, abs=1e-6)


def test_unusable_recordings_are_reported(tmp_path, monkeypatch):
    """An unknown name, and a recording that is missing or damaged, lead to one sentence with the command to run."""
    with pytest.raises(ConfigError, match="--name=rung is unknown; did you mean ring"):
        write_recordings("rung")
    monkeypatch.setattr("book.explorers.RECORDINGS", tmp_path)
    with pytest.raises(ConfigError, match="run make record NAME=ring"):
        render_explorer("ring")
    recording = json.loads((FOLDER / "ring.json").read_text())
    del recording["samples"]["runs"][0]["steps"]
    (tmp_path / "ring.json").write_text(json.dumps(recording))
    with pytest.raises(ConfigError, match="is damaged .*: run make record NAME=ring"):
        render_explorer("ring")
