"""The campaign on a GPU: what a call runs, what survives a crash, a hang and a kill, and the report."""

import importlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.campaign.__main__ import forget_parts, main, print_summary, select_parts
from bench.campaign.folder import CampaignFolder, Part
from bench.campaign.identity import MEASURED_CODE, describe_campaign
from bench.campaign.parts import list_parts
from bench.campaign.scheduler import Worker, build_environment, choose_next, find_pending, find_problems, run_parts
from bench.campaign.settings import Settings
from bench.campaign.worker import run_part
from bench.tables import campaign_tables, records, tables
from nanoGPT.errors import ConfigError
from tests.helpers.forking import fork_ranks_from_this_process
from tests.helpers.programs import DEADLINE
from tests.helpers.training import ROOT

PARTS = "tests.helpers.campaign_parts"


def run_all(parts: list[Part], folder: CampaignFolder, seconds: float = 600) -> dict[str, str]:
    """Run parts in real workers, and return the state of each."""
    settings = {"folder": str(folder.path), "dry_run": True, "nanogpt": None}
    run_parts(parts, folder, lambda: Worker(settings, build_environment(True, None)), seconds)
    return {part.name: folder.read(part)["state"] for part in parts}


def test_every_part_ends_with_a_record(folder):
    """A part that fails, is skipped or crashes its process is recorded with the reason, and the next one runs."""
    functions = {"crash": "crash", "failure": "fail", "skip": "skip", "package": "need_a_package"}
    parts = [Part("stage", name, f"{PARTS}:{function}") for name, function in functions.items()]
    parts.append(Part("stage", "success", f"{PARTS}:succeed", (7,)))
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


def test_an_idle_worker_that_died_fails_one_part(folder):
    """If the worker dies between two parts, the next part fails, and a new worker runs the part after it."""

    class MortalWorker(Worker):
        """A worker that dies before it runs the part `lost`."""

        def run(self, part: Part, seconds: float) -> str:
            if part.name == "lost":
                self.process.kill()
                self.process.wait()
            return super().run(part, seconds)

    settings = {"folder": str(folder.path), "dry_run": True}
    parts = [Part("stage", name, f"{PARTS}:succeed", (1,)) for name in ("first", "lost", "last")]
    run_parts(parts, folder, lambda: MortalWorker(settings, build_environment(True, None)), 600)
    assert [folder.read(part)["state"] for part in parts] == ["done", "failed", "done"]
    assert folder.read(parts[1])["reason"] == f"the process ended with code -{signal.SIGKILL}"


def test_a_part_that_ends_at_its_limit_keeps_its_record(folder):
    """A worker is killed before its timeout is recorded. A record that it wrote in the meantime stays."""

    class LateWorker:
        """A worker that exceeds the limit of each part, and writes the record just before it is killed."""

        def run(self, part: Part, seconds: float) -> str:
            folder.write(part, "running")
            self.part = part
            return "timeout"

        def kill(self) -> None:
            if self.part.name == "success":
                folder.write(self.part, "done", result={})

    parts = [Part("stage", "success", ""), Part("stage", "hang", "")]
    run_parts(parts, folder, LateWorker, 600)  # type: ignore[arg-type]
    assert [folder.read(part)["state"] for part in parts] == ["done", "failed"]
    assert "did not finish within" in folder.read(parts[1])["reason"]


def test_a_part_that_hangs_is_stopped_and_runs_once_more(folder):
    """A part that is still running at the end of a call is killed, and runs again after all others; then it fails."""
    parts = [Part("stage", "hang", f"{PARTS}:hang"), Part("stage", "success", f"{PARTS}:succeed", (1,))]
    assert run_all(parts, folder, seconds=2) == {"hang": "pending", "success": "pending"}
    assert find_pending(parts, folder) == [parts[1], parts[0]]
    assert run_all(parts, folder, seconds=29) == {"hang": "pending", "success": "done"}
    assert run_all(parts, folder, seconds=2) == {"hang": "failed", "success": "done"}
    assert "did not finish" in folder.read(parts[0])["reason"]


def test_a_kill_loses_only_the_running_part(tmp_path):
    """After SIGKILL of the campaign its worker ends, and the next call continues with the part that was running."""
    target = tmp_path / "campaign"
    program = (
        f"from bench.campaign import __main__ as program; from bench.campaign.folder import Part\n"
        f"parts = [Part('stage', 'first', '{PARTS}:succeed', (1,)), Part('stage', 'second', '{PARTS}:hang')]\n"
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
    parts = [Part("stage", "first", f"{PARTS}:succeed", (1,)), Part("stage", "second", f"{PARTS}:succeed", (2,))]
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
    """A part that is too long for the rest of a call waits, the first always fits, and interrupted parts need more."""
    long, short = Part("stage", "long", "", (), 100), Part("stage", "short", "", (), 10)
    assert choose_next([long, short], folder, 50, is_first=True) == long
    assert choose_next([long, short], folder, 50, is_first=False) == short
    assert choose_next([long, short], folder, 5, is_first=False) is None
    folder.write(short, "pending", interruptions=1)
    assert find_pending([short, long], folder) == [long, short]
    assert choose_next([long, short], folder, 49, is_first=False) is None
    assert choose_next([long, short], folder, 50, is_first=False) == short
    assert choose_next([short], folder, 5, is_first=True) == short


def test_the_most_important_parts_fit_into_half_an_hour():
    """The estimates of everything up to the throughput of GPT-2 124M fit into three calls of nine minutes."""
    parts = list_parts()
    last = max(i for i, part in enumerate(parts) if part.name.startswith("gpt2_"))
    assert {part.stage for part in parts[: last + 1]} == {"machine", "kernels", "compiled", "times", "throughput"}
    assert sum(part.estimate_seconds for part in parts[: last + 1]) < 3 * 8 * 60
    assert parts[-1].stage == "tests"


def test_calls_with_another_gpu_or_other_code_are_refused(tmp_path):
    """A campaign never mixes two GPUs or two versions of the code, the programs that it starts included."""
    identity = {**describe_campaign(dry_run=True), "gpu": "NVIDIA H100"}
    folder = CampaignFolder(tmp_path / "campaign")
    folder.create(identity)
    folder.create(identity)
    with pytest.raises(ConfigError, match="a campaign with gpu NVIDIA H100, not NVIDIA H200: use another --to"):
        folder.create({**identity, "gpu": "NVIDIA H200"})
    with pytest.raises(ConfigError, match="sources .*, not 0: use another --to"):
        folder.create({**identity, "sources": "0"})
    measured = {path.relative_to(ROOT).as_posix() for pattern in MEASURED_CODE for path in ROOT.glob(pattern)}
    assert {"bench/plan/planner.py", "bench/trainer/profile_step.py", "bench/trainer/against_nanogpt.py"} <= measured
    assert {"bench/matrix/cells.py", "workshop/ranks.py", "phase2_triton/kernels/configs.json"} <= measured


def test_parts_can_be_chosen_and_repeated(folder, capsys):
    """--stages selects parts; --retry repeats failed and skipped parts and those with problems, --again only one."""
    states: dict[str, dict[str, Any]] = {
        "right": {"state": "done", "result": {}},
        "wrong": {"state": "done", "result": {"problems": ["x"]}},
        "skipped": {"state": "skipped"},
        "failed": {"state": "failed"},
    }
    parts = [Part("one" if name == "right" else "two", name, "") for name in states]
    assert select_parts(parts, "one") == parts[:1] and select_parts(parts, None) == parts
    for part in parts:
        folder.write(part, **states[part.name])
    forget_parts(parts, folder, False, "one.right")
    assert [part.name for part in find_pending(parts, folder)] == ["right"]
    print_summary(parts, folder, ["--retry"])
    assert capsys.readouterr().out.endswith("1 of 4 parts are left (one): run the same command again without --retry\n")
    forget_parts(parts, folder, True, None)
    assert find_pending(parts, folder) == parts
    with pytest.raises(ConfigError, match="did you mean one.right"):
        forget_parts(parts, folder, False, "one.rihgt")
    with pytest.raises(ConfigError, match="there is no stage 'three', use some of one,two"):
        select_parts(parts, "three")


def test_parts_have_unique_names_and_functions_that_exist():
    """Every part of the campaign has a unique name, and names a function."""
    import importlib

    parts = list_parts()
    assert len({part.key for part in parts}) == len(parts) > 90
    for module, _, name in {part.function.partition(":") for part in parts}:
        assert callable(getattr(importlib.import_module(module), name))


# One part of most stages. The rest of them differ only in their arguments; `--dry_run` runs all.
SAMPLE = ["machine.versions", "machine.attention_backends", "kernels.gelu", "kernels.adamw", "compiled.baseline_none"]
SAMPLE += ["times.gelu", "tuning.gelu_forward", "tuned_times.gelu", "throughput.gpt2_phase2_loss_eager"]
SAMPLE += ["nanogpt.baseline", "fsdp.against_baseline", "plan.train_mid", "memory.cpu_offload", "largest.95_percent"]
SAMPLE += ["options.muon_with_fsdp", "evaluation.phase3"]


class InlineWorker:
    """A worker that runs the parts in this process, which has imported torch, and whose ranks are forked."""

    def __init__(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["TRITON_INTERPRET"]) == ("", "1")
        self.settings = Settings(**{**settings, "folder": Path(settings["folder"])})

    def run(self, part: Part, seconds: float) -> str:
        part = Part(**json.loads(json.dumps(vars(part))))  # as a worker reads it
        return "next" if run_part(part, self.settings, CampaignFolder(self.settings.folder)) else "stop"

    def kill(self) -> None:
        pass


def test_a_dry_run_measures_and_reports(tmp_path, monkeypatch, capsys):
    """A dry run of a part of each stage succeeds on a CPU. Its report has the format that the tables read."""
    for compiler in ("torch._functorch.aot_autograd", "torch._inductor.pattern_matcher", "torch._inductor.debug"):
        importlib.import_module(compiler)  # once for the five parts that compile, which fork their ranks from here
    parts = [part for part in list_parts(dry_run=True) if part.key in SAMPLE]
    assert len(parts) == len(SAMPLE)
    monkeypatch.setattr("bench.campaign.__main__.list_parts", lambda dry_run: parts)
    monkeypatch.setattr("bench.campaign.__main__.Worker", InlineWorker)
    target = tmp_path / "campaign"
    with fork_ranks_from_this_process():
        main(["--dry_run", "--minutes=30", f"--to={target}"])
    output = capsys.readouterr().out
    assert "nothing is left" in output.splitlines()[-1], output
    folder = CampaignFolder(target)
    states = {part.key: folder.read(part) for part in parts}
    unexpected = {key: state for key, state in states.items() if state["state"] != "done" and key != "nanogpt.baseline"}
    assert not unexpected
    assert states["nanogpt.baseline"]["state"] == "skipped" and "git clone" in states["nanogpt.baseline"]["reason"]
    assert not [key for key, state in states.items() if find_problems(state)]
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path / "unpacked"))
    main(["--report", f"--from={target / 'campaign.tar.gz'}"])
    report = tmp_path / "unpacked" / "report"
    results = {result["name"]: result for result in map(records.read_result, report.iterdir())}
    assert results.keys() == {"kernels", "gpu-throughput", "campaign"}
    (run,) = results["gpu-throughput"]["samples"]["rows"]
    assert (run["dataset"], run["tiles"]) == ("letters", "committed")
    tuned = states["tuned_times.gelu"]["result"]
    assert {row["tiles"] for row in tuned["rows"] if row["contender"] == "ours"} == {"tuned"}
    assert tuned["tile_rows"].keys() == {"gelu_forward", "gelu_backward"}
    monkeypatch.setattr(records, "RESULTS", report)
    assert "phase 2 (Triton), kernels loss" in tables.throughput_table()
    text = campaign_tables.campaign_table()
    assert "times the error of torch" in text and "skipped: needs --nanogpt=DIR" in text


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
        (["--report", f"--from={tmp_path / 'other.txt'}"], "is not a complete campaign.tar.gz"),
        (["--dry_run", f"--to={tmp_path / 'new'}", f"--wheels={empty}"], "contains no wheels"),
        (["--dry_run", f"--to={tmp_path / 'new'}", f"--nanogpt={empty}"], "is not a checkout of nanoGPT"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(words)


def test_wheels_are_importable(tmp_path, monkeypatch):
    """A package in a wheel of --wheels can be imported by the parts, unless it is installed already."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("a_package_that_nobody_has", "torch"):
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}/__init__.py", "")
    parts = [Part("stage", "package", f"{PARTS}:need_a_package")]
    monkeypatch.setattr("bench.campaign.__main__.list_parts", lambda dry_run: parts)
    target = tmp_path / "campaign"
    main(["--dry_run", f"--to={target}", f"--wheels={wheels}"])
    folder = CampaignFolder(target)
    assert folder.read(parts[0])["state"] == "done"
    assert [path.name for path in (target / "site").iterdir()] == ["a_package_that_nobody_has"]
