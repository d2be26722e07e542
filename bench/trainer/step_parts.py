"""Measure where the milliseconds of a training step go on 4 ranks, with the default configuration of each trainer.

    python -m bench.trainer.step_parts              # about two minutes on 2 idle cores
    python -m bench.trainer.step_parts --write      # also write bench/results/step-parts-<hardware>.json

The numbers are those of `make profile`: rank 0 under torch's profiler, two steps. The profiler itself makes a step
slower, mainly in Python.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bench.tables.records import write_result
from bench.trainer.profile_step import format_summary, parse_request, profile_into
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from workshop.phases import find_package

RANKS = 4
PHASES = ("baseline", "phase1", "phase3")  # phase 2 is interpreted on a CPU, so its step is all Python


def measure(phase: str) -> dict[str, float]:
    """Return the milliseconds of a step of rank 0 by activity: see `profile_step.summarize`."""
    _, _, config = parse_request([phase, str(RANKS)])
    with tempfile.TemporaryDirectory() as folder:
        return profile_into(Path(folder) / phase, find_package(phase), RANKS, replace(config, device="cpu"))


def main(write: bool = False) -> None:
    """Measure the trainers and print the parts of their steps.

    Args:
        write: also write bench/results/step-parts-<hardware>.json.
    """
    samples = {}
    for phase in PHASES:
        samples[phase] = measure(phase)
        print(f"{phase}: {format_summary(samples[phase])}", flush=True)
    if write:
        settings = {"command": "python -m bench.trainer.step_parts --write", "ranks": RANKS}
        print(f"wrote {write_result('step-parts', torch.device('cpu'), settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
