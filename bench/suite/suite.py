"""Named experiments: many runs, one after another or by Slurm, with one report.

    make suite SUITE=scaling                                   # or memory, wrapping, kernels, optimizers, seeds, all
    make suite SUITE=my_suite.toml  # one's own; bench/suite/suites/scaling.toml shows the form
    make suite SUITE=scaling ARGS="--create_slurm --gpus_per_node=8 --gpu=h100 --price=2.5"

A suite is every phase on every number of ranks with every variant and every seed. Its runs are those of `make`, each in
a directory of its own with a status.json: pending, running, done, oom, timeout, or failed and why. What is done is not
done again: start the same command after a kill, and it goes on, a run that had saved from its checkpoint. At the end,
`results.json`, a picture and `report.md` are in `out/suites/NAME`.
"""

import hashlib
import importlib
import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.matrix.cells import PHASES
from bench.plan.plan import check_amount
from bench.suite.execution import DONE, ROOT, Run, directory_lock, execute, forget, read_status
from bench.suite.file import SCALINGS, SUITES, Suite, load
from bench.suite.report import STEPS, fault_of, report, value_of
from bench.suite.schedule import describe_seconds, gpu_of, seconds_of
from bench.suite.slurm import check_nodes, create_scripts
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.job.parse import parse
from nanoGPT.train_config import TrainConfig, validate


@dataclass
class SuiteConfig:
    """Which suite to run, and where."""

    suite: str = "scaling"
    """scaling, memory, wrapping, kernels, optimizers, seeds, all of them, or a file"""
    out_dir: Path = Path("out/suites")
    """a directory for each suite is made here"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """of the runs"""
    retry: bool = False
    """run again what ended as oom, timeout or failed"""
    create_slurm: bool = False
    """write sbatch scripts and submit-all.sh, and run nothing"""
    gpus_per_node: int = 8
    """of the Slurm cluster"""
    gpu: str | None = None
    """its GPUs, such as h100, to estimate times for; None: this machine"""
    price: float | None = None
    """of a GPU for an hour, to estimate costs"""


def config_class(phase: str) -> type[TrainConfig]:
    found: type[TrainConfig] = importlib.import_module(f"{PHASES[phase]}.train").Config
    return found


def runs_of(suite: Suite, out_dir: Path, device: str) -> list[Run]:
    """Every run of a suite, each with a configuration that its phase accepts.

    Raises:
        ConfigError: a field or a variant that no phase of the suite has, or a configuration that cannot be.
    """
    known = fields_of(suite)
    for name in {*suite.config, *itertools.chain(*suite.variants.values())}:
        if not any(name in names for names in known.values()):
            every = sorted(set().union(*known.values()))
            raise ConfigError(f"suite {suite.name}: {name} is no field of a configuration{did_you_mean(name, every)}")
    without = left_out(suite)
    for variant, phases in without.items():
        if len(phases) == len(suite.phases):
            raise ConfigError(f"suite {suite.name}: no phase has all fields of variants.{variant}: take it out")
    found = []
    for phase, ranks, (variant, words), seed in itertools.product(
        suite.phases, suite.ranks, suite.variants.items(), suite.seeds
    ):
        if phase in without[variant]:
            continue
        given = {**{k: v for k, v in suite.config.items() if k in known[phase]}, **words, "seed": seed}
        given |= {"device": device} if device != "auto" else {}
        try:
            found.append(run_of(suite, phase, ranks, variant, given, out_dir))
        except ConfigError as error:
            raise ConfigError(f"suite {suite.name}, {phase} on {ranks} rank(s), {variant}: {error}") from None
    return found


def fields_of(suite: Suite) -> dict[str, set[str]]:
    """What each phase's configuration has."""
    return {phase: {each.name for each in fields(config_class(phase))} for phase in suite.phases}


def left_out(suite: Suite) -> dict[str, list[str]]:
    """For each variant the phases that leave it out."""
    known = fields_of(suite)
    return {name: [phase for phase in known if set(words) - known[phase]] for name, words in suite.variants.items()}


def run_of(suite: Suite, phase: str, ranks: int, variant: str, given: dict[str, Any], out_dir: Path) -> Run:
    """One run; its directory's name changes with its configuration."""
    trainer = ROOT / PHASES[phase] / "train.py"
    config = parse(config_class(phase), flags(given), trainer)
    scaled: dict[str, Any] = {}
    if suite.scale_batch:
        scaled["gradient_accumulation_steps"] = config.gradient_accumulation_steps * ranks
        config = replace(config, **scaled)
    if suite.lr_scaling != "none":
        batch = config.batch_size * config.gradient_accumulation_steps
        factor = (batch / suite.reference_batch) ** SCALINGS[suite.lr_scaling]
        scaled |= {name: getattr(config, name) * factor for name in ("learning_rate", "min_lr")}
        config = replace(config, **scaled)
    validate(config, ranks)
    config.check(ranks)
    TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    if suite.metric == "peak_bytes" and not config.ledger:
        raise ConfigError("peak_bytes is what the ledger counts: add ledger = true to config")
    if config.max_iters < (least := STEPS.get(suite.metric, 1)):
        raise ConfigError(f"--max_iters={config.max_iters} is too few for {suite.metric}: give {least} or more")
    words = flags({**given, **scaled})
    digest = hashlib.sha256(" ".join([phase, str(ranks), *words]).encode()).hexdigest()[:6]
    directory = out_dir / f"{phase}-{ranks}-{variant}-{given['seed']}-{digest}"
    return Run(directory, phase, ranks, variant, given["seed"], words, suite.minutes, config.max_iters, config)


def flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def main(config: SuiteConfig) -> int:
    """Run one suite, or all, and write its report; 1 where a run did not end well, or has no figure."""
    names = sorted(path.stem for path in SUITES.glob("*.toml")) if config.suite == "all" else [config.suite]
    suites = [load(name) for name in names]
    check_amount("price", config.price)
    if config.create_slurm and config.device == "auto":  # the machine that writes the scripts need not have what runs
        config = replace(config, device="cuda")
    gpu = gpu_of(config.gpu, elsewhere=config.create_slurm and gpus_elsewhere(config))
    planned = [(suite, runs_of(suite, config.out_dir / suite.name, config.device)) for suite in suites]
    if config.create_slurm:
        check_nodes([run for _, runs in planned for run in runs], config.gpus_per_node)
    codes = []
    for suite, runs in planned:
        directory = config.out_dir / suite.name
        with directory_lock(directory) as lock:
            introduce(suite)
            if config.create_slurm:
                forget_lost(runs, suite.metric)
                again = f'make suite SUITE={config.suite} ARGS="--device={config.device} --out_dir={config.out_dir}"'
                print(create_scripts(runs, directory, config.gpus_per_node, gpu, config.price, config.retry, again))
                continue
            code = run_suite(suite, runs, config, gpu, lock)
        if code is None:
            print("stopped; the same command goes on")
            return 0
        codes.append(code)
    return max(codes, default=0)


def gpus_elsewhere(config: SuiteConfig) -> bool:
    """Whether the runs are on GPUs that this machine has not: here are written only their scripts, and their report."""
    return config.device == "cuda" and not torch.cuda.is_available()


def introduce(suite: Suite) -> None:
    print(f"{suite.name}: {suite.about}")
    for variant, phases in left_out(suite).items():
        if phases:
            print(f"left out: {variant} on {', '.join(phases)}: no such field")


def forget_lost(runs: list[Run], metric: str) -> None:
    """A run that is done, but whose figure is gone, is to be done again."""
    for run in runs:
        if read_status(run.directory)["state"] == "done" and value_of(run, metric) is None:
            forget(run)


def run_suite(suite: Suite, runs: list[Run], config: SuiteConfig, gpu: Any, lock: int) -> int | None:
    """Do what is left of a suite, and report; 1 where a run has no figure, None where a signal ended it."""
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    fitting = [run for run in runs if not gpus or run.ranks <= gpus]
    forget_lost(fitting, suite.metric)
    ended = {run for run in fitting if read_status(run.directory)["state"] in DONE[config.retry]}
    left = [run for run in fitting if run not in ended]
    if left and gpus_elsewhere(config):
        if not ended:
            raise ConfigError("--device=cuda: this machine has no GPU that torch can use; leave it out")
        print("this machine has no GPU: a report of what ended elsewhere")
        left = []
    seconds = {run: seconds_of(run.config, run.phase, run.ranks, gpu) for run in left}
    print(f"{len(fitting)} runs, {len(ended)} of them ended before{describe_seconds(seconds, config.price)}")
    if not gpus and any(getattr(run.config, "kernels", "none") != "none" for run in left):
        print("not in this time: kernels are interpreted where there is no GPU")
    if len(fitting) < len(runs):
        print(f"left out: {len(runs) - len(fitting)} on more ranks than the {gpus} GPU(s) of this machine")
    for i, run in enumerate(left):
        print(f"[{len(ended) + i + 1}/{len(fitting)}] {run.name} ...", end=" ", flush=True)
        status = execute(run, lock)
        print(" ".join(filter(None, [status["state"], f"{status['seconds']:.0f} s", status["reason"]])), flush=True)
        if status["state"] == "pending" or status.get("stopped"):
            return None
    faults = {run.name: fault for run in fitting if (fault := fault_of(run, suite.metric))}
    print(f"wrote {report(suite.name, suite.about, suite.metric, fitting, config.out_dir / suite.name)}")
    for name, fault in faults.items():
        print(f"not done: {name}: {fault}")
    return 1 if faults else 0
