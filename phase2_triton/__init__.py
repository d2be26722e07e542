"""Where there is no GPU, Triton's interpreter runs the kernels; Triton must be told before it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
