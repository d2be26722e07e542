"""Run nanoGPT next to one of our trainers: the same model, batch, data and precision, in alternating rounds.

    git clone https://github.com/karpathy/nanoGPT /tmp/nanogpt              # nanoGPT is not part of this repository
    python -m bench.trainer.against_nanogpt --nanogpt=/tmp/nanogpt          # on a CPU: nanoGPT's CPU configuration
    python -m bench.trainer.against_nanogpt --nanogpt=/tmp/nanogpt --write  # write bench/results/nanogpt-*.json
    python -m bench.trainer.against_nanogpt --nanogpt=/tmp/nanogpt --phase=phase2 --compile=True --batch_size=32

Both are started as their users start them: nanoGPT with its train.py, ours with the launcher that `make` uses. The two
draw different weights and batches, so their losses are close, but not equal.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.phases import find_package
from bench.tables.records import write_result
from bench.tables.tables import find_fast_step
from nanoGPT.command_line import command_line
from nanoGPT.dataset import find_dataset
from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE
from nanoGPT.program import report_errors

HOW_TO_GET_ONE = "get one with `git clone https://github.com/karpathy/nanoGPT`"
WARMUP = 5  # steps that are not timed
# nanoGPT's train.py does not report its peak memory, so this program runs it and prints the peak at the end.
RUNNER = """
import resource, runpy, sys, torch
runpy.run_path("train.py", run_name="__main__")
resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("peak", torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident)
"""
CPU_SHAPE = {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}  # nanoGPT's example for a laptop
GPU_SHAPE = {"block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}


@dataclass
class Options:
    """Compare a trainer with nanoGPT."""

    nanogpt: str
    """directory of a checkout of nanoGPT"""
    phase: str = "baseline"
    """trainer to compare: baseline, phase1, phase2 or phase3"""
    rounds: int = 5
    """runs of each"""
    steps: int = 60
    """steps of each run"""
    batch_size: int = 12
    """sequences per micro-batch"""
    gradient_accumulation_steps: int = 1
    """micro-batches per step"""
    compile: bool = False
    """use torch.compile in both"""
    dataset: str | None = None
    """a prepared dataset; None: shakespeare_char on a CPU, shakespeare on a GPU"""
    device: str = "auto"
    """auto, cpu or cuda"""
    write: bool = False
    """write bench/results/nanogpt-<hardware>.json"""


def build_flags(options: Options, device: str) -> dict[str, Any]:
    """Return the flags that both trainers get. nanoGPT's names are ours."""
    is_gpu = device == "cuda"
    flags: dict[str, Any] = {**(GPU_SHAPE if is_gpu else CPU_SHAPE), "dropout": 0.0, "bias": False}
    flags |= {"device": device, "dtype": "bfloat16" if is_gpu else "float32", "compile": options.compile}
    flags |= {"batch_size": options.batch_size, "gradient_accumulation_steps": options.gradient_accumulation_steps}
    flags |= {"max_iters": options.steps, "lr_decay_iters": options.steps, "warmup_iters": 5, "learning_rate": 1e-3}
    flags |= {"min_lr": 1e-4, "beta2": 0.99, "eval_interval": 10**6, "eval_iters": 1, "log_interval": 1}
    return flags


def run_nanogpt(options: Options, flags: dict[str, Any], dataset: Path) -> dict[str, Any]:
    """Train with nanoGPT, in a directory that links to its files and to our data, and return a row.

    Raises:
        ConfigError: nanoGPT failed; the message has its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(options.nanogpt).resolve().glob("*.py"):
            (Path(folder) / file.name).symlink_to(file)
        (Path(folder) / "data").mkdir()
        (Path(folder) / "data" / "ours").symlink_to(dataset.resolve())
        words = [f"--{name}={value}" for name, value in {**flags, "dataset": "ours", "out_dir": "out"}.items()]
        output = run([sys.executable, "-c", RUNNER, *words], Path(folder), "nanoGPT")
    lines = re.findall(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms", output, re.M)
    steps = [(float(loss), float(ms)) for number, loss, ms in lines if int(number) < options.steps]
    peak = re.search(r"^peak (\d+)$", output, re.M)
    assert peak is not None, output[-500:]
    return {
        "trainer": "nanoGPT",
        "step_ms": [ms for _, ms in steps[WARMUP:]],
        "first_loss": steps[0][0],
        "last_loss": steps[-1][0],
        "peak_bytes": int(peak[1]),
    }


def run_ours(options: Options, flags: dict[str, Any], dataset: Path) -> dict[str, Any]:
    """Train with one of our trainers, through the launcher, and return a row.

    Raises:
        ConfigError: the trainer failed; the message has its last line.
    """
    trainer = PACKAGE.parent / find_package(options.phase) / "train.py"
    with tempfile.TemporaryDirectory() as folder:
        out_dir = Path(folder) / "run"
        words = [f"--{name}={value}" for name, value in {**flags, "dataset": dataset, "out_dir": out_dir}.items()]
        command = [sys.executable, "-m", "operate.launch", "--gpus=1", str(trainer), *words]
        run(command, PACKAGE.parent, options.phase)
        lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["loss"] is not None]
    return {
        "trainer": options.phase,
        "step_ms": [line["step_ms"] for line in steps[WARMUP:]],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "peak_bytes": max(line["peak_memory_bytes"] for line in steps),
    }


def run(command: list[str], folder: Path, name: str) -> str:
    """Run a trainer and return its output.

    Raises:
        ConfigError: it failed.
    """
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ConfigError(f"{name} failed: {last.removeprefix('error: ')}")
    return done.stdout


def compare(options: Options) -> dict[str, Any]:
    """Return the rows of all rounds, and the ratios of our time and memory to those of nanoGPT.

    Raises:
        ConfigError: there is no checkout of nanoGPT, or a run failed.
    """
    if not (Path(options.nanogpt) / "train.py").is_file():
        raise ConfigError(f"--nanogpt={options.nanogpt} is not a checkout of nanoGPT: {HOW_TO_GET_ONE}")
    if options.steps < WARMUP + 1 or options.rounds < 1:
        raise ConfigError(f"use --steps={WARMUP + 1} or more, and --rounds=1 or more")
    is_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    dataset = find_dataset(options.dataset or ("shakespeare" if is_gpu else "shakespeare_char"))
    flags, rows, ratios, fast = build_flags(options, "cuda" if is_gpu else "cpu"), [], [], []
    for _ in range(options.rounds):
        theirs, ours = run_nanogpt(options, flags, dataset), run_ours(options, flags, dataset)
        rows += [theirs, ours]
        ratios.append(statistics.median(ours["step_ms"]) / statistics.median(theirs["step_ms"]))
        fast.append(find_fast_step(ours) / find_fast_step(theirs))
        print(f"{format_row(theirs)}\n{format_row(ours)}  {ratios[-1]:.2f} of nanoGPT's time", flush=True)
    memory = max(row["peak_bytes"] for row in rows[1::2]) / max(row["peak_bytes"] for row in rows[::2])
    return {"flags": flags, "rows": rows, "time_ratios": ratios, "fast_ratios": fast, "memory_ratio": memory}


def format_row(row: dict[str, Any]) -> str:
    """Return a run as a line."""
    step, peak = statistics.median(row["step_ms"]), row["peak_bytes"] / 2**20
    losses = f"{row['first_loss']:.3f} to {row['last_loss']:.3f}"
    return f"{row['trainer']:10}{step:9.1f} ms per step{peak:10,.0f} MiB  loss {losses}"


def main(options: Options) -> None:
    """Compare, print the median ratio, and write the result if `options.write` is set."""
    result = compare(options)
    ratio = statistics.median(result["time_ratios"])
    fast = statistics.median(result["fast_ratios"])
    print(f"{options.phase} takes {ratio:.2f} of nanoGPT's time ({fast:.2f} in the fastest tenth of the steps)")
    print(f"and {result['memory_ratio']:.2f} of its peak memory")
    if options.write:
        device = torch.device("cuda", 0) if result["flags"]["device"] == "cuda" else torch.device("cpu")
        settings = {"command": "python -m bench.trainer.against_nanogpt --write", **asdict(options)}
        settings["variables"] = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES")}
        print(f"wrote {write_result('nanogpt', device, settings, result)}")


if __name__ == "__main__":
    with report_errors():
        main(command_line(Options, sys.argv[1:]))
