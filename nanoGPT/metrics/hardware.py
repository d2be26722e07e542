"""The machine that a run uses: its name, its peak FLOP/s, its peak memory, and the commit of the code."""

import contextlib
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import torch

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import PACKAGE

# Dense bfloat16 (T4: float16) peaks in FLOP/s, from the makers' data sheets, without sparsity.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 6000 Ada": 364e12,
    "RTX 4090": 165e12,
    "T4": 65e12,
}


def peak_flops(run: Runtime) -> float | None:
    """This rank's device peak for the run's dtype, or None where the table does not know it."""
    if run.device.type != "cuda" or run.dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(run.device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The allocator's peak on a GPU; the process's largest resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def hardware(device: torch.device) -> str:
    """The processor or GPU by name, for people and file names."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def git_commit() -> str | None:
    """Return the commit of this code; None without git, or outside of a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(PACKAGE), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return None
