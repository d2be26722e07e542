"""The files that a run writes about itself: metrics, environment, heartbeats and stack traces."""

import json
from pathlib import Path

import pytest
import torch

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.job import log as log_module
from nanoGPT.job.log import Log, count_tokens
from nanoGPT.model import GPTConfig
from operate.run_files import read_json_lines
from tests.helpers.training import read_metric, tiny, train
from workshop.ranks import run_on_ranks

ONE_RANK = (0, 0, 1, 1, torch.device("cpu"), torch.float32)
METRICS = ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_ms", "mfu", "peak_memory_bytes"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train the runs that the tests of this file read, on one rank and on two, and return the folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    train("nanoGPT", 1, tiny("nanoGPT", folder / "metrics"))
    train("phase3_fsdp", 2, tiny("phase3_fsdp", folder / "env", max_iters=1))
    return folder


def test_every_line_of_metrics_has_every_field(runs):
    """Each line has every field. mfu is null on a CPU, val_loss is null without an evaluation, and the last line is an
    evaluation."""
    lines = read_json_lines(runs / "metrics" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(12), 12]
    for line in lines[:-1]:
        assert set(METRICS) <= line.keys() and line["mfu"] is None
        assert line["tokens"] == (line["step"] + 1) * 8 * 2 * 16 and line["tokens_per_second"] > 0
        assert line["peak_memory_bytes"] > 50 << 20
        assert (line["val_loss"] is not None) == (line["step"] % 5 == 0)
    assert lines[-1]["loss"] is None and lines[-1]["val_loss"] > 0 and lines[-1]["tokens_per_second"] is None


def test_env_describes_the_run(runs):
    """env.json has the versions, hardware, world size, full configuration, and the reason for each automatic choice."""
    env = json.loads((runs / "env" / "env.json").read_text())
    assert env["world_size"] == 2 and env["config"]["n_embd"] == 32 and env["tokens_per_step"] == 256
    assert env["chosen"] == {
        "device": "cpu (requested)",
        "attention": "torch's choice",
        "dtype": "torch.float32 (the default on cpu)",
    }
    assert env["versions"]["torch"] == torch.__version__ and env["hardware"]


def test_a_resume_keeps_the_evaluation_at_the_end_of_the_earlier_start(tmp_path):
    """The validation loss after the last step stays, because the resumed run does not measure it again."""
    fields = {"max_iters": 4, "eval_interval": 3, "n_layer": 1}
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **fields))
    before = read_metric(tmp_path, "val_loss")
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **{**fields, "max_iters": 7, "init_from": "resume"}))
    after = read_metric(tmp_path, "val_loss")
    assert list(after) == [0, 3, 4, 6, 7] and {step: after[step] for step in before} == before
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 4, 5, 6, 7]


def test_tokens_are_counted_on_after_a_resume_with_another_batch(tmp_path):
    """The tokens of earlier steps are those that the run has read, with the batch of that time."""
    fields = {"max_iters": 5, "eval_interval": 5, "n_layer": 1, "log_interval": 2}
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **fields))
    fields |= {"max_iters": 8, "init_from": "resume", "gradient_accumulation_steps": 16}
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **fields))
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    tokens = {line["step"]: line["tokens"] / (2 * 16) for line in lines if line["loss"] is not None}
    assert tokens == {0: 8, 2: 24, 4: 40, 5: 40 + 16, 6: 40 + 32, 7: 40 + 48}
    assert count_tokens(lines[:2], 5, 100) == 3 * 256 + 200 and count_tokens([], 5, 100) == 500


def log_with_a_fake_clock(out: str) -> None:
    """Log an evaluation of 10 s, then two steps of 3 s."""
    now = [0.0]
    log_module.time.perf_counter = lambda: now[0]  # type: ignore[method-assign]
    run = Runtime(*ONE_RANK)
    log = Log(tiny("nanoGPT", out), run, 0, GPTConfig(1, 1, 8, 8, False, 16))
    run.observers.members.append(log)
    for stage, seconds in [("evaluation, micro-batch 0", 10), ("micro-batch 0", 2), ("update", 4)]:
        run.enter_stage(stage, 0)
        now[0] += seconds
    log.write(1, 3.0, 1e-3, float("inf"), None)


def test_rates_are_averaged_over_the_steps_since_the_last_line(tmp_path):
    """Rates do not include the time of evaluations. An infinite norm is null, and a printed line says what it means."""
    run_on_ranks(log_with_a_fake_clock, 1, str(tmp_path), show=False)
    (line,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert line["step_ms"] == 3000 and line["tokens_per_second"] == pytest.approx(256 / 3)
    assert line["grad_norm"] is None
    assert "no update, because float16 gradients overflow" in log_module.format_line(line)


def test_tracking_writes_tensorboard_events(tmp_path):
    """--track=tensorboard writes an event file, if tensorboard is installed."""
    pytest.importorskip("tensorboard", reason="the extra `track` is not installed")
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=1, track="tensorboard"))
    assert list(tmp_path.glob("events.out.tfevents.*"))
