"""Measure what `--diagnostics_interval` costs: a step with a record against a step without one, in the same job.

    python -m bench.trainer.diagnostics_overhead            # about two minutes on 2 idle cores
    python -m bench.trainer.diagnostics_overhead --write    # also write bench/results/diagnostics-overhead-*.json

Each trainer writes a record at every third step. It is compared with the step before the next record, because the step
directly after a record finds other data in the caches. If the speed of the machine changes, it changes for both. The
batch is nanoGPT's for a CPU, 12 sequences of 64 tokens, on each rank. Without the flag, the trainer still calls the
diagnostics twice per step. The time in these calls is measured too.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.tables.campaign_tables import find_fast_step_ms
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.metrics.diagnostics import Diagnostics
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from workshop.imports import ROOT
from workshop.phases import find_package

JOBS = (("baseline", 2), ("phase1", 2), ("phase3", 2))
INTERVAL, WARMUP, STEPS, CALLS = 3, 12, 150, 1000


def measure_job(phase: str, ranks: int, steps: int, *flags: str) -> dict[str, Any]:
    """Train with a record at every third step, and return the milliseconds of steps with and without a record.

    Args:
        steps: number of steps.
        flags: of the trainer.
    """
    with tempfile.TemporaryDirectory() as folder:
        out_dir = Path(folder) / "run"
        words = [f"--gpus={ranks}", f"{find_package(phase)}/train.py", "--device=cpu", f"--out_dir={out_dir}"]
        words += [f"--max_iters={steps}", "--log_interval=1", "--eval_interval=100000", "--eval_iters=1"]
        words += [f"--diagnostics_interval={INTERVAL}", "--batch_size=12", f"--gradient_accumulation_steps={ranks}"]
        command = [sys.executable, "-m", "nanoGPT.launch", *words, *flags]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] >= WARMUP and line["step_ms"]]
    return {
        "phase": phase,
        "ranks": ranks,
        "record_ms": [line["step_ms"] for line in timed if line["step"] % INTERVAL == 0],
        "plain_ms": [line["step_ms"] for line in timed if line["step"] % INTERVAL == INTERVAL - 1],
    }


def measure_calls(calls: int) -> list[float]:
    """Return the milliseconds of the calls of one step, if diagnostics are off."""
    config = TrainConfig(device="cpu")
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, bias=False, vocab_size=16))
    optimizer, zero = torch.optim.AdamW(model.parameters()), torch.zeros(())
    off = Diagnostics(config, create_runtime("cpu", "float32"), model, optimizer)
    samples = []
    for step in range(calls):
        begin = time.perf_counter()
        with off.watch(step):
            pass
        off.record(step, zero, zero)
        samples.append(1000 * (time.perf_counter() - begin))
    return samples


def summarize(row: dict[str, Any]) -> dict[str, float]:
    """Return the medians of a job (ms), and the ratio with a record / without: of medians, and of fastest tenths."""
    with_record, plain = statistics.median(row["record_ms"]), statistics.median(row["plain_ms"])
    fast = find_fast_step_ms(row["record_ms"]) / find_fast_step_ms(row["plain_ms"])
    return {"record_ms": with_record, "plain_ms": plain, "ratio": with_record / plain, "fast_ratio": fast}


def main(write: bool = False) -> None:
    """Measure the trainers, and print the ratios of their steps.

    Args:
        write: also write bench/results/diagnostics-overhead-<hardware>.json.
    """
    rows, off = [], measure_calls(CALLS)
    for phase, ranks in JOBS:
        rows.append(measure_job(phase, ranks, STEPS))
        summary = summarize(rows[-1])
        share = statistics.median(off) / summary["plain_ms"]
        print(
            f"{phase}, {ranks} rank(s): {summary['plain_ms']:.1f} ms, with a record {summary['record_ms']:.1f} ms, "
            f"ratio {summary['ratio']:.3f}, of the fastest tenths {summary['fast_ratio']:.3f}; off: {share:.4%}",
            flush=True,
        )
    if write:
        command = "python -m bench.trainer.diagnostics_overhead --write"
        settings = {"command": command, "steps": STEPS, "interval": INTERVAL, "batch_size": 12, "block_size": 64}
        path = write_result("diagnostics-overhead", torch.device("cpu"), settings, {"rows": rows, "off_ms": off})
        print(f"wrote {path}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
