"""Read the hardware's name and driver, its peak FLOP/s, the peak memory of the process, and the commit of the code."""

import contextlib
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import PACKAGE

# Peak FLOP/s of dense bfloat16 (T4 and V100: float16), without sparsity, from the data sheets of the manufacturers.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}


def find_peak_flops(run: Runtime) -> float | None:
    """Return the peak FLOP/s of this rank's device for the run's dtype; None if the device is not in the table."""
    if run.device.type != "cuda" or run.dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(run.device)
    if " MIG " in name:  # a part of a GPU
        return None
    slower_variants = "(?! (Laptop|D\\b))"  # parts with the same name, but another peak
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b{slower_variants}", name)), None)


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of torch's allocator on a GPU, else the maximum resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_hardware(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def read_gpu_driver() -> str | None:
    """Return the version of NVIDIA's driver as the kernel module reports it; None without one."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


def read_environment() -> dict[str, str]:
    """Return the environment variables that change how torch, CUDA, NCCL, OpenMP and glibc work."""
    prefixes = ("NCCL_", "CUDA_", "PYTORCH_", "TORCH_", "TRITON_", "GLOO_", "OMP_", "GLIBC_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def read_git_commit() -> str | None:
    """Return the git commit of this code; None without git or outside of a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(PACKAGE), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return None
