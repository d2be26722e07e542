"""Decide whether a phase is ready for a long run: train the phase and the baseline (DDP), and compare the results.

    make gate PHASE=phase3 GPUS=2                                   # about three minutes on 2 cores
    make gate PHASE=phase3 GPUS=8 CONFIG=config/train_mid.py ARGS="--max_gb=45 --min_tokens_per_second=20000"
    make gate PHASE=phase1 GPUS=4 ARGS="--scale_up --n_layer=2"     # flags of the gate, then flags of the trainer

The gate trains the phase and the baseline (DDP) with the same configuration, on two datasets:

- `synthetic`, 200 steps: a random walk whose lowest possible loss is known. A lower loss means that the model sees the
  tokens that it should predict. A much higher loss means that it does not learn.
- the configured dataset, 300 steps. The loss must be well below the unigram entropy: the loss of a
  model that knows only the token frequencies.

With `--scale_up`, it also trains on the configured dataset with sequences of twice the length.

All limits are printed. The gate exits with code 1 if a check fails, and with 0 otherwise. The runs and
`gate.json` are in `out/gate-<phase>-<ranks>-<time>/`.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.matrix.cells import matches_formula
from bench.plan.plan import check_amount
from bench.plan.run import RunPrediction, detect_hardware, find_gpu, predict_run
from bench.suite.execution import Run, execute
from nanoGPT.checkpoint.manifest import DamagedCheckpoint, read_manifest, step_directories, verify_files
from nanoGPT.cli.command_line import command_line, join_flag_values
from nanoGPT.cli.program import report_errors
from nanoGPT.dataset import find_mixture, read_dataset_meta
from nanoGPT.errors import ConfigError
from nanoGPT.job.parse import is_config_file, parse
from nanoGPT.job.preflight import preflight
from nanoGPT.train_config import TrainConfig, field_names
from operate.checks import Check, Result, format_check, has_failed, summarize
from workshop.imports import ROOT
from workshop.phases import PHASES, find_package, load_config_class

SYNTHETIC_STEPS, REAL_STEPS = 200, 300
EARLY_STEPS = 20  # up to this step, two curves differ only by rounding; later, small differences grow
# Largest difference of the losses of two phases: up to EARLY_STEPS, and at the last step.
TOLERANCES = {"float32": (1e-5, 0.02), "lower precision": (0.02, 0.05)}
# Required progress of the final loss, from the unigram entropy (0) to the lowest possible loss (1).
MIN_LEARNED = 0.9
# Limits of the final loss on other data, as fractions of the unigram entropy.
REAL_LOSS_LIMITS = (0.3, 0.9)
SAMPLING_ERROR = 0.03  # nats: more than four standard errors of a loss over 8,000 tokens of `synthetic`
MEMORY_MARGIN = 1.05  # of the planner's prediction
SPEED_MARGIN = 0.5  # of the planner's prediction
MINUTES = 60.0  # time limit of one run


@dataclass
class GateConfig:
    """Command-line options of `make gate`. All other flags are flags of the trainer."""

    phase: str = "phase3"
    """phase1, phase2 or phase3; it is compared with the baseline"""
    gpus: int = 1
    """ranks, one per GPU"""
    max_gb: float | None = None
    """highest peak memory of a rank, in GB; None: 1.05 times the planner's prediction"""
    min_tokens_per_second: float | None = None
    """lowest throughput of all ranks together; None: half of the planner's prediction for a GPU that it knows"""
    scale_up: bool = False
    """also train with sequences of twice the length"""


@dataclass(frozen=True)
class Trial:
    """One configuration, which the baseline and the phase both run.

    Attributes:
        name: of the trial.
        config: of the phase.
        runs: one for the baseline and one for the phase.
    """

    name: str
    config: TrainConfig
    runs: tuple[Run, Run]


@dataclass
class TrialResult:
    """What the two runs of a trial wrote: the lines of metrics.jsonl, and the status."""

    trial: Trial
    lines: list[list[dict[str, Any]]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_finished(self) -> bool:
        """Whether both runs are complete."""
        return all(status["state"] == "done" for status in self.states)


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into the flags of the gate, and the config files and flags of the trainer."""
    words = join_flag_values(words)
    names = field_names(GateConfig)
    is_gate_flag = [word.lstrip("-").partition("=")[0].replace("-", "_") in names for word in words]
    gate_words = [word for word, is_gate in zip(words, is_gate_flag, strict=True) if is_gate or word == "--help"]
    return gate_words, [word for word in words if word not in gate_words]


def build_trials(gate: GateConfig, words: list[str], out_dir: Path) -> list[Trial]:
    """Return the trials, each with a configuration that both trainers accept.

    Raises:
        ConfigError: the phase is unknown or the baseline, or a flag is not valid.
    """
    package = find_package(gate.phase)
    if package == "nanoGPT":
        raise ConfigError(f"PHASE={gate.phase} cannot be compared with itself: use phase1, phase2 or phase3")
    if gate.gpus < 1:
        raise ConfigError(f"GPUS={gate.gpus} is out of range: use 1 or more")
    for word in words:
        if not word.startswith("--") and not is_config_file(word):
            raise ConfigError(f"{word!r} is neither a flag nor a config file: write --flag=value or config/name.py")
    trainer = ROOT / package / "train.py"
    config = parse(load_config_class(gate.phase), words, trainer, gate.gpus)
    trials = []
    shapes: list[tuple[str, str, dict[str, Any], int]] = [
        ("synthetic", "synthetic", {"dataset": "synthetic", "vocab_size": None}, SYNTHETIC_STEPS),
        ("dataset", config.dataset, {}, REAL_STEPS),
    ]
    if gate.scale_up:
        longer = {"block_size": 2 * config.block_size, "batch_size": max(1, config.batch_size // 2)}
        name = f"{config.dataset}, {longer['block_size']} tokens per sequence"
        shapes.append(("longer", name, longer, REAL_STEPS))
    for folder, name, fields, steps in shapes:
        if uses_interpreter(config):
            steps = min(steps, config.max_iters)
        changed = {**fields, "max_iters": steps, "eval_interval": steps, "log_interval": 10, "ledger": True}
        changed |= {"warmup_iters": min(config.warmup_iters, steps // 4), "lr_decay_iters": None}
        values: dict[str, Any] = {**changed, "init_from": "scratch", "keep_checkpoints": 3, "eval_only": False}
        trial_config = dataclasses.replace(config, **values)
        runs = (
            build_run("baseline", gate.gpus, trial_config, out_dir / f"{folder}-baseline"),
            build_run(gate.phase, gate.gpus, trial_config, out_dir / f"{folder}-{gate.phase}"),
        )
        preflight(trial_config, gate.gpus, gate.gpus)
        trials.append(Trial(name, trial_config, runs))
    return trials


def uses_interpreter(config: TrainConfig) -> bool:
    """Return whether the run interprets Triton kernels, which takes about a hundred times as long."""
    has_kernels = getattr(config, "kernels", "none").lower() not in ("none", "auto")  # on a CPU, auto selects none
    return has_kernels and resolve_device(config) == "cpu"


def resolve_device(config: TrainConfig) -> str:
    """Return "cuda" or "cpu", for the value of `--device`."""
    import torch

    return "cuda" if config.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"


def build_run(phase: str, ranks: int, config: TrainConfig, directory: Path) -> Run:
    """Return a run of a trainer. Every field is passed as a flag; the baseline gets only the fields that it has."""
    names = [name for name in field_names(load_config_class(phase)) if name != "out_dir"]
    words = [f"--{name}={getattr(config, name)}" for name in names]
    return Run(directory, phase, ranks, "gate", config.seed, words, MINUTES, config.max_iters)


def execute_trial(trial: Trial) -> TrialResult:
    """Run the baseline and the phase, and read what they wrote."""
    result = TrialResult(trial)
    for run in trial.runs:
        print(f"training {run.phase} on {run.ranks} rank(s), {trial.name}, {run.steps} steps ...", end=" ", flush=True)
        status = execute(run)
        print(" ".join(filter(None, [status["state"], f"{status['seconds']:.0f} s", status["reason"]])), flush=True)
        result.states.append(status)
        path = run.out_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        result.lines.append([json.loads(line) for line in lines])
        if status["state"] != "done":
            break
    return result


def check_trial(result: TrialResult, gate: GateConfig, predicted: RunPrediction) -> Iterator[Check]:
    """Yield the checks of a trial."""
    name, runs = result.trial.name, result.trial.runs
    if not result.has_finished:
        run, status = runs[len(result.states) - 1], result.states[-1]
        finding = f"{run.phase}: {status['state']}: {status['reason']}"
        yield Check(f"{name}: training", "fail", finding, f"read {run.directory / 'log.txt'}, or run make autopsy")
        return
    yield check_artifacts(name, runs)
    yield check_loss(result)
    yield check_same_curve(result)
    yield check_ledger(name, runs[1])
    yield check_memory(result, gate, predicted)
    yield check_speed(result, gate, predicted)


def check_artifacts(name: str, runs: tuple[Run, Run]) -> Check:
    """Check that both runs wrote every file that a run writes, and that their checkpoints are complete."""
    missing = []
    for run in runs:
        ranks = range(run.ranks)
        files = ["metrics.jsonl", "env.json", "ledger.json", *(f"heartbeat/rank{rank}.json" for rank in ranks)]
        files += [f"stacks/rank{rank}.txt" for rank in ranks]
        missing += [f"{run.phase}: {file}" for file in files if not (run.out_dir / file).exists()]
        steps = step_directories(run.out_dir)
        if not steps or steps[0].name != f"step-{run.steps:08d}":
            missing.append(f"{run.phase}: checkpoints/step-{run.steps:08d}")
            continue
        try:
            verify_files(steps[0], read_manifest(steps[0]))
        except DamagedCheckpoint as problem:
            missing.append(f"{run.phase}: {steps[0].name} ({problem})")
    if missing:
        return Check(f"{name}: files", "fail", f"missing or damaged: {', '.join(missing)}", "look into log.txt")
    return Check(f"{name}: files", "pass", "metrics, environment, heartbeats, ledger, verified checkpoint")


def compute_unigram_entropy(dataset: str) -> float:
    """Return the unigram entropy of the first validation file, or of the mixture of these files, in nats.

    It is the lowest loss of a model that knows only how often each token occurs.
    """
    mixture = find_mixture(dataset)
    frequencies = np.zeros(read_dataset_meta(mixture[0][0])["tokenizer"]["vocab_size"])
    for folder, weight in mixture:
        meta = read_dataset_meta(folder)
        tokens = np.fromfile(folder / meta["splits"]["val"][0]["name"], np.dtype(meta["dtype"]).newbyteorder("<"))
        frequencies += weight * np.bincount(tokens, minlength=len(frequencies)) / len(tokens)
    frequencies = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def compute_loss_limits(trial: Trial) -> tuple[float, float]:
    """Return the lowest and the highest validation loss that the end of a trial may have."""
    entropy = compute_unigram_entropy(trial.config.dataset)
    mixture = find_mixture(trial.config.dataset)
    source = read_dataset_meta(mixture[0][0]).get("source", {}) if len(mixture) == 1 else {}
    if (lowest := source.get("entropy_rate")) and trial.config.max_iters >= SYNTHETIC_STEPS:
        return lowest - SAMPLING_ERROR, entropy - MIN_LEARNED * (entropy - lowest)
    return max(REAL_LOSS_LIMITS[0] * entropy, (lowest or 0) - SAMPLING_ERROR), REAL_LOSS_LIMITS[1] * entropy


def check_loss(result: TrialResult) -> Check:
    """Check that the final validation loss of the phase is inside its band."""
    loss, (low, high) = result.lines[1][-1]["val_loss"], compute_loss_limits(result.trial)
    finding = f"validation loss {loss:.3f} after {result.trial.config.max_iters} steps; limits {low:.3f} to {high:.3f}"
    subject = f"{result.trial.name}: loss"
    if loss > high:
        return Check(subject, "fail", finding, "it learns too slowly: check the learning rate and the gradients")
    if loss < low:
        return Check(subject, "fail", finding, "a model sees tokens that it should predict: check the attention mask")
    return Check(subject, "pass", finding)


def check_same_curve(result: TrialResult) -> Check:
    """Check that the losses of the phase equal those of the baseline."""
    config = result.trial.config
    is_fp32 = config.dtype == "float32" or (config.dtype == "auto" and resolve_device(config) == "cpu")
    tolerances = TOLERANCES["float32" if is_fp32 and not config.compile else "lower precision"]
    curves = [{line["step"]: line["loss"] for line in lines if line["loss"] is not None} for lines in result.lines]
    differences = {step: abs(loss - curves[1].get(step, math.inf)) for step, loss in curves[0].items()}
    early = max(difference for step, difference in differences.items() if step <= EARLY_STEPS)
    final = abs(result.lines[0][-1]["val_loss"] - result.lines[1][-1]["val_loss"])
    finding = f"max loss difference to DDP {early:.1e} up to step {EARLY_STEPS} (limit {tolerances[0]:g}); "
    finding += f"final validation losses differ by {final:.1e} (limit {tolerances[1]:g})"
    is_same = early <= tolerances[0] and final <= tolerances[1]
    remedy = "" if is_same else "train both with --diagnostics_interval=1, and compare the norms in diagnostics/"
    return Check(f"{result.trial.name}: same curve as DDP", "pass" if is_same else "fail", finding, remedy)


def check_ledger(name: str, run: Run) -> Check:
    """Check that the model state and the communication of the phase match the formula exactly."""
    ledger = json.loads((run.out_dir / "ledger.json").read_text())
    subject = f"{name}: state and communication"
    if matches_formula(ledger):
        return Check(subject, "pass", "match the formula exactly, on every rank")
    return Check(subject, "fail", "differ from the formula", f"compare them in {run.out_dir / 'ledger.json'}")


def check_memory(result: TrialResult, gate: GateConfig, predicted: RunPrediction) -> Check:
    """Check the peak memory: of the allocator on a GPU, and as the ledger counts it on a CPU."""
    run = result.trial.runs[1]
    ranks = json.loads((run.out_dir / "ledger.json").read_text())["ranks"]
    peaks = [each["memory"]["allocator_peak_bytes"] or sum(each["memory"]["peak"].values()) for each in ranks]
    limit = gate.max_gb if gate.max_gb is not None else MEMORY_MARGIN * predicted.peak_bytes / 1e9
    origin = "--max_gb" if gate.max_gb is not None else f"{MEMORY_MARGIN} x the planner's prediction"
    finding = f"peak {max(peaks) / 1e9:.4g} GB per rank; limit {limit:.4g} GB ({origin})"
    is_within = max(peaks) / 1e9 <= limit
    remedy = "" if is_within else "use activation checkpointing, a smaller --batch_size or more ranks: see make plan"
    return Check(f"{result.trial.name}: memory", "pass" if is_within else "fail", finding, remedy)


def check_speed(result: TrialResult, gate: GateConfig, predicted: RunPrediction) -> Check:
    """Check the throughput: the median over the second half of the run."""
    config = result.trial.config
    baseline, phase = (statistics.median(read_rates(lines)) for lines in result.lines)
    finding = f"{phase:,.0f} tokens per second, {phase / baseline:.2f} x DDP; "
    subject = f"{result.trial.name}: speed"
    tokens = config.gradient_accumulation_steps * config.batch_size * config.block_size
    limit = gate.min_tokens_per_second
    if limit is None and find_gpu() is None:
        finding += "no limit, because the planner does not know this device"
        return Check(subject, "skip", finding, "give one with --min_tokens_per_second")
    origin = "--min_tokens_per_second"
    if limit is None:
        limit, origin = SPEED_MARGIN * tokens / predicted.step_seconds, f"{SPEED_MARGIN} x the planner's prediction"
    result_name: Result = "pass" if phase >= limit else "fail"
    remedy = "" if phase >= limit else f"profile a step: make profile PHASE={result.trial.runs[1].phase}"
    return Check(subject, result_name, f"{finding}limit {limit:,.0f} ({origin})", remedy)


def read_rates(lines: list[dict[str, Any]]) -> list[float]:
    """Return the tokens per second of the logged lines in the second half of a run."""
    rates = [line["tokens_per_second"] for line in lines if line["tokens_per_second"]]
    return rates[len(rates) // 2 :]


def main(gate: GateConfig, words: list[str]) -> int:
    """Run the gate, print a table, write gate.json, and return the exit code."""
    for name in ("max_gb", "min_tokens_per_second"):
        check_amount(name, getattr(gate, name))
    phase = next(name for name, package in PHASES.items() if package == find_package(gate.phase))
    gate = dataclasses.replace(gate, phase=phase)
    out_dir = Path("out") / f"gate-{phase}-{gate.gpus}-{time.strftime('%Y%m%d-%H%M%S')}"
    trials = build_trials(gate, words, out_dir)
    hardware = detect_hardware()
    checks: list[Check] = []
    for trial in trials:
        predicted = predict_run(trial.config, phase, gate.gpus, hardware)
        checks += check_trial(execute_trial(trial), gate, predicted)
    width = max(len(check.subject) for check in checks)
    print("\n" + "\n".join(format_check(check, width) for check in checks))
    report = {"settings": dataclasses.asdict(gate), "checks": [dataclasses.asdict(check) for check in checks]}
    (out_dir / "gate.json").write_text(json.dumps(report, indent=1) + "\n")
    verdict = "is not ready for a long run" if has_failed(checks) else "is ready for a long run"
    print(f"\n{phase} on {gate.gpus} rank(s) {verdict}: {summarize(checks)}; the runs are in {out_dir}")
    return int(has_failed(checks))


if __name__ == "__main__":
    with report_errors():
        gate_words, trainer_words = split_flags(sys.argv[1:])
        sys.exit(main(command_line(GateConfig, gate_words), trainer_words))
