"""Suites: runs that continue after a kill, states that report how runs ended, scripts for Slurm, and one report."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench.suite import execution as suite_run
from bench.suite.execution import (
    SLURM,
    Run,
    build_command,
    classify_exit,
    directory_lock,
    execute,
    read_last_step,
    read_run,
    read_status,
    write_status,
)
from bench.suite.file import SUITES, Suite, load_suite
from bench.suite.intervals import half_width, paired_differences, t_quantile
from bench.suite.metrics import explain_missing_metrics, read_metric
from bench.suite.plot import plot_lines
from bench.suite.report import describe_cheapest, group_runs, write_report
from bench.suite.schedule import Estimate, detect_hardware, estimate_run, format_schedule, select_gpu
from bench.suite.slurm import format_script
from bench.suite.suite import SuiteConfig, build_runs, main, print_introduction
from nanoGPT.cli.command_line import command_line
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError
from tests.helpers.programs import DEADLINE, Program, run_program, wait_until
from tests.helpers.slurm import SCONTROL, SRUN
from tests.helpers.training import ROOT

TINY = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 8, "batch_size": 2, "max_iters": 4, "log_interval": 1}
TINY |= {"eval_interval": 2, "eval_iters": 1, "gradient_accumulation_steps": 2, "always_save_checkpoint": True}
SUITE = """about = "Tiny runs."
phases = ["baseline", "phase3"]
ranks = [1]
metrics = ["val_loss"]
minutes = 2
seeds = [1, 2]

[config]
"""
BY_RANKS = SUITE.replace("[config]", "[by_ranks.1]")
TWO_PHASES = """[variants.both]
zero1_bucket_mb = 1
fsdp_cpu_offload = true

[config]
"""


def write_suite(tmp_path: Path, text: str = SUITE, **fields: object) -> Path:
    """Write a suite file with tiny runs. `fields` replace fields of the configuration."""
    path = tmp_path / "tiny.toml"
    path.write_text(text + "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**TINY, **fields}.items()))
    return path


def make_run(tmp_path: Path, phase: str = "baseline", ranks: int = 1, **fields: object):
    """Return the only run of a suite with one run."""
    suite = Suite("one", "One run.", [phase], [ranks], ["val_loss"], config={**TINY, **fields}, minutes=2)
    (run,) = build_runs(suite, tmp_path, "cpu")
    return run


@pytest.mark.heavy
def test_every_suite_can_be_planned(tmp_path, capsys):
    """Every suite of this repository has valid runs and an estimate of their time."""
    names = sorted(path.stem for path in SUITES.glob("*.toml"))
    assert names == ["kernels", "memory", "optimizers", "scaling", "seeds", "wrapping"]
    for name in names:
        suite = load_suite(name)
        runs = build_runs(suite, tmp_path, "cpu")
        assert len(runs) > 1 and len({run.directory for run in runs}) == len(runs)
    print_introduction(load_suite("memory"))
    assert "skipped: variant offload on baseline, phase1" in capsys.readouterr().out
    runs = build_runs(load_suite("memory"), tmp_path, "cpu")
    assert {run.variant for run in runs if run.phase == "phase1"} == {"plain"}
    run = build_runs(load_suite("scaling"), tmp_path, "cpu")[0]
    assert 5 < estimate_run(run.config, run.phase, run.ranks, detect_hardware()).seconds < 600


@pytest.fixture
def no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the estimates of the runs, which trace each of them."""
    monkeypatch.setattr("bench.suite.suite.format_schedule", lambda *_: "")


@pytest.fixture
def two_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `all` mean two suites with tiny runs: `first` and `second`."""
    suites = tmp_path / "suites"
    suites.mkdir()
    for name in ("first", "second"):
        write_suite(tmp_path).rename(suites / f"{name}.toml")
    for module in ("suite", "file"):
        monkeypatch.setattr(f"bench.suite.{module}.SUITES", suites)


def make_suite(**fields: Any) -> Suite:
    """Return a suite for reports."""
    return Suite(**{"name": "mixed", "about": "Some.", "phases": [], "ranks": [], "metrics": ["val_loss"], **fields})


def test_the_suite_in_the_documents_can_be_run(tmp_path):
    """The documented example uses every key of a suite, and its phases accept the values."""
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/measuring.md").read_text(), re.S)
    (tmp_path / "example.toml").write_text(example)
    suite = load_suite(str(tmp_path / "example.toml"))
    names = {field.name for field in dataclasses.fields(Suite)} - {"name", "phases", "config"}
    assert all(f"\n{name}" in f"\n{example}" or f"[{name}." in example for name in names)
    runs = build_runs(suite, tmp_path, "cpu")
    assert len(runs) == 27 and {run.phase for run in runs if run.variant == "full"} == {"phase3"}


def test_a_killed_suite_continues(tmp_path):
    """After SIGKILL in the middle of a suite, a second start runs only the unfinished runs and writes the report."""
    path = write_suite(tmp_path, SUITE.replace('"baseline", ', ""), max_iters=30, eval_interval=5)
    words = ["bench.suite", f"--suite={path}", f"--out_dir={tmp_path}/out", "--device=cpu"]
    first = Program(*words)
    directory = tmp_path / "out" / "tiny"
    wait_until(
        lambda: len(read_states(directory)) >= 2 and sorted(read_states(directory).values()) == ["done", "running"]
    )
    first.kill()
    finished = next(name for name, state in read_states(directory).items() if state == "done")
    status = (directory / finished / "status.json").read_text()
    wait_until(lambda: is_unlocked(directory))  # the run outlives the suite and keeps the lock
    second = run_program(*words)
    assert second.code == 0, second.output
    assert "2 runs, 1 already finished" in second.output
    assert (directory / finished / "status.json").read_text() == status
    assert set(read_states(directory).values()) == {"done"} and len(read_states(directory)) == 2
    (row,) = json.loads((directory / "results.json").read_text())["metrics"]["val_loss"]
    assert row["mean"] == pytest.approx(sum(row["values"].values()) / 2) and row["spread"] > 0
    text = (directory / "report.md").read_text()
    assert "| phase3 | 1 | plain |" in text and (directory / "tiny-val_loss.png").stat().st_size > 5000


def read_states(directory: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["state"] for path in directory.glob("*/status.json")}


def is_unlocked(directory: Path) -> bool:
    try:
        with directory_lock(directory):
            return True
    except ConfigError:
        return False


def execute_as_program(run: Run) -> dict[str, Any]:
    """Execute a run with `python -m bench.suite.execution`, and return its status."""
    run.save()
    run_program("bench.suite.execution", str(run.directory))
    return read_status(run.directory)


def test_the_state_of_a_run_reports_how_it_ended(tmp_path):
    """A run is done, failed with an error, or stopped by its time limit. SIGKILL counts as out of memory."""
    run = make_run(tmp_path)
    assert execute_as_program(run)["state"] == "done" and read_run(run.directory) == run
    broken_run = dataclasses.replace(make_run(tmp_path, learning_rate=1e30, grad_clip=0.0), words=["--learning_rate=x"])
    status = execute_as_program(broken_run)
    assert status["state"] == "failed" and "learning_rate" in status["reason"]
    long_run = make_run(tmp_path, max_iters=100_000, eval_interval=50)
    steps = 0
    for minutes in (0.05, 0.3, 3.0):  # enough for some steps, also on a busy machine
        status = execute_as_program(dataclasses.replace(long_run, minutes=minutes))
        assert status["state"] == "timeout" and "of 100000" in status["reason"]
        steps = int(status["reason"].split("at step ")[1].split()[0])
        if steps > 0:
            break
    assert steps > 0 and list((long_run.out_dir / "checkpoints").glob("step-*"))
    killed_run = dataclasses.replace(long_run, minutes=2)
    killed_run.save()
    process = Program("bench.suite.execution", str(killed_run.directory))
    wait_until(lambda: read_last_step(killed_run) > steps)  # it has resumed from its checkpoint
    os.kill(json.loads((killed_run.out_dir / "heartbeat" / "rank0.json").read_text())["pid"], signal.SIGKILL)
    assert process.wait() == 1
    status = read_status(killed_run.directory)
    assert status["state"] == "oom" and "SIGKILL" in status["reason"]
    assert group_runs([killed_run], "val_loss")[0]["mean"] is None
    assert "oom: " in write_report(make_suite(), [run, killed_run], tmp_path).read_text()
    with open(run.out_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert "cannot be read" in write_report(make_suite(), [run], tmp_path).read_text()


def test_a_run_is_executed_only_once(tmp_path, monkeypatch):
    """A finished run is not repeated, a run in use is refused, and a signal is passed on to the run."""
    run = make_run(tmp_path)
    stub = f"trap 'exit 0' TERM; until [ -e {tmp_path}/waits ]; do sleep 0.1; done; kill -INT $PPID"
    stub += "; while :; do sleep 0.1; done"
    wait = subprocess.Popen.wait  # `execute` calls it when its handlers of signals are set
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *words: ((tmp_path / "waits").touch(), wait(*words))[1])
    monkeypatch.setattr("bench.suite.execution.build_command", lambda *_: ["bash", "-c", stub])
    with directory_lock(run.directory), pytest.raises(ConfigError, match="is in use by"):
        execute(run)
    assert not (run.directory / "status.json").exists()
    status = execute(run)
    assert status["state"] == "pending" and status["stopped"]
    done = write_status(run.directory, "done")
    assert execute(run) == done


def test_only_the_latest_output_of_a_run_sets_its_state(tmp_path, monkeypatch):
    """Output of an earlier start does not count. A run inherits the lock of its suite. A stopped run returns 0."""
    run = make_run(tmp_path)
    with directory_lock(tmp_path / "suite") as lock:
        for line, expected in (
            ("echo error: CUDA out of memory; exit 1", ("oom", "error: CUDA out of memory")),
            ("echo error: no; exit 1", ("failed", "error: no")),
            (f"test -e /proc/self/fd/{lock}", ("pending", "stopped at step 0 of 4; the next start resumes the run")),
        ):
            monkeypatch.setattr("bench.suite.execution.build_command", lambda *_, line=line: ["bash", "-c", line])
            status = execute(run, lock)
            assert (status["state"], status["reason"]) == expected
    monkeypatch.setattr("bench.suite.execution.build_command", lambda *_: ["true"])
    assert suite_run.main([str(run.directory)]) == 0
    for stopped, state in (("signal", "pending"), ("", "failed")):
        assert classify_exit(run, -signal.SIGTERM, stopped, "")[0] == state


def test_a_run_that_ends_at_its_time_limit_is_done(tmp_path):
    """If the last step ends when the time limit stops the run, the run is done."""
    run = make_run(tmp_path)
    run.out_dir.mkdir(parents=True)
    for step, state in ((run.steps - 1, "timeout"), (run.steps, "done")):
        (run.out_dir / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        assert classify_exit(run, 0, "timeout", "")[0] == state


def test_a_run_without_a_checkpoint_starts_from_scratch(tmp_path):
    """The directory of a run that was killed before its first save is deleted. With a checkpoint, the run resumes."""
    run = make_run(tmp_path)
    for has_checkpoint in (True, False):
        (run.out_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run.out_dir / "checkpoints" / "step-00000002").mkdir()
        if not has_checkpoint:
            shutil.rmtree(run.out_dir / "checkpoints" / "step-00000002")
        assert ("--init_from=resume" in build_command(run)) == has_checkpoint == run.out_dir.exists()
        shutil.rmtree(run.out_dir, ignore_errors=True)


def test_a_report_contains_the_correct_numbers(tmp_path):
    """A report contains the median without the first line, the last loss, the maximum memory and the sample deviation.

    Expected values are computed by hand.
    """
    run = dataclasses.replace(make_run(tmp_path), seed=2)
    other = dataclasses.replace(run, directory=tmp_path / "other", seed=1)
    for each, offset in ((run, 0), (other, 2)):
        each.out_dir.mkdir(parents=True)
        write_status(each.directory, "done")
        lines = [{"step_ms": ms + offset, "val_loss": ms / 4} for ms in (1000, 10, 60, 20)]
        lines.append({"step_ms": None, "val_loss": None})
        (each.out_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ranks = [{"memory": {"peak": {"parameters": n, "other": 1}}} for n in (3, 6, 4)]
        (each.out_dir / "ledger.json").write_text(json.dumps({"ranks": ranks}))
    assert [read_metric(run, metric) for metric in ("step_ms", "val_loss", "peak_bytes")] == [20, 5, 7]
    (row,) = group_runs([run, other], "step_ms")
    assert row["values"] == {2: 20, 1: 22} and row["mean"] == 21 and row["spread"] == pytest.approx(2**0.5)


def test_an_estimate_counts_micro_batches_and_evaluations(tmp_path):
    """The estimated time includes every micro-batch and evaluation. The cost is the price of every GPU-hour."""
    long = {"max_iters": 1000, "eval_interval": 1000}
    runs = [make_run(tmp_path, **{**long, "gradient_accumulation_steps": n}) for n in (1, 2, 4)]
    one, two, four = (estimate_run(run.config, run.phase, 1, select_gpu("h100")).seconds for run in runs)
    assert four - two == pytest.approx(2 * (two - one), rel=0.1)
    compiled = make_run(tmp_path, "phase1", compile=True).config
    assert 0 < estimate_run(compiled, "phase1", 1, select_gpu("h100")).seconds < 60
    config = dataclasses.replace(runs[0].config, eval_iters=1000)
    evaluated = estimate_run(config, "baseline", 1, select_gpu("h100")).seconds
    assert evaluated > one + 0.2
    measured = dataclasses.replace(config, eval_accuracy=True)
    twice = estimate_run(measured, "baseline", 1, select_gpu("h100")).seconds
    assert twice - evaluated == pytest.approx(evaluated - one, rel=0.1)


def test_the_schedule_adds_up(tmp_path, monkeypatch):
    """A line of the schedule adds the runs of all seeds. The total adds time, cost and disk of all suites.

    Its memory is the largest.
    """
    sizes = {1: (1800.0, 2 * 10**9, 10**9), 4: (5400.0, 10**9, 3 * 10**9)}
    monkeypatch.setattr("bench.suite.schedule.estimate_run", lambda _, __, ranks, ___: Estimate(*sizes[ranks]))
    one, four = make_run(tmp_path), make_run(tmp_path, ranks=4, gradient_accumulation_steps=4)
    runs = {"small": [one, dataclasses.replace(one, seed=2)], "large": [four], "none": []}
    lines = [line.split(" | ") for line in format_schedule(runs, select_gpu("h100"), 2.0).splitlines()]
    assert lines[2] == ["| small", "baseline", "1", "plain", "2", "1:00:00", "1.00", "2.00", "2.000", "2.000 |"]
    assert lines[3] == ["| large", "baseline", "4", "plain", "1", "1:30:00", "6.00", "12.00", "1.000", "3.000 |"]
    assert lines[4] == ["| total", "", "", "", "3", "2:30:00", "7.00", "14.00", "2.000", "5.000 |"]
    assert "cost" not in format_schedule(runs, select_gpu("h100"), None)
    assert format_schedule({"none": []}, select_gpu("h100"), None) == ""
    monkeypatch.undo()
    params = 65 * 16 + 8 * 16 + 12 * 16 * 16 + 3 * 16  # of the tiny model: tokens, positions, one block, LayerNorms
    assert estimate_run(one.config, "baseline", 1, select_gpu("h100")).disk_bytes == pytest.approx(24 * params, rel=0.3)


def write_metrics(run: Run, lines: list[dict[str, Any]]) -> None:
    """Write metrics.jsonl of a run that is done."""
    run.out_dir.mkdir(parents=True)
    (run.out_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_status(run.directory, "done")


def test_the_way_to_a_loss_has_the_correct_numbers(tmp_path):
    """Steps, seconds and FLOPs count the training until the first evaluation with the target loss.

    A loss that is never reached is infinite, and not a reason to repeat the run.
    """
    run = make_run(tmp_path, eval_interval=10)
    lines = [{"step": 0, "val_loss": 4.0, "step_ms": 500.0}, {"step": 9, "val_loss": None, "step_ms": 100.0}]
    lines += [{"step": 10, "val_loss": 2.0, "step_ms": 300.0}, {"step": 20, "val_loss": 1.0, "step_ms": None}]
    write_metrics(run, lines)
    assert read_metric(run, "steps_to_loss", 2.5) == 10
    assert read_metric(run, "seconds_to_loss", 2.5) == pytest.approx(0.5 + 9 * 0.1)
    tokens_per_step = 2 * 2 * 8
    vocabulary = TokenData("shakespeare_char", 8, 2, 1).tokenizer["vocab_size"]
    flops_per_token = 6 * (vocabulary * 16 + 12 * 16**2 + 3 * 16) + 12 * 1 * 16 * 8
    assert read_metric(run, "flops_to_loss", 2.5) == 10 * tokens_per_step * flops_per_token
    for name in ("steps_to_loss", "seconds_to_loss", "flops_to_loss"):
        assert read_metric(run, name, 0.5) == math.inf
        assert explain_missing_metrics(run, [name], 0.5) == ""
    suite = make_suite(metrics=["steps_to_loss"], target_loss=0.5)
    assert "| not reached |" in write_report(suite, [run], tmp_path).read_text()
    (row,) = json.loads((tmp_path / "results.json").read_text())["metrics"]["steps_to_loss"]
    assert row["mean"] is None and row["values"] == {"1337": None} and row["faults"] == {}
    (run.out_dir / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
    assert read_metric(run, "steps_to_loss", 2.5) is None


def test_intervals_over_seeds():
    """Intervals use Student's t distribution. Paired differences vary less than values, and need both seeds."""
    assert t_quantile(1) == pytest.approx(math.tan(0.475 * math.pi), abs=1e-4)
    assert t_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), abs=1e-4)
    for degrees, expected in ((31, 2.0395), (40, 2.0211), (100, 1.9840), (10**6, 1.9600)):
        assert t_quantile(degrees) == pytest.approx(expected, abs=1e-4)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / math.sqrt(3))
    assert half_width([1.0]) is None and half_width([1.0, math.inf]) is None
    reference = {1: 10.0, 2: 20.0, 3: 30.0, 4: None, 5: math.inf}
    differences = paired_differences({1: 11.0, 2: 21.0, 3: 31.5, 4: 1.0, 5: 1.0, 6: 1.0}, reference)
    assert differences == [1.0, 1.0, 1.5]
    assert half_width(differences) < half_width([11.0, 21.0, 31.5]) / 10


def test_rows_are_compared_with_a_reference(tmp_path):
    """A variant is compared with the first variant of its phase, and a phase with the first phase, seed by seed."""
    variants = {"a": {}, "b": {"n_layer": 2}}
    fields = {"about": "", "phases": ["baseline", "phase1"], "metrics": ["val_loss"], "seeds": [1, 2], "config": TINY}
    for names, expected in ((["a", "b"], [None, "baseline a", None, "phase1 a"]), (["a"], [None, "baseline a"])):
        suite = Suite("s", **fields, ranks=[1], variants={name: variants[name] for name in names})
        runs = build_runs(suite, tmp_path / str(len(names)), "cpu")
        for i, run in enumerate(runs):
            write_metrics(run, [{"step": 4, "val_loss": 10.0 * run.seed + i}])
        rows = group_runs(runs, "val_loss")
        assert [row["reference"] for row in rows] == expected
        assert rows[0]["difference"] is None and rows[1]["difference"] == 2 and rows[1]["difference_interval"] == 0


def test_the_cheapest_number_of_ranks(tmp_path):
    """GPU-hours count every rank. The report names the cheapest and the fastest number of ranks, and their cost."""
    runs = [make_run(tmp_path, ranks=ranks, gradient_accumulation_steps=4) for ranks in (1, 2, 4)]
    for run, rate in zip(runs, (1e6, 1.9e6, 2e6), strict=True):
        write_metrics(run, [{"tokens_per_second": 1.0}, {"tokens_per_second": rate}])
    rows = group_runs(runs, "gpu_hours")
    assert [row["mean"] for row in rows] == pytest.approx([1e3 / 3600, 2e3 / 1.9 / 3600, 4e3 / 2 / 3600])
    cheapest = "1 rank(s), 0.28 GPU-hours in 0.28 hours, cost 0.83"
    fastest = "4 rank(s), 0.56 GPU-hours in 0.14 hours, cost 1.67"
    assert describe_cheapest(rows, 3.0).splitlines()[2] == f"| baseline | plain | {cheapest} | {fastest} |"
    text = write_report(make_suite(metrics=["gpu_hours"]), runs, tmp_path, 3.0).read_text()
    assert f"## The cheapest number of ranks\n\n{describe_cheapest(rows, 3.0)}" in text


def test_fields_can_depend_on_the_number_of_ranks(tmp_path):
    """by_ranks replaces fields of config, and the time limit, on one number of ranks only."""
    config = {**TINY, "gradient_accumulation_steps": 4}
    by_ranks = {"2": {"n_layer": 3, "fsdp_prefetch": 2, "minutes": 7}}
    suite = Suite("s", "", ["baseline", "phase3"], [1, 2], ["loss"], config=config, by_ranks=by_ranks, minutes=2)
    runs = build_runs(suite, tmp_path, "cpu")
    assert [(run.ranks, run.config.n_layer, run.minutes) for run in runs] == 2 * [(1, 1, 2), (2, 3, 7)]
    assert [getattr(run.config, "fsdp_prefetch", None) for run in runs] == [None, None, 0, 2]


def test_a_suite_logs_to_weights_and_biases(tmp_path, monkeypatch):
    """The group of a run is the suite. Without credentials, the suite stops before its first run."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_suite(tmp_path, track="wandb")
    (run, *_) = build_runs(load_suite(str(path)), tmp_path, "cpu")
    assert (run.config.wandb_group, run.config.wandb_run_name) == ("tiny", "baseline-1-plain-1")
    with pytest.raises(ConfigError, match="--track=wandb has no credentials"):
        main(SuiteConfig(str(path), tmp_path / "out", device="cpu"))
    assert not (tmp_path / "out").exists()


def test_a_run_without_its_metric_is_repeated(tmp_path, monkeypatch, capsys, no_schedule):
    """If the metric of a run is missing, the suite names it and returns 1. The next start repeats only this run."""
    config = SuiteConfig(str(write_suite(tmp_path)), tmp_path / "out", device="cpu")
    executed, lines = [], [""]

    def fake_execute(run, lock):
        executed.append(run.name)
        run.out_dir.mkdir(parents=True)
        (run.out_dir / "metrics.jsonl").write_text(lines[0])
        return write_status(run.directory, "done")

    monkeypatch.setattr("bench.suite.suite.execute", fake_execute)
    assert main(config) == 1 and len(executed) == 4
    assert "not measured: phase3 on 1 rank(s), plain, seed 2: its files cannot be read" in capsys.readouterr().out
    assert "seed 2, its files cannot be read" in (tmp_path / "out" / "tiny" / "report.md").read_text()
    lines[0] = '{"step": 4, "val_loss": 3.0}\n'
    assert main(config) == 0 and len(executed) == 8
    (run, *_) = build_runs(load_suite(config.suite), tmp_path / "out" / "tiny", "cpu")
    shutil.rmtree(run.out_dir)
    assert main(dataclasses.replace(config, create_slurm=True, gpu="h100")) == 0
    assert read_status(run.directory)["state"] == "pending"  # so that submit-all.sh submits it
    assert main(config) == 0 and executed[8:] == [run.name]
    for name, text, metric in (("ledger.json", "[]", "peak_bytes"), ("metrics.jsonl", "[1]", "loss")):
        (run.out_dir / name).write_text(text)
        assert read_metric(run, metric) is None
    assert read_last_step(run) == 0
    (run.out_dir / "metrics.jsonl").write_text('{"step": 4, "val_loss": NaN}\n')
    assert read_metric(run, "val_loss") is None


def test_runs_with_more_ranks_than_gpus_are_skipped(tmp_path, monkeypatch, capsys):
    """On a machine with two GPUs, the suite executes runs on one and two ranks, and prints how many it skips."""
    ranks: list[int] = []

    def fake_execute(run, lock):
        ranks.append(run.ranks)
        run.directory.mkdir()
        return {**write_status(run.directory, "failed", "why"), "stopped": False}

    monkeypatch.setattr("bench.suite.suite.execute", fake_execute)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    text = SUITE.replace("[1]", "[1, 2, 4]").replace(', "phase3"', "").replace("[1, 2]\n", "[1]\n")
    path = write_suite(tmp_path, text, gradient_accumulation_steps=4)
    assert main(SuiteConfig(str(path), tmp_path / "out", gpu="h100")) == 1
    assert ranks == [1, 2]
    assert "skipped: 1 run(s) with more ranks than this machine's 2 GPU(s)" in capsys.readouterr().out


def test_a_signal_ends_all_suites(tmp_path, monkeypatch, capsys, no_schedule, two_suites):
    """After a signal during a run, no other suite starts, even if the run has finished."""
    executed = []
    for status in ({"state": "pending"}, {"state": "done", "stopped": True}):
        status |= {"seconds": 1.0, "reason": ""}
        monkeypatch.setattr(
            "bench.suite.suite.execute", lambda run, lock, status=status: executed.append(run) or status
        )
        assert main(SuiteConfig("all", tmp_path, device="cpu")) == 0
        assert capsys.readouterr().out.endswith("stopped: run the same command again to continue\n")
    assert len(executed) == 2


def test_a_failing_suite_fails_the_command(tmp_path, monkeypatch, no_schedule, two_suites):
    """The exit code of `all` is the highest exit code of a suite, even if the first suite fails."""
    monkeypatch.setattr("bench.suite.suite.run_suite", lambda suite, *_: int(suite.name == "first"))
    assert main(SuiteConfig("all", tmp_path, device="cpu", gpu="h100")) == 1


def test_the_figure_shows_equal_values_side_by_side(tmp_path):
    """Equal values have different markers, side by side around the number of ranks, and error bars."""
    rows = [
        {"phase": phase, "variant": "plain", "ranks": ranks, "mean": 2.5, "interval": 0.1}
        for phase in ("baseline", "phase1", "phase3")
        for ranks in (1, 2)
    ]
    axes = Figure().subplots()
    plot_lines(axes, rows)
    lines = [container[0] for container in axes.containers]
    assert len({line.get_marker() for line in lines}) == 3
    positions = [line.get_xdata()[0] for line in lines]
    assert positions[0] < positions[1] == 1.0 < positions[2] < 1.2
    text = write_report(make_suite(), [], tmp_path).read_text()
    assert "Vertical bars: 95% confidence intervals over the seeds." in text


def test_the_learning_rate_scales_only_on_request(tmp_path):
    """The learning rate scales with the batch size over the reference batch, linearly or with the square root.

    By default, it does not scale.
    """
    config = {**TINY, "learning_rate": 1e-3, "min_lr": 2e-4, "gradient_accumulation_steps": 4}
    base = {"about": "", "phases": ["baseline"], "ranks": [1, 4], "metrics": ["loss"], "config": config}
    (deep, _) = build_runs(Suite("a", **base, variants={"deep": {"n_layer": 3}}), tmp_path, "cpu")
    assert deep.config.n_layer == 3 != TINY["n_layer"], "a variant does not override the shared configuration"
    assert [run.config.learning_rate for run in build_runs(Suite("a", **base), tmp_path, "cpu")] == [1e-3, 1e-3]
    for scaling, factor in (("linear", 4.0), ("sqrt", 2.0)):
        suite = Suite("a", **base, scale_batch=True, lr_scaling=scaling, reference_batch=8)
        one, four = build_runs(suite, tmp_path, "cpu")
        assert one.config.gradient_accumulation_steps == 4 and four.config.gradient_accumulation_steps == 16
        assert one.config.learning_rate == pytest.approx(1e-3) and four.config.min_lr == pytest.approx(2e-4 * factor)
        assert four.config.learning_rate == pytest.approx(1e-3 * factor)
        assert f"--learning_rate={four.config.learning_rate}" in four.words


def test_a_run_uses_its_own_number_of_ranks_in_a_slurm_job(tmp_path, monkeypatch):
    """In any Slurm job, a run keeps its number of ranks. With slurm=True, slurm.sh starts the run."""
    run = make_run(tmp_path, ranks=4, gradient_accumulation_steps=4)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert build_command(run)[1:4] == ["-m", "nanoGPT.launch", "--gpus=4"]
    assert "GPUS=2" in build_command(run, slurm=True) and SLURM in build_command(run, slurm=True)
    # The time limit is two minutes for the run, and three to start and to save.
    for word in ("--nodes=1", "--gpus-per-node=4", "--time=5"):
        assert f"#SBATCH {word}\n" in format_script(run, 8)
    monkeypatch.setenv("SLURM_NNODES", "3")
    with pytest.raises(ConfigError, match="4 rank"):
        build_command(run, slurm=True)


def test_invalid_requests_keep_the_existing_scripts(tmp_path, no_schedule):
    """If ranks do not fill nodes or out_dir is a file, the request is refused. --retry submits failed runs again."""
    path = write_suite(tmp_path, SUITE.replace("[1]", "[4]"), gradient_accumulation_steps=4)
    config = SuiteConfig(str(path), tmp_path / "out", device="cpu", create_slurm=True, gpus_per_node=4, gpu="h100")
    assert main(config) == 0
    scripts = tmp_path / "out" / "tiny" / "slurm"
    assert "(done|failed|oom|timeout)" in (scripts / "submit-all.sh").read_text()
    with pytest.raises(ConfigError, match="do not fill nodes of 3"):
        main(dataclasses.replace(config, gpus_per_node=3))
    assert len(list(scripts.glob("*.sbatch"))) == 4
    with pytest.raises(ConfigError, match="cannot be created"):
        main(dataclasses.replace(config, out_dir=path))
    assert main(dataclasses.replace(config, retry=True)) == 0
    assert '"(done)"' in (scripts / "submit-all.sh").read_text()


def test_scripts_are_written_for_the_gpus_of_a_cluster(tmp_path, monkeypatch, capsys, no_schedule):
    """A machine without a GPU can write scripts for the GPUs of a cluster, with the configuration for a GPU.

    The suite prints the command that writes the report on this machine after the runs have finished on the cluster.
    """
    text = SUITE.replace('"baseline", ', "").replace("seeds = [1, 2]", "seeds = [1]")
    path = tmp_path / "tiny.toml"
    path.write_text(text + "max_iters = 4\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = SuiteConfig(str(path), tmp_path / "out", create_slurm=True)
    with pytest.raises(ConfigError, match="name the cluster's GPUs, such as --gpu=h100"):
        main(config)
    assert main(dataclasses.replace(config, gpu="h100")) == 0
    report_command = f'make suite SUITE={path} ARGS="--device=cuda --out_dir={tmp_path}/out"'
    submit = (tmp_path / "out" / "tiny" / "slurm" / "submit-all.sh").read_text()
    assert report_command in capsys.readouterr().out and report_command in submit and 'sbatch "$@"' in submit
    (run,) = build_runs(load_suite(str(path)), tmp_path / "out" / "tiny", "cuda")
    assert "--device=cuda" in read_run(run.directory).words and run.config.n_layer == 12 and run.config.compile
    assert "--cpus-per-task=16" in format_script(dataclasses.replace(run, ranks=2), 8)
    report_config = SuiteConfig(str(path), tmp_path / "out", device="cuda")
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        main(report_config)
    run.out_dir.mkdir()
    (run.out_dir / "metrics.jsonl").write_text('{"step": 4, "val_loss": 2.5}\n')
    environment = {"hardware": "NVIDIA H100", "versions": {"torch": "2.13.0"}, "git_commit": "abc"}
    (run.out_dir / "env.json").write_text(json.dumps(environment))
    write_status(run.directory, "done")
    assert main(report_config) == 0
    assert "Measured on NVIDIA H100, torch 2.13.0." in (tmp_path / "out" / "tiny" / "report.md").read_text()


def test_slurm_scripts_are_valid_and_run(tmp_path, capsys, python):
    """Scripts pass bash -n and shellcheck. A simulated scheduler runs one to its end on two nodes.

    The next submission leaves out the finished run.
    """
    path = write_suite(tmp_path, SUITE.replace("seeds = [1, 2]", "").replace("[1]", "[2]").replace('"baseline", ', ""))
    config = SuiteConfig(str(path), tmp_path / "out", device="cpu", create_slurm=True, gpus_per_node=1, gpu="h100")
    assert main(dataclasses.replace(config, price=2.0)) == 0
    output = capsys.readouterr().out
    assert "wrote 1 script(s); submit them with" in output and "| total |  |  |  | 1 | 0:00:" in output
    scripts = sorted((tmp_path / "out" / "tiny" / "slurm").iterdir())
    assert len(scripts) == 2
    for word in ("--nodes=2", "--requeue", f"--job-name=tiny-{scripts[0].stem}\n", "--dependency=singleton"):
        assert f"#SBATCH {word}" in scripts[0].read_text()
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for script in (*scripts, ROOT / "deploy" / "slurm.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        completed = subprocess.run([shellcheck, script], capture_output=True, text=True)
        assert completed.returncode == 0, completed.stdout
    sbatch = '#!/bin/bash\nSLURM_JOB_ID=$PPID exec bash "$1"\n'
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("sbatch", sbatch)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    environment = {**os.environ, **job, "PY": python, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submit = ["bash", str(tmp_path / "out" / "tiny" / "slurm" / "submit-all.sh")]
    completed = subprocess.run(submit, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert completed.returncode == 0 and completed.stdout.strip() == "done", completed.stdout + completed.stderr
    assert list(read_states(tmp_path / "out" / "tiny").values()) == ["done"]
    completed = subprocess.run(submit, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert completed.returncode == 0 and completed.stdout.startswith("already finished: ")
    scripts[0].unlink()
    assert subprocess.run(submit, env=environment, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phasse = 1\n" + SUITE, "phasse is not a field of a suite; did you mean phases"),
        (SUITE.replace('metrics = ["val_loss"]\n', ""), "metrics is missing"),
        (SUITE.replace("val_loss", "speed"), "metrics = 'speed' is unknown: use tokens_per_second"),
        (SUITE.replace("phase3", "phase9"), "phases = 'phase9' is unknown"),
        (SUITE.replace("[1]\nmetrics", "[0]\nmetrics"), "$.ranks[0] is 0: must be from 1 to "),
        (SUITE.replace("minutes = 2", "minutes = 0"), "minutes = 0 is out of range: use more than 0"),
        (SUITE.replace("minutes = 2", 'minutes = "2"'), "$.minutes is a string: must be a number"),
        (SUITE.replace("minutes = 2", "minutes = true"), "$.minutes is true or false: must be a number"),
        (SUITE.replace("minutes = 2", 'lr_scaling = "linear"'), "lr_scaling needs reference_batch"),
        (SUITE.replace('"Tiny', "Tiny"), "is not a valid TOML file"),
        (SUITE.replace("seeds = [1, 2]", "seeds = [1, 1]"), "seeds has 1 more than once"),
        (SUITE.replace('"phase3"', '"baseline"'), "phases has baseline more than once"),
        (SUITE.replace("[config]", '[variants."a/b"]\n[config]'), "variants.a/b is not a valid name"),
        (
            SUITE.replace("[config]", "[variants]\nx = 3\n[config]"),
            "$.variants['x'] is an integer: must be an object",
        ),
        (SUITE + "seed = 3\n", "seed is set by the suite"),
        (SUITE + 'device = "cpu"\n', "device is set by the suite"),
        (SUITE + 'init_from = "resume"\n', "init_from is set by the suite"),
        (SUITE.replace("val_loss", "peak_bytes"), "peak_bytes needs ledger: add ledger = true"),
        (SUITE.replace("minutes = 2", "minutes = inf"), "less than one year"),
        (SUITE.replace("metrics", "metric"), "metric is not a field of a suite; did you mean metrics"),
        (SUITE.replace("val_loss", "val_accuracy"), "val_accuracy needs eval_accuracy: add eval_accuracy = true"),
        (SUITE.replace("val_loss", "steps_to_loss"), "metric steps_to_loss needs target_loss"),
        (SUITE.replace("minutes = 2", "target_loss = 2.0"), "target_loss is not used"),
        (BY_RANKS + "n_layers = 3\n[config]\n", "n_layers is not a field of the configuration; did you mean n_layer"),
        (SUITE + "minutes = 3\n", "minutes is not a field of the configuration"),
        (BY_RANKS + "seed = 3\n[config]\n", "seed is set by the suite"),
        (BY_RANKS + "minutes = true\n[config]\n", "minutes = True is out of range"),
        (BY_RANKS.replace(".1]", ".2]") + "[config]\n", "by_ranks.2 is not in ranks = [1]"),
        (
            BY_RANKS + "n_layer = 3\n[variants.deep]\nn_layer = 2\n[config]\n",
            "n_layer is in by_ranks.1 and variants.deep: keep only one",
        ),
        (SUITE.replace("seeds = [1, 2]", f"seeds = {[*range(5_001)]}"), "has 10,002 runs, more than 10,000"),
        (SUITE + "x = " + "[" * 100_000, "is not a valid TOML file"),
        (SUITE + "n_layers = 3\n", "n_layers is not a field of the configuration; did you mean n_layer"),
        (SUITE + "dropout = 2.0\n", "baseline on 1 rank"),
        (SUITE + 'dataset = "shakespear"\n', "there is no dataset shakespear; did you mean shakespeare"),
        (SUITE.replace("val_loss", "tokens_per_second"), "max_iters=1 is too small for tokens_per_second: use 2"),
        (SUITE.replace("val_loss", "peak_bytes") + "ledger = true\n", "max_iters=1 is too small for peak_bytes: use 3"),
        (
            SUITE.replace("baseline", "phase1").replace("[config]", TWO_PHASES),
            "no phase has all fields of variants.both",
        ),
    ],
)
def test_a_wrong_suite_file_is_refused_with_one_sentence(tmp_path, text, message):
    """A misspelled, missing or invalid key is named before any run starts."""
    path = write_suite(tmp_path, text, max_iters=1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_runs(load_suite(str(path)), tmp_path, "cpu")


def test_a_wrong_request_is_refused_with_one_sentence(tmp_path, no_schedule):
    """Invalid suites, GPUs, prices, file names and node sizes are refused, and so is a directory that is in use."""
    with pytest.raises(ConfigError, match="no suite scalling; did you mean scaling"):
        load_suite("scalling")
    with pytest.raises(ConfigError, match=r"dir.toml is a directory"):
        (tmp_path / "dir.toml").mkdir()
        load_suite(str(tmp_path / "dir.toml"))
    for name, message in (("...toml", "invalid name"), (".toml", "invalid name"), ("scaling.toml", "rename the file")):
        with pytest.raises(ConfigError, match=message):
            load_suite(str(write_suite(tmp_path).rename(tmp_path / name)))
    with pytest.raises(ConfigError, match="h1000 is unknown"):
        select_gpu("h1000")
    for price in ("-3", "nan"):
        with pytest.raises(ConfigError, match=f"--price={price} is out of range"):
            main(SuiteConfig(out_dir=tmp_path, create_slurm=True, gpu="h100", price=float(price)))
    config = command_line(SuiteConfig, ["--suite=scaling", f"--out_dir={tmp_path}", "--device=cpu"])
    with pytest.raises(ConfigError, match="do not fill nodes of 3"):
        main(dataclasses.replace(config, create_slurm=True, gpus_per_node=3, gpu="h100"))
    small = dataclasses.replace(config, suite=str(write_suite(tmp_path)))
    with directory_lock(tmp_path / "tiny"), pytest.raises(ConfigError, match="is in use by"):
        main(small)
    with pytest.raises(ConfigError, match="does not contain a run"):
        read_run(tmp_path)
    for words in ([], ["a", "b"]):
        with pytest.raises(ConfigError, match="pass the directory of one run"):
            suite_run.main(words)
    run = dataclasses.replace(make_run(tmp_path / "phase9"), phase="phase9")
    run.save()
    with pytest.raises(ConfigError, match="'phase9' in run.json is not a phase"):
        suite_run.main([str(run.directory)])
    write_status(tmp_path, "running")
    assert read_status(tmp_path)["state"] == "running"
    for damaged in ("{}", "[]", '{"state": 3}', '{"sta'):
        (tmp_path / "status.json").write_text(damaged)
        assert read_status(tmp_path)["state"] == "pending"
