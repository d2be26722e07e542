"""Run a suite: a named experiment with many runs, on this machine or as Slurm jobs, and one report.

    make suite SUITE=scaling                    # or memory, wrapping, depth, kernels, optimizers, seeds
    make suite SUITE=my_suite.toml              # your own suite; copy bench/suite/suites/scaling.toml to start
    make suite SUITE=scaling ARGS="--create_slurm --gpus_per_node=8"

A suite combines every phase with every number of ranks, every variant and every seed. Each run has a separate directory
with a status.json: pending, running, done, oom, timeout, or failed with the reason. The same command, started again,
skips the runs that are finished and resumes a run from its last checkpoint. At the end, `results.json` and `report.md`
are in `out/suites/NAME`.
"""

import hashlib
import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from bench.phases import PHASES, load_config_class
from bench.suite.execution import FINISHED_STATES, ROOT, Run, execute, read_status
from bench.suite.file import Suite, list_fields, load_suite
from bench.suite.metrics import METRICS, explain_missing_metrics
from bench.suite.report import write_report
from bench.suite.slurm import check_nodes, create_scripts
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.job.parse import parse
from nanoGPT.train_config import validate


@dataclass
class SuiteConfig:
    """Command-line options of `make suite`."""

    suite: str = "scaling"
    """scaling, depth, memory, wrapping, kernels, optimizers, seeds, or the path of a .toml file"""
    out_dir: Path = Path("out/suites")
    """parent of the suites' directories"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the runs"""
    retry: bool = False
    """run again the runs that ended as oom, timeout or failed"""
    report: bool = False
    """start nothing, and only write the report of the runs that are finished"""
    create_slurm: bool = False
    """write sbatch scripts and submit-all.sh instead of starting the runs"""
    gpus_per_node: int = 8
    """GPUs per node of the Slurm cluster"""


def build_runs(suite: Suite, out_dir: Path, device: str) -> list[Run]:
    """Return every run of a suite, each with a configuration that its phase accepts.

    Raises:
        ConfigError: no phase of the suite has some field or all fields of a variant, or a configuration is invalid.
    """
    models = {str(each.get("model", "gpt2")) for each in (suite.config, *suite.variants.values())}
    known = {
        phase: {each.name for model in models for each in fields(load_config_class(phase, model))}
        for phase in suite.phases
    }
    all_names = sorted(set().union(*known.values()))
    for name in list_fields(suite):
        if name not in all_names:
            hint = did_you_mean(name, all_names)
            raise ConfigError(f"suite {suite.name}: {name} is not a field of the configuration{hint}")
    for variant, changes in suite.variants.items():
        if all(changes.keys() - names for names in known.values()):
            raise ConfigError(f"suite {suite.name}: no phase has all fields of variants.{variant}: remove the variant")
    runs = []
    for phase, ranks, (variant, changes), seed in itertools.product(
        suite.phases, suite.ranks, suite.variants.items(), suite.seeds
    ):
        if changes.keys() - known[phase]:
            continue  # the variant is left out for a phase without its fields
        shared = {name: value for name, value in suite.config.items() if name in known[phase]}
        values = {**shared, **changes, "seed": seed, **({"device": device} if device != "auto" else {})}
        try:
            runs.append(build_run(suite, phase, ranks, variant, values, out_dir))
        except ConfigError as error:
            raise ConfigError(f"suite {suite.name}, {phase} on {ranks} rank(s), {variant}: {error}") from None
    return runs


def build_run(suite: Suite, phase: str, ranks: int, variant: str, values: dict[str, Any], out_dir: Path) -> Run:
    """Return one run. The name of its directory contains a hash of its configuration.

    Raises:
        ConfigError: the phase does not accept the configuration.
    """
    config = parse(load_config_class(phase), format_flags(values), ROOT / PHASES[phase] / "train.py", ranks)
    validate(config, ranks)
    TokenData(config)
    for name in suite.metrics:
        metric = METRICS[name]
        if metric.needs and not getattr(config, metric.needs):
            raise ConfigError(f"the metric {name} needs {metric.needs}: add {metric.needs} = true to config")
        if config.max_iters < metric.min_steps:
            raise ConfigError(f"--max_iters={config.max_iters} is too small for {name}: use {metric.min_steps} or more")
    flags = format_flags(values)
    digest = hashlib.sha256(" ".join([phase, str(ranks), *flags]).encode()).hexdigest()[:6]
    directory = out_dir / f"{phase}-{ranks}-{variant}-{values['seed']}-{digest}"
    return Run(directory, phase, ranks, variant, values["seed"], flags, suite.minutes, config.max_iters)


def format_flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def main(config: SuiteConfig) -> int:
    """Run a suite, or write its Slurm jobs or its report.

    Returns:
        Exit code: 0, also after a signal; 1 if a run has no metric.
    """
    suite = load_suite(config.suite)
    device = "cuda" if config.create_slurm and config.device == "auto" else config.device
    directory = config.out_dir / suite.name
    runs = build_runs(suite, directory, device)
    print(f"{suite.name}: {suite.about}")
    if config.create_slurm:
        check_nodes(runs, config.gpus_per_node)
        report = f'make suite SUITE={config.suite} ARGS="--report --device={device} --out_dir={config.out_dir}"'
        print(create_scripts(runs, directory, config.gpus_per_node, config.retry, report))
        return 0
    gpus = 0 if device == "cpu" or config.report else torch.cuda.device_count()
    possible = [run for run in runs if not gpus or run.ranks <= gpus]
    if len(possible) < len(runs):
        print(f"skipped: {len(runs) - len(possible)} run(s) with more ranks than this machine's {gpus} GPU(s)")
    if not config.report and not run_missing(possible, config.retry):
        print("stopped: run the same command again to continue")
        return 0
    faults = {run.name: explain_missing_metrics(run, suite.metrics) for run in possible}
    print(f"wrote {write_report(suite, possible, directory)}")
    for name, fault in faults.items():
        if fault:
            print(f"not measured: {name}: {fault}")
    return 1 if any(faults.values()) else 0


def run_missing(runs: list[Run], retry: bool) -> bool:
    """Execute the runs that are not finished. Return False if a signal stopped the suite."""
    missing = [run for run in runs if read_status(run.directory)["state"] not in FINISHED_STATES[retry]]
    finished = len(runs) - len(missing)
    print(f"{len(runs)} runs, {finished} already finished")
    for i, run in enumerate(missing, finished + 1):
        print(f"[{i}/{len(runs)}] {run.name} ...", end=" ", flush=True)
        status = execute(run)
        print(" ".join(filter(None, [status["state"], f"{status['seconds']:.0f} s", status["reason"]])), flush=True)
        if status["state"] == "pending" or status.get("stopped"):
            return False
    return True
