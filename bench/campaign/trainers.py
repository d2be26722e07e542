"""Stages that train: compiled steps against eager ones, throughput, options, evaluation, nanoGPT and profiles.

Every run is a separate process, so that its peak memory does not include other runs, and a crash ends nothing else.
"""

import contextlib
import functools
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.campaign.checks import find_data
from bench.campaign.settings import Settings, Skipped
from bench.campaign.tiles import choose_tiles, use_tuned_table
from bench.matrix.cells import make_config
from bench.plan.models import MODELS
from bench.trainer import against_nanogpt
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.errors import GPU_OUT_OF_MEMORY_MESSAGES
from nanoGPT.files import write_atomically
from nanoGPT.train_config import TrainConfig
from workshop.phases import find_package
from workshop.ranks import RankFailed, run_on_ranks

WARMUP = 5  # steps that are not timed
TINY: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 2, "dtype": "float32"}
TOLERANCE = 0.02  # largest difference of two loss curves over five steps in bfloat16


def run_on_one_rank(settings: Settings, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    """Call a function on one rank, and return its result. The rank writes its errors into the log of the part.

    Raises:
        RankFailed: the rank failed.
    """
    values = (settings.log, function, *arguments)
    (result,) = run_on_ranks(call_with_log, 1, *values, timeout=timeout, device=settings.device.type)
    return result


def call_with_log(log: Path | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on this rank, with the log as its standard error.

    The ranks are forked from a server process, whose standard error stays the log of the part that started it.
    """
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    return function(*arguments)


def train_without_saving(package: str, config: TrainConfig, settings: Settings, tiles: str | None) -> None:
    """Train on this rank with committed or tuned tile sizes. Save no checkpoint, and evaluate nothing.

    An evaluation would compile the model a second time, for inference. A dry run traces a compiled model, but generates
    no code for it: that takes a minute for each run on a CPU.
    """
    backend = "aot_eager" if settings.dry_run else "inductor"
    trainer = importlib.import_module(f"{package}.train")
    with (
        use_tuned_table(settings) if tiles == "tuned" else contextlib.nullcontext(),
        mock.patch.object(CheckpointDirectory, "save"),
        mock.patch.object(trainer, "evaluate", return_value=(0.0, None)),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)),
    ):
        trainer.train(config)


def run_trainer(settings: Settings, phase: str, model: str, **fields: Any) -> dict[str, Any]:
    """Train GPT-2 of a size on one GPU, and return a row as `bench.trainer.throughput` does, with the losses.

    Raises:
        ModuleNotFoundError: the trainer needs a package that is missing.
        RankFailed: the run failed.
    """
    importlib.import_module(f"{find_package(phase)}.train")
    out_dir = settings.folder / "run"
    shutil.rmtree(out_dir, ignore_errors=True)
    out_dir.mkdir()
    shape: dict[str, Any] = dict(zip(("n_layer", "n_head", "n_embd"), MODELS[model], strict=True))
    shape |= {"block_size": 1024, "vocab_size": 50304, "dtype": "bfloat16"}
    shape |= {"learning_rate": 6e-4, "min_lr": 6e-5, "warmup_iters": 5}  # the same in every phase
    values = {**shape, "ledger": False, "eval_interval": 10**6, "eval_iters": 1, "gradient_accumulation_steps": 4}
    values |= {"max_iters": WARMUP + 15, "dataset": find_data(settings), "device": settings.device.type, **fields}
    if settings.dry_run:
        values |= {
            **TINY,
            "vocab_size": None,
            "gradient_accumulation_steps": 2,
            "max_iters": min(values["max_iters"], 7),
        }
    config = make_config(phase, out_dir, **values)
    start = time.perf_counter()
    kernels = getattr(config, "kernels", "none")
    tiles = choose_tiles(settings, kernels)
    arguments = (find_package(phase), config, settings, tiles)
    run_on_one_rank(settings, train_without_saving, *arguments, timeout=900)
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["loss"] is not None]
    timed = [line for line in steps if line["step"] >= WARMUP]
    shutil.rmtree(out_dir)
    return {
        "size": model,
        "phase": phase,
        "ranks": 1,
        "dataset": Path(config.dataset).name,
        "compiled": config.compile,
        "kernels": kernels,
        "tiles": tiles,
        "batch_size": config.batch_size,
        "failed": None,
        "step_ms": [line["step_ms"] for line in timed],
        "tokens_per_second": [line["tokens_per_second"] for line in timed],
        "mfu": statistics.median(line["mfu"] for line in timed) if timed and timed[0]["mfu"] else None,
        "peak_bytes": max(line["peak_memory_bytes"] for line in steps),
        "losses": [line["loss"] for line in steps],
        "first_step_ms": steps[0]["step_ms"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def choose_batch_size(settings: Settings, model: str) -> int:
    """Return the sequences per micro-batch that fit into this GPU without any saving of memory."""
    if settings.dry_run:
        return int(TINY["batch_size"])
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    large, medium, small = {"gpt2": (32, 12, 4), "gpt2-large": (8, 4, 1), "gpt2-xl": (4, 1, 1)}[model]
    return large if gib > 70 else medium if gib > 38 else small


def read_baseline(settings: Settings, **fields: Any) -> dict[str, Any]:
    """Return the row of the eager baseline, which trains once for the campaign."""
    file = settings.folder / "baseline.json"
    if not file.exists():
        row = run_trainer(settings, "baseline", "gpt2", compile=False, **fields)
        write_atomically(file, json.dumps(row).encode())
    baseline: dict[str, Any] = json.loads(file.read_text())
    return baseline


def compare_compiled(settings: Settings, phase: str, kernels: str) -> dict[str, Any]:
    """Compare five steps of GPT-2 124M, compiled and eager, with the eager baseline.

    The batch is that of `measure_throughput`, so that torch finds the compiled graph in its cache there.
    """
    options = {} if kernels == "none" else {"kernels": kernels}
    batch_size = choose_batch_size(settings, "gpt2")
    common = {"max_iters": 5, "batch_size": batch_size, "gradient_accumulation_steps": 1}
    baseline = read_baseline(settings, **common)
    eager = run_trainer(settings, phase, "gpt2", compile=False, **common, **options)
    compiled = run_trainer(settings, phase, "gpt2", compile=True, **common, **options)
    differences = {
        name: max(abs(a - b) for a, b in zip(baseline["losses"], run["losses"], strict=True))
        for name, run in (("eager", eager), ("compiled", compiled))
    }
    problems = [f"{name}: losses differ by {gap:.1e}" for name, gap in differences.items() if not gap <= TOLERANCE]
    runs = {"baseline": baseline, "eager": eager, "compiled": compiled}
    return {"phase": phase, "kernels": kernels, "max_loss_difference": differences, "runs": runs, "problems": problems}


def measure_throughput(settings: Settings, model: str, phase: str, kernels: str, is_compiled: bool) -> dict[str, Any]:
    """Return tokens per second and peak memory of one trainer."""
    options = {} if kernels == "none" else {"kernels": kernels}
    batch_size = choose_batch_size(settings, model)
    row = {"size": model, "phase": phase, "ranks": 1, "compiled": is_compiled, "kernels": kernels}
    row["tiles"] = choose_tiles(settings, kernels)
    try:
        return run_trainer(settings, phase, model, compile=is_compiled, batch_size=batch_size, **options)
    except RankFailed as failure:
        if not is_out_of_memory(failure):
            raise
        return {**row, "batch_size": batch_size, "failed": "out of memory"}


def is_out_of_memory(failure: RankFailed) -> bool:
    """Return whether a run failed because the memory of the GPU did not suffice."""
    return any(words in str(failure) for words in ("out of memory", *GPU_OUT_OF_MEMORY_MESSAGES))


def compare_fsdp(settings: Settings) -> dict[str, Any]:
    """Compare the step of phase 3 on one GPU with the baseline, compiled, in three alternating rounds."""
    common = {"compile": True, "batch_size": choose_batch_size(settings, "gpt2")}
    rounds = 1 if settings.dry_run else 3
    runs = [
        (run_trainer(settings, phase, "gpt2", **common), phase)
        for _ in range(rounds)
        for phase in ("baseline", "phase3")
    ]
    step_ms = {
        name: [statistics.median(run["step_ms"]) for run, phase in runs if phase == name] for _, name in runs[:2]
    }
    ratio = statistics.median(step_ms["phase3"]) / statistics.median(step_ms["baseline"])
    return {"step_ms": step_ms, "ratio": ratio}


def measure_option(settings: Settings, phase: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return speed and memory of a compiled trainer with an option."""
    run = run_trainer(settings, phase, model, compile=True, batch_size=choose_batch_size(settings, model), **options)
    return {"options": options, **run}


def time_evaluation(package: str, config: Any) -> float:
    """Evaluate a checkpoint as `evaluate.py` does, and return the seconds after a first evaluation as a warm-up."""
    program = importlib.import_module(f"{package}.evaluate")
    evaluate = program.evaluate
    seconds = []

    def evaluate_twice(model: Any, data: Any, config: Any, run: Any) -> tuple[float, float | None]:
        evaluate(model, data, replace(config, eval_iters=2), run)
        start = time.perf_counter()
        result: tuple[float, float | None] = evaluate(model, data, config, run)  # reads the loss: waits for the GPU
        seconds.append(time.perf_counter() - start)
        return result

    with mock.patch.object(program, "evaluate", evaluate_twice):
        program.evaluate_weights(config)
    return seconds[0]


def measure_evaluation(settings: Settings) -> dict[str, Any]:
    """Return the tokens per second of `phase3_fsdp/evaluate.py`, which also counts the correct tokens, for GPT-2."""
    folder = settings.folder / "evaluated"
    package = find_package("phase3")
    shutil.rmtree(folder, ignore_errors=True)
    fields: dict[str, Any] = dict(zip(("n_layer", "n_head", "n_embd"), MODELS["gpt2"], strict=True))
    fields |= {"block_size": 1024, "dtype": "bfloat16", "batch_size": choose_batch_size(settings, "gpt2")}
    fields |= {"dataset": find_data(settings), "device": settings.device.type, "ledger": False}
    fields |= {"max_iters": 1, "eval_iters": 1, "gradient_accumulation_steps": 1}
    if settings.dry_run:
        fields |= TINY
    config = make_config("phase3", folder, **fields)
    run_on_one_rank(settings, save_checkpoint, package, config, timeout=300)
    values = {**vars(config), "init_from": "resume", "eval_iters": 2 if settings.dry_run else 50}
    evaluation = importlib.import_module(f"{package}.evaluate").EvaluateConfig(**values)
    seconds = run_on_one_rank(settings, time_evaluation, package, evaluation, timeout=300)
    shutil.rmtree(folder)
    tokens = evaluation.eval_iters * config.batch_size * config.block_size
    name = Path(config.dataset).name
    return {"dataset": name, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def save_checkpoint(package: str, config: TrainConfig) -> None:
    """Train one step on this rank, and save a checkpoint."""
    importlib.import_module(f"{package}.train").train(config)


def compare_with_nanogpt(settings: Settings, phase: str) -> dict[str, Any]:
    """Run nanoGPT next to a compiled trainer: see `bench.trainer.against_nanogpt`.

    Raises:
        Skipped: no checkout of nanoGPT was named.
    """
    if settings.nanogpt is None:
        raise Skipped(f"needs --nanogpt=DIR with a checkout of nanoGPT: {against_nanogpt.HOW_TO_GET_ONE}")
    for module in ("nanoGPT.launch", f"{find_package(phase)}.train"):
        importlib.import_module(module)  # if a package is missing, the part is skipped
    options = against_nanogpt.Options(
        nanogpt=settings.nanogpt,
        phase=phase,
        rounds=1 if settings.dry_run else 2,
        steps=7 if settings.dry_run else 25,
        batch_size=choose_batch_size(settings, "gpt2"),
        compile=not settings.dry_run,
        dataset=find_data(settings),
        device=settings.device.type,
    )
    return {"tiles": "committed" if phase == "phase2" else None, **against_nanogpt.compare(options)}


def profile_phase(settings: Settings, phase: str) -> dict[str, Any]:
    """Profile two steps of a phase, and keep the pictures and the table of operators, without the large traces."""
    import matplotlib  # noqa: F401  the profiler draws with it at its end

    import bench.trainer.profile_step  # noqa: F401  if a package is missing, the part is skipped

    importlib.import_module(f"{find_package(phase)}.train")
    fields: dict[str, Any] = {"dataset": find_data(settings), "batch_size": 8, "gradient_accumulation_steps": 2}
    if settings.dry_run:
        fields |= {**TINY, "device": "cpu"}
    command = [sys.executable, "-m", "bench.trainer.profile_step", phase, "1"]
    command += [f"--{name}={value}" for name, value in fields.items()]
    done = subprocess.run(command, cwd=settings.folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    folder = settings.folder / "out" / "profile" / f"{phase}-1"
    kept = settings.folder / f"profile-{phase}"
    kept.mkdir(exist_ok=True)
    for name in ("timeline.png", "memory.png", "operators.txt"):
        shutil.copy(folder / name, kept / name)
    shutil.rmtree(Path(settings.folder) / "out")
    tiles = "committed" if phase == "phase2" else None
    return {"folder": kept.name, "summary": done.stdout.strip().splitlines()[-3:], "tiles": tiles}
