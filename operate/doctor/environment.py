"""Check .venv: packages, PyTorch, GPUs, NCCL, Triton, real ranks, settings and Jupyter.

.venv/bin/python -m operate.doctor.environment     # `make doctor` starts it; it prints one check per line, as JSON
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distributions, version

import torch
import torch.distributed as dist
from torch.nn import functional as F

from operate.checks import Check
from operate.preflight.node import check_gpus, check_settings
from workshop.imports import ROOT
from workshop.ranks import RankFailed, collect, start_ranks

RANKS, RANK_SECONDS = 2, 60.0
SHOWN_PACKAGES = ("torch", "triton", "numpy", "tyro")


def check_all() -> Iterator[Check]:
    """Yield all checks. The ranks start first, because their server imports torch while the other checks run."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        begin = time.monotonic()
        started = start_ranks(sum_over_ranks, RANKS, folder=folder)
        yield check_packages()
        yield (result := check_torch())
        if torch.cuda.is_available() and result.result != "fail":
            yield from check_gpus(torch.cuda.device_count())
        yield check_triton()
        yield check_ranks(started, begin)
        yield from check_settings(torch.cuda.is_available(), is_multi_node=False)
        yield check_jupyter()


def check_packages() -> Check:
    """Compare the installed versions with constraints.txt."""
    installed = {each.name: each.version.partition("+")[0] for each in distributions()}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    different = [
        f"{name} {installed[name]} instead of {pin}" for name, pin in pins.items() if installed.get(name, pin) != pin
    ]
    if different:
        remedy = "the tests ran with other versions: if something fails, delete .venv and run make setup"
        return Check("packages", "warn", "; ".join(different), remedy)
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN_PACKAGES if name in installed)
    return Check("packages", "pass", f"{shown}: the versions of constraints.txt")


def check_torch() -> Check:
    """Multiply two matrices on the device of the trainers, and check that PyTorch can use the GPU of the machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        a = torch.arange(16.0, device=device).view(4, 4)
    except RuntimeError as failure:
        reason, remedy = str(failure).splitlines()[0], "run nvidia-smi: the GPU may be full, reserved or faulty"
        return Check("PyTorch", "fail", f"{device} cannot be used: {reason}", remedy)
    if (a @ a.T).diagonal().tolist() != a.square().sum(1).tolist():
        return Check("PyTorch", "fail", f"a matrix product on {device} is wrong", "delete .venv and run make setup")
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device == "cuda" else ""
    finding = f"matrix products on {device}, {torch.get_num_threads()} threads{nccl}"
    if device == "cpu" and shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        if torch.version.cuda is None:
            remedy = "this is the CPU build: to use the GPU, delete .venv and run make setup without TORCH=cpu"
        else:
            remedy = f"the driver does not support CUDA {torch.version.cuda}: update the driver"
        return Check("PyTorch", "warn", f"{finding}; the GPU is not used", remedy)
    return Check("PyTorch", "pass", finding)


def check_triton() -> Check:
    """Run the LayerNorm kernel of phase 2, compiled on a GPU or interpreted on a CPU, and compare it with torch."""
    if importlib.util.find_spec("triton") is None:
        return Check("Triton", "skip", "not installed: phase 2 and notebook 4 need Linux")
    from phase2_triton.kernels.core import is_interpreted
    from phase2_triton.kernels.layernorm import layer_norm

    device = "cpu" if is_interpreted() else "cuda"
    x, weight = torch.randn(3, 40, device=device), torch.ones(40, device=device)
    try:
        error = (layer_norm(x, weight) - F.layer_norm(x, (40,))).abs().max().item()
    except Exception as failure:
        reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
        return Check("Triton", "fail", f"a kernel failed: {reason}", "read make check-ptx, or use TRITON_INTERPRET=1")
    mode = "interpreted" if is_interpreted() else "compiled"
    if not error < 1e-5:
        finding = f"a kernel has an error of {error:.1e} ({mode})"
        return Check("Triton", "fail", finding, "run make test ARGS=tests/phase2")
    return Check("Triton", "pass", f"kernels run {mode}, with the results of torch")


def sum_over_ranks() -> float:
    """Return the sum of the rank numbers, by an all-reduce. Collective."""
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def check_ranks(started: list, begin: float) -> Check:
    """Wait for the ranks, and check the result of their all-reduce.

    Args:
        started: the processes and connections of `start_ranks`.
        begin: when they were started, as `time.monotonic()`.
    """
    remedy = "a firewall or a VPN may block local connections: allow them on the loopback interface"
    try:
        sums = collect(started, RANK_SECONDS, show=False)
    except RankFailed as failure:
        return Check("ranks", "fail", str(failure).strip().splitlines()[-1], remedy)
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    if sums != [sum(range(RANKS))] * RANKS:
        return Check("ranks", "fail", f"an all-reduce over {RANKS} ranks returned {sums}", remedy)
    finding = f"{RANKS} ranks started and all-reduced with gloo in {time.monotonic() - begin:.1f} s"
    return Check("ranks", "pass", finding)


def check_jupyter() -> Check:
    """Check that Jupyter and its kernel are installed."""
    if not (importlib.util.find_spec("jupyterlab") and importlib.util.find_spec("ipykernel")):
        return Check("Jupyter", "skip", "not installed", "make jupyter installs and opens it")
    return Check("Jupyter", "pass", f"jupyterlab {version('jupyterlab')}, kernel: ipykernel {version('ipykernel')}")


if __name__ == "__main__":
    for check in check_all():
        print(json.dumps(dataclasses.asdict(check)), flush=True)
    sys.exit(0)
