"""Stages that check: versions, the attention kernels of torch, every kernel against its reference, and the tests."""

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.campaign.settings import Settings, Skipped
from bench.kernels.cases import CASE_BUILDERS, Case, build_cases
from bench.kernels.kernels import Stopwatch
from bench.kernels.tune import compute_results
from bench.tables.records import describe_origin
from nanoGPT.files import PACKAGE
from phase2_triton.kernels.adamw import TritonAdamW
from phase2_triton.kernels.core import is_interpreted

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

SUM_ROUNDING = 16 * torch.finfo(torch.float32).eps  # of a sum over many rows in fp32, whose terms may cancel


def describe_machine(settings: Settings) -> dict[str, Any]:
    """Return the hardware, the versions and the commit, which every result of the campaign refers to."""
    import triton

    origin = describe_origin(settings.device)
    versions = {**origin["versions"], "triton": triton.__version__}
    if not settings.dry_run:
        versions |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = None
    if shutil.which("nvidia-smi") and not settings.dry_run:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {"origin": {**origin, "versions": versions}, "driver": driver}


def compare_attention_backends(settings: Settings) -> dict[str, Any]:
    """Return, for each backend of SDPA, the kernels that ran and the time of the forward and backward pass.

    The shape is that of GPT-2 124M: 16 sequences of 1,024 tokens, 12 heads of 64 channels.
    """
    device, dtype = settings.device, torch.float32 if settings.dry_run else torch.bfloat16
    shape = (1, 2, 32, 16) if settings.dry_run else (16, 12, 1024, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient, watch, rows = torch.randn_like(q), Stopwatch(device), []
    for name, backend in BACKENDS.items():
        context = sdpa_kernel(backend) if backend is not None else contextlib.nullcontext()

        def run_both_passes() -> None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, (q, k, v), gradient)

        try:
            with context:
                run_both_passes()
                kernels = list_kernels(run_both_passes, device)
                times = [watch.time(run_both_passes).device_ms for _ in range(20)]
            rows.append({"backend": name, "kernels": kernels, "ms": statistics.median(times)})
        except RuntimeError as error:  # this GPU or this version lacks the backend
            rows.append({"backend": name, "error": str(error).strip().splitlines()[0][:200]})
    return {"shape": shape, "rows": rows}


def list_kernels(call: Callable[[], Any], device: torch.device) -> list[str]:
    """Return the names of the kernels that a call runs on the GPU; on a CPU those of torch's operators."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return sorted({event.name[:120] for event in profiler.events()})


def check_kernel(settings: Settings, kernel: str) -> dict[str, Any]:
    """Compare a kernel with its reference at the shapes of GPT-2 124M and 1.5B, in bfloat16.

    The exact result is the reference in a more precise type. The error of the kernel may be twice the error of torch
    in bfloat16 (three times for gradients of attention), plus a rounding error of the largest value.
    """
    if kernel == "adamw":
        return check_adamw(settings)
    rows = []
    for case in build_cases(settings.device, {kernel}, ["124M", "1.5B"]):
        rows += compare_with_reference(case)
        del case
        if not settings.dry_run:
            torch.cuda.empty_cache()
    return {"rows": rows, "problems": [describe_problem(row) for row in rows if not row["is_ok"]]}


def compare_with_reference(case: Case) -> list[dict[str, Any]]:
    """Return a row for each result and gradient of a case: its error, the error of torch, and the largest value."""
    reference = next(name for name in case.contenders if name in ("eager", "sdpa"))
    exact_types = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.int64: torch.int64}
    exact_inputs = tuple(
        x.detach().to(exact_types[x.dtype]).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in case.inputs
    )
    exact = compute_results(dataclasses.replace(case, inputs=exact_inputs), reference)
    torch_results, results = compute_results(case, reference), compute_results(case, "ours")
    rows = []
    for i, (ours, theirs, true) in enumerate(zip(results, torch_results, exact, strict=True)):
        error, torch_error = ((x.to(true.dtype) - true).abs().max().item() for x in (ours, theirs))
        largest = true.abs().max().item()
        factor = 3 if case.kernel == "attention" and i else 2
        rounding = max(torch.finfo(ours.dtype).eps, SUM_ROUNDING) * largest
        is_ok = error <= factor * torch_error + rounding  # False for NaN
        rows.append({"kernel": case.kernel, "shape": case.shape, "result": i, "error": error})
        rows[-1] |= {"torch_error": torch_error, "largest": largest, "is_ok": is_ok}
    return rows


def describe_problem(row: dict[str, Any]) -> str:
    return f"{row['shape']}, result {row['result']}: error {row['error']:.1e}, of torch {row['torch_error']:.1e}"


def check_adamw(settings: Settings) -> dict[str, Any]:
    """Compare three steps of TritonAdamW with torch's AdamW in fp64, for a matrix, a vector and an odd size."""
    rows = []
    for shape in ((64, 96), (96,), (33, 7)) if settings.dry_run else ((50304, 768), (3072,), (1023, 77)):
        start = torch.randn(shape, device=settings.device)
        gradients = [torch.randn(shape, device=settings.device) for _ in range(3)]
        results = []
        for build, dtype in (
            (TritonAdamW, torch.float32),
            (torch.optim.AdamW, torch.float32),
            (torch.optim.AdamW, torch.float64),
        ):
            param = start.to(dtype, copy=True).requires_grad_()
            optimizer: torch.optim.Optimizer = build([param], lr=1e-2, weight_decay=0.1)
            for gradient in gradients:
                param.grad = gradient.to(dtype)
                optimizer.step()
            results.append(param.detach().double())
        ours, theirs, exact = results
        error, torch_error = ((x - exact).abs().max().item() for x in (ours, theirs))
        largest = exact.abs().max().item()
        is_ok = error <= 2 * torch_error + torch.finfo(torch.float32).eps * largest
        rows.append({"kernel": "adamw", "shape": " x ".join(map(str, shape)), "result": 0, "error": error})
        rows[-1] |= {"torch_error": torch_error, "largest": largest, "is_ok": is_ok}
    return {"rows": rows, "problems": [describe_problem(row) for row in rows if not row["is_ok"]]}


def run_small_kernels(device: str) -> None:
    """Run the forward and backward pass of every kernel once, with small shapes. The sanitizer watches this."""
    for case in build_cases(torch.device(device), set(CASE_BUILDERS), ["124M"], is_small=True):
        if case.kernel == "adamw":
            case.contenders["ours"]()
        else:
            compute_results(case, "ours")
    print("all kernels ran")


def run_sanitizer(settings: Settings, tool: str) -> dict[str, Any]:
    """Run every kernel under a tool of NVIDIA's compute-sanitizer: memcheck, or racecheck.

    Raises:
        Skipped: there is no compute-sanitizer.
    """
    program = f"from bench.campaign.checks import run_small_kernels; run_small_kernels({str(settings.device)!r})"
    command = [sys.executable, "-c", program]
    if not settings.dry_run:
        sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if sanitizer is None:
            raise Skipped("compute-sanitizer is not installed")
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=PACKAGE.parent, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    print(output)
    has_run = "all kernels ran" in output
    problems = [] if done.returncode == 0 and has_run else [f"{tool} ended with {done.returncode}: {output[-300:]}"]
    return {"interpreted": is_interpreted(), "output": output[-2000:], "problems": problems}


def run_tests(settings: Settings, path: str) -> dict[str, Any]:
    """Run the tests of a directory on the GPU. In a dry run, run the tests of one file on the CPU.

    Raises:
        Skipped: pytest or a plugin is missing.
    """
    import pytest
    import pytest_timeout  # noqa: F401
    import xdist  # noqa: F401

    target = "tests/phase2/test_kernel_gelu.py" if settings.dry_run else path
    device = "cpu" if settings.dry_run else "cuda"
    workers = 0 if settings.dry_run else min(4, os.cpu_count() or 1)
    command = [sys.executable, "-m", "pytest", f"--device={device}", "-v", "-n", str(workers), "--tb=short", target]
    log = settings.folder / "logs" / f"pytest-{path.replace('/', '-')}.txt"
    with open(log, "w") as file:
        done = subprocess.run(command, cwd=PACKAGE.parent, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text(errors="replace").splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    is_known = done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    problems = failures[:20] or ([] if is_known else lines[-3:])
    return {"version": pytest.__version__, "summary": lines[-1] if lines else "", "problems": problems}


def find_data(settings: Settings) -> str:
    """Return the dataset of the trainers: Shakespeare as GPT-2 tokens if it is prepared, otherwise random letters."""
    from nanoGPT.dataset import find_dataset
    from nanoGPT.errors import ConfigError
    from nanoGPT.prepare.text import write_text

    if not settings.dry_run:
        with contextlib.suppress(ConfigError):
            find_dataset("shakespeare")
            return "shakespeare"
    folder = Path(settings.folder) / "letters"
    if not (folder / "meta.json").exists():
        ids = torch.randint(26, (200_000,), generator=torch.Generator().manual_seed(0)).tolist()
        source = {"text": "random letters, because no dataset is prepared"}
        write_text(folder, "".join(chr(ord("a") + i) for i in ids), source, "char")
    return str(folder)
