"""The recordings in docs/data agree with the code: its order, bytes, owners and losses. Times are not compared."""

import json

import pytest

from book.explorers import render_explorer
from book.recordings import fsdp_step, ring
from book.recordings.__main__ import FOLDER, MAX_BYTES, RECORDERS, write_recordings
from nanoGPT.errors import ConfigError
from nanoGPT.memory.costs import ring_bytes


def read_samples(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["samples"]


@pytest.mark.parametrize("name", RECORDERS)
def test_a_recording_is_small_and_names_its_origin(name):
    """A recording is smaller than the limit, and contains its command, commit and hardware."""
    content = (FOLDER / f"{name}.json").read_bytes()
    recording = json.loads(content)
    assert len(content) <= MAX_BYTES
    assert recording["settings"]["command"] == f"make record NAME={name}"
    assert len(recording["git_commit"]) == 40 and recording["hardware"] and recording["versions"]["torch"]


@pytest.mark.parametrize("kind", ring.COLLECTIVES)
def test_the_ring_still_sends_what_was_recorded(kind):
    """On 3 ranks, a new run sends the recorded chunks in the recorded order, and its chunks have the same contents."""
    recorded = [run for run in read_samples("ring")["runs"] if run["collective"] == kind and run["ranks"] == 3]
    assert recorded == [ring.record_collective(kind, 3)]


def test_the_recorded_rings_match_the_formulas():
    """In every recorded run, each rank sends the bytes of the ring formula, and the end result is complete."""
    runs = read_samples("ring")["runs"]
    assert {(run["collective"], run["ranks"]) for run in runs} == {
        (kind, ranks) for kind in ring.COLLECTIVES for ranks in ring.WORLD_SIZES
    }
    for run in runs:
        ranks, everything = run["ranks"], 2 ** run["ranks"] - 1
        for rank in range(ranks):
            assert all(sends[rank]["to"] == (rank + 1) % ranks for sends in run["steps"])
            sent = sum(sends[rank]["bytes"] for sends in run["steps"])
            assert sent == run["predicted_bytes"] == ring_bytes(run["collective"], run["tensor_bytes"], ranks)
            if run["collective"] == "reduce-scatter":
                assert run["end"][rank][rank] == everything
        if run["collective"] == "all-reduce":
            assert run["end"] == [[everything] * ranks] * ranks
        elif run["collective"] == "all-gather":
            assert run["end"] == [[2**owner for owner in range(ranks)]] * ranks


def test_the_fsdp_step_still_runs_as_recorded():
    """A new run has the recorded events, bytes and state, and the recorded loss up to rounding."""
    recorded, new = read_samples("fsdp_step"), json.loads(json.dumps(fsdp_step.record()))
    for key in ("ranks", "step", "units", "categories", "events", "expected", "ring_bytes"):
        assert new[key] == recorded[key], key
    assert new["loss"] == pytest.approx(recorded["loss"], abs=1e-6)
    names = new["categories"]
    state = [names.index(name) for name in ("parameters", "gradients", "optimizer_state")]
    for rank in range(new["ranks"]):
        for position in state:  # gloo frees its copies at any time, so the other categories vary
            assert new["memory"][rank][-1][position] == recorded["memory"][rank][-1][position]
        full = names.index("gathered")
        assert max(m[full] for m in new["memory"][rank]) == max(m[full] for m in recorded["memory"][rank])


def test_the_recorded_fsdp_step_matches_the_formulas():
    """The recorded collectives move the bytes of `expected_traffic`, and each block is gathered and freed twice."""
    recorded = read_samples("fsdp_step")
    for kind, expected in recorded["expected"].items():
        assert sum(size for each, _, size in recorded["events"] if each == kind) == expected
        assert recorded["ring_bytes"][kind] == ring_bytes(kind, expected, recorded["ranks"])
    for unit in recorded["units"][1:]:
        kinds = [kind for kind, each, _ in recorded["events"] if each == unit]
        assert kinds == ["all-gather", "forward", "free", "all-gather", "backward", "free", "reduce-scatter"]


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
