"""The profile of a step: the overlap is computed from spans, and the profiler runs the real trainer of a phase."""

import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench.profile_step import (
    collect_spans,
    format_summary,
    intersect,
    main,
    merge,
    parse_request,
    summarize,
)
from nanoGPT.errors import ConfigError
from tests.helpers.training import ROOT


def test_overlap_is_the_hidden_part_of_the_communication():
    """Of 10 ms of communication, 4 ms overlap with computation. Expected values are computed by hand."""
    computation = [("a", 0.0, 4.0), ("b", 2.0, 3.0), ("c", 10.0, 12.0)]
    communication = [("gloo:all_reduce", 2.0, 10.0), ("gloo:all_gather", 9.0, 12.0)]
    assert merge(computation) == [(0.0, 4.0), (10.0, 12.0)] and merge(communication) == [(2.0, 12.0)]
    assert intersect(merge(computation), merge(communication)) == [(2.0, 4.0), (10.0, 12.0)]
    spans = {
        "step": [("step 3", 0.0, 6.0), ("step 4", 6.0, 12.0)],
        "computation": computation,
        "communication": communication,
    }
    expected = {"step_ms": 6.0, "computation_ms": 3.0, "communication_ms": 5.0, "exposed_ms": 3.0, "rest_ms": 0.0}
    assert summarize(spans) == {**expected, "overlap": 0.4}
    without = summarize({**spans, "communication": []})
    assert without["overlap"] == 0.0 and without["rest_ms"] == 3.0
    text = format_summary(summarize(spans))
    assert "takes 6 ms: 3 ms computation, 3 ms communication without computation, 0 ms" in text


def make_event(name: str, begin: float, end: float, device: DeviceType, is_annotation: bool = False) -> Any:
    """Return an event as the profiler does. Communication has a thread of its own."""
    times = SimpleNamespace(start=1e3 * begin, end=1e3 * end)
    thread = 2 if "AllReduce" in name else 1
    return SimpleNamespace(
        name=name, time_range=times, thread=thread, device_type=device, is_user_annotation=is_annotation
    )


def test_the_steps_on_a_gpu_are_those_of_the_host():
    """On a GPU, a step is counted once, however many streams repeat its name, and contains its optimizer.

    Annotations on a GPU, which contain waiting, do not count as computation.
    """
    events = [
        make_event("step 2", 0, 10, DeviceType.CPU),
        *(make_event("step 2", 1, 5, DeviceType.CUDA, is_annotation=True) for _ in range(3)),  # one per stream
        make_event("adamw", 8, 9, DeviceType.CUDA),
        make_event("FSDP::post_backward", 0, 9, DeviceType.CUDA, is_annotation=True),
        make_event("gemm", 1, 3, DeviceType.CUDA),
        make_event("## Call CompiledFxGraph a ##", 4, 5, DeviceType.CUDA, is_annotation=True),
        make_event("ncclDevKernel_AllReduce", 2, 8, DeviceType.CUDA),
    ]
    summary = summarize(collect_spans(events))
    assert summary["computation_ms"] == 3.0 and summary["communication_ms"] == 6.0
    assert summary["overlap"] == pytest.approx(1 / 6) and summary["step_ms"] == 10.0


@pytest.mark.slow
def test_a_profile_of_zero1_shows_overlap(tmp_path, monkeypatch, capsys):
    """With two ranks and small buckets, some communication overlaps, and the traces open."""
    monkeypatch.chdir(tmp_path)
    main(["--gpus=2", str(ROOT / "phase1_zero1/train.py"), "--device=cpu", "--zero1_bucket_mb=0.1", "--n_layer=6"])
    output = capsys.readouterr().out
    folder = tmp_path / "out" / "profile" / "phase1-2"
    summary = summarize(json.loads((folder / "timeline.json").read_text()))
    assert 0 < summary["overlap"] <= 1 and summary["communication_ms"] > 0
    assert summary["computation_ms"] <= summary["step_ms"]
    assert format_summary(summary) in output and "aten::mm" in output
    for rank in range(2):
        names = {
            each.get("name") for each in json.loads(gzip.open(folder / f"rank{rank}.json.gz").read())["traceEvents"]
        }
        assert {"step 2", "step 3", "aten::mm"} <= names and any(str(name).startswith("gloo:") for name in names)
    with pytest.raises(ConfigError, match="^there is no dataset nope"):
        main(["--gpus=2", str(ROOT / "phase1_zero1/train.py"), "--device=cpu", "--dataset=nope"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus=2", "phase3_fsdp/train.py", "--max_iters=1"], "max_iters=1 cannot be used here"),
        (["--gpus=3", "phase3_fsdp/train.py"], "is not divisible by the 3 ranks"),
    ],
)
def test_a_wrong_request_is_refused_with_one_sentence(words, message):
    """A flag that the profiler sets, or an invalid number of ranks, raises a ConfigError."""
    with pytest.raises(ConfigError, match=message):
        parse_request(words)
