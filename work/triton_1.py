"""Exercise triton.1: Write LayerNorm with one row per program. 20 minutes, medium.

A program loads one row of N elements into a tile of BLOCK lanes, a power of two. It computes y, and
stores the mean and rstd of the row for the backward pass: x is read once, and y is written once.
Compute in fp32.

Check your answer with `make check N=triton.1`. `make hint N=triton.1 LEVEL=1` gives the first of
three hints, and `make solution N=triton.1` prints the repository's own code.

During the check, your code replaces phase2_triton.kernels.layernorm.one_row_kernel.
"""

from phase2_triton.kernels.core import jit, tl, to_fp32


@jit
def one_row_kernel(x, weight, bias, y, mean, rstd, N, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Step 1 of the forward: one row per program. A short row gives a program too little work."""
    raise NotImplementedError("your code")
