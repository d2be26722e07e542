"""Measure the run time and the losses of every phase with its defaults, for the tables in the documents.

    python -m bench.trainer.runs            # all phases and rank counts; about 15 minutes on 2 cores
    python -m bench.trainer.runs --write    # also write bench/results/runs-<hardware>.json
    python -m bench.trainer.runs --phase2   # phase 2, and the baseline with phase 2's configuration

Each row runs the command of the README in a new directory. It contains the seconds of the full command (set-up and data
already exist), the seconds to the first step, and the first and last logged loss. With --phase2, the result file is
phase2-runs-<hardware>.json.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.files import PACKAGE
from nanoGPT.train_config import TrainConfig
from phase2_triton.apply import TritonConfig

Command = tuple[str, int, str]  # make target, ranks, flags
SHARDED = [(phase, n, "") for phase in ("phase1", "phase3") for n in (1, 2, 4)]
COMMANDS: list[Command] = [("baseline", 1, ""), ("baseline", 4, ""), *SHARDED]


def list_phase2_commands() -> list[Command]:
    """Return the commands of the baseline with phase 2's CPU defaults, and of phase 2 on 1, 2 and 4 ranks."""
    triton, base = TritonConfig(), TrainConfig()
    names = [field.name for field in dataclasses.fields(base)]
    flags = [f"--{name}={getattr(triton, name)}" for name in names if getattr(triton, name) != getattr(base, name)]
    kernels: list[Command] = [("phase2", n, "--log_interval=1") for n in (1, 2, 4)]
    return [("baseline", 1, " ".join([*flags, "--log_interval=1"])), *kernels]


def run_target(target: str, ranks: int, flags: str, out_dir: Path) -> dict[str, Any]:
    """Run one make target, and return its seconds and losses."""
    begin = time.time()
    command = ["make", target, f"GPUS={ranks}", f"ARGS=--out_dir={out_dir} {flags}"]
    process = subprocess.Popen(command, cwd=PACKAGE.parent, stdout=subprocess.DEVNULL)
    first_step_seconds = None
    while process.poll() is None:
        metrics = out_dir / "metrics.jsonl"
        if first_step_seconds is None and metrics.exists() and metrics.stat().st_size:
            first_step_seconds = time.time() - begin
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    return {
        "target": target,
        "ranks": ranks,
        "flags": flags,
        "seconds": time.time() - begin,
        "first_step_seconds": first_step_seconds,
        "steps": lines[-1]["step"],
        "losses": losses,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "val_loss": lines[-1]["val_loss"],
        "step_ms": sorted(line["step_ms"] for line in lines if line["step_ms"])[len(losses) // 2],
    }


def main(phase2: bool = False, write: bool = False) -> None:
    """Run each command and print its row.

    Args:
        phase2: run the commands of phase 2 instead.
        write: also write bench/results/runs-<hardware>.json, or phase2-runs-<hardware>.json.
    """
    gpus = torch.cuda.device_count()
    rows = []
    name, commands = ("phase2-runs", list_phase2_commands()) if phase2 else ("runs", COMMANDS)
    for target, ranks, flags in commands:
        if gpus and ranks > gpus:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_target(target, ranks, flags, Path(folder) / "run"))
        print(json.dumps(rows[-1]), flush=True)
    if write:
        device = torch.device("cuda", 0) if gpus else torch.device("cpu")
        command = f"python -m bench.trainer.runs{' --phase2' if phase2 else ''} --write"
        settings = {"command": command, "cores": os.cpu_count()}
        print(f"wrote {write_result(name, device, settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
