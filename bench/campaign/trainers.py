"""Stages that train: compiled steps against eager ones, throughput, memory, the planner's prediction, and profiles.

Every run is a process of its own, so that its peak memory is its own and a crash ends nothing else.
"""

import functools
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.campaign.checks import find_data
from bench.campaign.settings import Settings, Skipped
from bench.campaign.timings import use_tuned_table
from bench.matrix.cells import make_config
from bench.plan.plan import MODELS, start_workers
from bench.plan.planner import Job, Planner
from bench.plan.speed import GPUS
from bench.trainer import against_nanogpt
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from workshop.phases import find_package
from workshop.ranks import RankFailed, run_on_ranks

WARMUP = 5  # steps that are not timed
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 2, "dtype": "float32"}
TOLERANCE = 0.02  # largest difference of two loss curves over five steps in bfloat16


def train_without_saving(package: str, config: TrainConfig, settings: Settings) -> None:
    """Train on this rank with the tuned tile sizes, and save no checkpoint.

    A dry run traces a compiled model, but generates no code for it: that takes a minute for each run on a CPU.
    """
    backend = "aot_eager" if settings.dry_run else "inductor"
    with (
        use_tuned_table(settings),
        mock.patch.object(CheckpointDirectory, "save"),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)),
    ):
        __import__(f"{package}.train", fromlist=["train"]).train(config)


def run_trainer(settings: Settings, phase: str, model: str, **fields: Any) -> dict[str, Any]:
    """Train GPT-2 of a size on one GPU, and return a row as `bench.trainer.throughput` does, with the losses.

    Raises:
        RankFailed: the run failed.
    """
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
    config, start = make_config(phase, out_dir, **values), time.perf_counter()
    arguments = (find_package(phase), config, settings)
    run_on_ranks(train_without_saving, 1, *arguments, timeout=900, device=settings.device.type)
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["loss"] is not None]
    timed = [line for line in steps if line["step"] >= WARMUP]
    shutil.rmtree(out_dir)
    return {
        "size": model,
        "phase": phase,
        "ranks": 1,
        "compiled": config.compile,
        "kernels": getattr(config, "kernels", "none"),
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
        return TINY["batch_size"]  # type: ignore[return-value]
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    large, medium, small = {"gpt2": (32, 12, 4), "gpt2-large": (8, 4, 1), "gpt2-xl": (4, 1, 1)}[model]
    return large if gib > 70 else medium if gib > 38 else small


def compare_compiled(settings: Settings, phase: str, kernels: str) -> dict[str, Any]:
    """Compare five steps of GPT-2 124M, compiled and eager, with the eager baseline."""
    options = {} if kernels == "none" else {"kernels": kernels}
    common = {"max_iters": 5, "batch_size": 4, "gradient_accumulation_steps": 1}
    baseline = run_trainer(settings, "baseline", "gpt2", compile=False, **common)
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
    try:
        return run_trainer(settings, phase, model, compile=is_compiled, batch_size=batch_size, **options)
    except RankFailed as failure:
        if "out of memory" not in str(failure):
            raise
        return {**row, "batch_size": batch_size, "failed": "out of memory"}


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


def compare_plan(settings: Settings, phase: str) -> dict[str, Any]:
    """Compare the planner's peak memory of an eager step with that of torch's allocator."""
    batch_size = choose_batch_size(settings, "gpt2")
    shape = GPTConfig(*MODELS["gpt2"], 1024, False, 50304)
    if settings.dry_run:
        shape = GPTConfig(TINY["n_layer"], TINY["n_head"], TINY["n_embd"], TINY["block_size"], False, 64)  # type: ignore[arg-type]
    with start_workers() as pool:
        predicted = Planner(Job(shape, GPUS["h100"], 1), pool).peak_bytes((phase, {}), batch_size)
    run = run_trainer(settings, phase, "gpt2", compile=False, batch_size=batch_size, gradient_accumulation_steps=1)
    measured = None if settings.dry_run else run["peak_bytes"]  # on a CPU, the process's memory says little
    return {"phase": phase, "batch_size": batch_size, "predicted_bytes": predicted, "measured_bytes": measured}


def measure_memory_option(settings: Settings, **options: Any) -> dict[str, Any]:
    """Return speed and memory of GPT-2 774M in phase 3 with an option that saves memory."""
    batch_size = choose_batch_size(settings, "gpt2-large")
    run = run_trainer(settings, "phase3", "gpt2-large", compile=True, batch_size=batch_size, **options)
    return {"options": options, **run}


def measure_activation_checkpointing(settings: Settings, value: str) -> dict[str, Any]:
    return measure_memory_option(settings, fsdp_activation_checkpointing=value)


def measure_cpu_offload(settings: Settings) -> dict[str, Any]:
    return measure_memory_option(settings, fsdp_activation_checkpointing="full", fsdp_cpu_offload=True)


def train_large_model(settings: Settings, model: str) -> dict[str, Any]:
    """Try three steps of a large GPT with every saving of memory except CPU offload, one sequence per micro-batch."""
    options = {"fsdp_activation_checkpointing": "full", "kernels": "loss"}
    fields = {"max_iters": 3, "batch_size": 1, "gradient_accumulation_steps": 1, "compile": False}
    try:
        run = run_trainer(settings, "phase3", model, **fields, **options)
    except RankFailed as failure:
        if "out of memory" not in str(failure):
            raise
        return {"model": model, "fits": False}
    return {"model": model, "fits": True, "peak_bytes": run["peak_bytes"], "losses": run["losses"]}


def compare_with_nanogpt(settings: Settings, phase: str) -> dict[str, Any]:
    """Run nanoGPT beside a compiled trainer: see `bench.trainer.against_nanogpt`.

    Raises:
        Skipped: no checkout of nanoGPT was named.
    """
    if settings.nanogpt is None:
        raise Skipped(f"needs --nanogpt=DIR with a checkout of nanoGPT: {against_nanogpt.HOW_TO_GET_ONE}")
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
    return against_nanogpt.compare(options)


def profile_phase(settings: Settings, phase: str) -> dict[str, Any]:
    """Profile two steps of a phase, and keep the pictures and the table of operators, without the large traces."""
    import matplotlib  # noqa: F401  the profiler draws with it at its end

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
    return {"folder": kept.name, "summary": done.stdout.strip().splitlines()[-3:]}
