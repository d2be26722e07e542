"""Decide whether a phase is ready for a long run: train the phase and the baseline (DDP), and compare the results.

    make gate PHASE=phase3 GPUS=2                                   # about three minutes on 2 cores
    make gate PHASE=phase3 GPUS=8 CONFIG=config/train_mid.py ARGS=--batch_size=8

The gate trains the phase and the baseline (DDP) with the same configuration, on two datasets:

- `synthetic`, 200 steps: a random walk whose lowest possible loss is known. A lower loss means that the model sees the
  tokens that it should predict. A much higher loss means that it does not learn.
- the configured dataset, 300 steps. The loss must be well below the unigram entropy: the loss of a
  model that knows only the token frequencies.

All limits are printed. The gate exits with code 1 if a check fails, and with 0 otherwise. The runs are in
`out/gate-<phase>-<ranks>-<time>/`.
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

from bench.checks import Check, format_check, has_failed, summarize
from bench.matrix.cells import matches_formula
from bench.phases import PHASES, ROOT, Ranks, find_phase, load_config_class
from bench.plan.run import RunPrediction, detect_hardware, find_gpu, predict_run, read_usable_bytes
from bench.plan.speed import GIB
from bench.suite.execution import Run, execute
from nanoGPT.dataset import find_mixture
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.parse import parse
from nanoGPT.job.start import check_run
from nanoGPT.prepare.meta import read_dataset_meta
from nanoGPT.train_config import TrainConfig, field_names
from operate.launch import split_arguments
from operate.run_files import read_json_lines

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
class Trial:
    """One configuration, which the baseline and the phase both run.

    Attributes:
        name: of the trial.
        config: of the phase.
        runs: one for the baseline and one for the phase.
        lines: of their metrics.jsonl, when they have ended.
    """

    name: str
    config: TrainConfig
    runs: tuple[Run, Run]
    lines: list[list[dict[str, Any]]] = field(default_factory=list)


def build_trials(phase: str, ranks: int, words: list[str], out_dir: Path) -> list[Trial]:
    """Return the trials, each with a configuration that both trainers accept.

    Args:
        phase: to compare with the baseline.
        ranks: of each run.
        words: the config files and flags of the trainer.
        out_dir: for the runs.

    Raises:
        ConfigError: the phase is the baseline, or a flag is not valid.
    """
    if phase == "baseline":
        raise ConfigError("PHASE=baseline cannot be compared with itself: use phase1, phase2 or phase3")
    config = parse(load_config_class(phase), words, ROOT / PHASES[phase] / "train.py", ranks)
    fixed: dict[str, Any] = {"log_interval": 10, "ledger": True, "diagnostics_interval": EARLY_STEPS}
    fixed |= {"lr_decay_iters": None, "init_from": "scratch", "keep_checkpoints": 3, "eval_only": False}
    without_effect = {*fixed, "eval_interval"} | (set() if uses_interpreter(config) else {"max_iters"})
    if given := [word for word in words if word.partition("=")[0].removeprefix("--") in without_effect]:
        lengths = f"{SYNTHETIC_STEPS} and {REAL_STEPS} steps"
        raise ConfigError(f"{given[0]} has no effect: the gate sets it for its runs of {lengths}; leave it out")
    trials = []
    for name, steps in (("synthetic", SYNTHETIC_STEPS), ("dataset", REAL_STEPS)):
        if uses_interpreter(config):
            steps = min(steps, config.max_iters)
        fields = {**fixed, "max_iters": steps, "eval_interval": steps}
        fields |= {"warmup_iters": min(config.warmup_iters, steps // 4)}
        fields |= {"dataset": name, "vocab_size": None} if name == "synthetic" else {}
        trial_config = dataclasses.replace(config, **fields)
        check_run(trial_config, ranks, ranks)
        trial_config = fit_micro_batch(trial_config, phase, ranks)
        baseline, other = (
            build_run(each, ranks, trial_config, out_dir / f"{name}-{each}") for each in ("baseline", phase)
        )
        trials.append(Trial(trial_config.dataset, trial_config, (baseline, other)))
    return trials


def fit_micro_batch(config: TrainConfig, phase: str, ranks: int) -> TrainConfig:
    """Halve the micro-batch until both runs fit into the GPU. The tokens per step remain the same.

    The ledger measures an eager step, which needs about twice the memory of a compiled one.
    """
    if resolve_device(config) == "cpu":
        return config
    gpu = detect_hardware(config.device)
    baseline = load_config_class("baseline")
    while True:
        same = baseline(**{name: getattr(config, name) for name in field_names(baseline)})
        peaks = [predict_run(each, name, ranks, gpu).peak_bytes for name, each in (("baseline", same), (phase, config))]
        if max(peaks) <= read_usable_bytes(gpu) or config.batch_size % 2:
            return config
        steps = 2 * config.gradient_accumulation_steps
        config = dataclasses.replace(config, batch_size=config.batch_size // 2, gradient_accumulation_steps=steps)
        print(f"a step needs {max(peaks) / GIB:.1f} GiB, so --batch_size is now {config.batch_size}", flush=True)


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


def execute_trial(trial: Trial) -> Check | None:
    """Run the baseline and the phase, and read their metrics. Return a failed check if one of them fails."""
    for run in trial.runs:
        print(f"training {run.phase} on {run.ranks} rank(s), {trial.name}, {run.steps} steps ...", flush=True)
        status = execute(run)
        if status["state"] != "done":
            finding = f"{run.phase}: {status['state']}: {status['reason']}"
            remedy = f"read {run.output_file}, or run make autopsy RUN={run.out_dir}"
            return Check(f"{trial.name}: training", "fail", finding, remedy)
        trial.lines.append(read_json_lines(run.out_dir / "metrics.jsonl"))
    return None


def check_trial(trial: Trial, predicted: RunPrediction) -> Iterator[Check]:
    """Yield the checks of a trial whose runs have ended."""
    yield check_loss(trial)
    yield check_same_curve(trial)
    yield check_ledger(trial)
    yield check_memory(trial, predicted)
    yield check_speed(trial, predicted)
    yield check_files(trial)


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


def check_loss(trial: Trial) -> Check:
    """Check that the final validation loss of the phase is inside its band."""
    loss, (low, high) = trial.lines[1][-1]["val_loss"], compute_loss_limits(trial)
    finding = f"validation loss {loss:.3f} after {trial.config.max_iters} steps; limits {low:.3f} to {high:.3f}"
    subject = f"{trial.name}: loss"
    if loss > high:
        return Check(subject, "fail", finding, "it learns too slowly: check the learning rate and the gradients")
    if loss < low:
        return Check(subject, "fail", finding, "a model sees tokens that it should predict: check the attention mask")
    return Check(subject, "pass", finding)


def check_same_curve(trial: Trial) -> Check:
    """Check that the losses of the phase equal those of the baseline."""
    config = trial.config
    is_fp32 = config.dtype == "float32" or (config.dtype == "auto" and resolve_device(config) == "cpu")
    tolerances = TOLERANCES["float32" if is_fp32 and not config.compile else "lower precision"]
    curves = [{line["step"]: line["loss"] for line in lines if line["loss"] is not None} for lines in trial.lines]
    early = max(abs(loss - curves[1].get(step, math.inf)) for step, loss in curves[0].items() if step <= EARLY_STEPS)
    final = abs(trial.lines[0][-1]["val_loss"] - trial.lines[1][-1]["val_loss"])
    finding = f"max loss difference to DDP {early:.1e} up to step {EARLY_STEPS} (limit {tolerances[0]:g}); "
    finding += f"final validation losses differ by {final:.1e} (limit {tolerances[1]:g})"
    is_same = early <= tolerances[0] and final <= tolerances[1]
    remedy = "train both with --diagnostics_interval=1, and compare the norms in diagnostics/"
    return make_check(f"{trial.name}: same curve as DDP", is_same, finding, remedy)


def make_check(subject: str, is_right: bool, finding: str, remedy: str) -> Check:
    """Return a check that passes, or fails with a remedy."""
    return Check(subject, "pass", finding) if is_right else Check(subject, "fail", finding, remedy)


def check_ledger(trial: Trial) -> Check:
    """Check that the model state and the communication of the phase match the formula exactly."""
    path = trial.runs[1].out_dir / "ledger.json"
    is_right = matches_formula(json.loads(path.read_text()))
    finding = "match the formula exactly, on every rank" if is_right else "differ from the formula"
    return make_check(f"{trial.name}: state and communication", is_right, finding, f"compare them in {path}")


def check_memory(trial: Trial, predicted: RunPrediction) -> Check:
    """Check the peak memory: of the allocator on a GPU, and as the ledger counts it on a CPU."""
    ranks = json.loads((trial.runs[1].out_dir / "ledger.json").read_text())["ranks"]
    peaks = [each["memory"]["allocator_peak_bytes"] or sum(each["memory"]["peak"].values()) for each in ranks]
    limit = MEMORY_MARGIN * predicted.peak_bytes / 1e9
    finding = f"peak {max(peaks) / 1e9:.4g} GB per rank; limit {limit:.4g} GB ({MEMORY_MARGIN} x the prediction)"
    remedy = "use activation checkpointing, a smaller --batch_size or more ranks: see make plan"
    return make_check(f"{trial.name}: memory", max(peaks) / 1e9 <= limit, finding, remedy)


def check_speed(trial: Trial, predicted: RunPrediction) -> Check:
    """Check the throughput: the median over the second half of the run."""
    config, subject = trial.config, f"{trial.name}: speed"
    baseline, phase = (statistics.median(read_rates(lines)) for lines in trial.lines)
    finding = f"{phase:,.0f} tokens per second, {phase / baseline:.2f} x DDP; "
    tokens = config.gradient_accumulation_steps * config.batch_size * config.block_size
    if find_gpu(config.device) is None:
        return Check(subject, "skip", f"{finding}no limit, because the planner does not know this device")
    limit = SPEED_MARGIN * tokens / predicted.step_seconds
    remedy = f"profile a step: make profile PHASE={trial.runs[1].phase}"
    finding += f"limit {limit:,.0f} ({SPEED_MARGIN} x the prediction)"
    return make_check(subject, phase >= limit, finding, remedy)


def check_files(trial: Trial) -> Check:
    """Check that the run has left what explains a failure. A run whose ranks have different parameters has failed."""
    run = trial.runs[1]
    names = [f"{folder}/rank{rank}.json" for folder in ("heartbeat", "diagnostics") for rank in range(run.ranks)]
    missing = [name for name in ("env.json", *names) if not (run.out_dir / name).exists()]
    finding = f"missing: {', '.join(missing)}" if missing else "env.json, heartbeats and diagnostics of every rank"
    return make_check(f"{trial.name}: files", not missing, finding, f"check that {run.out_dir} is a shared directory")


def read_rates(lines: list[dict[str, Any]]) -> list[float]:
    """Return the tokens per second of the logged lines in the second half of a run."""
    rates = [line["tokens_per_second"] for line in lines if line["tokens_per_second"]]
    return rates[len(rates) // 2 :]


def main(arguments: list[str]) -> int:
    """Run the gate, print a table, and return the exit code."""
    arguments, trainer, words = split_arguments(arguments)
    ranks, phase = command_line(Ranks, arguments).gpus, find_phase(trainer)
    out_dir = Path("out") / f"gate-{phase}-{ranks}-{time.strftime('%Y%m%d-%H%M%S')}"
    trials = build_trials(phase, ranks, words, out_dir)
    checks: list[Check] = []
    for trial in trials:
        predicted = predict_run(trial.config, phase, ranks, detect_hardware(trial.config.device))
        failure = execute_trial(trial)
        checks += [failure] if failure else check_trial(trial, predicted)
    width = max(len(check.subject) for check in checks)
    print("\n" + "\n".join(format_check(check, width) for check in checks))
    verdict = "is not ready for a long run" if has_failed(checks) else "is ready for a long run"
    print(f"\n{phase} on {ranks} rank(s) {verdict}: {summarize(checks)}; the runs are in {out_dir}")
    return int(has_failed(checks))


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
