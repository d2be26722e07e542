"""Cross-entropy of logits that are given, forward and backward; `linear_cross_entropy.py` avoids the logits.

    lse = peak + log(total)        peak = max(z)        total = sum(exp(z - peak))
    loss = log(total) - (1 - s) (z[target] - peak) - s (mean(z) - peak) + w lse^2
    dz = p (1 + 2 w lse) - (1 - s) [target] - s / V        p = exp(z - peak) / total

with label smoothing s (Szegedy et al. 2016) and the weight w of the z-loss, which keeps lse near 0 (Chowdhery et al.
2022, section 5). One pass over a row finds its largest value and its sum of exponentials together: when a larger value
turns up, what was summed so far is scaled down (online softmax, Milakov & Gimelshein 2018).

Steps: 1 two passes, the maximum and then the sum; 2 online, one pass, a tile of rows a program; 3 the gradient is
written over the logits in the same program, while they are still in the cache: one read, one write and no new memory.
The target's gradient p - 1 is subtracted in fp32: through a bfloat16 buffer, p = 0.999 would be 1 and its gradient 0.
"""

from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.checks import check_loss
from phase2_triton.kernels.core import (
    Cost,
    config,
    flat,
    jit,
    kernel_op,
    launch,
    rows_of,
    tile,
    tl,
    to_fp32,
)


def reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """The same in plain torch; see `cross_entropy`."""
    z = logits[..., :vocab_size].reshape(targets.numel(), -1)
    z = z if z.dtype == torch.float64 else z.float()  # (M, V)
    targets = targets.reshape(-1)
    counted = targets != ignore_index
    lse = z.logsumexp(-1)
    picked = z.gather(1, targets.where(counted, 0).unsqueeze(1)).squeeze(1)
    losses = lse - (1 - label_smoothing) * picked + z_loss * lse.square()
    if label_smoothing:
        losses = losses - label_smoothing * z.mean(-1)
    return reduce(losses.where(counted, 0.0), counted, reduction)


def reduce(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The sum of the losses, or their mean over the targets that count: 0 where none does."""
    total = losses.sum(dtype=torch.float64)
    return (total if reduction == "sum" else total / counted.sum().clamp(min=1)).to(losses.dtype)


@jit
def two_pass_kernel(logits, targets, losses, V, stride, ignore_index, BLOCK: tl.constexpr):
    """Step 1: a row a program; the row is read for its maximum, then again for its sum."""
    row = tl.program_id(0).to(tl.int64)
    biggest = to_fp32(tl.load(logits + row * stride))
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        z = to_fp32(tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf")))
        biggest = tl.maximum(biggest, tl.max(z, 0))
    total = tl.zeros_like(biggest)
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        z = to_fp32(tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf")))
        total += tl.sum(tl.exp(z - biggest), 0)
    target = tl.load(targets + row)
    picked = to_fp32(tl.load(logits + row * stride + target, mask=target != ignore_index, other=0.0))
    tl.store(losses + row, tl.where(target != ignore_index, tl.log(total) - (picked - biggest), 0.0))


@jit
def forward_kernel(
    logits, targets, losses, peaks, totals, M, V, padded_V, stride, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 2 and, with GRADIENT, 3. A target that is no column makes its row NaN and reads nothing.

    The loss is of differences: what all logits of a row have in common is not to cost digits.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = logits + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * stride  # past 2^31: 65,536 rows of 50,304
    biggest = to_fp32(tl.max(tl.load(base), 1))
    total = tl.zeros_like(biggest)
    distance = tl.zeros_like(biggest)
    origin = tl.where(biggest == float("-inf"), 0.0, biggest)
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        z = to_fp32(tl.load(base + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last"))
        new = tl.maximum(biggest, tl.max(z, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # nothing but -inf so far: -inf - -inf would be NaN
        total = total * tl.exp(biggest - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        biggest = new
        if SMOOTH:
            distance += tl.sum(tl.where(cols < V, z - origin[:, None], 0.0), 1)
    lse = biggest + tl.log(total)
    target = tl.load(targets + rows, mask=rows < M, other=0)
    counted = target != ignore_index
    known = (target >= 0) & (target < V)
    picked = to_fp32(tl.load(base + tl.where(known, target, 0)[:, None]))
    loss = tl.log(total) - (1 - smoothing) * (tl.max(picked, 1) - biggest) + z_loss * lse * lse
    if SMOOTH:
        loss -= smoothing * (distance / V + (origin - biggest))
    loss = tl.where(known, loss, float("nan"))
    tl.store(losses + rows, tl.where(counted, loss, 0.0), mask=rows < M)
    tl.store(peaks + rows, biggest, mask=rows < M)
    tl.store(totals + rows, total, mask=rows < M)
    if GRADIENT:
        tl.debug_barrier()  # no warp may write over the logits before all have loaded `picked`
        for first in range(0, padded_V, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            z = to_fp32(tl.load(base + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_first"))
            d = gradient(z, cols, target[:, None], biggest[:, None], total[:, None], V, smoothing, z_loss, SMOOTH)
            d = tl.where(counted[:, None], d, 0.0)
            tl.store(base + cols, d, mask=(rows < M)[:, None] & (cols < padded_V))


@jit
def gradient(z, cols, target, peak, total, V, smoothing, z_loss, SMOOTH: tl.constexpr):
    """dz of one loss, in fp32; 0 where z is -inf, as in the columns that only pad; NaN for a target that is none."""
    d = tl.exp(z - peak) / total * (1 + 2 * z_loss * (peak + tl.log(total)))
    d -= tl.where(cols == target, 1 - smoothing, 0.0)
    if SMOOTH:
        d -= tl.where(cols < V, smoothing / V, 0.0)
    return tl.where((target >= 0) & (target < V), d, float("nan"))


@jit
def backward_kernel(
    logits, targets, peaks, totals, dlosses, out, M, V, padded_V, stride, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of logits, times that of each row's loss; `out` may be the logits."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = rows.to(tl.int64)[:, None] * stride + cols
    z = to_fp32(tl.load(logits + at, mask=(rows < M)[:, None] & (cols < V), other=float("-inf")))
    target = tl.load(targets + rows, mask=rows < M, other=ignore_index)[:, None]
    peak = tl.load(peaks + rows, mask=rows < M, other=0.0)[:, None]
    total = tl.load(totals + rows, mask=rows < M, other=1.0)[:, None]
    d = gradient(z, cols, target, peak, total, V, smoothing, z_loss, SMOOTH)
    d *= tl.load(dlosses + rows, mask=rows < M, other=0.0)[:, None]
    tl.store(out + at, tl.where(target != ignore_index, d, 0.0), mask=(rows < M)[:, None] & (cols < padded_V))


@kernel_op("cross_entropy")
def forward_op(
    logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, smoothing: float, z_loss: float, in_place: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss, 0 where its target is ignored, its peak and its total; `in_place` is for the backward."""
    return run_forward(logits, targets, vocab_size, ignore_index, smoothing, z_loss, gradient=False)


def run_forward(
    logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, smoothing: float, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, peaks and totals of contiguous (M, V) logits; `gradient` writes each loss's own over its logits."""
    M, padded = logits.shape
    losses, peaks, totals = rows_of(logits), rows_of(logits), rows_of(logits)
    options, rows = tiles("cross_entropy_forward", M, padded)
    launch(
        forward_kernel, (-(-M // rows),), logits, targets, losses, peaks, totals, M, vocab_size, padded, padded,
        ignore_index, smoothing, z_loss, SMOOTH=smoothing > 0, GRADIENT=gradient, ROWS=rows, **options,
    )  # fmt: skip
    return losses, peaks, totals


def tiles(kernel: str, M: int, V: int) -> tuple[dict[str, int], int]:
    """Its options with BLOCK, and the rows a program takes: no wider or higher than the logits."""
    options = config(kernel, V)
    rows, options["BLOCK"] = options.pop("rows"), min(tile(V), options.pop("block"))
    return options, min(tile(M), rows)


@kernel_op("cross_entropy_backward")
def backward_op(
    dlosses: Tensor, logits: Tensor, targets: Tensor, peaks: Tensor, totals: Tensor,
    vocab_size: int, ignore_index: int, smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    """The gradient of (M, V) logits in a tensor of its own."""
    out = torch.empty_like(logits)
    return run_backward(out, dlosses, logits, targets, peaks, totals, vocab_size, ignore_index, smoothing, z_loss)


@kernel_op("cross_entropy_backward_", mutates=("logits",))
def backward_op_(
    dlosses: Tensor, logits: Tensor, targets: Tensor, peaks: Tensor, totals: Tensor,
    vocab_size: int, ignore_index: int, smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    """The gradient of (M, V) logits, written over them."""
    run_backward(logits, dlosses, logits, targets, peaks, totals, vocab_size, ignore_index, smoothing, z_loss)


def run_backward(
    out: Tensor, dlosses: Tensor, logits: Tensor, targets: Tensor, peaks: Tensor, totals: Tensor,
    vocab_size: int, ignore_index: int, smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    M, padded = logits.shape
    options, rows = tiles("cross_entropy_backward", M, padded)
    launch(
        backward_kernel, (-(-M // rows), -(-padded // options["BLOCK"])), logits, targets, peaks, totals, dlosses, out,
        M, vocab_size, padded, padded, ignore_index, smoothing, z_loss, SMOOTH=smoothing > 0, ROWS=rows, **options,
    )  # fmt: skip
    return out


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, *ctx.options, ctx.in_place = inputs
    ctx.save_for_backward(logits, targets, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def backward(ctx: Any, dlosses: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    given = (dlosses.contiguous(), *saved, *ctx.options)
    if ctx.in_place and not torch.compiler.is_compiling():  # compiled, the memory is the compiler's to plan
        backward_op_(*given)
        return saved[0], *[None] * 6
    return backward_op(*given), *[None] * 6


forward_op.register_autograd(backward, setup_context=setup_context)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocab_size: int | None = None,
    in_place: bool = False,
) -> Tensor:
    """Cross-entropy in nats, computed in fp32 (fp64 for fp64).

    Args:
        logits: (..., V).
        targets: int64, of the shape of logits without its last dimension.
        ignore_index: targets of this value count neither in the loss nor in the mean.
        label_smoothing: what is taken from the target and spread over all classes, from 0 up to 1.
        z_loss: weight of the squared logsumexp.
        reduction: mean over the targets that count (0 where none does), or sum.
        vocab_size: columns from here on only pad; default: none do.
        in_place: the backward writes the gradient over the logits, which nobody may read after it.

    Returns:
        A scalar, fp32. On a GPU, where looking would wait for it, a target that is no column makes it NaN.

    Raises:
        KernelError: a shape, type, device or option that does not fit; in the interpreter also a target.
    """
    check_loss("cross_entropy", logits, targets, vocab_size, ignore_index, label_smoothing, z_loss, reduction)
    V = logits.size(-1) if vocab_size is None else vocab_size
    labels = targets.reshape(-1).contiguous()
    losses, *_ = forward_op(flat(logits), labels, V, ignore_index, label_smoothing, z_loss, in_place)
    return reduce(losses, labels != ignore_index, reduction)


def cost(M: int, V: int, itemsize: int) -> tuple[Cost, Cost]:
    """Forward and backward of (M, V) logits; the fused step 3 reads and writes what the backward does."""
    size = M * V * itemsize
    return Cost(size + 8 * M, 8 * M, 4 * M * V), Cost(size + 16 * M, size, 4 * M * V)


def two_passes(logits: Tensor, targets: Tensor, ignore_index: int = -1, block: int = 4096) -> Tensor:
    """Step 1: each row's loss, of contiguous (M, V) logits."""
    M, V = logits.shape
    losses = rows_of(logits)
    launch(two_pass_kernel, (M,), logits, targets, losses, V, V, ignore_index, BLOCK=min(tile(V), block))
    return losses
