"""What a run tells of itself."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.metrics import telemetry
from nanoGPT.metrics.telemetry import Telemetry, drop_lines_from
from tests.helpers.training import tiny, train
from workshop.ranks import RankFailed, run_on_ranks

ONE = (0, 0, 1, 1, torch.device("cpu"), torch.float32)
FIELDS = ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_ms", "mfu", "peak_memory_bytes"]


def lines(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_metrics_hold_every_field_and_no_invented_value(tmp_path):
    """Each line has every field, mfu null on a CPU, val_loss at evaluations; the last line is an evaluation."""
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path))
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [*range(12), 12]
    for line in found[:-1]:
        assert set(FIELDS) <= line.keys() and line["mfu"] is None
        assert line["tokens"] == (line["step"] + 1) * 8 * 2 * 16 and line["tokens_per_second"] > 0
        assert line["peak_memory_bytes"] > 50 << 20
        assert (line["val_loss"] is not None) == (line["step"] % 5 == 0)
    assert found[-1]["loss"] is None and found[-1]["val_loss"] > 0 and found[-1]["tokens_per_second"] is None


def test_env_says_what_ran(tmp_path):
    """env.json has versions, hardware, world size, the whole configuration and why each choice was made."""
    train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path, max_iters=1))
    found = json.loads((tmp_path / "env.json").read_text())
    assert found["world_size"] == 2 and found["config"]["n_embd"] == 32 and found["tokens_per_step"] == 256
    assert found["chosen"] == {"device": "cpu (asked for)", "dtype": "torch.float32 (a cpu device)"}
    assert found["versions"]["torch"] == torch.__version__ and found["hardware"]


def test_a_heartbeat_has_step_and_stage(tmp_path):
    """Every rank's heartbeat file tells its step, its phase and when."""
    train("nanoGPT", 2, tiny("nanoGPT", tmp_path, max_iters=3))
    for rank in range(2):
        beat = json.loads((tmp_path / "heartbeat" / f"rank{rank}.json").read_text())
        assert beat["step"] == 3 and beat["stage"] in ("evaluate", "save") and time.time() - beat["time"] < 60


def test_a_torn_line_and_later_lines_go(tmp_path):
    """Resuming from step 2 keeps steps 0 and 1 only; a torn line and one that is no object go."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n[3]\n{"step": 2}\n{"step": 3, "lo')
    drop_lines_from(path, 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    drop_lines_from(tmp_path / "none.jsonl", 0)
    assert (tmp_path / "none.jsonl").read_text() == ""


def log_by_a_clock(out: str) -> None:
    """Rank 0 of two, with 512 FLOP/s each and 6 FLOPs a token: an evaluation of 10 s, and two steps of 3 s."""
    now = [0.0]
    telemetry.time = SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[assignment]
    with Telemetry(tiny("nanoGPT", out), Runtime(0, 0, 2, 2, *ONE[4:]), 0, 6) as told:
        told.peak = 512.0
        with told.untimed("evaluate", 0):
            now[0] += 10
        now[0] += 6
        told.log(1, 3.0, 1e-3, float("inf"))


def test_rates_are_means_since_the_last_line(tmp_path):
    """Without what went on aside, of all steps since; MFU is of all ranks' peaks, and a norm that is infinite null."""
    run_on_ranks(log_by_a_clock, 1, str(tmp_path), show=False)
    (line,) = lines(tmp_path)
    assert line["step_ms"] == 3000 and line["tokens_per_second"] == pytest.approx(256 / 3)
    assert line["mfu"] == pytest.approx(0.5) and line["grad_norm"] is None


def crash(out: str) -> None:
    with Telemetry(tiny("nanoGPT", out), Runtime(*ONE), 0, 1):
        raise ValueError("planted")


def test_a_crash_leaves_its_stack(tmp_path):
    """An exception inside the loop is in the rank's stacks file."""
    with pytest.raises(RankFailed, match="planted"):
        run_on_ranks(crash, 1, str(tmp_path), show=False)
    assert "ValueError: planted" in (tmp_path / "stacks" / "rank0.txt").read_text()


def test_tracking_writes_what_tensorboard_reads(tmp_path):
    """--track=tensorboard writes an event file, where tensorboard is installed."""
    pytest.importorskip("tensorboard", reason="the extra `track` is not installed")
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=1, track="tensorboard"))
    assert list(tmp_path.glob("events.out.tfevents.*"))
