"""The documents' tables of runs: what the phases take and reach with their defaults, on this machine.

    python -m bench.trainer.runs            # one rank count after another; about a quarter of an hour on 2 cores
    python -m bench.trainer.runs --write    # and bench/results/runs-<hardware>.json
    python -m bench.trainer.runs --phase2  # phase 2 and the baseline in its configuration: phase2-runs-<hardware>.json

Each row is the command of the README, run in a new directory: seconds from the command to its end, set-up and data
being there already, seconds to the first step, and the first and last loss that it logged.
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

Command = tuple[str, int, str]  # a target, ranks, flags
SHARDED = [(phase, n, "") for phase in ("phase1", "phase3") for n in (1, 2, 4, 8)]
COMMANDS: list[Command] = [("baseline", 1, ""), ("baseline", 4, ""), *SHARDED]


def phase2_commands() -> list[Command]:
    """Phase 2 on 1, 2 and 4 ranks and compiled, after the baseline with phase 2's defaults for a CPU."""
    ours, base = TritonConfig(), TrainConfig()
    names = [field.name for field in dataclasses.fields(base)]
    flags = [f"--{name}={getattr(ours, name)}" for name in names if getattr(ours, name) != getattr(base, name)]
    kernels: list[Command] = [("phase2", n, "--log_interval=1") for n in (1, 2, 4)]
    compiled = ("phase2", 1, "--log_interval=1 --compile=True")
    return [("baseline", 1, " ".join([*flags, "--log_interval=1"])), *kernels, compiled]


def run_one(target: str, ranks: int, flags: str, out_dir: Path) -> dict[str, Any]:
    """Run one make target; seconds and losses."""
    begin = time.time()
    command = ["make", target, f"GPUS={ranks}", f"ARGS=--out_dir={out_dir} {flags}"]
    process = subprocess.Popen(command, cwd=PACKAGE.parent, stdout=subprocess.DEVNULL)
    first = None
    while process.poll() is None:
        metrics = out_dir / "metrics.jsonl"
        if first is None and metrics.exists() and metrics.stat().st_size:
            first = time.time() - begin
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    return {
        "target": target,
        "ranks": ranks,
        "flags": flags,
        "seconds": time.time() - begin,
        "first_step_seconds": first,
        "steps": lines[-1]["step"],
        "losses": losses,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "val_loss": lines[-1]["val_loss"],
        "step_ms": sorted(line["step_ms"] for line in lines if line["step_ms"])[len(losses) // 2],
    }


def main(phase2: bool = False, write: bool = False) -> None:
    """Run each, and print what came of it.

    Args:
        phase2: those of phase 2.
        write: also write bench/results/runs-<hardware>.json, or phase2-runs.
    """
    gpus = torch.cuda.device_count()
    rows = []
    name, commands = ("phase2-runs", phase2_commands()) if phase2 else ("runs", COMMANDS)
    for target, ranks, flags in commands:
        if gpus and ranks > gpus:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_one(target, ranks, flags, Path(folder) / "run"))
        print(json.dumps(rows[-1]), flush=True)
    if write:
        device = torch.device("cuda", 0) if gpus else torch.device("cpu")
        settings = {"command": "make TARGET GPUS=N", "cores": os.cpu_count()}
        print(f"wrote {write_result(name, device, settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
