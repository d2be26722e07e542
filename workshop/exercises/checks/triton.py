"""Checks of the exercises on Triton kernels. Triton's interpreter runs them on the CPU, between guard bands."""

from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from phase2_triton.kernels import attention, cross_entropy
from phase2_triton.kernels.core import launch
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import draw_normal, is_close

BAND = 64  # elements on each side of a buffer


def run_strictly(kernel: Any, *args: Any, **constants: Any) -> None:
    """Launch a kernel in the interpreter. A masked load without `other` fills the lanes that it does not read with NaN.

    On a GPU these lanes are undefined, but the interpreter fills them with zeros.

    Raises:
        IndexError: a lane that is not masked reads or writes outside of the tensors.
    """
    from triton.runtime.interpreter import InterpreterBuilder  # there is no Triton for macOS

    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    load_masked = InterpreterBuilder.create_masked_load
    store_masked, add_atomically = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_atomic_rmw

    def check_lanes(pointers: Any, mask: Any, verb: str) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
        inside = np.zeros(addresses.shape, dtype=bool)
        for each in tensors:
            inside |= (addresses >= each.data_ptr()) & (addresses < each.data_ptr() + each.nbytes)
        if not inside.all():
            raise IndexError(
                f"the kernel {verb} outside of its tensors: lanes beyond the end need a mask in each load and store, "
                "and a row or a tile must begin at its own place"
            )

    def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_lanes(pointers, mask, "writes")
        return store_masked(builder, pointers, value, mask, *rest)

    def atomic(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_lanes(pointers, mask, "writes")
        return add_atomically(builder, operation, pointers, value, mask, *rest)

    def load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        check_lanes(pointers, mask, "reads")
        loaded = load_masked(builder, pointers, mask, other, *rest)
        if other is None and loaded.data.dtype.kind == "f":
            loaded.data[~mask.data] = float("nan")
        return loaded

    patched = mock.patch.multiple(
        InterpreterBuilder, create_masked_load=load, create_masked_store=store, create_atomic_rmw=atomic
    )
    with patched:
        launch(kernel, *args, **constants)


def surround_with_nan(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor between bands of NaN, so that an element that is read outside of it is visible."""
    buffer = torch.full((tensor.numel() + 2 * BAND,), float("nan"), dtype=tensor.dtype)
    return buffer[BAND:-BAND].copy_(tensor.flatten()).view(tensor.shape)


def allocate(*shape: int) -> Tensor:
    """Return a tensor of NaN between bands of NaN, so that an element that a kernel does not write is visible."""
    return surround_with_nan(torch.full(shape, float("nan")))


def check_values(actual: Tensor, expected: Tensor, name: str, advice: str, tolerance: float = 1e-5) -> None:
    """Check a result, and describe a wrong one by the kind of its error."""
    expect(
        not actual.isnan().any(),
        f"{name} contains NaN: the kernel has not written all elements, has used lanes of a masked load without "
        f"`other`, or has computed inf - inf or 0 / 0. {advice}",
    )
    error = (actual.double() - expected.double()).abs().max().item()
    expect(is_close(actual, expected, tolerance), f"The max error of {name} is {error:.1e}. {advice}")


def check_layer_norm(answer: ModuleType, _: Any) -> None:
    M, N = 3, 20
    x = draw_normal(M, N) + 3
    x[2] = 5.0  # a constant row has a variance of 0
    weight, bias = draw_normal(N, seed=1), draw_normal(N, seed=2)
    for with_bias in (False, True):
        y, mean, rstd = allocate(M, N), allocate(M), allocate(M)
        args = (
            surround_with_nan(x),
            surround_with_nan(weight),
            surround_with_nan(bias) if with_bias else None,
            y,
            mean,
            rstd,
            N,
        )
        run_strictly(answer.one_row_kernel, (M,), *args, EPS=1e-5, HAS_BIAS=with_bias, BLOCK=32)
        check_values(mean, x.mean(1), "mean", "Store sum / N, not sum / BLOCK, at mean + row.")
        exact = 1 / (x.var(1, correction=0) + 1e-5).sqrt()
        check_values(
            rstd[:2],
            exact[:2],
            "rstd",
            "rstd = 1 / sqrt(variance + EPS). Lanes beyond the row must not count in the variance: mask the centred "
            "values. Divide by N, not by N - 1.",
        )
        check_values(rstd, exact, "rstd of a constant row", "Add EPS to the variance.")
        expected = F.layer_norm(x, (N,), weight, bias if with_bias else None)
        check_values(
            y, expected, f"y {'with' if with_bias else 'without'} a bias", "y = (x - mean) * rstd * weight + bias."
        )
    half = (4 * draw_normal(M, N, seed=3) + 1000).half()
    y, mean, rstd = torch.empty_like(half), torch.empty(M), torch.empty(M)
    run_strictly(answer.one_row_kernel, (M,), half, weight, None, y, mean, rstd, N, EPS=1e-5, HAS_BIAS=False, BLOCK=32)
    exact = half.double()
    convert = "Convert what you load to fp32 first."
    check_values(mean, exact.mean(1), "mean of a row in float16", convert)
    check_values(
        rstd,
        1 / (exact.var(1, correction=0) + 1e-5).sqrt(),
        "rstd of a row with a mean near 1,000",
        "The difference of two large squares loses its digits: subtract the mean before you square.",
        1e-4,
    )
    check_values(y, F.layer_norm(half.float(), (N,), weight).half(), "y in float16", convert, 2e-3)


def check_online_softmax(answer: ModuleType, _: Any) -> None:
    M, V = 4, 20
    logits = draw_normal(M, V) * 3
    logits[1] = logits[1].sort().values  # the largest logit comes last
    logits[2] = logits[2].sort(descending=True).values
    logits[3, :8], logits[3, 8:] = float("-inf"), logits[3, 8:] - 200
    targets = torch.tensor([3, 19, 0, 9])
    losses, peaks, totals = (allocate(M) for _ in range(3))
    args = (surround_with_nan(logits), targets, losses, peaks, totals, M, V, V, 16, V, -1)
    run_strictly(cross_entropy.forward_kernel, (2,), *args, GRADIENT=False, ROWS=2, BLOCK=8, TAIL=4)
    check_values(peaks, logits.max(1).values, "the largest logit", "Keep the larger of the old and the new maximum.")
    exact = (logits - logits.max(1, keepdim=True).values).exp().sum(1)
    advice = (
        "When a larger logit appears, the sum so far is relative to the old maximum: multiply it by exp(old - new). "
        "The new terms are exp(z - new)."
    )
    check_values(totals[:3], exact[:3], "the sum of exponentials", advice)
    expect(
        not totals[3].isnan(),
        "A row whose first tile is all -inf gives NaN: -inf - -inf is NaN. Subtract 0 while the maximum is -inf.",
    )
    check_values(totals, exact, "the sum of exponentials", advice)
    check_values(losses, F.cross_entropy(logits, targets, reduction="none"), "the loss", "", 1e-5)


def check_attention(answer: ModuleType, _: Any) -> None:
    heads, T, hs = 3, 20, 32
    q, k, v = (draw_normal(heads, T, hs, seed=i) for i in range(3))
    q[0, 5] = 40 * k[0, 5]  # a score above 88 overflows exp in fp32
    y = allocate(heads, T, hs)
    sizes = {"HS": hs, "BLOCK_D": 32, "BLOCK": 16, "KEYS": 32}
    run_strictly(
        answer.all_keys_kernel,
        (2, heads),
        surround_with_nan(q),
        surround_with_nan(k),
        surround_with_nan(v),
        y,
        T,
        hs**-0.5,
        **sizes,
    )
    expected = attention.reference(q[None], k[None], v[None])[0]
    everything = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    expect(
        not is_close(y[:, :4], everything[:, :4], 1e-4),
        "A query attends to keys after its own position: the mask is missing. The model would see the token that it "
        "must predict, and its loss would be too small.",
    )
    expect(
        bool(y[0, 5].isfinite().all()) or not is_close(y[1], expected[1], 1e-4),
        "Large scores give NaN: exp overflows. Subtract the largest score of the row before exp.",
    )
    unscaled = attention.reference(q[None], k[None], v[None], scale=1.0)[0]
    expect(not is_close(y, unscaled, 1e-4), "The scores are not multiplied by SCALE, so softmax is too sharp.")
    check_values(
        y,
        expected,
        "y",
        "y = softmax(q k^T * SCALE) v over the keys up to and including the position of the query. The maximum and the "
        "sum of a query are over its keys, axis 1. The first query of a block has the position program_id(0) * BLOCK.",
        1e-4,
    )


def check_layer_norm_backward(answer: ModuleType, _: Any) -> None:
    M, N = 5, 20
    x, weight, bias, dy, dtotal = (
        draw_normal(M, N) + 2,
        draw_normal(N, seed=1),
        draw_normal(N, seed=2),
        draw_normal(M, N, seed=3),
        draw_normal(M, N, seed=4),
    )
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    F.layer_norm(leaves[0], (N,), leaves[1], leaves[2]).backward(dy)
    exact_dx, exact_dw, exact_db = (leaf.grad for leaf in leaves)
    assert exact_dx is not None and exact_dw is not None and exact_db is not None
    mean, rstd = x.mean(1), 1 / (x.var(1, correction=0) + 1e-5).sqrt()
    variants = (
        (False, True, False),
        (True, True, False),
        (False, False, False),
        (False, True, True),
        (False, False, True),
    )
    for with_dtotal, has_bias, atomic in variants:
        dx, sums = allocate(M, N), allocate(1 if atomic else 2, 1 + has_bias, N)
        if atomic:
            sums.zero_()
        inputs = [surround_with_nan(each) for each in (x, weight, mean, rstd)]
        branch = surround_with_nan(dtotal) if with_dtotal else None
        constants = {"HAS_BIAS": has_bias, "ATOMIC": atomic, "ROWS": 2, "BLOCK": 32}
        run_strictly(
            answer.backward_kernel, (2,), surround_with_nan(dy), branch, *inputs, dx, sums, M, N,
            HAS_DTOTAL=with_dtotal, **constants,
        )  # fmt: skip
        if with_dtotal:
            check_values(
                dx, exact_dx + dtotal, "dx with dtotal", "x + branch is also an output: add its gradient to dx."
            )
            continue
        g = dy * weight
        expect(
            not is_close(dx, rstd[:, None] * (g - g.mean(1, keepdim=True)), 1e-4),
            "dx lacks the term xhat * mean(g * xhat): rstd also depends on x.",
        )
        expect(not is_close(dx, rstd[:, None] * g, 1e-4), "dx lacks both means: mean and rstd depend on x.")
        advice = "dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight, and means over N elements."
        check_values(dx, exact_dx, "dx", advice)
        total = sums.sum(0)
        advice = (
            "Each program adds up its rows, and writes the sums into its own rows of `sums`, (programs, 1 + HAS_BIAS, "
            "N). With ATOMIC, it adds them to `sums`, (1 + HAS_BIAS, N)."
        )
        name = f"with HAS_BIAS={has_bias} and ATOMIC={atomic}"
        check_values(total[0], exact_dw, f"dW {name}", f"dW = sum of dy * xhat over the rows. {advice}")
        if has_bias:
            check_values(total[1], exact_db, f"dB {name}", f"dB = sum of dy over the rows. {advice}")
