"""The profile of a step: what overlaps is computed from spans, and a phase's own trainer is what is watched."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench.trainer.profile_step import LAST, REMEMBERED, main, request, sentence, spans_of, summary, together, union
from nanoGPT.errors import ConfigError


def test_overlap_is_the_hidden_part_of_the_communication():
    """By hand: 10 ms of communication, of which 4 lie under computation."""
    work = [("a", 0.0, 4.0), ("b", 2.0, 3.0), ("c", 10.0, 12.0)]
    talk = [("gloo:all_reduce", 2.0, 10.0), ("gloo:all_gather", 9.0, 12.0)]
    assert union(work) == [(0.0, 4.0), (10.0, 12.0)] and union(talk) == [(2.0, 12.0)]
    assert together(union(work), union(talk)) == [(2.0, 4.0), (10.0, 12.0)]
    spans = {"step": [("step 3", 0.0, 6.0), ("step 4", 6.0, 12.0)], "computation": work, "communication": talk}
    expected = {"step_ms": 6.0, "computation_ms": 3.0, "communication_ms": 5.0, "exposed_ms": 3.0, "rest_ms": 0.0}
    assert summary(spans) == {**expected, "overlap": 0.4}
    silent = summary({**spans, "communication": []})
    assert silent["overlap"] == 0.0 and silent["rest_ms"] == 3.0
    assert "6 ms, of them computing 3, only communicating 3, neither 0" in sentence(summary(spans))


def events_of(on_gpu: bool) -> list[Any]:
    """Those of a step, as the profiler gives them: what computes, what waits, what another thread does, what sends."""
    here = DeviceType.CUDA if on_gpu else DeviceType.CPU

    def event(name: str, begin: float, end: float, thread: int = 1, named: bool = False) -> Any:
        device = DeviceType.CPU if name == "step 2" else here
        times = SimpleNamespace(start=1e3 * begin, end=1e3 * end)
        return SimpleNamespace(name=name, time_range=times, thread=thread, device_type=device, is_user_annotation=named)

    return [
        event("step 2", 0, 10, named=True),
        event("RegisterPostBackwardFunctionBackward" if not on_gpu else "FSDP::post_backward", 0, 9, named=on_gpu),
        event("aten::mm" if not on_gpu else "gemm", 1, 3),
        event("## Call CompiledFxGraph a ##", 4, 5, named=on_gpu),
        event("gloo:all_reduce" if not on_gpu else "ncclDevKernel_AllReduce", 2, 8, thread=2),
        *([] if on_gpu else [event("aten::copy_", 6, 7, thread=2)]),
    ]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_waiting_is_no_computation(on_gpu):
    """A span that also waits, gloo's own copies, and on a GPU the names that Python gave, are not counted."""
    found = summary(spans_of(events_of(on_gpu)))
    assert found["computation_ms"] == (2.0 if on_gpu else 3.0) and found["communication_ms"] == 6.0
    assert found["overlap"] == pytest.approx((1 if on_gpu else 2) / 6) and found["step_ms"] == 10.0
    assert LAST < REMEMBERED, "torch does not compile again what it has run under a watching mode"


def recounted(path: Path) -> tuple[float, float]:
    """From a rank's trace, in steps of 20 us: the share of the steps in which its main thread is inside an operator of
    aten or FSDP, and the share of gloo's time in which it is so too."""
    events = [each for each in json.loads(gzip.open(path).read())["traceEvents"] if each.get("ph") == "X"]
    steps = [each for each in events if each["name"].startswith("step ")]
    zero = min(each["ts"] for each in steps)
    marks = {kind: bytearray(int(max(each["ts"] + each["dur"] for each in steps) - zero) // 20) for kind in "csg"}
    for each in events:
        main = each["tid"] == steps[0]["tid"]
        kind = "s" if each in steps else "g" if each["name"].startswith("gloo:") else "c"
        if kind == "c" and not (main and each["name"].startswith(("aten::", "fsdp::", "torch::distributed::reducer"))):
            continue
        first, last = (max(0, round((each["ts"] - zero + more) / 20)) for more in (0, each["dur"]))
        last = min(last, len(marks[kind]))
        marks[kind][first:last] = bytes([1]) * (last - first)
    computing, sending = ([a & s for a, s in zip(marks[kind], marks["s"], strict=True)] for kind in "cg")
    both = sum(c & g for c, g in zip(computing, sending, strict=True))
    return sum(computing) / sum(marks["s"]), both / sum(sending)


def test_a_profile_of_zero1_shows_overlap(tmp_path, monkeypatch, capsys):
    """Two ranks with small buckets: some communication is hidden, the traces open, the pictures are there."""
    monkeypatch.chdir(tmp_path)
    main(["phase1", "2", "--device=cpu", "--zero1_bucket_mb=0.1", "--n_layer=6"])
    said = capsys.readouterr().out
    folder = tmp_path / "out" / "profile" / "phase1-2"
    found = summary(json.loads((folder / "timeline.json").read_text())["spans"])
    assert 0 < found["overlap"] <= 1 and found["communication_ms"] > 0 and found["computation_ms"] <= found["step_ms"]
    computing, overlap = recounted(folder / "rank0.json.gz")
    assert computing == pytest.approx(found["computation_ms"] / found["step_ms"], abs=0.05)
    assert overlap == pytest.approx(found["overlap"], abs=0.05)
    assert sentence(found) in said and "aten::mm" in said
    for rank in range(2):
        names = {
            each.get("name") for each in json.loads(gzip.open(folder / f"rank{rank}.json.gz").read())["traceEvents"]
        }
        assert {"step 2", "step 3", "aten::mm"} <= names and any(str(name).startswith("gloo:") for name in names)
    assert (folder / "timeline.png").stat().st_size > 5000 and (folder / "memory.png").stat().st_size > 5000
    with pytest.raises(ConfigError, match="^there is no dataset nope"):
        main(["phase1", "2", "--device=cpu", "--dataset=nope"])
    assert [path.name for path in folder.parent.iterdir()] == ["phase1-2"] and (folder / "timeline.json").exists()


def test_a_profile_takes_the_place_of_the_last(tmp_path, monkeypatch):
    """The same command again succeeds, and none of the earlier files is left beside the new ones."""
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []

    def pretend(folder: Path, *_: Any) -> dict[str, float]:
        folder.mkdir()
        (folder / "operators.txt").touch()
        folders.append(folder)
        (folder / f"of run {len(folders)}").touch()
        return summary(spans_of(events_of(False)))

    monkeypatch.setattr("bench.trainer.profile_step.profile_into", pretend)
    for _ in range(2):
        main(["phase1", "2", "--device=cpu"])
    names = {path.name for path in (tmp_path / "out" / "profile" / "phase1-2").iterdir()}
    assert names == {"operators.txt", "of run 2"}


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
