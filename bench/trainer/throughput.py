"""Tokens a second and memory of the baseline and each phase, eager and compiled, at the sizes that this machine holds.

    python -m bench.trainer.throughput              # about five minutes on 2 cores
    python -m bench.trainer.throughput --write      # and bench/results/throughput-<hardware>.json

Each row is a run of the phase's own trainer. Its first steps warm up; of the others the median is taken, and the spread
is half the distance between their quartiles. On a CPU the size is the default, phase 2's its own, for its kernels are
interpreted; memory is what the ledger counts at the peak. On GPUs, GPT-2 from 124M up as long as it fits, on all of
them; memory is the allocator's peak.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import config_of, run_cell
from bench.plan.plan import MODELS
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from workshop.ranks import RankFailed

WARMUP = 5  # steps; the ledger's is among them
SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
Case = tuple[str, str, int, dict[str, Any]]  # a size's name, a phase, ranks, and words of a configuration


def cases(gpus: int) -> list[Case]:
    """What is measured on a machine with so many GPUs."""
    if not gpus:
        steps = {"max_iters": WARMUP + 15, "device": "cpu"}
        few = {"max_iters": WARMUP + 5, "device": "cpu"}
        alone: list[Case] = [("default", "baseline", 1, steps), ("phase 2's default", "phase2", 1, few)]
        return alone + [("default", phase, 2, steps) for phase in ("baseline", "phase1", "phase3")]
    words = {"max_iters": WARMUP + 30, "device": "cuda", "batch_size": 8, "gradient_accumulation_steps": 8 * gpus}
    words |= {"dataset": "shakespeare", "block_size": 1024, "dtype": "bfloat16"}
    found = []
    for name in SIZES:
        shape = dict(zip(("n_layer", "n_head", "n_embd"), MODELS[name], strict=True))
        found += [(name, phase, gpus, {**words, **shape}) for phase in ("baseline", "phase1", "phase2", "phase3")]
    return found


def measure(case: Case, compiled: bool, out_dir: Path) -> dict[str, Any]:
    """One row; its `failed` says why there are no numbers."""
    size, phase, ranks, words = case
    config = config_of(phase, out_dir, **words, compile=compiled, eval_interval=10**6, eval_iters=8)
    row: dict[str, Any] = {"size": size, "phase": phase, "ranks": ranks, "compiled": compiled, "failed": None}
    try:
        found = run_cell(phase, ranks, config, timeout=1200)
    except RankFailed as failure:
        return {**row, "failed": str(failure).strip().splitlines()[-1]}
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] >= WARMUP and line["step_ms"]]
    on_gpu = found.rank_0["memory"]["allocator_peak_bytes"] is not None
    counted = [sum(rank["memory"]["peak"].values()) for rank in found.ledger["ranks"]]
    return {
        **row,
        "parameters": found.ledger["parameters"],
        "step_ms": [line["step_ms"] for line in timed],
        "tokens_per_second": [line["tokens_per_second"] for line in timed],
        "mfu": statistics.median([line["mfu"] for line in timed]) if timed[0]["mfu"] is not None else None,
        "peak_bytes": max(line["peak_memory_bytes"] for line in timed) if on_gpu else max(counted),
    }


def quartile_spread(values: list[float]) -> float:
    """Half the distance between the quartiles, as a part of the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def line_of(row: dict[str, Any]) -> str:
    mode = "compiled" if row["compiled"] else "eager"
    start = f"{row['size']:<18}{row['phase']:<10}{row['ranks']:>5}  {mode:<9}"
    if row["failed"]:
        return f"{start} {row['failed']}"
    rate, mfu = statistics.median(row["tokens_per_second"]), row["mfu"]
    step = statistics.median(row["step_ms"])
    said = f"{rate:>12,.0f} +-{quartile_spread(row['tokens_per_second']):>4.0%}{step:>9,.0f} ms"
    return f"{start}{said}{row['peak_bytes'] / 1e6:>12,.1f} MB{'' if mfu is None else f'{mfu:>7.1%}'}"


def main(write: bool = False) -> None:
    """Measure every case, eager and compiled.

    Args:
        write: also write bench/results/throughput-<hardware>.json.
    """
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    rows = []
    print(f"{'size':<18}{'phase':<10}{'ranks':>5}  {'':<9}{'tokens/s':>12}{'':>7}{'step':>12}{'peak':>15}    MFU")
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases(gpus)):
            for compiled in (False, True):
                rows.append(measure(case, compiled, Path(folder) / f"{i}-{compiled}"))
                print(line_of(rows[-1]), flush=True)
    if write:
        settings = {"command": "python -m bench.trainer.throughput", "warmup_steps": WARMUP}
        print(f"wrote {write_result('throughput', device, settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
