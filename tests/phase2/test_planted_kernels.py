"""Known bugs of real kernels, planted one by one. The checks that the real kernels pass detect each of them.

A test first shows that the correct kernel passes. Then it shows that the planted kernel, which differs in only a few
lines, fails.
"""

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import jit, launch, record_launches, tl
from tests.helpers.kernels import (
    assert_near,
    draw_normal,
    find_converted_numbers,
    gap,
    guard,
    guard_bands,
)

pytestmark = pytest.mark.usefixtures("on_device")


def is_within_tolerance(actual, eager, exact):
    """Return whether a result passes the tolerance rule."""
    try:
        assert_near(actual, eager, exact)
        return True
    except AssertionError:
        return False


def test_dw_is_summed_over_chunks_in_fp32(monkeypatch):
    """If dW is summed over 96 chunks in half precision, its error exceeds the tolerance."""
    x, w = (draw_normal((96, 16), 1).abs() + 1).half(), (draw_normal((75, 16), 2) / 10).half()
    targets = torch.full((96,), 3)

    def compute_dw(weight, hidden, loss):
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(loss(hidden, leaf), leaf)[0]

    def torch_loss(x, w):
        return F.cross_entropy(F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)), targets, reduction="sum")

    def shipped_loss(x, w):
        return linear_cross_entropy.linear_cross_entropy(x, w, targets, reduction="sum", chunk_bytes=75 * 2)

    def add_product_in_half(total, a, b):
        total.copy_((total.half() + a.t() @ b).to(total.dtype))

    eager, exact = compute_dw(w, x, torch_loss), compute_dw(w.double(), x.double(), torch_loss)
    assert is_within_tolerance(compute_dw(w, x, shipped_loss), eager, exact)
    monkeypatch.setattr(linear_cross_entropy, "add_product", add_product_in_half)
    assert not is_within_tolerance(compute_dw(w, x, shipped_loss), eager, exact)


def make_sparse_rows():
    """Return 5 rows of 8 numbers that begin 2^30 elements apart: 8.6 GB of memory on a GPU, but 5 pages on a CPU."""
    x = torch.empty(4 * 2**30 + 8, dtype=torch.float16).as_strided((5, 8), (2**30, 1))
    return x.copy_(torch.arange(40).view(5, 8))


@pytest.mark.parametrize("full_columns", [4, 8])
def test_cross_entropy_past_2_to_the_31(full_columns):
    """The shipped kernel reads rows past 2^31 and writes their gradients in place."""
    x, targets = make_sparse_rows(), torch.arange(5)
    logits = x.float().clone()
    losses, peaks, totals = torch.zeros(3, 5).unbind()
    args = (targets, losses, peaks, totals, 5, 8, 8, full_columns, x.stride(0), -1)
    launch(cross_entropy.forward_kernel, (3,), x, *args, GRADIENT=True, ROWS=2, BLOCK=4, TAIL=4)
    assert gap(losses, F.cross_entropy(logits, targets, reduction="none")) <= 1e-6
    gradient = logits.softmax(1) - F.one_hot(targets, 8)
    assert gap(x, gradient) <= 1e-3


def test_an_expanded_gradient_must_be_made_contiguous():
    """The gradient of `.sum()` is one number with strides of 0. A kernel for contiguous memory reads past it."""
    x, weight = torch.randn(2, 20), torch.randn(20)
    _, _, mean, rstd = layernorm.forward_op(x, None, weight, None, 1e-5, x.dtype)
    dy = guard(torch.ones(1)).expand(2, 20)
    correct = layernorm.backward_op(dy.contiguous(), None, x, weight, mean, rstd, False)
    planted = layernorm.backward_op(dy, None, x, weight, mean, rstd, False)
    assert not correct[0].isnan().any() and planted[0].isnan().any()


@pytest.mark.parametrize("min_programs", [0, 1])
def test_no_rows_still_need_a_program(min_programs, monkeypatch):
    """With M = 0 and no program, no kernel writes the sums, and dW contains old memory."""

    def launch_programs(kernel, grid, *args, **options):
        launch(kernel, (grid[0] if min_programs else 0,), *args, **options)

    monkeypatch.setattr(layernorm, "launch", launch_programs)
    x, weight, rows = torch.zeros(0, 5), torch.ones(5), torch.zeros(0)
    with guard_bands():
        _, dw = layernorm.backward_op(x, None, x, weight, rows, rows, False)
    assert bool((dw == 0).all()) is bool(min_programs)


@pytest.mark.parametrize("reduce", [cross_entropy.reduce, lambda losses, counted, _: losses.sum() / counted.sum()])
def test_all_targets_ignored_is_not_0_over_0(reduce, monkeypatch):
    """A batch whose targets are all ignored must not change the weights. 0/0 would make them NaN."""
    monkeypatch.setattr(cross_entropy, "reduce", reduce)
    logits = torch.randn(3, 9, requires_grad=True)
    loss = cross_entropy.cross_entropy(logits, torch.full((3,), -1))
    (gradient,) = torch.autograd.grad(loss, logits)
    is_correct = bool(loss == 0) and not gradient.any()
    assert is_correct is (reduce.__name__ == "reduce")


@jit
def converting_kernel(x, eps):
    tl.store(x, eps.to(tl.float32))


def test_planted_number_conversion_is_detected():
    """Under torch.compile, `.to()` on a Python number gives zeros. find_converted_numbers detects it."""
    assert find_converted_numbers(converting_kernel, (torch.zeros(1), 0.5)) == {"eps"}


@jit
def counting_kernel(x, M: tl.constexpr):
    tl.store(x, M)


def record_constants(call, tokens):
    """Return the constants of every launch of a call. Triton compiles once for each combination."""
    with record_launches("sm_90") as recorder:
        call(tokens)
    return [(kernel.__name__, options) for kernel, _, options in recorder.launches]


def test_planted_row_count_is_detected():
    """If the number of rows is a constant, Triton compiles again for each batch size. record_launches shows it."""
    assert record_constants(lambda M: launch(counting_kernel, (1,), torch.zeros(1), M=M), 7) != record_constants(
        lambda M: launch(counting_kernel, (1,), torch.zeros(1), M=M), 8
    )
