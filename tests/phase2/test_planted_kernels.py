"""Known bugs of real kernels, planted one by one. The checks that the real kernels pass detect each of them.

A test first shows that the correct kernel passes. Then it shows that the planted kernel, which differs in only a few
lines, fails.
"""

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy, embedding, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import jit, launch, next_power_of_2, record_launches, tl, to_fp32
from tests.helpers.kernels import (
    assert_near,
    draw_normal,
    find_converted_numbers,
    gap,
    guard,
    guard_bands,
    import_variant,
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
    """Return rows of 8 numbers that begin 2^30 elements apart: 10 GB of addresses, but only 5 pages in memory."""
    x = torch.empty((rows - 1) * stride + 8, dtype=torch.float16).as_strided((rows, 8), (stride, 1))
    return x.copy_(torch.arange(rows * 8).view(rows, 8))


@pytest.mark.parametrize("is_wide", [True, False])
def test_offsets_past_2_to_the_31(is_wide):
    """65,536 rows of 50,304 logits pass 2^31: an int32 offset wraps around to another row."""
    x, out = make_sparse_rows(), torch.zeros(2, 8, dtype=torch.float16)
    launch(offset_kernel, (2,), x, out, x.stride(0), 8, WIDE=is_wide, BLOCK=8)
    assert torch.equal(out, x[::4]) is is_wide


@pytest.mark.parametrize("full_columns", [0, 4, 8])
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


FAR_ROW = 2**18  # a row of 16,384 elements begins at 2^32 there, which wraps around to 0 in 32 bits
WIDTH = 16384


def make_far_rows():
    """Return 2^18 + 1 rows: 8.6 GB of addresses. Only the first and the last row are set and need memory."""
    rows = torch.empty(FAR_ROW + 1, WIDTH, dtype=torch.float16)
    rows[0], rows[-1] = 5, draw_normal((WIDTH,))
    return rows


FORWARD_ROWS = "tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)"


@pytest.mark.parametrize("is_wide", [True, False])
def test_layer_norm_past_2_to_the_31(is_wide, tmp_path):
    """LayerNorm reads and writes rows past 2^31 in its forward and its backward. With int32 offsets it uses row 0.

    The kernels begin at the last row here, because the interpreter is too slow for all rows before it.
    """
    forward_rows = f"(tl.program_id(0) + {FAR_ROW}) * ROWS + tl.arange(0, ROWS)"
    backward_rows = "(first + tl.arange(0, ROWS))"
    replacements = [
        (FORWARD_ROWS, forward_rows.replace("* ROWS", ".to(tl.int64) * ROWS") if is_wide else forward_rows),
        ("    program = tl.program_id(0)\n", f"    program = tl.program_id(0) + {FAR_ROW}\n"),
        ("sums += program * (1 + HAS_BIAS) * N", "pass"),  # this program has the only row of the sums
        (f"{backward_rows}.to(tl.int64)", f"{backward_rows}.to(tl.int64)" if is_wide else backward_rows),
    ]
    kernels = import_variant(tmp_path, layernorm, f"far_{is_wide}", replacements)
    x, y, dx = make_far_rows(), make_far_rows(), make_far_rows()
    weight, rows = torch.ones(WIDTH), torch.empty(2, FAR_ROW + 1)
    sums = torch.empty(1, WIDTH)
    constants = {"ROWS": 1, "BLOCK": WIDTH, "HAS_BIAS": False}
    backward_constants = {**constants, "HAS_DTOTAL": False, "ATOMIC": False}
    sizes = (FAR_ROW + 1, WIDTH)
    inputs = (x, None, weight, None, x, y, *rows, *sizes)
    launch(kernels.forward_kernel, (1,), *inputs, EPS=1e-5, HAS_BRANCH=False, CHUNKS=1, **constants)
    launch(kernels.backward_kernel, (1,), x, None, x, weight, *rows, dx, sums, *sizes, **backward_constants)
    leaf = x[-1].double().requires_grad_()
    exact = F.layer_norm(leaf, (WIDTH,))
    exact.backward(x[-1].double())
    assert (gap(y[-1], exact) <= 4e-3) is is_wide  # float16 rounds numbers near 4 by up to 2e-3
    assert (gap(dx[-1], leaf.grad) <= 4e-3) is is_wide


@pytest.mark.parametrize("is_wide", [True, False])
def test_embeddings_past_2_to_the_31(is_wide, tmp_path):
    """The embedding of a token past element 2^31 of the result is written to its row, and not to row 0."""
    far_rows = f"(tl.program_id(0) + {FAR_ROW}){'.to(tl.int64)' if is_wide else ''} * ROWS + tl.arange(0, ROWS)"
    kernels = import_variant(tmp_path, embedding, f"far_{is_wide}", [(FORWARD_ROWS, far_rows)])
    idx = torch.zeros(FAR_ROW + 1, dtype=torch.int64)
    out, wte, wpe = make_far_rows(), torch.full((1, WIDTH), 3.0), torch.zeros(1, WIDTH)
    sizes = (FAR_ROW + 1, 1, 1, WIDTH, 0)
    launch(kernels.forward_kernel, (1, 1), idx, wte, wpe, out, *sizes, ROWS=1, BLOCK=WIDTH)
    assert bool((out[-1] == 3).all()) is is_wide


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


def test_planted_item_is_detected():
    """`.item()` waits for the device. On meta tensors, which contain no numbers, it raises an error."""
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(3, device="meta").sum().item()
