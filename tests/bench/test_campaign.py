"""The campaign on a GPU: what a call runs, what survives a crash, a hang and a kill, and the report."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.campaign.__main__ import main
from bench.campaign.folder import CampaignFolder, Part
from bench.campaign.parts import list_parts
from bench.campaign.report import write_results
from bench.campaign.scheduler import Worker, build_environment, choose_next, find_problems, run_parts
from bench.campaign.settings import Settings, Skipped
from bench.tables import campaign_tables, records
from nanoGPT.errors import ConfigError
from tests.helpers.programs import DEADLINE
from tests.helpers.training import ROOT

HERE = "tests.bench.test_campaign"


def succeed(settings: Settings, value: int) -> dict[str, Any]:
    print("this goes into the log")
    return {"value": value, "dry_run": settings.dry_run}


def fail(settings: Settings) -> None:
    raise ValueError("the kernel is wrong")


def skip(settings: Settings) -> None:
    raise Skipped("there is no such tool")


def need_a_package(settings: Settings) -> None:
    import a_package_that_nobody_has  # noqa: F401


def crash(settings: Settings) -> None:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(settings: Settings) -> None:
    (settings.folder / "hangs").touch()
    time.sleep(10 * DEADLINE)


@pytest.fixture
def folder(tmp_path: Path) -> CampaignFolder:
    folder = CampaignFolder(tmp_path / "campaign")
    folder.create({"dry_run": True})
    return folder


def run_all(parts: list[Part], folder: CampaignFolder, seconds: float = 600) -> dict[str, str]:
    """Run parts in real workers, and return the state of each."""
    settings = {"folder": str(folder.path), "dry_run": True, "nanogpt": None}
    run_parts(parts, folder, lambda: Worker(settings, build_environment(True, None)), seconds)
    return {part.name: folder.read(part)["state"] for part in parts}


def test_every_part_ends_with_a_record(folder):
    """A part that fails, is skipped or crashes its process is recorded with the reason, and the next one runs."""
    functions = {"crash": "crash", "failure": "fail", "skip": "skip", "package": "need_a_package"}
    parts = [Part("stage", name, f"{HERE}:{function}") for name, function in functions.items()]
    parts.append(Part("stage", "success", f"{HERE}:succeed", (7,)))
    states = run_all(parts, folder)
    assert states == {
        "crash": "failed",
        "failure": "failed",
        "skip": "skipped",
        "package": "skipped",
        "success": "done",
    }
    reasons = {part.name: folder.read(part).get("reason") for part in parts}
    assert reasons["crash"] == f"the process ended with code -{signal.SIGSEGV}"
    assert "about to crash" in folder.read(parts[0])["traceback"]
    assert reasons["failure"] == "ValueError: the kernel is wrong"
    assert "in fail" in folder.read(parts[1])["traceback"]
    assert reasons["skip"] == "there is no such tool"
    assert "a_package_that_nobody_has" in reasons["package"] and "--wheels" in reasons["package"]
    assert folder.read(parts[4])["result"] == {"value": 7, "dry_run": True}
    assert folder.log_path(parts[4]).read_text() == "this goes into the log\n"


def test_a_part_that_hangs_is_stopped_and_runs_once_more(folder):
    """A part that is still running at the end of a call is killed, and runs again in the next; then it has failed."""
    parts = [Part("stage", "hang", f"{HERE}:hang"), Part("stage", "success", f"{HERE}:succeed", (1,), 0.0)]
    assert run_all(parts, folder, seconds=5)["hang"] == "pending"
    assert run_all(parts, folder, seconds=5)["hang"] == "failed"
    assert "did not finish" in folder.read(parts[0])["reason"]
    assert run_all(parts, folder) == {"hang": "failed", "success": "done"}


def test_a_kill_loses_only_the_running_part(tmp_path):
    """After SIGKILL of the campaign its worker ends, and the next call continues with the part that was running."""
    target = tmp_path / "campaign"
    program = (
        f"from bench.campaign import __main__ as program; from bench.campaign.folder import Part\n"
        f"parts = [Part('stage', 'first', '{HERE}:succeed', (1,)), Part('stage', 'second', '{HERE}:hang')]\n"
        "program.list_parts = lambda dry_run: parts\n"
        f"program.main(['--dry_run', '--to={target}'])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE
    while not (target / "hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="another campaign is writing"):
        main(["--dry_run", f"--to={target}"])
    process.kill()
    process.wait()
    folder = CampaignFolder(target)
    parts = [Part("stage", "first", f"{HERE}:succeed", (1,)), Part("stage", "second", f"{HERE}:succeed", (2,))]
    assert [folder.read(part)["state"] for part in parts] == ["done", "running"]
    while is_worker_alive(target) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_worker_alive(target)
    assert run_all(parts, folder) == {"first": "done", "second": "done"}
    assert folder.read(parts[1])["interruptions"] == 1


def is_worker_alive(target: Path) -> bool:
    """Return whether a worker of this campaign runs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "bench.campaign.worker" in words and str(target) in words:
            return True
    return False


def test_a_call_chooses_the_first_part_that_fits(folder):
    """Parts run in order of worth; one that is too long for the rest of a call waits, and the first always fits."""
    long, short = Part("stage", "long", "", (), 100), Part("stage", "short", "", (), 10)
    assert choose_next([long, short], folder, 50, is_first=True) == long
    assert choose_next([long, short], folder, 50, is_first=False) == short
    assert choose_next([long, short], folder, 5, is_first=False) is None
    folder.write(short, "pending", interruptions=1)
    assert choose_next([long, short], folder, 50, is_first=False) is None
    assert choose_next([short], folder, 50, is_first=True) == short


def test_parts_have_unique_names_and_functions_that_exist():
    """Every part of the campaign has a unique name, and names a function."""
    import importlib

    parts = list_parts()
    assert len({part.key for part in parts}) == len(parts) > 90
    for module, _, name in {part.function.partition(":") for part in parts}:
        assert callable(getattr(importlib.import_module(module), name))


# One part of most stages. The rest of them differ only in their arguments; `--dry_run` runs all.
SAMPLE = ["machine.versions", "machine.attention_backends", "kernels.gelu", "kernels.adamw", "compiled.phase3_none"]
SAMPLE += ["times.gelu", "tuning.gelu_forward", "tuned_times.gelu", "throughput.gpt2_phase2_loss_compiled"]
SAMPLE += ["nanogpt.baseline", "fsdp.against_baseline", "plan.phase3", "memory.cpu_offload", "largest.2.7b"]


def test_a_dry_run_measures_and_reports(tmp_path, monkeypatch, capsys):
    """A dry run of a part of each stage succeeds on a CPU. Its report has the format that the tables read."""
    parts = [part for part in list_parts(dry_run=True) if part.key in SAMPLE]
    assert len(parts) == len(SAMPLE)
    monkeypatch.setattr("bench.campaign.__main__.list_parts", lambda dry_run: parts)
    target = tmp_path / "campaign"
    main(["--dry_run", "--minutes=30", f"--to={target}"])
    output = capsys.readouterr().out
    assert "nothing is left" in output.splitlines()[-1], output
    folder = CampaignFolder(target)
    states = {part.key: folder.read(part) for part in parts}
    unexpected = {key: state for key, state in states.items() if state["state"] != "done" and key != "nanogpt.baseline"}
    assert not unexpected
    assert states["nanogpt.baseline"]["state"] == "skipped" and "git clone" in states["nanogpt.baseline"]["reason"]
    assert not [key for key, state in states.items() if find_problems(state)]
    main(["--report", f"--from={target}"])
    paths = {path.name.split("-")[0]: json.loads(path.read_text()) for path in (target / "report").iterdir()}
    assert paths.keys() == {"kernels", "throughput", "campaign"}
    monkeypatch.setattr(records, "RESULTS", target / "report")
    text = campaign_tables.campaign_table()
    assert "times the error of torch" in text and "skipped: needs --nanogpt=DIR" in text


def test_a_report_needs_the_machine(tmp_path):
    """A campaign that could not describe its machine cannot be reported, and the message says what to do."""
    record = {"stage": "kernels", "name": "gelu", "state": "done", "result": {}}
    with pytest.raises(ConfigError, match="--retry"):
        write_results([record], tmp_path, is_dry=True)


def test_bad_requests_are_refused(tmp_path):
    """Every bad request gets one sentence with the remedy."""
    (tmp_path / "other.txt").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, message in (
        (["--to=x", "--minuets=3"], "unrecognized arguments: --minuets=3"),
        (["--minutes=3"], "write --to=DIR"),
        (["--report", "--to=x"], "write --report --from=DIR"),
        (["--to=x", "--minutes=0"], "--minutes=0 is out of range"),
        (["--dry_run", f"--to={tmp_path}"], "does not contain a campaign"),
        (["--report", f"--from={tmp_path}"], "does not contain a campaign"),
        (["--dry_run", f"--to={tmp_path / 'new'}", f"--wheels={empty}"], "contains no wheels"),
        (["--dry_run", f"--to={tmp_path / 'new'}", f"--nanogpt={empty}"], "is not a checkout of nanoGPT"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(words)


def test_wheels_are_importable(tmp_path, monkeypatch):
    """A package in a wheel of --wheels can be imported by the parts."""
    wheel = tmp_path / "wheels" / "a_package_that_nobody_has-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("a_package_that_nobody_has/__init__.py", "")
    parts = [Part("stage", "package", f"{HERE}:need_a_package")]
    monkeypatch.setattr("bench.campaign.__main__.list_parts", lambda dry_run: parts)
    target = tmp_path / "campaign"
    main(["--dry_run", f"--to={target}", f"--wheels={wheel.parent}"])
    folder = CampaignFolder(target)
    assert folder.read(parts[0])["state"] == "done"
