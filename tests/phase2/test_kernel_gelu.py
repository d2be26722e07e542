"""Tests of bias + GELU in the interpreter, against plain torch in fp64."""

import math

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import gelu
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    draw_normal,
    gap,
)

pytestmark = pytest.mark.usefixtures("on_device")

TILES = {
    "gelu_forward": {"rows": 2, "block": 64},
    "gelu_backward": {"rows": 2, "block": 64, "programs": 3},
}


def make_leaves(*shapes, dtype=torch.float32, scale=1.0):
    return tuple((scale * draw_normal(s, seed)).to(dtype).requires_grad_() for seed, s in enumerate(shapes))


def bind_approximation(function, approximate):
    return lambda *tensors: function(*tensors, approximate=approximate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("M", "N", "bias", "approximate"), [(1, 769, True, "none"), (33, 1023, False, "tanh"), (129, 1600, True, "tanh")]
)
def test_bias_gelu_is_as_exact_as_torch(M, N, bias, approximate, dtype):
    """Results and gradients are as exact as torch's, at ragged widths and odd numbers of rows, with and without
    bias."""
    tensors = make_leaves((M, N), (N,), dtype=dtype, scale=2.0)[: 1 + bias]
    assert_as_exact_as_torch(
        bind_approximation(gelu.bias_gelu, approximate), bind_approximation(gelu.reference, approximate), tensors
    )


def test_tiles_and_programs_cover_all_elements(monkeypatch):
    """With tiles of 2 x 64 and 3 programs for dB, results are exact."""
    monkeypatch.setattr(gelu, "select_config", lambda name, _: dict(TILES[name]))
    assert_as_exact_as_torch(
        bind_approximation(gelu.bias_gelu, "none"),
        bind_approximation(gelu.reference, "none"),
        make_leaves((75, 100), (100,)),
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_large_values_do_not_overflow_and_tiny_values_are_exact(approximate):
    """1e30 and -1e30 do not overflow. Where GELU is nearly 0, its digits are correct, which torch's are not."""
    x = torch.tensor([-1e30, -1e4, -7.0, -5.0, -3.0, -1e-6, 0.0, 1e-6, 3.0, 7.0, 1e4, 1e30], requires_grad=True)
    y = gelu.bias_gelu(x, approximate=approximate)
    (slope,) = torch.autograd.grad(y.sum(), x)
    v = x.detach().double()
    exact = v * torch.special.erfc(-v / math.sqrt(2)) / 2
    if approximate == "tanh":
        exact = v * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))
    assert ((y - exact).abs() <= 5e-6 * exact.abs()).all()
    assert torch.equal(slope[:2], torch.zeros(2)) and torch.equal(slope[-2:], torch.ones(2))
    assert slope[6] == 0.5 and not slope.isnan().any()


def test_any_layout_and_shape_work():
    """Transposed, sliced and 3-dimensional inputs, a strided bias and an expanded gradient give exact results."""
    b = torch.randn(24)[::2]
    for x in (torch.randn(12, 40).t(), torch.randn(4, 5, 24)[..., ::2]):
        leaf = x.detach().requires_grad_()
        y, exact = gelu.bias_gelu(leaf, b), F.gelu(leaf.double() + b.double())
        assert y.shape == x.shape and gap(y, exact) <= 1e-5
        # The gradient of z.sum() has a stride of 0.
        actual, expected = (torch.autograd.grad(z.sum(), leaf)[0] for z in (y, exact))
        assert gap(actual, expected) <= 1e-5


@pytest.mark.heavy
def test_the_operators_pass_opcheck():
    """Schemas, fake tensors, autograd and AOT tracing are correct."""
    x, b = make_leaves((3, 4), (4,))
    assert_registered(gelu.forward_op, (x, b, False, torch.float32))
    assert_registered(gelu.backward_op, (x.detach(), x.detach(), None, False, True))
