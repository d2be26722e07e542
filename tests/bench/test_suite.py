"""Suites: runs that continue after a kill, states that say how they ended, scripts for Slurm, and one report."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bench.suite import execution as suite_run
from bench.suite.execution import (
    SLURM,
    command,
    directory_lock,
    execute,
    last_step,
    outcome,
    read_run,
    read_status,
    write_status,
)
from bench.suite.file import SUITES, Suite, load
from bench.suite.report import draw_lines, grouped, report, value_of
from bench.suite.schedule import describe_seconds, gpu_of, here, seconds_of
from bench.suite.slurm import script_of
from bench.suite.suite import SuiteConfig, introduce, main, runs_of
from nanoGPT.cli.command_line import command_line
from nanoGPT.errors import ConfigError
from tests.helpers.slurm import SCONTROL, SRUN
from tests.helpers.training import ROOT

TINY = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 8, "batch_size": 2, "max_iters": 4, "log_interval": 1}
TINY |= {"eval_interval": 2, "eval_iters": 1, "gradient_accumulation_steps": 2, "always_save_checkpoint": True}
FORM = """about = "Tiny runs."
phases = ["baseline", "phase3"]
ranks = [1]
metric = "val_loss"
minutes = 2
seeds = [1, 2]

[config]
"""
TWO_PHASES = """[variants.both]
zero1_bucket_mb = 1
fsdp_cpu_offload = true

[config]
"""


def file_of(tmp_path: Path, text: str = FORM, **words: object) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(text + "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**TINY, **words}.items()))
    return path


def one_run(tmp_path: Path, phase: str = "baseline", ranks: int = 1, **words: object):
    """The run of a suite that has no other."""
    suite = Suite("one", "One run.", [phase], [ranks], "val_loss", config={**TINY, **words}, minutes=2)
    (run,) = runs_of(suite, tmp_path, "cpu")
    return run


@pytest.mark.heavy
def test_every_suite_can_be_planned(tmp_path, capsys):
    """Each of this repository's suites has runs that their phases accept, and an estimate of their time."""
    names = sorted(path.stem for path in SUITES.glob("*.toml"))
    assert names == ["kernels", "memory", "optimizers", "scaling", "seeds", "wrapping"]
    for name in names:
        suite = load(name)
        runs = runs_of(suite, tmp_path, "cpu")
        assert len(runs) > 1 and len({run.directory for run in runs}) == len(runs)
    introduce(load("memory"))
    assert "left out: offload on baseline, phase1" in capsys.readouterr().out
    assert {run.variant for run in runs_of(load("memory"), tmp_path, "cpu") if run.phase == "phase1"} == {"plain"}
    run = runs_of(load("scaling"), tmp_path, "cpu")[0]
    assert 5 < seconds_of(run.config, run.phase, run.ranks, here()) < 600


def test_the_suite_that_the_readme_shows_can_be_run(tmp_path):
    """Every key of the README's example is one that a suite has, and its phases accept what it gives them."""
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "shown.toml").write_text(shown)
    suite = load(str(tmp_path / "shown.toml"))
    names = {field.name for field in dataclasses.fields(Suite)} - {"name", "phases", "config"}
    assert all(f"\n{name}" in f"\n{shown}" or f"[{name}." in shown for name in names)
    runs = runs_of(suite, tmp_path, "cpu")
    assert len(runs) == 27 and {run.phase for run in runs if run.variant == "full"} == {"phase3"}


def test_a_suite_is_killed_and_continued(tmp_path):
    """SIGKILL in the middle of a suite; started again, it does what is left, does nothing twice, and reports."""
    path = file_of(tmp_path, FORM.replace('"baseline", ', ""), max_iters=30, eval_interval=5)
    words = [sys.executable, "-m", "bench.suite", f"--suite={path}", f"--out_dir={tmp_path}/out", "--device=cpu"]
    first = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    directory = tmp_path / "out" / "tiny"
    wait_for(lambda: len(states(directory)) >= 2 and sorted(states(directory).values()) == ["done", "running"])
    first.kill()
    first.wait()
    done = next(name for name, state in states(directory).items() if state == "done")
    written = (directory / done / "status.json").read_text()
    wait_for(lambda: free(directory))  # of the run that outlives it
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 runs, 1 of them ended before" in again.stdout
    assert (directory / done / "status.json").read_text() == written
    assert set(states(directory).values()) == {"done"} and len(states(directory)) == 2
    found = json.loads((directory / "results.json").read_text())["rows"]
    (row,) = found
    assert row["mean"] == pytest.approx(sum(row["values"].values()) / 2) and row["spread"] > 0
    text = (directory / "report.md").read_text()
    assert "| phase3 | 1 | plain |" in text and (directory / "tiny.png").stat().st_size > 5000


def states(directory: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["state"] for path in directory.glob("*/status.json")}


def free(directory: Path) -> bool:
    try:
        with directory_lock(directory):
            return True
    except ConfigError:
        return False


def wait_for(true, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_how_a_run_ends(tmp_path):
    """Done, failed with its sentence, ended for its time, and, when it has gone on, killed as for memory."""
    run = one_run(tmp_path)
    assert execute(run)["state"] == "done" and read_run(run.directory) == run
    broken = dataclasses.replace(one_run(tmp_path, learning_rate=1e30, grad_clip=0.0), words=["--learning_rate=x"])
    status = execute(broken)
    assert status["state"] == "failed" and "learning_rate" in status["reason"]
    long = one_run(tmp_path, max_iters=100_000, eval_interval=50)
    status = execute(dataclasses.replace(long, minutes=0.15))
    assert status["state"] == "timeout" and "of 100000" in status["reason"]
    steps = int(status["reason"].split("at step ")[1].split()[0])
    assert steps > 0 and list((long.out_dir / "checkpoints").glob("step-*"))
    killed = dataclasses.replace(long, minutes=2)
    killed.save()
    process = subprocess.Popen([sys.executable, "-m", "bench.suite.execution", killed.directory], cwd=ROOT)
    wait_for(lambda: last_step(killed) > steps)  # from its checkpoint on
    os.kill(json.loads((killed.out_dir / "heartbeat" / "rank0.json").read_text())["pid"], signal.SIGKILL)
    assert process.wait(60) == 1
    status = read_status(killed.directory)
    assert status["state"] == "oom" and "SIGKILL" in status["reason"]
    assert grouped([killed], "val_loss")[0]["mean"] is None
    assert "oom: " in report("mixed", "Some.", "val_loss", [run, killed], tmp_path).read_text()
    with open(run.out_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert "cannot be read" in report("mixed", "Some.", "val_loss", [run], tmp_path).read_text()


def test_a_run_is_done_once_by_one(tmp_path, monkeypatch):
    """What is done is left alone, what another does is refused, and a signal, passed on to the run, is told of."""
    run = one_run(tmp_path)
    stub = "trap 'exit 0' TERM; sleep 0.5; kill -INT $PPID; while :; do sleep 0.1; done"
    monkeypatch.setattr("bench.suite.execution.command", lambda *_: ["bash", "-c", stub])
    with directory_lock(run.directory), pytest.raises(ConfigError, match="at work"):
        execute(run)
    assert not (run.directory / "status.json").exists()
    status = execute(run)
    assert status["state"] == "pending" and status["stopped"]
    done = write_status(run.directory, "done")
    assert execute(run) == done


def test_a_run_is_judged_by_what_it_said_now(tmp_path, monkeypatch):
    """Not by an earlier start's words; it holds its suite's directory; a job whose run was stopped ends well."""
    run = one_run(tmp_path)
    with directory_lock(tmp_path / "suite") as lock:
        for line, ends in (
            ("echo error: CUDA out of memory; exit 1", ("oom", "error: CUDA out of memory")),
            ("echo error: no; exit 1", ("failed", "error: no")),
            (f"test -e /proc/self/fd/{lock}", ("pending", "stopped at step 0 of 4; the next start goes on")),
        ):
            monkeypatch.setattr("bench.suite.execution.command", lambda *_, line=line: ["bash", "-c", line])
            status = execute(run, lock)
            assert (status["state"], status["reason"]) == ends
    monkeypatch.setattr("bench.suite.execution.command", lambda *_: ["true"])
    assert suite_run.main([str(run.directory)]) == 0
    for stopped, state in (("signal", "pending"), ("", "failed")):
        assert outcome(run, -signal.SIGTERM, stopped, "")[0] == state


def test_what_was_killed_before_it_saved_begins_anew(tmp_path):
    """Its directory goes, so that it is not refused; with a checkpoint there it resumes."""
    run = one_run(tmp_path)
    for saved in (True, False):
        (run.out_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run.out_dir / "checkpoints" / "step-00000002").mkdir()
        if not saved:
            shutil.rmtree(run.out_dir / "checkpoints" / "step-00000002")
        assert ("--init_from=resume" in command(run)) == saved == run.out_dir.exists()
        shutil.rmtree(run.out_dir, ignore_errors=True)


def test_the_figures_of_a_report(tmp_path):
    """By hand: the median but for the first line, the last loss, the fullest rank, and the spread of a sample."""
    run = dataclasses.replace(one_run(tmp_path), seed=2)
    other = dataclasses.replace(run, directory=tmp_path / "other", seed=1)
    for each, more in ((run, 0), (other, 2)):
        each.out_dir.mkdir(parents=True)
        write_status(each.directory, "done")
        lines = [{"step_ms": ms + more, "val_loss": ms / 4} for ms in (1000, 10, 60, 20)]
        lines.append({"step_ms": None, "val_loss": None})
        (each.out_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ranks = [{"memory": {"peak": {"parameters": n, "other": 1}}} for n in (3, 6, 4)]
        (each.out_dir / "ledger.json").write_text(json.dumps({"ranks": ranks}))
    assert [value_of(run, metric) for metric in ("step_ms", "val_loss", "peak_bytes")] == [20, 5, 7]
    (row,) = grouped([run, other], "step_ms")
    assert row["values"] == {2: 20, 1: 22} and row["mean"] == 21 and row["spread"] == pytest.approx(2**0.5)


def test_what_an_estimate_counts(tmp_path):
    """Each micro-batch and each evaluation takes its time, in minutes; a rank's hour costs the price of a GPU."""
    long = {"max_iters": 1000, "eval_interval": 1000}
    runs = [one_run(tmp_path, **{**long, "gradient_accumulation_steps": n}) for n in (1, 2, 4)]
    one, two, four = (seconds_of(run.config, run.phase, 1, gpu_of("h100")) for run in runs)
    assert four - two == pytest.approx(2 * (two - one), rel=0.1)
    compiled = one_run(tmp_path, "phase1", compile=True).config
    assert 0 < seconds_of(compiled, "phase1", 1, gpu_of("h100")) < 60
    config = dataclasses.replace(runs[0].config, eval_iters=1000)
    assert seconds_of(config, "baseline", 1, gpu_of("h100")) > one + 0.2
    said = describe_seconds({dataclasses.replace(runs[0], ranks=4): 5400.0}, 2.0)
    assert said == "; about 90 minute(s) to go, by the planner, 6.00 GPU-hours, 12.00 in all"


def test_a_run_without_its_figure_is_a_fault(tmp_path, monkeypatch, capsys):
    """Exit code 1, and named; the next start does it again, from its start. What has its figure is left alone."""
    config = SuiteConfig(str(file_of(tmp_path)), tmp_path / "out", device="cpu")
    executed, lines = [], [""]

    def pretend(run, lock):
        executed.append(run.name)
        run.out_dir.mkdir(parents=True)
        (run.out_dir / "metrics.jsonl").write_text(lines[0])
        return write_status(run.directory, "done")

    monkeypatch.setattr("bench.suite.suite.execute", pretend)
    assert main(config) == 1 and len(executed) == 4
    assert "not done: phase3 on 1, plain, seed 2: its files cannot be read, or have no val" in capsys.readouterr().out
    assert "seed 2, its files cannot be read" in (tmp_path / "out" / "tiny" / "report.md").read_text()
    lines[0] = '{"step": 4, "val_loss": 3.0}\n'
    assert main(config) == 0 and len(executed) == 8
    (run, *_) = runs_of(load(config.suite), tmp_path / "out" / "tiny", "cpu")
    shutil.rmtree(run.out_dir)
    assert main(dataclasses.replace(config, create_slurm=True, gpu="h100")) == 0
    assert read_status(run.directory)["state"] == "pending"  # so that submit-all.sh does not leave it out
    assert main(config) == 0 and executed[8:] == [run.name]
    for name, text, metric in (("ledger.json", "[]", "peak_bytes"), ("metrics.jsonl", "[1]", "loss")):
        (run.out_dir / name).write_text(text)
        assert value_of(run, metric) is None
    assert last_step(run) == 0
    (run.out_dir / "metrics.jsonl").write_text('{"step": 4, "val_loss": NaN}\n')
    assert value_of(run, "val_loss") is None


def test_what_has_more_ranks_than_gpus_is_left_out(tmp_path, monkeypatch, capsys):
    """On a machine with two GPUs runs on one and two ranks are done, and it is said how many are not."""
    ranks: list[int] = []

    def pretend(run, lock):
        ranks.append(run.ranks)
        run.directory.mkdir()
        return {**write_status(run.directory, "failed", "why"), "stopped": False}

    monkeypatch.setattr("bench.suite.suite.execute", pretend)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    form = FORM.replace("[1]", "[1, 2, 4]").replace(', "phase3"', "").replace("[1, 2]\n", "[1]\n")
    path = file_of(tmp_path, form, gradient_accumulation_steps=4)
    assert main(SuiteConfig(str(path), tmp_path / "out", gpu="h100")) == 1
    assert ranks == [1, 2]
    assert "left out: 1 on more ranks than the 2 GPU(s)" in capsys.readouterr().out


def test_a_signal_ends_all_suites(tmp_path, monkeypatch, capsys):
    """One that was asked to stop, saved or just done, is the last of all."""
    executed = []
    for status in ({"state": "pending"}, {"state": "done", "stopped": True}):
        status |= {"seconds": 1.0, "reason": ""}
        monkeypatch.setattr(
            "bench.suite.suite.execute", lambda run, lock, status=status: executed.append(run) or status
        )
        assert main(SuiteConfig("all", tmp_path, device="cpu")) == 0
        assert capsys.readouterr().out.endswith("stopped; the same command goes on\n")
    assert len(executed) == 2


def test_one_suite_that_fails_fails_all(tmp_path, monkeypatch):
    """The exit code of all suites is that of the worst, also where it is the first."""
    monkeypatch.setattr("bench.suite.suite.run_suite", lambda suite, *_: int(suite.name == "kernels"))
    assert main(SuiteConfig("all", tmp_path, device="cpu", gpu="h100")) == 1


def test_the_picture_shows_what_is_equal(tmp_path):
    """Lines of the same figures have markers of their own, side by side around the rank count; a bar is the spread."""
    rows = [
        {"phase": phase, "variant": "plain", "ranks": ranks, "mean": 2.5, "spread": 0.1}
        for phase in ("baseline", "phase1", "phase3")
        for ranks in (1, 2)
    ]
    axes = Figure().subplots()
    draw_lines(axes, rows)
    lines = [container[0] for container in axes.containers]
    assert len({line.get_marker() for line in lines}) == 3
    places = [line.get_xdata()[0] for line in lines]
    assert places[0] < places[1] == 1.0 < places[2] < 1.2
    text = report("none", "Some.", "val_loss", [], tmp_path).read_text()
    assert "Spread and vertical bars: the standard deviation over the seeds." in text


def test_learning_rate_and_batch_scale_when_asked(tmp_path):
    """Linear: in proportion to the sequences of a step over the reference; sqrt: to their root; none by default."""
    config = {**TINY, "learning_rate": 1e-3, "gradient_accumulation_steps": 4}
    base = {"about": "", "phases": ["baseline"], "ranks": [1, 4], "metric": "loss", "config": config}
    (deep, _) = runs_of(Suite("a", **base, variants={"deep": {"n_layer": 3}}), tmp_path, "cpu")
    assert deep.config.n_layer == 3 != TINY["n_layer"], "a variant wins over what all runs share"
    assert [run.config.learning_rate for run in runs_of(Suite("a", **base), tmp_path, "cpu")] == [1e-3, 1e-3]
    for scaling, factor in (("linear", 4.0), ("sqrt", 2.0)):
        suite = Suite("a", **base, scale_batch=True, lr_scaling=scaling, reference_batch=8)
        one, four = runs_of(suite, tmp_path, "cpu")
        assert one.config.gradient_accumulation_steps == 4 and four.config.gradient_accumulation_steps == 16
        assert one.config.learning_rate == pytest.approx(1e-3) and four.config.min_lr == pytest.approx(2e-4 * factor)
        assert four.config.learning_rate == pytest.approx(1e-3 * factor)
        assert f"--learning_rate={four.config.learning_rate}" in four.words


def test_only_its_own_job_is_used_by_a_run(tmp_path, monkeypatch):
    """In any job of Slurm a run has its own number of ranks; slurm.sh starts it where its script says so."""
    run = one_run(tmp_path, ranks=4, gradient_accumulation_steps=4)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert command(run)[1:4] == ["-m", "nanoGPT.launch", "--gpus=4"]
    assert "GPUS=2" in command(run, slurm=True) and SLURM in command(run, slurm=True)
    for word in ("--nodes=1", "--gpus-per-node=4", "--time=5"):  # two minutes, and three to start and to save in
        assert f"#SBATCH {word}\n" in script_of(run, 8)
    monkeypatch.setenv("SLURM_NNODES", "3")
    with pytest.raises(ConfigError, match="4 rank"):
        command(run, slurm=True)


def test_scripts_that_cannot_be_written(tmp_path):
    """Those of before stay where nodes are not filled; a file is no directory; what ended badly is submitted again."""
    path = file_of(tmp_path, FORM.replace("[1]", "[4]"), gradient_accumulation_steps=4)
    config = SuiteConfig(str(path), tmp_path / "out", device="cpu", create_slurm=True, gpus_per_node=4, gpu="h100")
    assert main(config) == 0
    scripts = tmp_path / "out" / "tiny" / "slurm"
    assert "(done|failed|oom|timeout)" in (scripts / "submit-all.sh").read_text()
    with pytest.raises(ConfigError, match="do not fill nodes of 3"):
        main(dataclasses.replace(config, gpus_per_node=3))
    assert len(list(scripts.glob("*.sbatch"))) == 4
    with pytest.raises(ConfigError, match="cannot be made"):
        main(dataclasses.replace(config, out_dir=path))
    assert main(dataclasses.replace(config, retry=True)) == 0
    assert '"(done)"' in (scripts / "submit-all.sh").read_text()


def test_scripts_for_gpus_that_are_elsewhere(tmp_path, monkeypatch, capsys):
    """A machine without a GPU writes scripts for a cluster's: with the configuration of a GPU, and the command that
    reports, here, what ended there."""
    form = FORM.replace('"baseline", ', "").replace("seeds = [1, 2]", "seeds = [1]")
    path = tmp_path / "tiny.toml"
    path.write_text(form + "max_iters = 4\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = SuiteConfig(str(path), tmp_path / "out", create_slurm=True)
    with pytest.raises(ConfigError, match="give the cluster's GPUs, such as --gpu=h100"):
        main(config)
    assert main(dataclasses.replace(config, gpu="h100")) == 0
    again = f'make suite SUITE={path} ARGS="--device=cuda --out_dir={tmp_path}/out"'
    submit = (tmp_path / "out" / "tiny" / "slurm" / "submit-all.sh").read_text()
    assert again in capsys.readouterr().out and again in submit and 'sbatch "$@"' in submit
    (run,) = runs_of(load(str(path)), tmp_path / "out" / "tiny", "cuda")
    assert "--device=cuda" in read_run(run.directory).words and run.config.n_layer == 12 and run.config.compile
    assert "--cpus-per-task=16" in script_of(dataclasses.replace(run, ranks=2), 8)
    report_here = SuiteConfig(str(path), tmp_path / "out", device="cuda")
    with pytest.raises(ConfigError, match="no GPU that torch can use"):
        main(report_here)
    run.out_dir.mkdir()
    (run.out_dir / "metrics.jsonl").write_text('{"step": 4, "val_loss": 2.5}\n')
    where = {"hardware": "NVIDIA H100", "versions": {"torch": "2.13.0"}, "git_commit": "abc"}
    (run.out_dir / "env.json").write_text(json.dumps(where))
    write_status(run.directory, "done")
    assert main(report_here) == 0
    assert "Measured on NVIDIA H100, torch 2.13.0." in (tmp_path / "out" / "tiny" / "report.md").read_text()


def test_scripts_for_slurm(tmp_path, capsys):
    """They pass bash -n and shellcheck; a stand-in scheduler runs one on two nodes to its end, and the next submission
    leaves it out."""
    path = file_of(tmp_path, FORM.replace("seeds = [1, 2]", "").replace("[1]", "[2]").replace('"baseline", ', ""))
    config = SuiteConfig(str(path), tmp_path / "out", device="cpu", create_slurm=True, gpus_per_node=1, gpu="h100")
    assert main(dataclasses.replace(config, price=2.0)) == 0
    said = capsys.readouterr().out
    assert "wrote 1 scripts; about" in said and "GPU-hours" in said
    scripts = sorted((tmp_path / "out" / "tiny" / "slurm").iterdir())
    assert len(scripts) == 2
    for word in ("--nodes=2", "--requeue", f"--job-name=tiny-{scripts[0].stem}\n", "--dependency=singleton"):
        assert f"#SBATCH {word}" in scripts[0].read_text()
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for script in (*scripts, ROOT / "phase3_fsdp" / "slurm.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        checked = subprocess.run([shellcheck, script], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    sbatch = '#!/bin/bash\nSLURM_JOB_ID=$PPID exec bash "$1"\n'
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("sbatch", sbatch)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    environment = {**os.environ, **job, "PY": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submit = ["bash", str(tmp_path / "out" / "tiny" / "slurm" / "submit-all.sh")]
    done = subprocess.run(submit, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stdout + done.stderr
    assert list(states(tmp_path / "out" / "tiny").values()) == ["done"]
    done = subprocess.run(submit, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith("ended before: ")
    scripts[0].unlink()
    assert subprocess.run(submit, env=environment, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("phasse = 1\n" + FORM, "phasse is no field of a suite; did you mean phases"),
        (FORM.replace('metric = "val_loss"\n', ""), "metric is missing"),
        (FORM.replace("val_loss", "speed"), "metric = 'speed' cannot be: give tokens_per_second"),
        (FORM.replace("phase3", "phase9"), "phases = 'phase9' cannot be"),
        (FORM.replace("[1]\nmetric", "[0]\nmetric"), "$.ranks[0] is 0: must be from 1 to "),
        (FORM.replace("minutes = 2", "minutes = 0"), "minutes must be more than 0"),
        (FORM.replace("minutes = 2", 'minutes = "2"'), "$.minutes is a string: must be a number"),
        (FORM.replace("minutes = 2", "minutes = true"), "$.minutes is true or false: must be a number"),
        (FORM.replace("minutes = 2", 'lr_scaling = "linear"'), "lr_scaling needs reference_batch"),
        (FORM.replace('"Tiny', "Tiny"), "is no TOML"),
        (FORM.replace("seeds = [1, 2]", "seeds = [1, 1]"), "seeds has 1 twice"),
        (FORM.replace('"phase3"', '"baseline"'), "phases has baseline twice"),
        (FORM.replace("[config]", '[variants."a/b"]\n[config]'), "variants.a/b must be a table, named"),
        (
            FORM.replace("[config]", "[variants]\nx = 3\n[config]"),
            "$.variants['x'] is an integer: must be an object",
        ),
        (FORM + "seed = 3\n", "seed is set by the suite"),
        (FORM + 'device = "cpu"\n', "device is set by the suite"),
        (FORM + 'init_from = "resume"\n', "init_from is set by the suite"),
        (FORM.replace("val_loss", "peak_bytes"), "add ledger = true"),
        (FORM.replace("minutes = 2", "minutes = inf"), "less than a year"),
        (FORM.replace("seeds = [1, 2]", f"seeds = {[*range(200_000)]}"), "asks for 400,000 runs: give at most 10,000"),
        (FORM + "x = " + "[" * 100_000, "is no TOML"),
        (FORM + "n_layers = 3\n", "n_layers is no field of a configuration; did you mean n_layer"),
        (FORM + "dropout = 2.0\n", "baseline on 1 rank"),
        (FORM + 'dataset = "shakespear"\n', "there is no dataset shakespear; did you mean shakespeare"),
        (FORM.replace("val_loss", "tokens_per_second"), "max_iters=1 is too few for tokens_per_second: give 2"),
        (FORM.replace("val_loss", "peak_bytes") + "ledger = true\n", "max_iters=1 is too few for peak_bytes: give 3"),
        (
            FORM.replace("baseline", "phase1").replace("[config]", TWO_PHASES),
            "no phase has all fields of variants.both",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, said):
    """What is misspelt, missing or impossible is named before any run starts."""
    path = file_of(tmp_path, text, max_iters=1)
    with pytest.raises(ConfigError, match=re.escape(said)):
        runs_of(load(str(path)), tmp_path, "cpu")


def test_a_wrong_request_is_one_sentence(tmp_path):
    """An unknown suite, GPU or price; a file that is none, or another's; ranks for no nodes; a directory held."""
    with pytest.raises(ConfigError, match="no suite scalling; did you mean scaling"):
        load("scalling")
    with pytest.raises(ConfigError, match=r"dir.toml is a directory"):
        (tmp_path / "dir.toml").mkdir()
        load(str(tmp_path / "dir.toml"))
    for name, said in (("...toml", "name it in"), (".toml", "name it in"), ("scaling.toml", "rename the file")):
        with pytest.raises(ConfigError, match=said):
            load(str(file_of(tmp_path).rename(tmp_path / name)))
    with pytest.raises(ConfigError, match="h1000 is unknown"):
        gpu_of("h1000")
    for price in ("-3", "nan"):
        with pytest.raises(ConfigError, match=f"--price={price} cannot be"):
            main(SuiteConfig(out_dir=tmp_path, create_slurm=True, gpu="h100", price=float(price)))
    config = command_line(SuiteConfig, ["--suite=scaling", f"--out_dir={tmp_path}", "--device=cpu"])
    with pytest.raises(ConfigError, match="do not fill nodes of 3"):
        main(dataclasses.replace(config, create_slurm=True, gpus_per_node=3, gpu="h100"))
    with directory_lock(tmp_path / "scaling"), pytest.raises(ConfigError, match="at work"):
        main(config)
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path)
    for words in ([], ["a", "b"]):
        with pytest.raises(ConfigError, match="give the directory of one run"):
            suite_run.main(words)
    run = dataclasses.replace(one_run(tmp_path / "phase9"), phase="phase9")
    run.save()
    with pytest.raises(ConfigError, match="'phase9' in run.json is no phase"):
        suite_run.main([str(run.directory)])
    write_status(tmp_path, "running")
    assert read_status(tmp_path)["state"] == "running"
    for damaged in ("{}", "[]", '{"state": 3}', '{"sta'):
        (tmp_path / "status.json").write_text(damaged)
        assert read_status(tmp_path)["state"] == "pending"
