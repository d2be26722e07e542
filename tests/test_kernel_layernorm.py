"""LayerNorm kernels, interpreted, against plain torch in fp64."""

import pytest
import torch

from phase2_triton.kernels import layernorm
from phase2_triton.kernels.core import KernelError
from tests.kernels import assert_as_exact_as_torch, fixed_normal, gap, guard_bands


def inputs(M, N, dtype=torch.float32, bias=True):
    x, branch = (fixed_normal((M, N), seed).to(dtype).requires_grad_() for seed in (1, 2))
    weight, b = (fixed_normal((N,), seed).to(dtype).requires_grad_() for seed in (3, 4))
    return (x, branch, weight, b) if bias else (x, branch, weight)


def plain_add(x, branch, weight, bias=None):
    total = x + branch
    return total, torch.nn.functional.layer_norm(total, weight.shape, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "N", "bias"), [(1, 769, True), (33, 1023, False), (129, 1600, True), (7, 1, True)])
def test_add_layer_norm_is_as_exact_as_torch(M, N, bias, dtype):
    """Results and gradients, at ragged widths and odd numbers of rows, with and without bias."""
    assert_as_exact_as_torch(layernorm.add_layer_norm, plain_add, inputs(M, N, dtype, bias))
