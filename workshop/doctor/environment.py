"""Check .venv: packages, PyTorch, GPUs, Triton, real ranks and settings.

.venv/bin/python -m workshop.doctor.environment     # `make doctor` starts it; it prints one check per line, as JSON
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions

import torch
from torch.nn import functional as F

from bench.checks import Check
from bench.preflight.node import check_gpus, check_settings
from bench.preflight.ranks import check_collectives
from nanoGPT.distributed.runtime import create_runtime
from operate.ranks import RankFailed, run_on_ranks

RANKS, RANK_SECONDS = 2, 60.0
SHOWN = ("torch", "triton", "numpy", "jupyterlab")


def check_all() -> Iterator[Check]:
    """Yield all checks."""
    yield check_packages()
    yield (result := check_torch())
    if torch.cuda.is_available() and result.result != "fail":
        yield from check_gpus(torch.cuda.device_count())
    yield check_triton()
    yield check_ranks()
    yield from check_settings(torch.cuda.is_available(), is_multi_node=False)


def check_packages() -> Check:
    """Ask pip whether every package has what it needs, and report the versions of the most important ones."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    if done.returncode:
        return Check("packages", "warn", "; ".join(done.stdout.splitlines()), "delete .venv and run make setup")
    installed = {each.name: each.version for each in distributions()}
    return Check("packages", "pass", ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed))


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
            remedy = (
                f"the driver does not support CUDA {torch.version.cuda}: update it, or delete .venv and run make setup "
                "TORCH=auto, which selects a build for the driver"
            )
        return Check("PyTorch", "warn", f"{finding}; the GPU is not used", remedy)
    return Check("PyTorch", "pass", finding)


def check_triton() -> Check:
    """Run the LayerNorm kernel of phase 2, compiled on a GPU or interpreted on a CPU, and compare it with torch."""
    if importlib.util.find_spec("triton") is None:
        return Check("Triton", "skip", "not installed: phase 2 and notebook 4 need Linux")
    from phase2_triton.kernels.core import is_interpreted
    from phase2_triton.kernels.layernorm import layer_norm

    device, mode = ("cpu", "interpreted") if is_interpreted() else ("cuda", "compiled")
    try:
        x, weight = torch.randn(3, 40, device=device), torch.ones(40, device=device)
        torch.testing.assert_close(layer_norm(x, weight), F.layer_norm(x, (40,)), rtol=0.0, atol=1e-5)
    except Exception as failure:  # Triton raises many kinds of errors
        finding = f"a kernel ({mode}) failed: {str(failure).strip().partition(chr(10))[0]}"
        return Check("Triton", "fail", finding, "run make test ARGS=tests/phase2")
    return Check("Triton", "pass", f"kernels run {mode}, with the results of torch")


def check_collectives_on_rank() -> Check:
    """Check the results of collectives on this rank. Collective."""
    return check_collectives(create_runtime("cpu", "float32"))


def check_ranks() -> Check:
    """Start two ranks, which check the results of their collectives."""
    try:
        result = run_on_ranks(check_collectives_on_rank, RANKS, timeout=RANK_SECONDS, show=False)[0]
    except RankFailed as failure:
        remedy = "a firewall or a VPN may block local connections: allow them on the loopback interface"
        return Check("ranks", "fail", str(failure).strip().splitlines()[-1], remedy)
    return dataclasses.replace(result, subject="ranks")


if __name__ == "__main__":
    for check in check_all():
        print(json.dumps(dataclasses.asdict(check)), flush=True)
