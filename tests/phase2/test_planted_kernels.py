"""Bugs that were found in kernels in the wild, planted one by one: the checks that the real kernels pass catch each.

A test first shows that the real kernel passes, then that the planted one, a few lines that differ in the bug alone,
does not.
"""

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import jit, launch, recording, tile, tl, to_fp32
from tests.helpers.kernels import assert_near, fixed_normal, gap, guard_bands, guarded, numbers_converted

pytestmark = pytest.mark.usefixtures("on_device")


def logits_and_targets(M, V):
    return (3 * fixed_normal((M, V))).float(), torch.arange(M) * 7 % V


@jit
def tail_kernel(logits, targets, losses, V, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """Cross-entropy of one row whose lanes beyond V hold OTHER: -inf is right."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    z = to_fp32(tl.load(logits + row * V + cols, mask=cols < V, other=OTHER))
    peak = tl.max(z, 0)
    lse = peak + tl.log(tl.sum(tl.exp(z - peak), 0))
    tl.store(losses + row, lse - to_fp32(tl.load(logits + row * V + tl.load(targets + row))))


@pytest.mark.parametrize(("other", "right"), [(float("-inf"), True), (0.0, False)])
def test_lanes_beyond_50257_must_be_minus_infinity(other, right):
    """A last tile filled up with zeros adds exp(0) for each lane."""
    logits, targets = logits_and_targets(2, 50257)
    with guard_bands():
        losses = torch.empty(2)
        launch(tail_kernel, (2,), guarded(logits), targets, losses, 50257, BLOCK=tile(50257), OTHER=other)
    eager, exact = (F.cross_entropy(z, targets, reduction="none") for z in (logits, logits.double()))
    assert judged(losses, eager, exact) is right


def judged(mine, eager, exact):
    """Whether the tolerance rule lets it pass."""
    try:
        assert_near(mine, eager, exact)
        return True
    except AssertionError:
        return False


@jit
def target_kernel(logits, target, total, N: tl.constexpr, ROUNDED: tl.constexpr):
    """The gradient of cross-entropy over `logits`; ROUNDED: 1 is subtracted after p went through their narrow type."""
    cols = tl.arange(0, N)
    z = to_fp32(tl.load(logits + cols))
    p = tl.exp(z - tl.max(z, 0)) / tl.load(total)
    one = tl.where(cols == target, 1.0, 0.0)
    if ROUNDED:
        p = to_fp32(p.to(logits.dtype.element_ty))
    tl.store(logits + cols, p - one)


@pytest.mark.parametrize("rounded", [False, True])
def test_the_targets_gradient_is_subtracted_in_fp32(rounded):
    """At p = 0.9998 a half-precision p is 1, and the target's gradient 100 percent wrong."""
    z = torch.zeros(16)
    z[3] = torch.tensor(0.9998 / (0.0002 / 15)).log()
    logits = z.half()
    leaf = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(leaf, torch.tensor(3)), leaf)
    narrow = logits.clone().requires_grad_()
    (eager,) = torch.autograd.grad(F.cross_entropy(narrow.float(), torch.tensor(3)), narrow)
    total = (logits.float() - logits.float().max()).exp().sum()
    launch(target_kernel, (1,), logits, 3, total, N=16, ROUNDED=rounded)
    assert judged(logits, eager, exact) is not rounded
    assert (abs(logits[3] / exact[3] - 1) > 0.5) == rounded
    shipped = narrow.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy.cross_entropy(shipped, torch.tensor(3)), shipped)
    assert judged(gradient, eager, exact)


def test_dw_is_summed_over_chunks_in_fp32(monkeypatch):
    """Summed over 96 chunks in half precision, dW is further off than the rule allows."""
    x, w = (fixed_normal((96, 16), 1).abs() + 1).half(), (fixed_normal((75, 16), 2) / 10).half()
    targets = torch.full((96,), 3)

    def dw(weight, hidden, loss):
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(loss(hidden, leaf), leaf)[0]

    def plain(x, w):
        return F.cross_entropy(F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)), targets, reduction="sum")

    def shipped(x, w):
        return linear_cross_entropy.linear_cross_entropy(x, w, targets, reduction="sum", chunk_bytes=75 * 2)

    def in_half(total, a, b):
        total.copy_((total.half() + a.t() @ b).to(total.dtype))

    eager, exact = dw(w, x, plain), dw(w.double(), x.double(), plain)
    assert judged(dw(w, x, shipped), eager, exact)
    monkeypatch.setattr(linear_cross_entropy, "add_product", in_half)
    assert not judged(dw(w, x, shipped), eager, exact)


@jit
def offset_kernel(x, out, stride, N, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy every fourth row; without WIDE the row's offset is int32."""
    row = tl.program_id(0) * 4
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * N + cols, tl.load(x + row * stride + cols, mask=cols < N), mask=cols < N)


def sparse_rows(rows=5, stride=2**30):
    """Rows of 8 numbers that begin 2^30 elements apart: 10 GB of addresses, of which 5 pages are ever touched."""
    x = torch.empty((rows - 1) * stride + 8, dtype=torch.float16).as_strided((rows, 8), (stride, 1))
    return x.copy_(torch.arange(rows * 8).view(rows, 8))


@pytest.mark.parametrize("is_wide", [True, False])
def test_offsets_past_2_to_the_31(is_wide):
    """65,536 rows of 50,304 logits pass 2^31: an int32 offset comes round to another row."""
    x, out = sparse_rows(), torch.zeros(2, 8, dtype=torch.float16)
    launch(offset_kernel, (2,), x, out, x.stride(0), 8, WIDE=is_wide, BLOCK=8)
    assert torch.equal(out, x[::4]) is is_wide


def test_cross_entropy_past_2_to_the_31():
    """The shipped kernels find the rows and write gradients to them, in place."""
    x, targets = sparse_rows(), torch.arange(5)
    expected = x.float().clone()
    losses, peaks, totals = torch.zeros(3, 5).unbind()
    where = (targets, losses, peaks, totals, 5, 8, 8, x.stride(0), -1, 0.0, 0.0)
    launch(cross_entropy.forward_kernel, (3,), x, *where, SMOOTH=False, GRADIENT=True, ROWS=2, BLOCK=8)
    assert gap(losses, F.cross_entropy(expected, targets, reduction="none")) <= 1e-6
    gradient = expected.softmax(1) - F.one_hot(targets, 8)
    assert gap(x, gradient) <= 1e-3


@jit
def variance_kernel(x, out, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    v = tl.load(x + cols, mask=cols < N, other=0.0)
    centred = v - tl.sum(v, 0) / N
    if MASKED:
        centred = tl.where(cols < N, centred, 0.0)
    tl.store(out + cols, centred / tl.sqrt(tl.sum(centred * centred, 0) / N + 1e-5), mask=cols < N)


@pytest.mark.parametrize("masked", [True, False])
def test_padding_does_not_count_in_the_variance(masked):
    """At a width of 769, 255 lanes of the tile hold no number; minus the mean they would each add its square."""
    x = (fixed_normal((769,)) + 1).float()
    with guard_bands():
        y = torch.empty(769)
        launch(variance_kernel, (1,), guarded(x), y, 769, MASKED=masked, BLOCK=tile(769))
    eager, exact = (F.layer_norm(v, (769,)) for v in (x, x.double()))
    assert judged(y, eager, exact) is masked


def test_a_gradient_may_be_expanded():
    """`.sum()` hands back one number with strides of 0: read as if contiguous, what follows it is not its own."""
    x, weight = torch.randn(2, 20), torch.randn(20)
    _, _, mean, rstd = layernorm.forward_op(x, None, weight, None, 1e-5, x.dtype)
    dy = guarded(torch.ones(1)).expand(2, 20)
    right = layernorm.backward_op(dy.contiguous(), None, x, weight, mean, rstd, False)
    planted = layernorm.backward_op(dy, None, x, weight, mean, rstd, False)
    assert not right[0].isnan().any() and planted[0].isnan().any()


@pytest.mark.parametrize("least", [0, 1])
def test_no_rows_still_need_a_program(least, monkeypatch):
    """With M = 0 and no program nobody writes the sums, and dW is what was in memory."""

    def launch_some(kernel, grid, *args, **options):
        launch(kernel, (grid[0] if least else 0,), *args, **options)

    monkeypatch.setattr(layernorm, "launch", launch_some)
    x, weight, rows = torch.zeros(0, 5), torch.ones(5), torch.zeros(0)
    with guard_bands():
        _, dw, _ = layernorm.backward_op(x, None, x, weight, rows, rows, False)
    assert bool((dw == 0).all()) is bool(least)


@pytest.mark.parametrize("reduce", [cross_entropy.reduce, lambda losses, counted, _: losses.sum() / counted.sum()])
def test_all_targets_ignored_is_not_0_over_0(reduce, monkeypatch):
    """A batch in which no target counts must leave the weights alone, not make them NaN."""
    monkeypatch.setattr(cross_entropy, "reduce", reduce)
    logits = torch.randn(3, 9, requires_grad=True)
    loss = cross_entropy.cross_entropy(logits, torch.full((3,), -1))
    (gradient,) = torch.autograd.grad(loss, logits)
    sound = bool(loss == 0) and not gradient.any()
    assert sound is (reduce.__name__ == "reduce")


@jit
def converting_kernel(x, eps):
    tl.store(x, eps.to(tl.float32))


def test_planted_number_conversion_is_seen():
    """`.to()` on a Python number gives zeros under torch.compile; the check of all kernels for it sees it."""
    assert numbers_converted(converting_kernel, (torch.zeros(1), 0.5)) == {"eps"}


@jit
def counting_kernel(x, M: tl.constexpr):
    tl.store(x, M)


def constants(call, tokens):
    """The constants of every launch of a call: what Triton compiles anew for."""
    with recording("sm_90") as recorder:
        call(tokens)
    return [(kernel.__name__, options) for kernel, _, options in recorder.launches]


def test_planted_row_count_is_seen():
    """A number of rows that is a constant is compiled for anew at each batch; the check of all kernels sees it."""
    assert constants(lambda M: launch(counting_kernel, (1,), torch.zeros(1), M=M), 7) != constants(
        lambda M: launch(counting_kernel, (1,), torch.zeros(1), M=M), 8
    )


def test_planted_item_is_seen():
    """Looking at a number on the device stops the queue; a call on meta tensors, which hold none, sees it."""
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(3, device="meta").sum().item()
