"""The promises of this trainer: the same losses on one rank and on two, and after a kill and a resume."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {
    "device": "cpu",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dropout": 0.2,
    "max_iters": 12,
    "eval_interval": 3,
    "eval_iters": 2,
    "log_interval": 1,
    "always_save_checkpoint": True,
}


def start(out: Path, ranks: int, **changes: object) -> subprocess.Popen[bytes]:
    """Start the trainer: one rank as a process of its own, several ranks with torchrun."""
    flags = [f"--{name}={value}" for name, value in {**FLAGS, "out_dir": out, **changes}.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *launcher, "train.py", *flags], cwd=ROOT, env=environment)


def read_losses(out: Path) -> dict[int, float]:
    """Return the training losses of a run by step."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["loss"] is not None}


def train(out: Path, ranks: int, **changes: object) -> dict[int, float]:
    """Train, and return the losses."""
    assert start(out, ranks, **changes).wait() == 0
    return read_losses(out)


def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    """The losses of all steps are equal to 1e-6, with dropout."""
    one, two = train(tmp_path / "one", 1), train(tmp_path / "two", 2)
    assert list(one) == list(range(12)) == list(two)
    assert max(abs(one[step] - two[step]) for step in one) < 1e-6


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    """A run that is killed after its first checkpoint resumes to the losses of an uninterrupted run, exactly."""
    process = start(tmp_path / "killed", 1, max_iters=100_000, lr_decay_iters=12)
    while process.poll() is None and not list((tmp_path / "killed" / "checkpoints").glob("step-*")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    steps = len(read_losses(tmp_path / "killed")) + 5
    resumed = train(tmp_path / "killed", 1, max_iters=steps, lr_decay_iters=12, init_from="resume")
    assert resumed == train(tmp_path / "whole", 1, max_iters=steps, lr_decay_iters=12)
