"""The trainer with each kernel alone, with all and with none, compiled and not: tokens/s and memory of real runs.

    python -m bench.kernels.ablation                              # print; on a CPU one small model, interpreted
    python -m bench.kernels.ablation --sizes=124M,350M            # some
    python -m bench.kernels.ablation --write                      # into bench/results/kernel-ablation-<hardware>.json

Every row is `phase2_triton/train.py` in a process of its own, at one batch size a model size; the rate is the median of
what it logged after its first steps, and the last loss stands beside it, since a fast wrong run is worth nothing.
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

from bench.kernels.kernels import names
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.files import PACKAGE
from phase2_triton.apply import KERNELS

SIZES = {  # n_layer, n_head, n_embd, sequences a micro-batch on a GPU with 80 GB
    "124M": (12, 12, 768, 32),
    "350M": (24, 16, 1024, 16),
    "774M": (36, 20, 1280, 8),
    "1.5B": (48, 25, 1600, 4),
}


@dataclass
class Options:
    """What to run."""

    sizes: str = "all"
    """all, or some of 124M,350M,774M,1.5B; a CPU has one small size of its own"""
    kernels: str = "all"
    """all rows, or some of none,all,adamw,attention,embedding,gelu,layernorm,loss"""
    steps: int = 20
    """optimizer steps of a run; a CPU runs 4"""
    write: bool = False
    """write bench/results/kernel-ablation-<hardware>.json"""


def run(size: str, kernels: str, compiled: bool, steps: int, cuda: bool) -> dict[str, Any]:
    """Train once and read what was logged."""
    layers, heads, channels, batch = SIZES[size] if cuda else (2, 2, 64, 12)
    with tempfile.TemporaryDirectory() as folder:
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
            "out_dir": folder,
            "dropout": 0.0,
            "device": "cuda" if cuda else "cpu",
        }
        words = [sys.executable, "phase2_triton/train.py", *(f"--{key}={value}" for key, value in flags.items())]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(words, cwd=PACKAGE.parent, env=environment, capture_output=True, text=True)
        row = {"size": size if cuda else "small", "kernels": kernels, "compile": compiled, "batch_size": batch}
        if done.returncode:
            return {**row, "error": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
        lines = [json.loads(text) for text in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["loss"] is not None]
    return {
        **row,
        "tokens_per_second": [line["tokens_per_second"] for line in logged[len(logged) // 4 :]],
        "peak_memory_bytes": max((line["peak_memory_bytes"] or 0) for line in logged),
        "loss": logged[-1]["loss"],
    }


def main(options: Options) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        print("No GPU: a small model in Triton's interpreter. These rates say nothing about a GPU.")
    sizes = names(options.sizes, list(SIZES)) if cuda else ["124M"]
    chosen = names(options.kernels, ["none", *KERNELS, "all"])
    rows = []
    for size, compiled, kernels in itertools.product(sizes, (False, True), chosen):
        row = run(size, kernels, compiled, options.steps if cuda else 4, cuda)
        rows.append(row)
        head = f"{row['size']:8}{'compiled' if compiled else 'eager':10}{kernels:12}"
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
