"""The peak FLOP/s of GPUs, and the model FLOP utilization (MFU) of a run (Chowdhery et al. 2022)."""

import re

import torch

from nanoGPT.distributed.runtime import Runtime

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


def find_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device for products of this dtype; None if the device is not in the table."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    if " MIG " in name:  # a part of a GPU
        return None
    slower_variants = "(?! (Laptop|D\\b))"  # parts with the same name, but another peak
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b{slower_variants}", name)), None)


def compute_mfu(tokens_per_second: float, flops_per_token: int, run: Runtime) -> float | None:
    """Return the fraction of the peak FLOP/s of all ranks that the model uses; None if the peak is not known.

    Args:
        tokens_per_second: of all ranks together.
        flops_per_token: of forward and backward.
        run: this rank's Runtime.
    """
    peak = find_peak_flops(run.device, run.dtype)
    return tokens_per_second * flops_per_token / run.world_size / peak if peak else None
