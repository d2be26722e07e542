"""Phase 2: GPT-2 training with Triton kernels.

Importing this package sets two environment variables, because Triton reads them only once, when it is first imported:

- TRITON_INTERPRET=1 where there is no GPU: Triton's interpreter then runs the kernels on the CPU.
- TRITON_DEFAULT_FP_FUSION=1: a multiplication and an addition become one fused instruction. The measured errors and
  instruction counts of the kernels depend on this. Triton 3.10 changes the default.
"""

import os

import torch

# is_available() would initialize CUDA, and processes forked later could not use it. So does device_count() with a MIG
# slice, which is part of a GPU.
if not os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") and not torch.cuda.device_count():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
