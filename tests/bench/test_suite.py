"""Suites: runs that continue after a kill, states that report how runs ended, scripts for Slurm, and one report."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.suite.execution import (
    Run,
    build_command,
    classify_exit,
    execute,
    write_status,
)
from bench.suite.file import SUITES, Suite, load_suite
from bench.suite.metrics import read_metric
from bench.suite.report import group_runs, write_report
from bench.suite.suite import SuiteConfig, build_runs, main
from nanoGPT.errors import ConfigError
from nanoGPT.files import lock_directory
from operate.run_files import find_newest_run
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
TWO_PHASES = "[variants.both]\nzero1_bucket_mb = 1\nfsdp_cpu_offload = true\n\n[config]\n"


def write_suite(tmp_path: Path, text: str = SUITE, **fields: object) -> Path:
    """Write a suite file with tiny runs. `fields` replace fields of the configuration."""
    path = tmp_path / "tiny.toml"
    path.write_text(text + "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**TINY, **fields}.items()))
    return path


def make_suite(**fields: Any) -> Suite:
    values = {"about": "Some.", "phases": ["baseline"], "ranks": [1], "metrics": ["val_loss"], "minutes": 2}
    return Suite("some", **{**values, "config": TINY, **fields})


def make_run(tmp_path: Path, **fields: object) -> Run:
    """Return the only run of a suite with one run."""
    (run,) = build_runs(make_suite(config={**TINY, **fields}), tmp_path, "cpu")
    return run


def write_files(run: Run, lines: list[dict[str, Any]], ledger: str = "{}") -> None:
    """Write the files of a run that is done."""
    run.out_dir.mkdir(parents=True, exist_ok=True)
    (run.out_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.out_dir / "ledger.json").write_text(ledger)
    write_status(run.directory, "done")


def read_states(directory: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["state"] for path in directory.glob("*/status.json")}


def is_unlocked(directory: Path) -> bool:
    try:
        lock_directory(directory).close()
        return True
    except ConfigError:
        return False


@pytest.mark.heavy
def test_every_suite_has_valid_runs(tmp_path):
    """Every suite of this repository has valid runs, also with the defaults of a GPU. The example of the documents and
    a suite with another model have valid runs too.

    A phase without a variant's fields skips it.
    """
    for path in SUITES.glob("*.toml"):
        runs = build_runs(load_suite(path.stem), tmp_path, "cpu")
        assert len(runs) > 1 and len({run.directory for run in runs}) == len(runs)
        assert len(build_runs(load_suite(path.stem), tmp_path, "cuda")) == len(runs)
    runs = build_runs(load_suite("memory"), tmp_path, "cpu")
    assert {run.variant for run in runs if run.phase == "phase1"} == {"plain"}
    text = SUITE.replace("[config]", '[variants.llama]\nmodel = "llama"\nn_kv_head = 1\n\n[config]')
    runs = build_runs(load_suite(str(write_suite(tmp_path, text))), tmp_path, "cpu")
    assert [run.words.count("--model=llama") for run in runs if run.variant == "llama"] == [1] * 4
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/measuring.md").read_text(), re.S)
    (tmp_path / "example.toml").write_text(example)
    runs = build_runs(load_suite(str(tmp_path / "example.toml")), tmp_path, "cpu")
    assert len(runs) == 27 and {run.phase for run in runs if run.variant == "full"} == {"phase3"}


def test_a_killed_suite_continues(tmp_path, monkeypatch):
    """After SIGKILL in the middle of a suite, a second start runs only the unfinished runs and writes the report.

    The newest run, which `make autopsy` reads, is the directory of the last run, not the one of its output.
    """
    path = write_suite(tmp_path, SUITE.replace('"baseline", ', ""), max_iters=30, eval_interval=5)
    words = ["bench.suite", f"--suite={path}", f"--out_dir={tmp_path}/out", "--device=cpu"]
    first = Program(*words)
    directory = tmp_path / "out" / "tiny"

    def is_in_second_run() -> bool:
        assert first.poll() is None, first.output()
        return sorted(read_states(directory).values()) == ["done", "running"]

    wait_until(is_in_second_run)
    first.kill()
    states = read_states(directory)
    finished, running = (next(name for name in states if states[name] == state) for state in ("done", "running"))
    status = (directory / finished / "status.json").read_text()
    wait_until(lambda: is_unlocked(directory / running))  # the run outlives the suite and keeps the lock
    second = run_program(*words)
    assert second.code == 0, second.output
    assert "2 runs, 1 already finished" in second.output
    assert (directory / finished / "status.json").read_text() == status
    assert set(read_states(directory).values()) == {"done"} and len(read_states(directory)) == 2
    (row,) = json.loads((directory / "results.json").read_text())["metrics"]["val_loss"]
    assert row["mean"] == pytest.approx(sum(row["values"].values()) / 2)
    text = (directory / "report.md").read_text()
    assert "| phase3 | 1 | plain |" in text and "Measured on" in text
    monkeypatch.chdir(tmp_path)
    assert find_newest_run() == Path("out/tiny") / running / "run"


def test_a_run_is_executed_only_once(tmp_path, monkeypatch):
    """A finished run is not repeated, a run in use is refused, and a signal is passed on to the run."""
    run = make_run(tmp_path)
    stub = f"trap 'exit 0' TERM; until [ -e {tmp_path}/waits ]; do sleep 0.1; done; kill -TERM $PPID"
    stub += "; while :; do sleep 0.1; done"
    wait = subprocess.Popen.wait  # `execute` calls it when its handlers of signals are set
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *words: ((tmp_path / "waits").touch(), wait(*words))[1])
    monkeypatch.setattr("bench.suite.execution.build_command", lambda *_: ["bash", "-c", stub])
    run.directory.mkdir()
    with lock_directory(run.directory), pytest.raises(ConfigError, match="another run is writing into"):
        execute(run)
    assert not (run.directory / "status.json").exists()
    status = execute(run)
    assert status["state"] == "pending" and status["stopped"]
    done = write_status(run.directory, "done")
    assert execute(run) == done


def test_an_exit_is_classified(tmp_path, monkeypatch):
    """Output of an earlier start does not count. A run whose last step ends at its time limit is done."""
    run = dataclasses.replace(make_run(tmp_path), minutes=0.001)
    for line, expected in (
        ("echo error: CUDA out of memory; exit 1", ("oom", "error: CUDA out of memory")),
        ("echo error: no; exit 1", ("failed", "error: no")),
        (
            "echo 'error: rank 1: it was killed by SIGKILL'; exit 137",
            ("oom", "error: rank 1: it was killed by SIGKILL"),
        ),
        ("true", ("pending", "stopped at step 0 of 4; the next start resumes the run")),
        ("exec sleep 60", ("timeout", "stopped after 0.001 minutes at step 0 of 4")),
    ):
        monkeypatch.setattr("bench.suite.execution.build_command", lambda *_, line=line: ["bash", "-c", line])
        status = execute(run)
        assert (status["state"], status["reason"]) == expected
    for stopped, state in (("signal", "pending"), ("", "failed")):
        assert classify_exit(run, -signal.SIGTERM, stopped, "")[0] == state
    for step, state in ((run.steps - 1, "timeout"), (run.steps, "done")):
        write_files(run, [{"step": step}])
        assert classify_exit(run, 0, "timeout", "")[0] == state


def test_a_run_without_a_checkpoint_starts_from_scratch(tmp_path):
    """The directory of a run that was killed before its first save is deleted. With a checkpoint, the run resumes."""
    run = make_run(tmp_path)
    (run.out_dir / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert "--init_from=resume" in build_command(run)
    (run.out_dir / "checkpoints" / "step-00000002").rmdir()
    assert "--init_from=resume" not in build_command(run) and not run.out_dir.exists()


def test_metrics_have_the_right_values(tmp_path):
    """Metrics are the median without the first line, the last loss and the maximum memory, or None."""
    run = make_run(tmp_path, eval_interval=10)
    lines = [{"step": 0, "val_loss": 4.0, "step_ms": 500.0}, {"step": 9, "val_loss": None, "step_ms": 100.0}]
    lines += [{"step": 10, "val_loss": 2.0, "step_ms": 300.0}, {"step": 20, "val_loss": 1.0, "step_ms": None}]
    write_files(run, lines, json.dumps({"ranks": [{"memory": {"peak": {"a": n, "other": 1}}} for n in (3, 6, 4)]}))
    assert [read_metric(run, metric) for metric in ("step_ms", "val_loss", "peak_bytes")] == [200, 1, 7]
    write_files(run, [{"step": 4, "val_loss": math.nan}], "[]")
    assert read_metric(run, "val_loss") is None and read_metric(run, "peak_bytes") is None


def test_rows_are_compared_with_a_reference(tmp_path):
    """A variant is compared with the first variant of its phase, and a phase with the first phase, seed by seed."""
    fields = {"phases": ["baseline", "phase1"], "seeds": [1, 2]}
    variants = {"a": {}, "b": {"n_layer": 2}}
    for names, expected in ((["a", "b"], [None, "baseline a", None, "phase1 a"]), (["a"], [None, "baseline a"])):
        suite = make_suite(**fields, variants={name: variants[name] for name in names})
        runs = build_runs(suite, tmp_path / str(len(names)), "cpu")
        for i, run in enumerate(runs):
            write_files(run, [{"step": 4, "val_loss": 10.0 * run.seed + i}])
        rows = group_runs(runs, "val_loss")
        assert [row["reference"] for row in rows] == expected
        assert rows[0]["difference"] is None and rows[1]["difference"] == 2 and rows[1]["difference_interval"] == 0
    text = write_report(suite, runs, tmp_path).read_text()
    assert "| phase1 | 1 | a | 17.5000 | ± 69.8841 | +2.0000 | ± 0.0000 | baseline a |" in text


def test_only_possible_runs_start_until_a_signal(tmp_path, monkeypatch, capsys):
    """Runs with more ranks than GPUs are skipped. After a signal, no other run starts; --report starts none."""
    ranks: list[int] = []
    status: dict[str, Any] = {"state": "failed", "reason": "why", "seconds": 1.0}
    monkeypatch.setattr("bench.suite.suite.execute", lambda run: ranks.append(run.ranks) or status)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    text = SUITE.replace("[1]", "[1, 2, 4]").replace(', "phase3"', "").replace("[1, 2]\n", "[1]\n")
    path = write_suite(tmp_path, text, gradient_accumulation_steps=4)
    config = SuiteConfig(str(path), tmp_path / "out")
    assert main(config) == 1 and ranks == [1, 2]
    assert "skipped: 1 run(s) with more ranks than this machine's 2 GPU(s)" in capsys.readouterr().out
    status["stopped"] = True
    assert main(config) == 0 and ranks == [1, 2, 1]
    assert capsys.readouterr().out.endswith("stopped: run the same command again to continue\n")
    assert main(dataclasses.replace(config, report=True)) == 1 and len(ranks) == 3


def test_slurm_scripts_are_valid_and_run(tmp_path, python):
    """Scripts pass shellcheck. A simulated scheduler runs one to its end on two nodes.

    Ranks that do not fill nodes are refused.
    """
    path = write_suite(tmp_path, SUITE.replace("seeds = [1, 2]", "").replace("[1]", "[2]").replace('"baseline", ', ""))
    config = SuiteConfig(str(path), tmp_path / "out", device="cpu", create_slurm=True, gpus_per_node=1)
    assert main(config) == 0
    scripts = sorted((tmp_path / "out" / "tiny" / "slurm").iterdir())
    assert len(scripts) == 2 and "#SBATCH --nodes=2\n" in scripts[0].read_text()
    shellcheck = Path(sys.executable).with_name("shellcheck")
    completed = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout
    sbatch = '#!/bin/bash\nSLURM_JOB_ID=$PPID exec bash "$1"\n'
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("sbatch", sbatch)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    environment = {**os.environ, **job, "PY": python, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submit = ["bash", str(scripts[1])]
    completed = subprocess.run(submit, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert completed.returncode == 0 and completed.stdout.strip() == "done", completed.stdout + completed.stderr
    assert list(read_states(tmp_path / "out" / "tiny").values()) == ["done"]
    with pytest.raises(ConfigError, match="do not fill nodes of 3"):
        main(dataclasses.replace(config, suite="scaling", gpus_per_node=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phasse = 1\n" + SUITE, "Object contains unknown field `phasse`"),
        (SUITE + "seed = 3\n", "seed is set by the suite"),
        (SUITE.replace("val_loss", "tokens_per_second"), "max_iters=1 is too small for tokens_per_second: use 2"),
        (
            SUITE.replace("baseline", "phase1").replace("[config]", TWO_PHASES),
            "no phase has all fields of variants.b",
        ),
    ],
)
def test_a_wrong_suite_file_is_refused_with_one_sentence(tmp_path, text, message):
    """A misspelled, missing or invalid key is named before any run starts."""
    path = write_suite(tmp_path, text, max_iters=1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_runs(load_suite(str(path)), tmp_path, "cpu")
