"""LayerNorm kernels, interpreted, against plain torch in fp64."""

import pytest
import torch

from phase2_triton.kernels import layernorm
from phase2_triton.kernels.core import KernelError
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    compile_whole,
    fixed_normal,
    gap,
    guard_bands,
    guarded,
)

pytestmark = pytest.mark.usefixtures("on_device")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "N", "bias"), [(3, 1023, True), (65, 769, False)])
def test_layer_norm_is_as_exact_as_torch(M, N, bias, dtype):
    """The same without a residual branch."""
    x, _, *params = inputs(M, N, dtype, bias)

    def plain(x, weight, bias=None):
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)

    assert_as_exact_as_torch(layernorm.layer_norm, plain, (x, *params))
    assert (
        gap(
            layernorm.reference(x.double(), *(p.double() for p in params)),
            plain(x.double(), *map(torch.Tensor.double, params)),
        )
        <= 1e-12
    )


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_rows_far_from_zero(offset):
    """A mean a thousand or ten thousand times the spread leaves the variance as exact as torch's."""
    x, _, weight, bias = inputs(5, 769)
    far = (x.detach() + offset).requires_grad_()
    plain = torch.nn.functional.layer_norm
    assert_as_exact_as_torch(
        layernorm.layer_norm, lambda x, w, b: plain(x, w.shape, w, b), (far, weight, bias), factor=3.0
    )


def test_steps_are_right():
    """One row a program, and sums by atomics, give what the shipped kernels give."""
    x, dy, weight, bias = (leaf.detach() for leaf in inputs(9, 769))
    with guard_bands():
        y = layernorm.step_1(guarded(x), weight, bias)
        dx, dw, db = layernorm.atomic_step(guarded(dy), guarded(x), weight)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_(), bias.double().requires_grad_()
    exact = layernorm.reference(*leaves)
    assert gap(y, exact) <= 1e-5
    for ours, theirs in zip((dx, dw, db), torch.autograd.grad(exact, leaves, dy.double()), strict=True):
        assert gap(ours, theirs) <= 1e-5


def test_programs_share_the_rows_out(monkeypatch):
    """With 3 programs of 2 rows over 17 rows, each program sums several tiles, and dW and dB are whole."""
    monkeypatch.setattr(layernorm, "config", lambda *_: {"rows": 2, "programs": 3})
    assert_as_exact_as_torch(layernorm.add_layer_norm, plain_add, inputs(17, 100), factor=3.0)


def test_no_rows():
    """M = 0 gives an empty result and gradients of 0."""
    x, branch, weight, bias = inputs(0, 769)
    total, y = layernorm.add_layer_norm(x, branch, weight, bias)
    (total.sum() + y.sum()).backward()
    assert y.shape == (0, 769) and not weight.grad.any() and not bias.grad.any() and x.grad.shape == (0, 769)


def test_any_layout_and_shape():
    """Transposed and three-dimensional inputs, and a gradient that is expanded, give what contiguous ones give."""
    weight = torch.randn(6)
    for x in (torch.randn(6, 40).t(), torch.randn(4, 5, 12)[..., ::2]):
        leaf = x.detach().requires_grad_()
        y = layernorm.layer_norm(leaf, weight)
        exact = layernorm.reference(x.double(), weight.double())
        assert y.shape == x.shape and gap(y, exact) <= 1e-5
        (gradient,) = torch.autograd.grad(y.sum(), leaf)  # of stride 0
        (expected,) = torch.autograd.grad(layernorm.reference(leaf, weight).sum(), leaf)
        assert gap(gradient, expected) <= 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.heavy
def test_gradcheck(bias):
    """In fp64, finite differences agree with the backward, through both results."""
    assert torch.autograd.gradcheck(layernorm.add_layer_norm, inputs(3, 5, torch.float64, bias))


@pytest.mark.heavy
def test_the_ops_are_registered_well():
    """opcheck: schemas, fake tensors, autograd and AOT tracing hold."""
    x, branch, weight, bias = inputs(4, 10)
    assert_registered(layernorm.forward_op, (x, branch, weight, bias, 1e-5, torch.float32))
    assert_registered(layernorm.forward_op, (x, None, weight, None, 1e-5, torch.float32))
    rows = torch.randn(4), torch.rand(4)
    plain = (branch.detach(), None, x.detach(), weight.detach(), *rows, True)
    assert_registered(layernorm.backward_op, plain)


@pytest.mark.heavy
def test_compiled_whole():
    """torch.compile(fullgraph=True) gives eager's results and gradients, also with another number of rows."""
    _, _, weight, bias = inputs(1, 100)

    def f(x, branch):
        total, y = layernorm.add_layer_norm(x * 2, branch, weight, bias, eps=0.5)
        return layernorm.layer_norm(y, weight) + total

    compiled = compile_whole(f)
    for M in (4, 7, 9):
        x, branch, _, _ = inputs(M, 100)
        ours, theirs = compiled(x, branch), f(x, branch)
        assert gap(ours, theirs) <= 1e-5
        pairs = zip(*(torch.autograd.grad(y.square().sum(), (x, branch)) for y in (ours, theirs)), strict=True)
        assert all(gap(a, b) <= 1e-4 for a, b in pairs)


def test_autocast_and_mixed_types():
    """Under autocast the norm comes in bfloat16 and the stream stays fp32; a narrower branch gets its own gradient."""
    x, branch, weight, bias = inputs(33, 769)
    narrow = branch.detach().bfloat16().requires_grad_()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        total, y = layernorm.add_layer_norm(x, narrow, weight, bias)
    assert total.dtype == torch.float32 and y.dtype == torch.bfloat16
    exact_total, exact = plain_add(x.double(), narrow.double(), weight.double(), bias.double())
    assert gap(total, exact_total) <= 1e-6 and gap(y, exact) <= exact.abs().max() * 2**-8
    dx, dbranch = torch.autograd.grad(y.sum(), (x, narrow))
    assert dx.dtype == torch.float32 and dbranch.dtype == torch.bfloat16 and gap(dx, dbranch) <= dx.abs().max() * 2**-8


def test_under_activation_checkpointing():
    """Recomputed in the backward, results and gradients are the same to the last bit."""
    x, branch, weight, bias = inputs(9, 100)

    def loss(recompute):
        f = torch.utils.checkpoint.checkpoint if recompute else lambda f, *args, **_: f(*args)
        total, y = f(layernorm.add_layer_norm, x, branch, weight, bias, use_reentrant=False)
        return torch.autograd.grad((total * y).sum(), (x, branch, weight, bias))

    assert all(torch.equal(a, b) for a, b in zip(loss(True), loss(False), strict=True))


def test_twice_is_bitwise_the_same():
    """Two backwards give the same bits: the sums have one order."""
    x, branch, weight, bias = inputs(301, 100)

    def gradients():
        total, y = layernorm.add_layer_norm(x, branch, weight, bias)
        return torch.autograd.grad((total * y).sum(), (x, branch, weight, bias))

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


WRONG = [
    (lambda: layernorm.layer_norm(torch.zeros(3, 5), torch.zeros(4)), r"weight is \(4,\): give one of \(5,\)"),
    (lambda: layernorm.layer_norm(torch.zeros(3, 5), torch.zeros(5), torch.zeros(1, 5)), r"bias is \(1, 5\)"),
    (lambda: layernorm.layer_norm(torch.zeros(3, 5).long(), torch.zeros(5)), "x is torch.int64: give float32"),
    (lambda: layernorm.layer_norm(torch.zeros(()), torch.zeros(5)), "no last dimension"),
    (lambda: layernorm.layer_norm([1.0], torch.zeros(5)), "x is list: give a dense tensor"),
    (lambda: layernorm.layer_norm(torch.zeros(3, 5), None), "weight is NoneType"),
    (lambda: layernorm.layer_norm(torch.zeros(3, 5).to_sparse(), torch.zeros(5)), "x is torch.sparse_coo"),
    (
        lambda: layernorm.layer_norm(torch.zeros(3, 5), torch.zeros(5), eps=float("nan")),
        "eps=nan: give a number from 0",
    ),
    (lambda: layernorm.layer_norm(torch.zeros(1, 20000), torch.zeros(20000)), "rows are 20000 wide, above 16384"),
    (lambda: layernorm.layer_norm(torch.zeros(3, 5, device="meta"), torch.zeros(5)), "on meta, where it cannot run"),
    (
        lambda: layernorm.add_layer_norm(torch.zeros(3, 5), torch.zeros(5), torch.zeros(5)),
        r"branch is \(5,\) and x \(3, 5\): give two of one shape",
    ),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:20] for _, words in WRONG])
def test_wrong_input_is_one_sentence(call, words):
    """A shape, type or device that does not fit is refused, and the sentence says what to give."""
    with pytest.raises(KernelError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
