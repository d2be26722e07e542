"""Run a suite: a named experiment with many runs, on this machine or as Slurm jobs, and one report.

    make suite SUITE=scaling                    # or memory, wrapping, kernels, optimizers, seeds, all
    make suite SUITE=my_suite.toml              # your own suite; copy bench/suite/suites/scaling.toml to start
    make suite SUITE=scaling ARGS="--create_slurm --gpus_per_node=8 --gpu=h100 --price=2.5"

A suite combines every phase with every number of ranks, every variant and every seed. Each run has a separate directory
with a status.json: pending, running, done, oom, timeout, or failed with the reason. The same command, started again,
skips the runs that are finished and resumes a run from its last checkpoint. At the end, `results.json`, a figure per
metric and `report.md` are in `out/suites/NAME`.
"""

import hashlib
import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.plan.plan import check_amount
from bench.plan.speed import Gpu
from bench.suite.execution import FINISHED_STATES, ROOT, Run, directory_lock, execute, read_status, reset_run
from bench.suite.file import SCALINGS, SUITES, Suite, list_fields, load_suite
from bench.suite.metrics import METRICS, explain_missing_metrics
from bench.suite.report import write_report
from bench.suite.schedule import format_schedule, select_gpu
from bench.suite.slurm import check_nodes, create_scripts
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.job.credentials import check_credentials
from nanoGPT.job.parse import parse
from nanoGPT.train_config import validate
from workshop.phases import PHASES, load_config_class


@dataclass
class SuiteConfig:
    """Command-line options of `make suite`."""

    suite: str = "scaling"
    """scaling, memory, wrapping, kernels, optimizers, seeds, all, or the path of a .toml file"""
    out_dir: Path = Path("out/suites")
    """parent of the suites' directories"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the runs"""
    retry: bool = False
    """run again the runs that ended as oom, timeout or failed"""
    create_slurm: bool = False
    """write sbatch scripts and submit-all.sh instead of starting the runs"""
    gpus_per_node: int = 8
    """GPUs per node of the Slurm cluster"""
    gpu: str | None = None
    """GPU for the time estimate, such as h100; None: the hardware of this machine"""
    price: float | None = None
    """price of a GPU per hour, for the estimated cost and for the cost of a billion tokens"""


def build_runs(suite: Suite, out_dir: Path, device: str) -> list[Run]:
    """Return every run of a suite, each with a configuration that its phase accepts.

    Raises:
        ConfigError: no phase of the suite has some field or all fields of a variant, or a configuration is invalid.
    """
    fields_by_phase = config_fields(suite)
    for name in list_fields(suite):
        if not any(name in names for names in fields_by_phase.values()):
            all_names = sorted(set().union(*fields_by_phase.values()))
            hint = did_you_mean(name, all_names)
            raise ConfigError(f"suite {suite.name}: {name} is not a field of the configuration{hint}")
    skipped = skipped_phases(suite)
    for variant, phases in skipped.items():
        if len(phases) == len(suite.phases):
            raise ConfigError(f"suite {suite.name}: no phase has all fields of variants.{variant}: remove the variant")
    runs = []
    for phase, ranks, (variant, fields_of_variant), seed in itertools.product(
        suite.phases, suite.ranks, suite.variants.items(), suite.seeds
    ):
        if phase in skipped[variant]:
            continue
        shared = {name: value for name, value in suite.config.items() if name in fields_by_phase[phase]}
        by_ranks = {k: v for k, v in suite.by_ranks.get(str(ranks), {}).items() if k in fields_by_phase[phase]}
        values = {**shared, **by_ranks, **fields_of_variant, "seed": seed}
        values |= {"device": device} if device != "auto" else {}
        if values.get("track") == "wandb":
            names = {"wandb_group": suite.name, "wandb_run_name": f"{phase}-{ranks}-{variant}-{seed}"}
            values = {**names, **values}
        try:
            runs.append(build_run(suite, phase, ranks, variant, values, out_dir))
        except ConfigError as error:
            raise ConfigError(f"suite {suite.name}, {phase} on {ranks} rank(s), {variant}: {error}") from None
    return runs


def config_fields(suite: Suite) -> dict[str, set[str]]:
    """Return the names of the configuration fields of each phase."""
    return {phase: {each.name for each in fields(load_config_class(phase))} for phase in suite.phases}


def skipped_phases(suite: Suite) -> dict[str, list[str]]:
    """Return for each variant the phases that skip it, because they do not have all of its fields."""
    known = config_fields(suite)
    return {name: [phase for phase in known if set(values) - known[phase]] for name, values in suite.variants.items()}


def build_run(suite: Suite, phase: str, ranks: int, variant: str, values: dict[str, Any], out_dir: Path) -> Run:
    """Return one run. The name of its directory contains a hash of its configuration.

    Raises:
        ConfigError: the phase does not accept the configuration.
    """
    trainer = ROOT / PHASES[phase] / "train.py"
    config = parse(load_config_class(phase), format_flags(values), trainer, ranks)
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
    TokenData.from_config(config)
    for name in suite.metrics:
        metric = METRICS[name]
        if metric.needs and not getattr(config, metric.needs):
            raise ConfigError(f"the metric {name} needs {metric.needs}: add {metric.needs} = true to config")
        if config.max_iters < metric.min_steps:
            raise ConfigError(f"--max_iters={config.max_iters} is too small for {name}: use {metric.min_steps} or more")
    flags = format_flags({**values, **scaled})
    digest = hashlib.sha256(" ".join([phase, str(ranks), *flags]).encode()).hexdigest()[:6]
    directory = out_dir / f"{phase}-{ranks}-{variant}-{values['seed']}-{digest}"
    minutes = suite.by_ranks.get(str(ranks), {}).get("minutes", suite.minutes)
    return Run(directory, phase, ranks, variant, values["seed"], flags, minutes, config.max_iters, config)


def format_flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def main(config: SuiteConfig) -> int:
    """Run one suite or all suites, and write their reports.

    Returns:
        Exit code: 0, also after a signal; 1 if a run has no metric.
    """
    names = sorted(path.stem for path in SUITES.glob("*.toml")) if config.suite == "all" else [config.suite]
    suites = [load_suite(name) for name in names]
    check_amount("price", config.price)
    if config.create_slurm and config.device == "auto":  # the machine that writes the scripts may have no GPU
        config = replace(config, device="cuda")
    gpu = select_gpu(config.gpu, is_remote=config.create_slurm and has_remote_gpus(config))
    planned = [(suite, build_runs(suite, config.out_dir / suite.name, config.device)) for suite in suites]
    if config.create_slurm:
        check_nodes([run for _, runs in planned for run in runs], config.gpus_per_node)
    print_schedule(planned, config, gpu)
    codes = []
    for suite, runs in planned:
        directory = config.out_dir / suite.name
        with directory_lock(directory) as lock:
            print_introduction(suite)
            if config.create_slurm:
                reset_incomplete_runs(suite, runs)
                price = f" --price={config.price:g}" if config.price else ""
                flags = f"--device={config.device} --out_dir={config.out_dir}{price}"
                report = f'make suite SUITE={config.suite} ARGS="{flags}"'
                print(create_scripts(runs, directory, config.gpus_per_node, config.retry, report))
                continue
            code = run_suite(suite, runs, config, lock)
        if code is None:
            print("stopped: run the same command again to continue")
            return 0
        codes.append(code)
    return max(codes, default=0)


def has_remote_gpus(config: SuiteConfig) -> bool:
    """Return whether the runs use GPUs that this machine does not have. It then writes only scripts and reports."""
    return config.device == "cuda" and not torch.cuda.is_available()


def print_introduction(suite: Suite) -> None:
    print(f"{suite.name}: {suite.about}")
    for variant, phases in skipped_phases(suite).items():
        if phases:
            print(f"skipped: variant {variant} on {', '.join(phases)}: no such configuration field")


def print_schedule(planned: list[tuple[Suite, list[Run]]], config: SuiteConfig, gpu: Gpu) -> None:
    """Print what the runs of all suites need that are not finished: time, cost, memory and disk.

    Raises:
        ConfigError: the runs log to a tracker without credentials.
    """
    if has_remote_gpus(config) and not config.create_slurm:
        return
    pending = {}
    for suite, runs in planned:
        runs = runs if config.create_slurm else select_possible(runs, config)
        pending[suite.name] = [run for run in runs if is_pending(suite, run, config.retry)]
    for run in itertools.chain(*pending.values()):
        if run.config and not config.create_slurm:
            check_credentials(run.config)
    if schedule := format_schedule(pending, gpu, config.price):
        print(schedule)
    values = {getattr(run.config, "kernels", "none").lower() for run in itertools.chain(*pending.values())}
    uses_kernels = bool(values - {"none", "auto"})  # without a GPU, auto selects none
    if uses_kernels and not config.create_slurm and count_gpus(config) == 0:
        print("the estimate does not include the Triton interpreter, which runs the kernels without a GPU")


def count_gpus(config: SuiteConfig) -> int:
    """Return the number of GPUs of this machine that runs use; 0 if they use CPUs."""
    return 0 if config.device == "cpu" else torch.cuda.device_count()


def select_possible(runs: list[Run], config: SuiteConfig) -> list[Run]:
    """Return the runs for which this machine has enough GPUs. A machine without GPUs can execute all runs."""
    gpus = count_gpus(config)
    return [run for run in runs if not gpus or run.ranks <= gpus]


def lacks_metrics(suite: Suite, run: Run) -> bool:
    """Return whether a run is done, but its files do not have all metrics."""
    is_done = read_status(run.directory)["state"] == "done"
    return is_done and explain_missing_metrics(run, suite.metrics, suite.target_loss) != ""


def is_pending(suite: Suite, run: Run, retry: bool) -> bool:
    """Return whether a run must be executed."""
    return read_status(run.directory)["state"] not in FINISHED_STATES[retry] or lacks_metrics(suite, run)


def reset_incomplete_runs(suite: Suite, runs: list[Run]) -> None:
    """Reset every run that is done but has not all metrics, so that it runs again."""
    for run in runs:
        if lacks_metrics(suite, run):
            reset_run(run)


def run_suite(suite: Suite, runs: list[Run], config: SuiteConfig, lock: int) -> int | None:
    """Execute the runs of a suite that are not finished, and write the report.

    Returns:
        0; 1 if a run lacks a metric; None if a signal stopped the suite.
    """
    possible = select_possible(runs, config)
    reset_incomplete_runs(suite, possible)
    remaining = [run for run in possible if is_pending(suite, run, config.retry)]
    finished = len(possible) - len(remaining)
    if remaining and has_remote_gpus(config):
        if not finished:
            raise ConfigError("--device=cuda: torch finds no GPU on this machine: remove the flag")
        print("this machine has no GPU: it reports only the runs that other machines finished")
        remaining = []
    print(f"{len(possible)} runs, {finished} already finished")
    if len(possible) < len(runs):
        skipped, gpus = len(runs) - len(possible), count_gpus(config)
        print(f"skipped: {skipped} run(s) with more ranks than this machine's {gpus} GPU(s)")
    for i, run in enumerate(remaining):
        print(f"[{finished + i + 1}/{len(possible)}] {run.name} ...", end=" ", flush=True)
        status = execute(run, lock)
        print(" ".join(filter(None, [status["state"], f"{status['seconds']:.0f} s", status["reason"]])), flush=True)
        if status["state"] == "pending" or status.get("stopped"):
            return None
    faults = {run.name: explain_missing_metrics(run, suite.metrics, suite.target_loss) for run in possible}
    print(f"wrote {write_report(suite, possible, config.out_dir / suite.name, config.price)}")
    for name, fault in faults.items():
        if fault:
            print(f"not measured: {name}: {fault}")
    return 1 if any(faults.values()) else 0
