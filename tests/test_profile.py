"""The profile of a step: what overlaps is computed from spans, and a phase's own trainer is what is watched."""

import gzip
import json

import pytest

from bench.profile_step import main, request, summary, together, union
from nanoGPT.exits import ConfigError


def test_overlap_is_the_hidden_part_of_the_communication():
    """By hand: 10 ms of communication, of which 4 lie under computation."""
    work = [("a", 0.0, 4.0), ("b", 2.0, 3.0), ("c", 10.0, 12.0)]
    talk = [("gloo:all_reduce", 2.0, 10.0), ("gloo:all_gather", 9.0, 12.0)]
    assert union(work) == [(0.0, 4.0), (10.0, 12.0)] and union(talk) == [(2.0, 12.0)]
    assert together(union(work), union(talk)) == 4.0
    spans = {"step": [("step 3", 0.0, 6.0), ("step 4", 6.0, 12.0)], "computation": work, "communication": talk}
    assert summary(spans) == {"step_ms": 6.0, "computation_ms": 3.0, "communication_ms": 5.0, "overlap": 0.4}
    assert summary({**spans, "communication": []})["overlap"] == 0.0


def test_a_profile_of_zero1_shows_overlap(tmp_path, monkeypatch, capsys):
    """Two ranks with small buckets: some communication is hidden, the traces open, the pictures are there."""
    monkeypatch.chdir(tmp_path)
    main(["phase1", "2", "--device=cpu", "--zero1_bucket_mb=0.1", "--n_layer=6"])
    said = capsys.readouterr().out
    folder = tmp_path / "out" / "profile" / "phase1-2"
    found = summary(json.loads((folder / "timeline.json").read_text())["spans"])
    assert 0 < found["overlap"] <= 1 and found["communication_ms"] > 0 and found["computation_ms"] <= found["step_ms"]
    assert f"{found['overlap']:.0%} of that beside computation" in said and "aten::mm" in said
    for rank in range(2):
        names = {
            each.get("name") for each in json.loads(gzip.open(folder / f"rank{rank}.json.gz").read())["traceEvents"]
        }
        assert {"step 3", "step 4", "aten::mm"} <= names and any(str(name).startswith("gloo:") for name in names)
    assert (folder / "timeline.png").stat().st_size > 5000 and (folder / "memory.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["phase9", "2"], "PHASE=phase9 is unknown; did you mean phase3|PHASE=phase9 is unknown"),
        (["phase3", "0"], "GPUS=0 cannot be"),
        (["phase3", "2", "--max_iters=1"], "max_iters=1 cannot be given"),
        (["phase3", "2", "--n_layers=2"], "n_layer"),
        (["phase3", "3"], "cannot be shared out among 3 ranks"),
    ],
)
def test_a_wrong_request_is_one_sentence(words, said):
    """An unknown phase or field, or ranks that cannot be."""
    with pytest.raises(ConfigError, match=said):
        request(words)
