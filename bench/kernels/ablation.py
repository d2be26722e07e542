"""Measure the trainer with each kernel alone, with all kernels and with none, eager and compiled.

    python -m bench.kernels.ablation                              # print; on a CPU one small model, interpreted
    python -m bench.kernels.ablation --sizes=124M,350M            # only these model sizes
    python -m bench.kernels.ablation --write                      # write bench/results/kernel-ablation-<hardware>.json

Every row is a run of `phase2_triton/train.py` in a separate process. All runs of a model size have the same batch size.
A row has the tokens per second (the median of the values logged after the first quarter of the steps), the peak memory
and the last loss. The loss shows whether the run is correct.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kernels.kernels import parse_names
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.files import PACKAGE
from phase2_triton.apply import KERNELS

SIZES = {  # n_layer, n_head, n_embd, sequences per micro-batch on a GPU with 80 GB
    "124M": (12, 12, 768, 32),
    "350M": (24, 16, 1024, 16),
    "774M": (36, 20, 1280, 8),
    "1.5B": (48, 25, 1600, 4),
}


@dataclass
class Options:
    """Measure the trainer with and without kernels."""

    sizes: str = "all"
    """all, or some of 124M,350M,774M,1.5B; on a CPU one small model runs instead"""
    kernels: str = "all"
    """all rows, or some of none,auto,all,adamw,attention,embedding,gelu,layernorm,loss"""
    steps: int = 20
    """optimizer steps per run; on a CPU always 4"""
    write: bool = False
    """write bench/results/kernel-ablation-<hardware>.json"""


def run_trainer(size: str, kernels: str, compiled: bool, steps: int, cuda: bool) -> dict[str, Any]:
    """Train once and return a row with the values that were logged, or with the error."""
    layers, heads, channels, batch = SIZES[size] if cuda else (2, 2, 64, 12)
    with tempfile.TemporaryDirectory() as out_dir:
        flags: dict[str, Any] = {
            "n_layer": layers,
            "n_head": heads,
            "n_embd": channels,
            "batch_size": batch,
            "compile": compiled,
        }
        flags |= {"kernels": kernels, "max_iters": steps, "eval_interval": 10**6, "eval_iters": 1, "log_interval": 1}
        flags |= {
            "gradient_accumulation_steps": 2,
            "out_dir": out_dir,
            "dropout": 0.0,
            "device": "cuda" if cuda else "cpu",
        }
        command = [sys.executable, "phase2_triton/train.py", *(f"--{key}={value}" for key, value in flags.items())]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        process = subprocess.run(command, cwd=PACKAGE.parent, env=environment, capture_output=True, text=True)
        row = {"size": size if cuda else "small", "kernels": kernels, "compile": compiled, "batch_size": batch}
        if process.returncode:
            return {**row, "error": (process.stderr.strip().splitlines() or ["no error message"])[-1][:300]}
        records = [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]
    steps_logged = [record for record in records if record["loss"] is not None]
    return {
        **row,
        "tokens_per_second": [record["tokens_per_second"] for record in steps_logged[len(steps_logged) // 4 :]],
        "peak_memory_bytes": max((record["peak_memory_bytes"] or 0) for record in steps_logged),
        "loss": steps_logged[-1]["loss"],
    }


def main(options: Options) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        print("No GPU: a small model runs in Triton's interpreter. These rates do not predict a GPU's.")
    sizes = parse_names(options.sizes, list(SIZES)) if cuda else ["124M"]
    kernel_sets = parse_names(options.kernels, ["none", *KERNELS, "auto", "all"])
    rows = []
    for size, compiled, kernels in itertools.product(sizes, (False, True), kernel_sets):
        row = run_trainer(size, kernels, compiled, options.steps if cuda else 4, cuda)
        rows.append(row)
        head = f"{row['size']:8}{'compiled' if compiled else 'eager':10}{kernels:18}"
        if "error" in row:
            print(f"{head}{row['error']}", flush=True)
            continue
        rate, memory = statistics.median(row["tokens_per_second"]), row["peak_memory_bytes"] / 2**30
        print(f"{head}{rate:12,.0f} tokens/s{memory:8.2f} GiB  loss {row['loss']:.4f}", flush=True)
    if options.write:
        settings = {"command": "python -m bench.kernels.ablation --write", "interpreted": not cuda}
        print(f"wrote {write_result('kernel-ablation', device, settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        main(command_line(Options, sys.argv[1:]))
