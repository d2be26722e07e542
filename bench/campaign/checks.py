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
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.campaign.settings import Settings, Skipped
from bench.campaign.tiles import name_tiles
from bench.error_messages import split_message
from bench.kernels.cases import CASE_BUILDERS, Case, build_cases
from bench.kernels.kernels import Stopwatch
from bench.kernels.tune import compute_results
from bench.tables.records import describe_origin
from nanoGPT.distributed.algorithms import choose_attention, find_package_problem, use_algorithms
from nanoGPT.files import PACKAGE
from nanoGPT.prepare.directory import META, choose_token_dtype, write_meta, write_tokens
from nanoGPT.tokenizer import TokenizerIdentity, make_char_identity, make_gpt2_identity
from phase2_triton.kernels.adamw import TritonAdamW
from phase2_triton.kernels.core import is_interpreted

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

TEST_SECONDS = 60  # a test that takes longer has failed
SANITIZER_SECONDS, PYTEST_SECONDS = 180, 400  # below the limits at which the parts count as hanging
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
    commit = settings.commit or origin["git_commit"]
    return {"origin": {**origin, "versions": versions, "git_commit": commit}, "driver": driver}


def compare_attention_backends(settings: Settings) -> dict[str, Any]:
    """Return, for each backend of SDPA, the kernels that ran, the time of both passes, and the largest difference.

    The shape is that of GPT-2 124M: 16 sequences of 1,024 tokens, 12 heads of 64 channels. The difference is the one
    from the default backend, of the result and the gradients, as a fraction of their largest value. `auto` is what
    `--attention=auto` chooses. FlashAttention 3 has a row if auto can choose it, else the reason why it cannot.
    """
    device, dtype = settings.device, torch.float32 if settings.dry_run else torch.bfloat16
    shape = (1, 2, 32, 16) if settings.dry_run else (16, 12, 1024, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient, watch = torch.randn_like(q), Stopwatch(device)
    rows: list[dict[str, Any]] = []
    auto = choose_attention("auto", False, device, dtype, 0.0)
    contexts = {
        name: sdpa_kernel(backend) if backend else contextlib.nullcontext() for name, backend in BACKENDS.items()
    }
    if auto.is_flash_3:
        contexts["flash_3"] = use_algorithms(auto, is_deterministic=False)
    else:
        rows.append({"backend": "flash_3", "error": find_package_problem() or auto.reason})

    def run_both_passes() -> list[Tensor]:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [y, *torch.autograd.grad(y, (q, k, v), gradient)]

    expected = run_both_passes()
    for name, context in contexts.items():
        try:
            with context:
                difference = max(map(measure_difference, run_both_passes(), expected))
                kernels = list_kernels(run_both_passes, device)
                times = [watch.time(run_both_passes).device_ms for _ in range(20)]
            ms = statistics.median(times)
            rows.append({"backend": name, "kernels": kernels, "ms": ms, "max_difference": difference})
        except RuntimeError as error:  # this GPU or this version lacks the backend
            rows.append({"backend": name, "error": split_message(error)[0][:200]})
    return {"shape": shape, "auto": auto.reason, "rows": rows}


def measure_difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, as a fraction of the largest expected value."""
    return ((result - expected).abs().max() / expected.abs().max()).item()


def list_kernels(call: Callable[[], Any], device: torch.device) -> list[str]:
    """Return the names of the kernels that a call runs on the GPU; on a CPU those of torch's operators."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    where = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU  # CUDA's events also include calls of the host
    return sorted({event.name[:120] for event in profiler.events() if event.device_type == where})


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
        factor = 3 if case.kernel.startswith("attention") and i else 2
        rounding = max(torch.finfo(ours.dtype).eps, SUM_ROUNDING) * largest
        is_ok = error <= factor * torch_error + rounding  # False for NaN
        rows.append({"kernel": case.kernel, "shape": case.shape, "result": i, "error": error})
        rows[-1] |= {"torch_error": torch_error, "largest": largest, "is_ok": is_ok, "tiles": name_tiles()}
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
        rows[-1] |= {"torch_error": torch_error, "largest": largest, "is_ok": is_ok, "tiles": name_tiles()}
    return {"rows": rows, "problems": [describe_problem(row) for row in rows if not row["is_ok"]]}


def run_small_kernels(device: str) -> None:
    """Run the forward and backward pass of every kernel once, with small shapes. The sanitizer watches this."""
    for case in build_cases(torch.device(device), set(CASE_BUILDERS), ["124M"], is_small=True):
        if case.kernel == "adamw":
            case.contenders["ours"]()
        else:
            compute_results(case, "ours")
    print("all kernels ran")


def run_with_log(
    command: list[str], log: Path, seconds: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command and write its output into a log, also if it does not end within the seconds.

    Returns:
        The exit code, or None if it did not end in time, and the output.
    """
    code = None
    with open(log, "w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
        code = subprocess.run(command, cwd=PACKAGE.parent, env=environment, timeout=seconds, **streams).returncode
    return code, log.read_text(errors="replace")


def describe_ending(code: int | None) -> str:
    return "did not end in time" if code is None else f"ended with {code}"


def run_sanitizer(settings: Settings, tool: str) -> dict[str, Any]:
    """Run every kernel under a tool of NVIDIA's compute-sanitizer: memcheck, or racecheck.

    Raises:
        Skipped: there is no compute-sanitizer, or it does not support this GPU or its virtual machine.
    """
    program = f"from bench.campaign.checks import run_small_kernels; run_small_kernels({str(settings.device)!r})"
    command = [sys.executable, "-c", program]
    if not settings.dry_run:
        sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if sanitizer is None:
            raise Skipped("compute-sanitizer is not installed")
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ending, output = run_with_log(command, settings.folder / "logs" / f"{tool}.txt", SANITIZER_SECONDS, environment)
    if "Device not supported" in output:
        raise Skipped("compute-sanitizer reports: Device not supported")
    has_run = "all kernels ran" in output
    problems = [] if ending == 0 and has_run else [f"{tool} {describe_ending(ending)}: {output[-300:]}"]
    return {"interpreted": is_interpreted(), "output": output[-2000:], "problems": problems}


def run_tests(settings: Settings, name: str, *paths: str) -> dict[str, Any]:
    """Run the tests with the marker `gpu` of some directories. In a dry run, run one file of them on the CPU.

    Raises:
        Skipped: pytest or a plugin is missing.
    """
    import hypothesis  # noqa: F401
    import pytest
    import pytest_timeout  # noqa: F401
    import xdist  # noqa: F401

    targets = ["tests/phase2/test_kernel_gelu.py"] if settings.dry_run else paths
    device = "cpu" if settings.dry_run else "cuda"
    workers = 0 if settings.dry_run else 2  # a test with offsets past 2^31 allocates 24 GiB
    command = [sys.executable, "-m", "pytest", f"--device={device}", "-m", "gpu and not slow", "-v", "--tb=short"]
    command += ["-n", str(workers), f"--timeout={TEST_SECONDS}", "--continue-on-collection-errors", *targets]
    log = settings.folder / "logs" / f"pytest-{name}.txt"
    ending, output = run_with_log(command, log, PYTEST_SECONDS)
    lines = output.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    is_known = ending in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    problems = failures[:20] or ([] if is_known else [f"pytest {describe_ending(ending)}", *lines[-3:]])
    return {"version": pytest.__version__, "summary": lines[-1] if lines else "", "problems": problems}


def find_data(settings: Settings) -> str:
    """Return the dataset of the trainers: Shakespeare as GPT-2 tokens if it is prepared, otherwise random tokens.

    The random tokens are those of GPT-2, so that the model has its full vocabulary. Like words of a text, the k-th most
    frequent token has a frequency proportional to 1/k. A dry run has 26 tokens, for a tiny model.
    """
    from nanoGPT.dataset import find_dataset
    from nanoGPT.errors import ConfigError

    if settings.dry_run:
        return write_random_tokens(settings.folder / "letters", make_char_identity(ascii_lowercase))
    with contextlib.suppress(ConfigError):
        find_dataset("shakespeare")
        return "shakespeare"
    return write_random_tokens(settings.folder / "random-gpt2", make_gpt2_identity())


def write_random_tokens(folder: Path, identity: TokenizerIdentity) -> str:
    """Write a dataset of random tokens, unless it is there, and return its path."""
    if not (folder / META).exists():
        folder.mkdir(exist_ok=True)
        generator, size = np.random.default_rng(0), identity["vocab_size"]
        frequencies = 1 / np.arange(1, size + 1)
        ids = generator.choice(size, 2_000_000, p=frequencies / frequencies.sum()).astype(choose_token_dtype(size))
        parts = {"train": ids[:-200_000], "val": ids[-200_000:]}
        splits = {name: [write_tokens(folder, f"{name}.bin", part)] for name, part in parts.items()}
        write_meta(folder, {"text": "random tokens, because no dataset is prepared"}, identity, splits)
    return str(folder)
