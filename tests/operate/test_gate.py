"""`make gate`: every check passes for two good runs, and fails for a planted fault."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from bench.plan.run import RunPrediction
from bench.suite.execution import Run
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.prepare.synthetic import CHARACTERS, PROBABILITIES, compute_entropy_rate, generate_text
from operate.gate import GateConfig, Trial, TrialResult, build_trials, check_trial, compute_unigram_entropy, split_flags
from tests.helpers.training import tiny, train_all

STEPS = 40
NAMES = ("files", "loss", "same curve as DDP", "state and communication", "memory", "speed")
PREDICTED = RunPrediction(step_seconds=0.1, forward_seconds=0.1, peak_bytes=10**6)
SHAKESPEARE = str(DATA / "shakespeare_char")


def test_the_synthetic_text_has_the_entropy_that_it_promises():
    """Each character has four successors with the stated frequencies, and all characters are equally frequent."""
    text = generate_text(200_000)
    assert text == generate_text(200_000)
    assert compute_entropy_rate() == pytest.approx(1.75 * math.log(2))
    for character in CHARACTERS[::8]:
        pairs = [b for a, b in zip(text, text[1:], strict=False) if a == character]
        counts = sorted((pairs.count(other) for other in set(pairs)), reverse=True)
        assert [count / len(pairs) for count in counts] == pytest.approx(PROBABILITIES, abs=0.03)
        assert text.count(character) / len(text) == pytest.approx(1 / 32, rel=0.1)


@pytest.fixture(scope="module")
def good_result(tmp_path_factory: pytest.TempPathFactory) -> TrialResult:
    """The result of a trial of phase 3 on two ranks."""
    folder = tmp_path_factory.mktemp("gate")
    fields = {"max_iters": STEPS, "eval_interval": STEPS, "dropout": 0.0, "ledger": True}
    fields |= {"dataset": "synthetic", "batch_size": 8, "learning_rate": 2e-2, "decay_lr": False}
    fields |= {"n_layer": 1, "gradient_accumulation_steps": 2, "eval_iters": 2}
    runs = tuple(Run(folder / phase, phase, 2, "gate", 1337, [], 1.0, STEPS) for phase in ("baseline", "phase3"))
    packages = ("nanoGPT", "phase3_fsdp")
    cells = [(name, tiny(name, run.out_dir, **fields)) for name, run in zip(packages, runs, strict=True)]
    train_all(2, cells)
    return read_result(Trial("synthetic", cells[1][1], runs))  # type: ignore[arg-type]


def read_result(trial: Trial) -> TrialResult:
    """Return the result of a trial whose runs have finished."""
    texts = [(run.out_dir / "metrics.jsonl").read_text() for run in trial.runs]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return TrialResult(trial, lines, [{"state": "done", "reason": ""}] * 2)


def check(result: TrialResult, **options: float) -> dict[str, str]:
    """Return the result of each check by its name."""
    checks = check_trial(result, GateConfig("phase3", 2, **options), PREDICTED)  # type: ignore[arg-type]
    return {each.subject.partition(": ")[2]: each.result for each in checks}


def test_a_good_run_passes(good_result):
    """All checks pass. The speed on a CPU has no limit, unless one is given."""
    assert check(good_result) == {name: "skip" if name == "speed" else "pass" for name in NAMES}
    assert check(good_result, min_tokens_per_second=1.0)["speed"] == "pass"


def copy_result(result: TrialResult, folder: Path) -> TrialResult:
    """Copy the runs of a trial, so that a test can damage them."""
    runs = []
    for run in result.trial.runs:
        shutil.copytree(run.directory, folder / run.phase)
        runs.append(dataclasses.replace(run, directory=folder / run.phase))
    return read_result(dataclasses.replace(result.trial, runs=tuple(runs)))


def delete_heartbeat(result: TrialResult) -> None:
    (result.trial.runs[1].out_dir / "heartbeat" / "rank1.json").unlink()


def flip_checkpoint(result: TrialResult) -> None:
    path = next(step_directories(result.trial.runs[1].out_dir)[0].glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def change_loss(result: TrialResult) -> None:
    result.lines[1][3]["loss"] += 2e-5


def leak_tokens(result: TrialResult) -> None:
    for lines in result.lines:
        lines[-1]["val_loss"] = 0.05


def stop_learning(result: TrialResult) -> None:
    for lines in result.lines:
        lines[-1]["val_loss"] = 4.3


def send_more(result: TrialResult) -> None:
    path = result.trial.runs[1].out_dir / "ledger.json"
    ledger = json.loads(path.read_text())
    ledger["ranks"][1]["collectives"][0]["tensor_bytes"] += 4
    path.write_text(json.dumps(ledger))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (delete_heartbeat, "files"),
        (flip_checkpoint, "files"),
        (leak_tokens, "loss"),
        (stop_learning, "loss"),
        (change_loss, "same curve as DDP"),
        (send_more, "state and communication"),
    ],
)
def test_a_planted_fault_fails_its_check(plant, name, good_result, tmp_path):
    """Each planted fault fails only its own check."""
    result = copy_result(good_result, tmp_path)
    plant(result)
    assert {subject for subject, outcome in check(result).items() if outcome == "fail"} == {name}


def test_limits_of_the_user_are_used(good_result):
    """A run fails if it needs more memory than --max_gb, or is slower than --min_tokens_per_second."""
    assert check(good_result, max_gb=1e-6)["memory"] == "fail"
    assert check(good_result, min_tokens_per_second=1e12)["speed"] == "fail"


def test_a_run_that_failed_is_one_check(good_result):
    """If a run does not finish, the gate reports one failed check with the reason."""
    failed = dataclasses.replace(good_result, states=[{"state": "oom", "reason": "rank 1: out of memory"}])
    (only,) = check_trial(failed, GateConfig(), PREDICTED)
    assert (only.result, only.finding) == ("fail", "baseline: oom: rank 1: out of memory")


def test_flags_are_divided_between_the_gate_and_the_trainer(tmp_path, monkeypatch):
    """The gate takes its own flags. The runs of the trial get all others as explicit values."""
    words = ["config/train_gpt2.py", "--max_gb", "3", "--n_layer=2", "--gpus=4", "--dropout=0.1"]
    assert split_flags(words) == (["--max_gb=3", "--gpus=4"], ["config/train_gpt2.py", "--n_layer=2", "--dropout=0.1"])
    monkeypatch.chdir(tmp_path)
    gate = GateConfig("phase3", 4, scale_up=True)
    synthetic, real, longer = build_trials(gate, ["--device=cpu", "--fsdp_wrap=size"], Path("out"))
    assert [synthetic.config.dataset, real.config.dataset] == ["synthetic", "shakespeare_char"]
    assert longer.config.block_size == 2 * real.config.block_size
    baseline, phase = real.runs
    assert "--fsdp_wrap=size" in phase.words and not any(word.startswith("--fsdp") for word in baseline.words)
    assert {*baseline.words} < {*phase.words}


@pytest.mark.parametrize("dataset", ["synthetic", SHAKESPEARE, "mixture"])
def test_each_run_has_its_own_directory(dataset, tmp_path):
    """For every kind of dataset, each run of each trial has another directory under the gate's directory."""
    if dataset == "mixture":
        dataset = f"shakespeare_char:3,{shutil.copytree(SHAKESPEARE, tmp_path / 'other')}:1"
    words = ["--device=cpu", f"--dataset={dataset}"]
    trials = build_trials(GateConfig("phase3", 2, scale_up=True), words, tmp_path / "gate")
    directories = [run.directory for trial in trials for run in trial.runs]
    assert len({*directories}) == 6 and {directory.parent for directory in directories} == {tmp_path / "gate"}


@pytest.mark.parametrize(
    ("phase", "words", "message"),
    [
        ("baseline", [], "PHASE=baseline cannot be compared with itself: use phase1, phase2 or phase3"),
        ("phase4", [], "PHASE=phase4 is unknown"),
        ("phase3", ["--drop=1"], "unknown flag --drop"),
        ("phase3", ["extra"], "'extra' is neither a flag nor a config file"),
    ],
)
def test_wrong_arguments_are_one_sentence(phase, words, message, tmp_path):
    """A wrong phase or flag stops the gate before it trains."""
    with pytest.raises(ConfigError, match=message):
        build_trials(GateConfig(phase), words, tmp_path)


def test_the_entropy_of_frequencies_is_computed_from_the_data():
    """The entropy of the synthetic data is that of 32 equally frequent characters."""
    assert compute_unigram_entropy("synthetic") == pytest.approx(math.log(32), abs=0.01)
