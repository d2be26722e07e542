"""Known bugs of real kernels, planted one by one. The checks that the real kernels pass detect each of them.

A test first shows that the correct kernel passes. Then it shows that the planted kernel, which differs in only a few
lines, fails.
"""

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import jit, launch, next_power_of_2, record_launches, tl, to_fp32
from tests.helpers.kernels import (
    assert_near,
    draw_normal,
    find_converted_numbers,
    gap,
    guard,
    guard_bands,
)

pytestmark = pytest.mark.usefixtures("on_device")


def logits_and_targets(M, V):
    return (3 * draw_normal((M, V))).float(), torch.arange(M) * 7 % V


@jit
def tail_kernel(logits, targets, losses, V, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """Compute the cross-entropy of one row. Lanes beyond V contain OTHER; -inf is correct."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    z = to_fp32(tl.load(logits + row * V + cols, mask=cols < V, other=OTHER))
    peak = tl.max(z, 0)
    lse = peak + tl.log(tl.sum(tl.exp(z - peak), 0))
    tl.store(losses + row, lse - to_fp32(tl.load(logits + row * V + tl.load(targets + row))))


@pytest.mark.parametrize(("other", "is_correct"), [(float("-inf"), True), (0.0, False)])
def test_lanes_beyond_50257_must_be_minus_infinity(other, is_correct):
    """If the last tile is filled with zeros, each extra lane adds exp(0) to the sum."""
    logits, targets = logits_and_targets(2, 50257)
    with guard_bands():
        losses = torch.empty(2)
        launch(tail_kernel, (2,), guard(logits), targets, losses, 50257, BLOCK=next_power_of_2(50257), OTHER=other)
    eager, exact = (F.cross_entropy(z, targets, reduction="none") for z in (logits, logits.double()))
    assert is_within_tolerance(losses, eager, exact) == is_correct


def is_within_tolerance(actual, eager, exact):
    """Return whether a result passes the tolerance rule."""
    try:
        assert_near(actual, eager, exact)
        return True
    except AssertionError:
        return False


@jit
def target_gradient_kernel(logits, target, total, N: tl.constexpr, ROUNDED: tl.constexpr):
    """Write the gradient of cross-entropy over `logits`.

    If ROUNDED, the probability is rounded to the type of the logits before 1 is subtracted.
    """
    cols = tl.arange(0, N)
    z = to_fp32(tl.load(logits + cols))
    p = tl.exp(z - tl.max(z, 0)) / tl.load(total)
    one = tl.where(cols == target, 1.0, 0.0)
    if ROUNDED:
        p = to_fp32(p.to(logits.dtype.element_ty))
    tl.store(logits + cols, p - one)


@pytest.mark.parametrize("is_rounded", [False, True])
def test_1_is_subtracted_from_the_target_in_fp32(is_rounded):
    """A probability of 0.9998 is 1 in half precision, so that the target's gradient is wrong by 100 percent."""
    z = torch.zeros(16)
    z[3] = torch.tensor(0.9998 / (0.0002 / 15)).log()
    logits = z.half()
    leaf = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(leaf, torch.tensor(3)), leaf)
    half_logits = logits.clone().requires_grad_()
    (eager,) = torch.autograd.grad(F.cross_entropy(half_logits.float(), torch.tensor(3)), half_logits)
    total = (logits.float() - logits.float().max()).exp().sum()
    launch(target_gradient_kernel, (1,), logits, 3, total, N=16, ROUNDED=is_rounded)
    assert is_within_tolerance(logits, eager, exact) is not is_rounded
    assert (abs(logits[3] / exact[3] - 1) > 0.5) == is_rounded
    shipped_logits = half_logits.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy.cross_entropy(shipped_logits, torch.tensor(3)), shipped_logits)
    assert is_within_tolerance(gradient, eager, exact)


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


@jit
def offset_kernel(x, out, stride, N, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy every fourth row. Without WIDE, the offset of the row is int32."""
    row = tl.program_id(0) * 4
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * N + cols, tl.load(x + row * stride + cols, mask=cols < N), mask=cols < N)


def make_sparse_rows(rows=5, stride=2**30):
    """Return rows of 8 numbers that begin 2^30 elements apart: 8.6 GB of memory on a GPU, but only 5 pages on a CPU."""
    x = torch.empty((rows - 1) * stride + 8, dtype=torch.float16).as_strided((rows, 8), (stride, 1))
    return x.copy_(torch.arange(rows * 8).view(rows, 8))


@pytest.mark.parametrize("is_wide", [True, False])
def test_offsets_past_2_to_the_31(is_wide):
    """65,536 rows of 50,304 logits pass 2^31: an int32 offset wraps around to another row."""
    x, out = make_sparse_rows(), torch.zeros(2, 8, dtype=torch.float16)
    launch(offset_kernel, (2,), x, out, x.stride(0), 8, WIDE=is_wide, BLOCK=8)
    assert torch.equal(out, x[::4]) is is_wide


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


@jit
def normalize_kernel(x, out, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    v = tl.load(x + cols, mask=cols < N, other=0.0)
    centred = v - tl.sum(v, 0) / N
    if MASKED:
        centred = tl.where(cols < N, centred, 0.0)
    tl.store(out + cols, centred / tl.sqrt(tl.sum(centred * centred, 0) / N + 1e-5), mask=cols < N)


@pytest.mark.parametrize("is_masked", [True, False])
def test_the_variance_excludes_padding(is_masked):
    """At a width of 769, 255 lanes of the tile contain padding. Without a mask, each would add the squared mean."""
    x = (draw_normal((769,)) + 1).float()
    with guard_bands():
        y = torch.empty(769)
        launch(normalize_kernel, (1,), guard(x), y, 769, MASKED=is_masked, BLOCK=next_power_of_2(769))
    eager, exact = (F.layer_norm(v, (769,)) for v in (x, x.double()))
    assert is_within_tolerance(y, eager, exact) == is_masked


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
