"""Triton is told two things before it is first imported, which is what importing this package comes before.

Where there is no GPU, its interpreter runs the kernels. Multiplication and addition are fused, as the kernels' errors
and instruction counts were measured; Triton 3.10 changes its default.
"""

import os

import torch

if not torch.cuda.device_count():  # is_available() would start CUDA, which processes forked from this one could not use
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
