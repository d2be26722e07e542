"""Measure tokens per second and memory of the baseline and each phase, eager and compiled.

    python -m bench.trainer.throughput              # about five minutes on 2 cores
    python -m bench.trainer.throughput --write      # also write bench/results/throughput-<hardware>.json

Each row is a run of the phase's trainer. The first steps are a warm-up. The table shows the median of the other steps,
and half the distance between their quartiles as the spread.

- On a CPU, the model has 4 blocks of 128 channels, and a micro-batch has 4 sequences. Phase 2 has a smaller model,
  because its kernels are interpreted. One rank uses all cores. Memory is the peak that the ledger counts.
- On GPUs, the models are GPT-2 from 124M to XL, on all GPUs of the machine. A model that does not fit is reported as
  failed. Memory is the peak of the allocator.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import make_config, run_cell
from bench.plan.models import MODELS
from bench.tables.records import write_result
from nanoGPT.command_line import command_line
from nanoGPT.program import report_errors
from operate.ranks import RankFailed

WARMUP = 5  # steps, including the step that the ledger records
SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
Case = tuple[str, str, int, dict[str, Any]]  # name of the size, phase, ranks, fields of the configuration


def list_cases(gpus: int) -> list[Case]:
    """Return the cases to measure on a machine with `gpus` GPUs."""
    if not gpus:
        steps = {"max_iters": WARMUP + 15, "device": "cpu"}
        few_steps = {"max_iters": WARMUP + 5, "device": "cpu", "batch_size": 4, "n_embd": 64}
        name, small_name = "4 blocks, 128 channels", "2 blocks, 64 channels"
        one_rank: list[Case] = [(name, "baseline", 1, steps), (small_name, "phase2", 1, few_steps)]
        return one_rank + [(name, phase, 2, steps) for phase in ("baseline", "phase1", "phase3")]
    fields = {"max_iters": WARMUP + 30, "device": "cuda", "batch_size": 8, "gradient_accumulation_steps": 8 * gpus}
    fields |= {"dataset": "shakespeare", "block_size": 1024, "dtype": "bfloat16"}
    cases = []
    for name in SIZES:
        shape = dict(zip(("n_layer", "n_head", "n_embd"), MODELS[name], strict=True))
        cases += [(name, phase, gpus, {**fields, **shape}) for phase in ("baseline", "phase1", "phase2", "phase3")]
    return cases


def measure(case: Case, is_compiled: bool, out_dir: Path) -> dict[str, Any]:
    """Measure one case and return its row. If the run fails, the row has the reason in `failed` and no numbers."""
    size, phase, ranks, fields = case
    config = make_config(phase, out_dir, **fields, compile=is_compiled, eval_interval=10**6, eval_iters=8)
    row: dict[str, Any] = {"size": size, "phase": phase, "ranks": ranks, "compiled": is_compiled, "failed": None}
    try:
        threads = (os.cpu_count() or 1) if ranks == 1 else 1  # as under the launcher
        result = run_cell(phase, ranks, config, timeout=1200, threads=threads)
    except RankFailed as failure:
        return {**row, "failed": str(failure).strip().splitlines()[-1]}
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] >= WARMUP and line["step_ms"]]
    uses_gpu = result.rank_0["memory"]["allocator_peak_bytes"] is not None
    ledger_peaks = [sum(rank["memory"]["peak"].values()) for rank in result.ledger["ranks"]]
    return {
        **row,
        "parameters": result.ledger["parameters"],
        "step_ms": [line["step_ms"] for line in timed],
        "tokens_per_second": [line["tokens_per_second"] for line in timed],
        "mfu": statistics.median([line["mfu"] for line in timed]) if timed[0]["mfu"] is not None else None,
        "peak_bytes": max(line["peak_memory_bytes"] for line in timed) if uses_gpu else max(ledger_peaks),
    }


def quartile_spread(values: list[float]) -> float:
    """Return half the distance between the quartiles, as a fraction of the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def format_row(row: dict[str, Any]) -> str:
    """Return a row's line of the printed table."""
    mode = "compiled" if row["compiled"] else "eager"
    start = f"{row['size']:<24}{row['phase']:<10}{row['ranks']:>5}  {mode:<9}"
    if row["failed"]:
        return f"{start} {row['failed']}"
    rate, mfu = statistics.median(row["tokens_per_second"]), row["mfu"]
    step = statistics.median(row["step_ms"])
    speed = f"{rate:>12,.0f} +-{quartile_spread(row['tokens_per_second']):>4.0%}{step:>9,.0f} ms"
    return f"{start}{speed}{row['peak_bytes'] / 1e6:>12,.1f} MB{'' if mfu is None else f'{mfu:>7.1%}'}"


def main(write: bool = False) -> None:
    """Measure every case, eager and compiled.

    Args:
        write: also write bench/results/throughput-<hardware>.json.
    """
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    rows = []
    columns = f"{'size':<24}{'phase':<10}{'ranks':>5}  {'':<9}{'tokens/s':>12}{'':>7}{'step':>12}{'peak memory':>15}"
    print(f"{columns}    MFU")
    for case in list_cases(gpus):
        for is_compiled in (False, True):
            with tempfile.TemporaryDirectory() as folder:  # a run saves a checkpoint at its end
                rows.append(measure(case, is_compiled, Path(folder) / "run"))
            print(format_row(rows[-1]), flush=True)
    if write:
        settings = {"command": "python -m bench.trainer.throughput --write", "warmup_steps": WARMUP}
        print(f"wrote {write_result('throughput', device, settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
