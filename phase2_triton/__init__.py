"""Phase 2: GPT-2 training with Triton kernels.

Importing this package sets two environment variables, because Triton reads them only once, when it is first imported:

- TRITON_INTERPRET=1 where there is no GPU: Triton's interpreter then runs the kernels on the CPU.
- TRITON_DEFAULT_FP_FUSION=1: a multiplication and an addition become one fused instruction. The measured errors and
  instruction counts of the kernels depend on this. Triton 3.10 changes the default.
"""

import os

import torch

# Call device_count(), not is_available(): the latter initializes CUDA, and processes forked later could not use it.
if not torch.cuda.device_count():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
