"""Tests of bias + GELU in the interpreter, against plain torch in fp64."""

import math

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import gelu
from phase2_triton.kernels.core import KernelError, launch
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_near,
    assert_registered,
    compile_full_graph,
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


def make_reference(approximate):
    return bind_approximation(gelu.reference, approximate)


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
    assert_as_exact_as_torch(bind_approximation(gelu.bias_gelu, approximate), make_reference(approximate), tensors)


def test_tiles_and_programs_cover_all_elements(monkeypatch):
    """With tiles of 2 x 64 and 3 programs for dB, results are exact."""
    monkeypatch.setattr(gelu, "select_config", lambda name, _: dict(TILES[name]))
    assert_as_exact_as_torch(
        bind_approximation(gelu.bias_gelu, "none"), make_reference("none"), make_leaves((75, 100), (100,))
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


def test_the_fitted_polynomial_is_exact():
    """The polynomial gives 5 correct digits of GELU down to -10, where torch has none, and 6 digits from -3 upwards."""
    x = torch.linspace(-10, 10, 4000)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    our_error, torch_error = ((y - exact).abs() / exact.abs() for y in (gelu.bias_gelu(x), F.gelu(x)))
    assert our_error.max() < 5e-6 and our_error[x > -3].max() < 1e-6 and torch_error.max() > 0.5


def test_no_rows_give_empty_results():
    """M = 0 gives an empty result and gradients of 0."""
    x, b = make_leaves((0, 40), (40,))
    y = gelu.bias_gelu(x, b)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 40) and not b.grad.any()


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


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.heavy
def test_gradcheck(approximate, monkeypatch):
    """In fp64, finite differences match the backward pass."""
    monkeypatch.setattr(gelu, "select_config", lambda name, _: dict(TILES[name]))
    assert torch.autograd.gradcheck(
        bind_approximation(gelu.bias_gelu, approximate), make_leaves((3, 2), (2,), dtype=torch.float64)
    )


@pytest.mark.heavy
def test_the_operators_pass_opcheck():
    """Schemas, fake tensors, autograd and AOT tracing are correct."""
    x, b = make_leaves((3, 4), (4,))
    assert_registered(gelu.forward_op, (x, b, False, torch.float32))
    assert_registered(gelu.backward_op, (x.detach(), x.detach(), None, False, True))


@pytest.mark.heavy
def test_compiled_results_match_eager():
    """torch.compile(fullgraph=True) gives eager mode's results and gradients, also with another number of rows."""
    _, w, b = make_leaves((1, 20), (30, 20), (30,))

    def f(x):
        return gelu.bias_gelu(F.linear(x, w) * 2, b, "tanh")

    compiled = compile_full_graph(f)
    for M in (4, 7, 9):
        (x,) = make_leaves((M, 20))
        y, expected = compiled(x), f(x)
        assert gap(y, expected) <= 1e-5
        pairs = zip(*(torch.autograd.grad(z.square().sum(), (x, w, b)) for z in (y, expected)), strict=True)
        assert all(gap(a, b) <= 1e-4 for a, b in pairs)


def test_autocast_is_as_exact_as_torch():
    """Under autocast the result is bfloat16 and as exact as torch's. Gradients have the fp32 type of the weights."""
    x, w, b = make_leaves((33, 64), (100, 64), (100,))
    dy = draw_normal((33, 100))
    results = []
    for function in (lambda x, w, b: gelu.bias_gelu(F.linear(x, w), b), lambda x, w, b: F.gelu(F.linear(x, w, b))):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            y = function(x, w, b)
        results.append([y, *torch.autograd.grad(y, (x, w, b), dy.to(y.dtype))])
    exact = F.gelu(F.linear(*(t.double() for t in (x, w, b))))
    exact = [exact, *torch.autograd.grad(exact, (x, w, b), dy)]
    assert [t.dtype for t in results[0]] == [torch.bfloat16, *[torch.float32] * 3] == [t.dtype for t in results[1]]
    for actual, eager, exact_tensor in zip(*results, exact, strict=True):
        assert_near(actual, eager, exact_tensor)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y = gelu.bias_gelu(x.detach())
    assert torch.equal(y, gelu.bias_gelu(x.detach()).bfloat16())  # rounded to nearest


def test_activation_checkpointing_gives_the_same_gradients():
    """With recomputation in the backward pass, gradients are bitwise identical."""
    x, b = make_leaves((9, 20), (20,))

    def compute_gradients(recompute):
        f = torch.utils.checkpoint.checkpoint if recompute else lambda f, *args, **_: f(*args)
        y = f(gelu.bias_gelu, x, b, use_reentrant=False)
        return torch.autograd.grad(y.square().sum(), (x, b))

    assert all(torch.equal(a, b) for a, b in zip(compute_gradients(True), compute_gradients(False), strict=True))


def test_two_runs_are_bitwise_identical():
    """Two backward passes with multiple programs give the same bits: the order of the sums is fixed."""
    x, b = make_leaves((1301, 70), (70,))

    def compute_gradients():
        return torch.autograd.grad(gelu.bias_gelu(x, b).square().sum(), (x, b))

    assert all(torch.equal(a, b) for a, b in zip(compute_gradients(), compute_gradients(), strict=True))


def test_offsets_past_2_to_the_31():
    """Rows that begin 2^30 elements apart are read and written correctly."""
    stride = 2**30
    x, y, dx = (torch.empty(2 * stride + 8, dtype=torch.float16).as_strided((3, 8), (stride, 1)) for _ in range(3))
    x.copy_(torch.arange(24).view(3, 8) / 8 - 1)
    flags = {"HAS_BIAS": False, "TANH": False}
    launch(gelu.forward_kernel, (1, 1), x, None, y, 3, stride, **flags, ROWS=4, BLOCK=8)
    launch(
        gelu.backward_kernel, (1, 1), y, x, None, dx, torch.empty(0), 3, stride, **flags, SUM=False, ROWS=4, BLOCK=8
    )  # fmt: skip
    leaf = x.double().requires_grad_()
    exact = F.gelu(leaf)
    assert gap(y, exact) <= 2e-3 and gap(dx, torch.autograd.grad(exact, leaf, y.double())[0]) <= 4e-3


def test_cost_of_a_call():
    """`cost` counts the bytes of the tensors. The roofline is the larger of the times for memory and FLOPs."""
    M, N = 8, 12
    forward, backward = gelu.cost(M, N, 2)
    assert (forward.read, forward.written) == (2 * M * N + 4 * N, 2 * M * N)
    assert (backward.read, backward.written) == (4 * M * N + 4 * N, 2 * M * N + 4 * N)
    assert forward.seconds(1.0, 1e30) == forward.read + forward.written and forward.seconds(1e30, 1.0) == forward.flops


INVALID_CALLS = [
    (
        lambda: gelu.bias_gelu(torch.zeros(3, 5), torch.zeros(4)),
        r"bias has shape \(4,\): pass \(5,\), the width of x",
    ),
    (lambda: gelu.bias_gelu(torch.zeros(())), "no last dimension"),
    (lambda: gelu.bias_gelu(torch.zeros(3, 5), approximate="sigmoid"), "'sigmoid' is unknown: use none or tanh"),
    (lambda: gelu.bias_gelu(torch.zeros(3, 5).long()), "x is torch.int64: pass float32"),
    (lambda: gelu.bias_gelu(torch.zeros(3, 5, device="meta")), "on meta, where kernels cannot run"),
]


def test_invalid_input_is_refused_with_one_sentence():
    """An unsuitable shape, type, device or option is refused with one sentence that states what to pass."""
    for call, words in INVALID_CALLS:
        with pytest.raises(KernelError, match=words) as error:
            call()
        assert "\n" not in str(error.value)


def test_a_second_derivative_is_refused():
    """The operator has no second derivative. It raises an error instead of returning a part of it."""
    x = draw_normal((4, 6)).float().requires_grad_()
    (gradient,) = torch.autograd.grad(gelu.bias_gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.square().sum().backward()
