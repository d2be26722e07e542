"""The tasks of `python -m bench.gpu`: what each process measures or checks.

A function gets the `Place` and the arguments of its task, and returns a JSON object. Its `summary` is printed, and a
task with `problems` has failed.
"""

import contextlib
import dataclasses
import importlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.kernels import tune
from bench.kernels.cases import CASE_BUILDERS, GPT2_WIDTHS, Case, build_cases
from bench.kernels.kernels import Stopwatch, compute_roofline_share, measure, measure_limits
from bench.plan.models import MODELS
from bench.tables.records import describe_origin
from phase2_triton.kernels.core import hash_sources

WARMUP = 5  # steps that are not timed
LOSS_TOLERANCE = 0.02  # of two loss curves over five steps in bfloat16
SUM_ROUNDING = 16 * torch.finfo(torch.float32).eps  # of a sum over many rows in fp32, whose terms may cancel
TINY: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 2, "dtype": "float32"}
TINY |= {"vocab_size": None, "gradient_accumulation_steps": 2, "max_iters": 7, "dataset": "shakespeare_char"}


class Skipped(Exception):
    """Raised by a task that cannot run on this machine. The message is the reason."""


@dataclass(frozen=True)
class Place:
    """Where a task runs: the directory of the results, and whether this is a dry run on a CPU."""

    folder: Path
    is_dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.is_dry else torch.device("cuda", 0)


def describe_machine(place: Place) -> dict[str, Any]:
    """Return the hardware, the versions and the kernels, which all results in a directory share.

    They may have other tile sizes, so that `tuning` does not make all other results obsolete.
    """
    if not place.is_dry and not torch.cuda.is_available():
        raise Skipped("torch finds no GPU: use --dry_run for small versions of everything on a CPU")
    if not place.is_dry and torch.cuda.get_device_capability()[0] < 8:
        name = torch.cuda.get_device_name()
        raise Skipped(f"{name} does not compute in bfloat16, which all tasks measure: use an A100 or a newer GPU")
    origin = describe_origin(place.device)
    identity = [origin["hardware"], origin["versions"], hash_sources("*.py")]
    return {"origin": origin, "identity": identity, "is_dry": place.is_dry, "summary": origin["hardware"]}


def check_kernel(place: Place, kernel: str) -> dict[str, Any]:
    """Compare a kernel with torch at the shapes of GPT-2 124M and 1.5B, in bfloat16.

    The exact result is torch's in a more precise type. The error of the kernel may be twice the error of torch in
    bfloat16 (three times for gradients of attention), plus a rounding error of the largest value.
    """
    rows = [row for case in build_cases(place.device, {kernel}, ["124M", "1.5B"]) for row in compare_with_torch(case)]
    worst = max(row["error"] / row["torch_error"] if row["torch_error"] else 0.0 for row in rows)
    problems = [f"{row['shape']}, result {row['result']}: error {row['error']:.1e}" for row in rows if not row["is_ok"]]
    return {"rows": rows, "problems": problems, "summary": f"error at most {worst:.2f} times the error of torch"}


def compare_with_torch(case: Case) -> list[dict[str, Any]]:
    """Return a row for each result and gradient of a case: the errors of the kernel and of torch."""
    reference = next(name for name in case.contenders if name in ("eager", "sdpa"))
    exact_types = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.int64: torch.int64}
    inputs = [x.detach().to(exact_types[x.dtype]).requires_grad_(x.requires_grad) for x in case.inputs]
    exact = tune.compute_results(dataclasses.replace(case, inputs=tuple(inputs)), reference)
    results = zip(tune.compute_results(case, "ours"), tune.compute_results(case, reference), exact, strict=True)
    rows = []
    for i, (ours, theirs, true) in enumerate(results):
        error, torch_error = ((x.to(true.dtype) - true).abs().max().item() for x in (ours, theirs))
        factor = 3 if case.kernel == "attention" and i else 2
        allowed = factor * torch_error + max(torch.finfo(ours.dtype).eps, SUM_ROUNDING) * true.abs().max().item()
        row = {"kernel": case.kernel, "shape": case.shape, "result": i, "error": error, "torch_error": torch_error}
        rows.append({**row, "is_ok": error <= allowed})  # False for NaN
    return rows


def time_kernel(place: Place, kernel: str) -> dict[str, Any]:
    """Return the times of a kernel and of torch's implementations, and the limits of the device."""
    watch = Stopwatch(place.device)
    limits, rows = measure_limits(watch, place.device), []
    for case in build_cases(place.device, {kernel}, list(GPT2_WIDTHS)):
        rows += measure(case, watch, 2 if place.is_dry else 30)
        del case
        if not place.is_dry:
            torch.cuda.empty_cache()
    lines = [f"{row['pass']} {row['contender']}: {format_time(row, limits)}" for row in rows]
    print(*lines, sep="\n")
    return {"limits": limits, "rows": rows, "summary": ", ".join(lines[:4])}


def format_time(row: dict[str, Any], limits: dict[str, float]) -> str:
    """Return the time of a row and its share of the roofline limit, or its error."""
    if "error" in row:
        return str(row["error"])
    return f"{statistics.median(row['samples_ms']):.3f} ms ({compute_roofline_share(row, limits):.0%})"


def tune_tiles(place: Place) -> dict[str, Any]:
    """Search tile sizes for this GPU, and write them into DIR/configs.json."""
    only, path = "layernorm_forward" if place.is_dry else "all", place.folder / "configs.json"
    tune.main(tune.Options(only=only, write=True, to=str(path)))
    return {"summary": f"if all checks pass with it, copy {path.name} to phase2_triton/kernels/"}


def train(
    place: Place, phase: str, model: str, fields: dict[str, Any], saved_run: Path | None = None
) -> dict[str, Any]:
    """Train GPT-2 in this process, and return losses, times and memory.

    Args:
        saved_run: the directory of the run, which saves and evaluates; None: a run without a save or an evaluation.
    """
    from bench.phases import find_package
    from nanoGPT.checkpoint.directory import CheckpointDirectory
    from operate.run_files import read_json_lines

    trainer = importlib.import_module(f"{find_package(phase)}.train")
    out_dir = saved_run or place.folder / f"run-{os.getpid()}"
    shape = dict(zip(("n_layer", "n_head", "n_embd"), MODELS[model], strict=True))
    values = {
        **shape,
        "block_size": 1024,
        "vocab_size": 50304,
        "dataset": "shakespeare",
        "dtype": "bfloat16",
        "learning_rate": 6e-4,
    }
    values |= {"min_lr": 6e-5, "warmup_iters": 5, "eval_interval": 10**6, "eval_iters": 1, "max_iters": WARMUP + 15}
    values |= {"gradient_accumulation_steps": 4, "batch_size": choose_batch_size(place, model)}
    values |= fields | (TINY if place.is_dry else {})
    if saved_run:
        values["max_iters"] = fields["max_iters"]  # the saves are in these steps, also in a dry run
    values |= {"log_interval": 1, "out_dir": str(out_dir), "device": place.device.type}
    config = trainer.Config(**values)
    with contextlib.ExitStack() as patches:
        if not saved_run:
            patches.enter_context(mock.patch.object(CheckpointDirectory, "save"))
            patches.enter_context(mock.patch.object(trainer, "evaluate", return_value=0.0))  # it would compile again
        trainer.train(config)
    lines = read_json_lines(out_dir / "metrics.jsonl")
    if not saved_run:
        shutil.rmtree(out_dir)
    steps = [line for line in lines if line["loss"] is not None]
    timed = [line for line in steps if line["step"] >= WARMUP]
    row = {"size": model, "phase": phase, "ranks": 1, "compiled": config.compile, "failed": None}
    row |= {"kernels": getattr(config, "kernels", "none"), "batch_size": config.batch_size}
    row |= {name: [line[name] for line in timed] for name in ("step_ms", "tokens_per_second")}
    row |= {"mfu": statistics.median(line["mfu"] for line in timed) if timed and timed[0]["mfu"] else None}
    return {**row, "peak_bytes": max(line["peak_memory_bytes"] for line in steps), "losses": [s["loss"] for s in steps]}


def train_in_new_process(*arguments: Any) -> dict[str, Any]:
    """Call `train` in a process of its own, so that its memory and its compiled code are only its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, *arguments).result()


def choose_batch_size(place: Place, model: str) -> int:
    """Return the sequences per micro-batch that fit into this GPU without any saving of memory."""
    gib = 0 if place.is_dry else torch.cuda.get_device_properties(0).total_memory / 2**30
    large, medium, small = {"gpt2": (32, 12, 4), "gpt2-large": (8, 4, 1), "gpt2-xl": (4, 1, 1)}[model]
    return large if gib > 70 else medium if gib > 38 else small


def compare_curves(place: Place, phase: str, kernels: str) -> dict[str, Any]:
    """Compare five steps of a trainer, eager and compiled, with the eager baseline: one loss curve."""
    batch_size = min(8, choose_batch_size(place, "gpt2"))
    short = {"gradient_accumulation_steps": 1, "max_iters": 5, "batch_size": batch_size}
    options: dict[str, Any] = short if kernels == "none" else {**short, "kernels": kernels}
    baseline = train_in_new_process(place, "baseline", "gpt2", {**short, "compile": False})["losses"]
    gaps = {}
    for mode in ("eager", "compiled")[: 1 if place.is_dry else 2]:  # to compile takes a minute on a CPU
        losses = train_in_new_process(place, phase, "gpt2", {**options, "compile": mode == "compiled"})["losses"]
        gaps[mode] = max(abs(a - b) for a, b in zip(baseline, losses, strict=True))
    problems = [f"{mode}: losses differ by {gap:.1e}" for mode, gap in gaps.items() if not gap <= LOSS_TOLERANCE]
    summary = ", ".join(f"{mode} {gap:.1e}" for mode, gap in gaps.items())
    return {"max_loss_difference": gaps, "problems": problems, "summary": f"max loss difference: {summary}"}


def check_resume(place: Place, phase: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train four steps with evaluations and saves, resume after two of them, and compare the losses of the others."""
    folder = place.folder / f"resume-{os.getpid()}"
    fields = {**options, "max_iters": 4, "eval_interval": 2, "always_save_checkpoint": True, "compile": False}
    again = {**fields, "init_from": "resume", "resume_step": 2}
    try:
        first, second = (train_in_new_process(place, phase, "gpt2", each, folder)["losses"] for each in (fields, again))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
    problems = [] if gap <= LOSS_TOLERANCE else [f"losses after the resume differ by {gap:.1e}"]
    return {"max_loss_difference": gap, "problems": problems, "summary": f"max loss difference: {gap:.1e}"}


def measure_option(place: Place, phase: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return speed and memory of a trainer with an option; compiled, except in a dry run."""
    row = train_in_new_process(place, phase, model, {"compile": not place.is_dry, **options})
    rate, peak = statistics.median(row["tokens_per_second"]), row["peak_bytes"] / 2**30
    return {**row, "options": options, "summary": f"{rate:,.0f} tokens/s, peak memory {peak:.1f} GiB"}


def measure_throughput(place: Place, model: str, phase: str, kernels: str) -> dict[str, Any]:
    """Return speed and memory of a trainer with its kernels."""
    return measure_option(place, phase, model, {} if kernels == "none" else {"kernels": kernels})


def run_sanitizer(place: Place, tool: str) -> dict[str, Any]:
    """Run every kernel with small shapes under a tool of NVIDIA's compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        raise Skipped("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run(
        [*command, "from bench.gpu.tasks import run_small_kernels; run_small_kernels()"], env=environment, check=True
    )
    return {"summary": f"{tool} found no error"}


def run_small_kernels() -> None:
    """Run the forward and backward pass of every kernel once, with small shapes."""
    for case in build_cases(torch.device("cuda", 0), set(CASE_BUILDERS), ["124M"], is_small=True):
        case.contenders["ours"]() if case.kernel == "adamw" else tune.compute_results(case, "ours")


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "machine": describe_machine,
    "check": check_kernel,
    "curve": compare_curves,
    "resume": check_resume,
    "times": time_kernel,
    "throughput": measure_throughput,
    "tuning": tune_tiles,
    "options": measure_option,
    "sanitizer": run_sanitizer,
}
