"""`make gate`: every check passes for two good runs, and fails for a planted fault."""

import copy
import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gate import Trial, build_trials, check_trial, fit_micro_batch, main
from bench.plan.run import RunPrediction, predict_run
from bench.plan.speed import GPUS
from bench.suite.execution import Run
from nanoGPT.errors import ConfigError
from operate.run_files import read_json_lines
from tests.helpers.training import tiny, train_all

STEPS = 40
NAMES = ("loss", "same curve as DDP", "state and communication", "memory", "speed", "files")
PREDICTED = RunPrediction(step_seconds=0.1, peak_bytes=10**6)


@pytest.fixture(scope="module")
def good_trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A trial of phase 3 on two ranks, which has ended."""
    folder = tmp_path_factory.mktemp("gate")
    fields = {"max_iters": STEPS, "eval_interval": STEPS, "dropout": 0.0, "ledger": True, "diagnostics_interval": 9}
    fields |= {"dataset": "synthetic", "batch_size": 8, "learning_rate": 2e-2, "decay_lr": False}
    fields |= {"n_layer": 1, "gradient_accumulation_steps": 2, "eval_iters": 2}
    runs = tuple(Run(folder / phase, phase, 2, "gate", 1337, [], 1.0, STEPS) for phase in ("baseline", "phase3"))
    packages = ("nanoGPT", "phase3_fsdp")
    cells = [(name, tiny(name, run.out_dir, **fields)) for name, run in zip(packages, runs, strict=True)]
    train_all(2, cells)
    lines = [read_json_lines(run.out_dir / "metrics.jsonl") for run in runs]
    return Trial("synthetic", cells[1][1], runs, lines)  # type: ignore[arg-type]


def check(trial: Trial, predicted: RunPrediction = PREDICTED) -> dict[str, str]:
    """Return the result of each check by its name."""
    checks = check_trial(trial, predicted)
    return {each.subject.partition(": ")[2]: each.result for each in checks}


def test_a_good_run_passes(good_trial, monkeypatch):
    """All checks pass. The speed has no limit on a CPU. A run that needs more memory or time than predicted fails."""
    assert check(good_trial) == {name: "skip" if name == "speed" else "pass" for name in NAMES}
    monkeypatch.setattr("bench.gate.find_gpu", lambda device: GPUS["t4"])
    assert check(good_trial, replace(PREDICTED, step_seconds=1e3))["speed"] == "pass"
    worse = check(good_trial, RunPrediction(step_seconds=1e-9, peak_bytes=1000))
    assert [name for name, result in worse.items() if result == "fail"] == ["memory", "speed"]


def change_loss(trial: Trial) -> None:
    trial.lines[1][3]["loss"] += 2e-5


def leak_tokens(trial: Trial) -> None:
    for lines in trial.lines:
        lines[-1]["val_loss"] = 0.05


def stop_learning(trial: Trial) -> None:
    for lines in trial.lines:
        lines[-1]["val_loss"] = 4.3


def send_more(trial: Trial) -> None:
    path = trial.runs[1].out_dir / "ledger.json"
    ledger = json.loads(path.read_text())
    ledger["ranks"][1]["collectives"][0]["tensor_bytes"] += 4
    path.write_text(json.dumps(ledger))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (leak_tokens, "loss"),
        (stop_learning, "loss"),
        (change_loss, "same curve as DDP"),
        (send_more, "state and communication"),
        (lambda trial: (trial.runs[1].out_dir / "heartbeat" / "rank1.json").unlink(), "files"),
    ],
)
def test_a_planted_fault_fails_its_check(plant, name, good_trial, tmp_path):
    """Each planted fault fails only its own check."""
    runs = tuple(dataclasses.replace(run, directory=tmp_path / run.phase) for run in good_trial.runs)
    for run, damaged in zip(good_trial.runs, runs, strict=True):
        shutil.copytree(run.directory, damaged.directory)
    trial = Trial("synthetic", good_trial.config, runs, copy.deepcopy(good_trial.lines))  # type: ignore[arg-type]
    plant(trial)
    assert {subject for subject, outcome in check(trial).items() if outcome == "fail"} == {name}


def test_both_runs_get_the_flags_that_they_have(tmp_path, monkeypatch):
    """The runs of a trial get all flags as explicit values; the baseline gets only those that it has."""
    monkeypatch.chdir(tmp_path)
    synthetic, real = build_trials("phase3", 4, ["--device=cpu", "--fsdp_wrap=1000000"], Path("out"))
    assert [synthetic.config.dataset, real.config.dataset] == ["synthetic", "shakespeare_char"]
    baseline, phase = real.runs
    assert "--fsdp_wrap=1000000" in phase.words and not any(word.startswith("--fsdp") for word in baseline.words)
    assert {*baseline.words} < {*phase.words}
    same = build_trials("phase3", 2, ["--device=cpu", "--dataset=synthetic"], Path("out"))
    assert len({run.directory for trial in same for run in trial.runs}) == 4


def test_the_micro_batch_is_halved_until_both_runs_fit(monkeypatch):
    """On a GPU that is too small for the eager step of the ledger, a step has more and smaller micro-batches."""
    gpu = GPUS["a100-40"]
    config = tiny("phase3_fsdp", Path("out"), batch_size=12, gradient_accumulation_steps=2)
    baseline = tiny("nanoGPT", Path("out"), batch_size=6, gradient_accumulation_steps=4)
    monkeypatch.setattr("bench.gate.resolve_device", lambda config: "cuda")
    monkeypatch.setattr("bench.gate.detect_hardware", lambda device: gpu)
    space = predict_run(baseline, "baseline", 2, gpu).peak_bytes
    for usable, expected in ((space, (6, 4)), (space - 1, (3, 8)), (0, (3, 8))):
        monkeypatch.setattr("bench.gate.read_usable_bytes", lambda gpu, usable=usable: usable)
        found = fit_micro_batch(config, "phase3", 2)
        assert (found.batch_size, found.gradient_accumulation_steps) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["phase3_fsdp/train.py", "--device=cpu", "--max_iters=6"], "--max_iters=6 has no effect: the gate sets it"),
        (["nanoGPT/train.py"], "PHASE=baseline cannot be compared with itself: use phase1, phase2 or phase3"),
    ],
)
def test_wrong_arguments_are_one_sentence(words, message):
    """A wrong phase or flag stops the gate before it trains."""
    with pytest.raises(ConfigError, match=message):
        main(words)
