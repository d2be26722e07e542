"""`make preflight`: each check passes on a good machine, and a planted problem gives a warning or a failure."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.checks import Check, has_failed
from bench.preflight import node, ranks
from nanoGPT.distributed.runtime import create_runtime
from tests.helpers.programs import assert_refused, make_flags, run_program
from tests.helpers.training import TINY, tiny
from workshop.ranks import run_on_ranks

NAMES = (*node.GPU_FIELDS, "slowdown")
HEALTHY = dict(zip(NAMES, ("GPU-1", "80995", "81559", "45", "0", "0", "Not Active"), strict=True))
OLD_NVIDIA_SMI = """#!/bin/sh
case "$1" in *event_reasons*) echo 'Field "clocks_event_reasons.hw_slowdown" is not a valid field'; exit 2;; esac
echo "GPU-1, 30000, 81559, 45, 0, 0, Not Active"
"""
SMALL = {**TINY, "n_layer": 1, "gradient_accumulation_steps": 2}


def run_rank_checks(out_dir: Path) -> tuple[list[Check], list[Check]]:
    """Run all checks on this rank, first as they are, then with a slow rank 1 and with wrong sums on rank 2."""
    run = create_runtime("cpu", "float32")
    good = ranks.run_checks(run, out_dir, bytes_per_save=10**6)
    if run.rank == 1:
        time_calls = ranks.time_calls
        ranks.time_calls = lambda *arguments: 1000 * time_calls(*arguments)
    if run.rank == 2:
        all_reduce = dist.all_reduce
        dist.all_reduce = lambda tensor, *args, **options: (all_reduce(tensor, *args, **options), tensor.add_(1))[0]
    return good, ranks.run_checks(run, out_dir, bytes_per_save=10**6)


def test_checks_of_ranks_pass_or_name_the_rank_at_fault(tmp_path):
    """On three ranks of this machine, no check fails, rank 0 reports each of them, and no file stays.

    A rank with wrong sums fails its check, and a slow rank gives a warning. Both name the rank.
    """
    good, planted = run_on_ranks(run_rank_checks, 3, tmp_path / "run", show=False)[0]
    subjects = {"collectives", "bandwidth", "slowest rank", "shared directory", "write speed"}
    assert {check.subject for check in good} == subjects
    assert not has_failed(good), good
    assert list(tmp_path.iterdir()) == []
    checks = {check.subject: check for check in planted}
    assert (checks["collectives"].result, checks["slowest rank"].result) == ("fail", "warn")
    assert "ranks [2]" in checks["collectives"].finding and "rank 1" in checks["slowest rank"].finding


@pytest.mark.parametrize(
    ("changes", "is_fatal", "word"),
    [
        ({"memory.free": "30000"}, True, "another process"),
        ({"temperature.gpu": "91"}, False, "hot"),
        ({"ecc.errors.uncorrected.volatile.total": "2"}, True, "uncorrected"),
        ({"slowdown": "Active"}, False, "clock"),
    ],
)
def test_gpu_problems_have_remedies(changes, is_fatal, word):
    """Each problem of a GPU is found; a healthy GPU has none, also if nvidia-smi does not know a value."""
    ((fatal, remedy),) = node.find_gpu_problems({**HEALTHY, **changes})
    assert fatal == is_fatal and word in remedy
    assert node.find_gpu_problems(HEALTHY) == []
    assert node.find_gpu_problems(dict.fromkeys(NAMES, "[N/A]")) == []


def test_an_old_driver_answers_too(tmp_path, monkeypatch):
    """A driver before 535 knows only the old name of the reasons for a low clock. nvidia-smi itself may be missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node.query_gpus() == []
    path = tmp_path / "nvidia-smi"
    path.write_text(OLD_NVIDIA_SMI)
    path.chmod(0o755)
    assert node.query_gpus() == [{**HEALTHY, "memory.free": "30000"}]


def test_a_run_that_does_not_fit_fails(tmp_path, monkeypatch):
    """The disk must have space for all checkpoints that are kept, and the memory for all ranks of the node.

    A run on the CPU of a machine with a GPU is compared with the memory of the CPU.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # AdamW would ask the GPU, which does not exist, whether it captures a graph.
    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None)
    config = tiny("phase3_fsdp", tmp_path / "a" / "b", n_layer=1, gradient_accumulation_steps=2)
    assert node.check_disk(config, 10**6).result == "pass"
    assert node.check_disk(config, 10**12).result == "fail"
    assert not (tmp_path / "a").exists()
    assert node.check_plan(config, "phase3", 2, 2).result == "pass"
    monkeypatch.setattr(node, "read_available_memory", lambda: 100_000)
    assert node.check_plan(config, "phase3", 2, 2).result == "fail"


def test_the_command_prints_every_check(tmp_path):
    """The command checks the node, starts two ranks, prints one row for each check, and leaves nothing behind."""
    words = make_flags(**{**SMALL, "out_dir": tmp_path / "run"})
    outcome = run_program("bench.preflight", "--gpus=2", "phase3_fsdp/train.py", *words)
    assert outcome.code == 0, outcome.output
    subjects = ["configuration", "settings", "disk", "plan"]
    subjects += ["collectives", "bandwidth", "slowest rank", "shared directory", "write speed"]
    for subject in subjects:
        assert re.search(rf"^(pass|warn|skip)  {subject}  ", outcome.output, re.MULTILINE), (subject, outcome.output)
    assert list(tmp_path.iterdir()) == []
    resume = run_program("bench.preflight", "--gpus=2", "phase3_fsdp/train.py", *words, "--init_from=resume")
    assert_refused(resume, "there is no checkpoint")
