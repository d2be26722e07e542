"""Tests of the LayerNorm kernels in the interpreter, against plain torch in fp64."""

import pytest
import torch

from phase2_triton.kernels import layernorm
from phase2_triton.kernels.core import is_interpreted
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    draw_normal,
    gap,
    guard,
    guard_bands,
)

pytestmark = pytest.mark.usefixtures("on_device")


def make_inputs(M, N, dtype=torch.float32, bias=True):
    x, branch = (draw_normal((M, N), seed).to(dtype).requires_grad_() for seed in (1, 2))
    weight, b = (draw_normal((N,), seed).to(dtype).requires_grad_() for seed in (3, 4))
    return (x, branch, weight, b) if bias else (x, branch, weight)


def add_layer_norm_reference(x, branch, weight, bias=None):
    total = x + branch
    return total, torch.nn.functional.layer_norm(total, weight.shape, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("M", "N", "bias"), [(1, 769, True), (33, 1023, False), (129, 1600, True), (7, 1, True), (0, 5, True)]
)
def test_add_layer_norm_is_as_exact_as_torch(M, N, bias, dtype):
    """Results and gradients are as exact as torch's, at ragged widths and odd numbers of rows, with and without bias.

    With a single column, the terms of dx cancel, but not exactly where a GPU fuses a multiplication and an addition.
    This rounding is multiplied by rstd, which is 1 / sqrt(1e-5) there.
    """
    inputs = make_inputs(M, N, dtype, bias)
    allowed = torch.finfo(torch.float32).eps * 1e-5**-0.5 if N == 1 and not is_interpreted() else 0.0
    assert_as_exact_as_torch(layernorm.add_layer_norm, add_layer_norm_reference, inputs, allowed=allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "N", "bias"), [(3, 1023, True), (65, 769, False)])
def test_layer_norm_is_as_exact_as_torch(M, N, bias, dtype):
    """Without a residual branch, results and gradients are also as exact as torch's."""
    x, _, *params = make_inputs(M, N, dtype, bias)

    def plain(x, weight, bias=None):
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)

    assert_as_exact_as_torch(layernorm.layer_norm, plain, (x, *params))


def test_rows_far_from_zero_are_as_exact_as_torch():
    """If the mean is 10,000 times the standard deviation, the variance is as exact as torch's."""
    x, _, weight, bias = make_inputs(5, 769)
    far = (x.detach() + 1e4).requires_grad_()
    plain = torch.nn.functional.layer_norm
    assert_as_exact_as_torch(
        layernorm.layer_norm, lambda x, w, b: plain(x, w.shape, w, b), (far, weight, bias), factor=3.0
    )


def test_chunks_cover_all_columns(monkeypatch):
    """With chunks of 16 columns and tiles of 4 rows, an odd number of rows and of columns are as exact as in torch."""
    tiles = {"layernorm_forward": {"rows": 4, "block": 16}, "layernorm_backward": {"rows": 4, "programs": 2}}
    monkeypatch.setattr(layernorm, "select_config", lambda kernel, _: dict(tiles[kernel]))
    x, branch, weight, bias = make_inputs(7, 45)
    far = (x.detach() + 1e3).requires_grad_()
    assert_as_exact_as_torch(layernorm.add_layer_norm, add_layer_norm_reference, (far, branch, weight, bias), 3.0)


def test_the_steps_match_the_reference():
    """The kernels with one row per program and with full rows, and the one with atomic sums, match the reference."""
    x, dy, weight, bias = (leaf.detach() for leaf in make_inputs(9, 769))
    with guard_bands():
        y = layernorm.run_one_row_step(guard(x), weight, bias)
        tiled = layernorm.run_tile_step(guard(x), weight, bias)
        dx, dw, db = layernorm.run_atomic_step(guard(dy), guard(x), weight)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_(), bias.double().requires_grad_()
    exact = layernorm.reference(*leaves)
    assert gap(y, exact) <= 1e-5 and gap(tiled, exact) <= 1e-5
    for actual, expected in zip((dx, dw, db), torch.autograd.grad(exact, leaves, dy.double()), strict=True):
        assert gap(actual, expected) <= 1e-5


def test_programs_cover_all_rows(monkeypatch):
    """With 3 programs and tiles of 2 rows for 17 rows, each program sums multiple tiles. dW and dB are complete."""
    tiles = {"layernorm_forward": {"rows": 2, "block": 128}, "layernorm_backward": {"rows": 2, "programs": 3}}
    monkeypatch.setattr(layernorm, "select_config", lambda kernel, _: dict(tiles[kernel]))
    assert_as_exact_as_torch(layernorm.add_layer_norm, add_layer_norm_reference, make_inputs(17, 100), factor=3.0)


def test_any_layout_and_shape_work():
    """Transposed and 3-dimensional inputs, and an expanded gradient, give the results of contiguous tensors."""
    weight = torch.randn(6)
    for x in (torch.randn(6, 40).t(), torch.randn(4, 5, 12)[..., ::2]):
        leaf = x.detach().requires_grad_()
        y = layernorm.layer_norm(leaf, weight)
        exact = layernorm.reference(x.double(), weight.double())
        assert y.shape == x.shape and gap(y, exact) <= 1e-5
        (gradient,) = torch.autograd.grad(y.sum(), leaf)  # the gradient of y.sum() has a stride of 0
        (expected,) = torch.autograd.grad(layernorm.reference(leaf, weight).sum(), leaf)
        assert gap(gradient, expected) <= 1e-5


@pytest.mark.heavy
def test_the_operators_pass_opcheck():
    """Schemas, fake tensors, autograd and AOT tracing are correct."""
    x, branch, weight, bias = make_inputs(4, 10)
    assert_registered(layernorm.forward_op, (x, branch, weight, bias, 1e-5, torch.float32))
    assert_registered(layernorm.forward_op, (x, None, weight, None, 1e-5, torch.float32))
    statistics = torch.randn(4), torch.rand(4)
    args = (branch.detach(), None, x.detach(), weight.detach(), *statistics, True)
    assert_registered(layernorm.backward_op, args)


def test_autocast_keeps_the_residual_stream_in_fp32():
    """Under autocast, the normalized result is bfloat16. The gradient of a bfloat16 branch is bfloat16."""
    x, branch, weight, bias = make_inputs(33, 769)
    bf16_branch = branch.detach().bfloat16().requires_grad_()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        total, y = layernorm.add_layer_norm(x, bf16_branch, weight, bias)
    assert total.dtype == torch.float32 and y.dtype == torch.bfloat16
    exact_total, exact = add_layer_norm_reference(x.double(), bf16_branch.double(), weight.double(), bias.double())
    assert gap(total, exact_total) <= 1e-6 and gap(y, exact) <= exact.abs().max() * 2**-8
    dx, dbranch = torch.autograd.grad(y.sum(), (x, bf16_branch))
    assert dx.dtype == torch.float32 and dbranch.dtype == torch.bfloat16 and gap(dx, dbranch) <= dx.abs().max() * 2**-8
