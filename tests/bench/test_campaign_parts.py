"""The parts of the campaign on a GPU: tile sizes, logs, checks, and what the report makes of them."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bench.campaign.checks import PYTEST_SECONDS, SANITIZER_SECONDS, find_data, list_kernels, run_sanitizer
from bench.campaign.folder import Part
from bench.campaign.parts import KERNELS, list_parts
from bench.campaign.report import advise_on_tuned_table, write_results
from bench.campaign.scheduler import hang_limit
from bench.campaign.settings import Settings, Skipped
from bench.campaign.tiles import choose_tiles, find_correct_kernels, name_tiles, use_tuned_table
from bench.campaign.timings import tune_key
from bench.campaign.trainers import compare_with_nanogpt, profile_phase, run_on_one_rank, run_trainer
from bench.campaign.worker import run_part
from bench.error_messages import split_message
from bench.kernels.tune import climb
from bench.tables import campaign_tables, records
from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.errors import ConfigError
from phase2_triton.kernels import core
from tests.helpers.programs import DEADLINE, wait_until

PARTS = "tests.helpers.campaign_parts"


def test_an_error_that_a_part_has_caught_is_found(folder, monkeypatch):
    """If a kernel has made the CUDA context unusable, the part has failed, and a new process runs the next one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    settings, part = Settings(folder.path, dry_run=False), Part("stage", "success", f"{PARTS}:succeed", (1,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert run_part(part, settings, folder) and folder.read(part)["state"] == "done"

    def fail_to_synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail_to_synchronize)
    assert not run_part(part, settings, folder)
    assert folder.read(part)["state"] == "failed" and "illegal memory access" in folder.read(part)["reason"]


def test_a_sanitizer_that_cannot_watch_this_gpu_is_skipped(folder, monkeypatch):
    """If compute-sanitizer does not support the device, the part is skipped, and the kernels are not called wrong."""
    program = folder.path / "compute-sanitizer"
    program.write_text("#!/bin/sh\necho 'Error: Device not supported'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder.path), prepend=os.pathsep)
    with pytest.raises(Skipped, match="Device not supported"):
        run_sanitizer(Settings(folder.path, dry_run=False), "memcheck")


def test_random_tokens_have_gpt2s_vocabulary(tmp_path, monkeypatch):
    """Without a prepared dataset, the trainers read random tokens of GPT-2, so that the model's head has its size."""
    monkeypatch.setattr("nanoGPT.files.DATA", tmp_path)
    monkeypatch.setattr("nanoGPT.dataset.DATA", tmp_path)
    name = find_data(Settings(tmp_path, dry_run=False))
    data = TokenData(name, 1024, 4, 0)
    x, _ = data.batch("train", TRAIN, 0, 0)
    assert data.tokenizer["vocab_size"] == 50257 and Path(name).name == "random-gpt2"
    assert 10_000 < x.max() < 50257 and len(x.unique()) > 500
    assert find_data(Settings(tmp_path, dry_run=False)) == name


def test_each_part_that_trains_has_its_own_log(tmp_path):
    """A rank appends its errors to the log of its part, although the server of the ranks has another log."""
    for name, words in (("first", b"1"), ("second", b"22"), ("second", b"333")):
        settings = Settings(tmp_path, dry_run=True, log=tmp_path / f"{name}.log")
        assert run_on_one_rank(settings, os.write, 2, words, timeout=DEADLINE) == len(words)
    assert [(tmp_path / f"{name}.log").read_text() for name in ("first", "second")] == ["1", "22333"]


def test_an_error_in_the_tuning_keeps_the_best_rows(tmp_path, monkeypatch):
    """If a candidate makes the CUDA context unusable, the table contains the best rows that were found before."""
    calls: list[dict[str, int]] = []

    def time_candidate(case: Any, pass_name: str, watch: Any, rounds: int, reference: Any) -> float:
        calls.append(core.find_rows("gelu_forward")[0])
        if len(calls) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 1 / len(calls)

    monkeypatch.setattr("bench.kernels.tune.time_candidate", time_candidate)
    # the search has no deadline, however slow the machine is
    monkeypatch.setattr("bench.campaign.timings.time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr("bench.campaign.timings.climb", lambda *values: climb(*values[:-1]))
    settings = Settings(tmp_path, dry_run=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune_key(settings, "gelu_forward", 60)
    assert calls[1] in json.loads(settings.tuned_table.read_text())["gelu_forward"]["interpreter"]
    assert calls[2] not in json.loads(settings.tuned_table.read_text())["gelu_forward"]["interpreter"]


def test_the_cache_of_compiled_graphs_distinguishes_tables_of_tile_sizes(tmp_path):
    """Two tables have different keys in torch's cache, and the committed table is back after the context."""
    settings, tags = Settings(tmp_path, dry_run=True), [torch.compiler.config.cache_key_tag]
    for space in ("", " "):
        settings.tuned_table.write_text(core.CONFIG_FILE.read_text() + space)
        with use_tuned_table(settings):
            tags.append(torch.compiler.config.cache_key_tag)
            assert name_tiles() == "tuned" and settings.tuned_table == core.CONFIG_FILE
    assert len({*tags}) == 3 and torch.compiler.config.cache_key_tag == tags[0]
    assert name_tiles() == "committed"


def test_trainers_use_tuned_tile_sizes_only_with_correct_kernels(folder):
    """A trainer uses the tuned table if all its kernels were correct with the rows that the table contains now."""
    settings, rows = Settings(folder.path, dry_run=True), [{"up_to": 64, "rows": 1}]

    def write_record(kernel: str, problems: list[str]) -> None:
        result = {"tile_rows": {kernel: rows}, "problems": problems}
        folder.write(Part("tuned_times", kernel, ""), "done", result=result)

    assert (choose_tiles(settings, "none"), choose_tiles(settings, "loss")) == (None, "committed")
    settings.tuned_table.write_text(json.dumps({name: {"sm_90": rows} for name in KERNELS}))
    write_record("loss", [])
    write_record("gelu", ["error 1"])
    write_record("layernorm", [])
    assert choose_tiles(settings, "loss") == "tuned"
    assert [choose_tiles(settings, each) for each in ("gelu,loss", "layernorm", "all", "auto")] == ["committed"] * 4
    write_record("add_layernorm", [])
    assert choose_tiles(settings, "layernorm,loss") == "tuned"
    settings.tuned_table.write_text(json.dumps({"loss": {"sm_90": [{"up_to": 64, "rows": 2}]}}))
    assert choose_tiles(settings, "loss") == "committed"


def test_wrong_times_are_not_reported(folder, tmp_path):
    """Times with tuned tile sizes are a contender of their own, and only if the kernel is correct with them."""
    machine = {"origin": {"hardware": "none"}}
    records = [{"stage": "machine", "name": "versions", "state": "done", "result": machine}]
    for stage, name, problems in (
        ("times", "gelu", []),
        ("times", "loss", []),
        ("tuned_times", "gelu", []),
        ("tuned_times", "loss", ["error 1"]),
    ):
        rows = [{"contender": "ours", "kernel": name, "stage": stage, "tiles": "tuned"}]
        rows.append({"contender": "eager", "kernel": name, "stage": stage, "tiles": None})
        result = {"limits": {}, "rows": rows, "problems": problems, "tile_rows": {}}
        folder.write(Part(stage, name, ""), "done", result=result)
        records.append(folder.read(Part(stage, name, "")))
    correct = find_correct_kernels(folder, KERNELS)
    kernels, _ = write_results(records, tmp_path, is_dry=False, correct=correct)
    reported = [tuple(row.values())[:3] for row in json.loads(kernels.read_text())["samples"]["rows"]]
    measured = [(contender, name, "times") for name in ("gelu", "loss") for contender in ("ours", "eager")]
    assert reported == [*measured, ("ours (tuned tile sizes)", "gelu", "tuned_times")]
    advice = advise_on_tuned_table(Path("table"), correct)
    assert "do not use" in advice and " loss" in advice and " gelu" not in advice
    assert "copy table to" in advise_on_tuned_table(Path("table"), list(KERNELS))


def test_a_part_without_a_reason_is_reported(tmp_path, monkeypatch):
    """The table accepts a result with a part that was killed while it ran."""
    part = {"stage": "kernels", "name": "gelu", "state": "running"}
    origin = {"hardware": "none", "versions": {"torch": "2.11"}}
    records.write_result_of(origin, tmp_path, "campaign", {"command": ""}, {"parts": [part]})
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert "| kernels | gelu | running:  |" in campaign_tables.campaign_table()


def test_a_report_needs_the_machine(tmp_path):
    """A campaign that could not describe its machine cannot be reported, and the message says what to do."""
    record = {"stage": "kernels", "name": "gelu", "state": "done", "result": {}}
    with pytest.raises(ConfigError, match="--retry"):
        write_results([record], tmp_path, is_dry=True, correct=[])


def test_only_kernels_are_listed(monkeypatch):
    """The list of a GPU's kernels leaves out the host's calls of CUDA, which the profiler records, too."""
    events = [SimpleNamespace(name="flash_fwd_kernel", device_type=DeviceType.CUDA)]
    events.append(SimpleNamespace(name="cudaLaunchKernel", device_type=DeviceType.CPU))
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert list_kernels(lambda: None, torch.device("cuda")) == ["flash_fwd_kernel"]


def test_an_error_without_a_message_has_a_name():
    """An error is reported by the lines of its message, or by its type."""
    assert split_message(ValueError(" one\ntwo\n")) == ["one", "two"]
    assert split_message(AssertionError()) == ["AssertionError"]


def test_the_output_before_a_timeout_is_reported(folder, monkeypatch):
    """If the sanitizer does not end, the part has a problem that contains what it printed."""
    program = folder.path / "compute-sanitizer"
    program.write_text("#!/bin/sh\necho 'Invalid read of size 4'\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder.path), prepend=os.pathsep)
    monkeypatch.setattr("bench.campaign.checks.SANITIZER_SECONDS", 0.3)
    wait, log = subprocess.Popen.wait, folder.path / "logs" / "memcheck.txt"

    def wait_after_output(process: subprocess.Popen, timeout: float | None = None) -> int:
        if timeout is not None:
            wait_until(log.read_text)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_after_output)
    result = run_sanitizer(Settings(folder.path, dry_run=False), "memcheck")
    assert result["problems"] == ["memcheck did not end in time: Invalid read of size 4\n"]
    assert (folder.path / "logs" / "memcheck.txt").read_text() == "Invalid read of size 4\n"
    describe = campaign_tables.DESCRIPTIONS["sanitizer"]
    assert (describe(result), describe({"output": ""})) == ("Invalid read of size 4", "")


def test_the_checks_end_before_their_limits():
    """The sanitizer and pytest are stopped before their parts count as hanging."""
    for stage, seconds in (("sanitizer", SANITIZER_SECONDS), ("tests", PYTEST_SECONDS)):
        assert all(seconds < hang_limit(part) for part in list_parts() if part.stage == stage)


def test_a_missing_package_of_a_trainer_is_found_in_the_part(folder, monkeypatch):
    """Before a part starts a rank or a program, it imports what this needs: a missing package is no failure."""
    settings = Settings(folder.path, dry_run=True, nanogpt=str(folder.path))
    parts = [
        ("phase1_zero1.train", lambda: run_trainer(settings, "phase1", "gpt2")),
        ("bench.trainer.profile_step", lambda: profile_phase(settings, "phase1")),
        ("nanoGPT.launch", lambda: compare_with_nanogpt(settings, "phase1")),
    ]
    for module, run in parts:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=module):
            run()
        monkeypatch.undo()
