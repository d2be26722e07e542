"""Cross-entropy of given logits, forward and backward. `linear_cross_entropy.py` avoids storing the logits.

    peak = max(z)        total = sum(exp(z - peak))        p = exp(z - peak) / total
    loss = log(total) - (z[target] - peak)        dz = p - [target]

[target] is 1 for the target class and 0 for all others.

One pass over a row finds its largest logit and its sum of exponentials together. When a larger logit appears, the
kernel scales down the sum that it has so far (online softmax, Milakov & Gimelshein 2018).

Steps:
1. Two passes over a row: first the maximum, then the sum.
2. One pass (online softmax), a tile of rows per program.
3. The same program also writes the gradient over the logits, while they are still in the cache: one more read, one
   write and no new memory.
4. Fewer instructions per logit (the shipped kernel): full tiles have no masks, exp2 replaces exp, one division per row
   replaces one per logit, and the target's gradient is written apart. This halves the instructions of step 3.

The target's gradient is p - 1, computed in fp32. In bfloat16, p = 0.999 would round to 1 and the gradient to 0.
"""

from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.checks import check_loss
from phase2_triton.kernels.core import (
    LOG2E,
    Cost,
    allocate_per_row,
    flatten_rows,
    jit,
    kernel_op,
    launch,
    next_power_of_2,
    select_config,
    tl,
    to_fp32,
)


def reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """Return the same loss in plain torch. For the arguments see `cross_entropy`."""
    z = logits[..., :vocab_size].reshape(targets.numel(), -1)
    z = z if z.dtype == torch.float64 else z.float()  # (M, V)
    targets = targets.reshape(-1)
    is_counted = targets != ignore_index
    target_logits = z.gather(1, targets.where(is_counted, 0).unsqueeze(1)).squeeze(1)
    return reduce((z.logsumexp(-1) - target_logits).where(is_counted, 0.0), is_counted, reduction)


def reduce(losses: Tensor, is_counted: Tensor, reduction: str) -> Tensor:
    """Return the sum of the losses, or their mean over the targets that count (0 if no target counts)."""
    total = losses.sum()
    return total if reduction == "sum" else total / is_counted.sum().clamp(min=1)


@jit
def two_pass_kernel(logits, targets, losses, V, stride, ignore_index, BLOCK: tl.constexpr):
    """Step 1: one row per program. It reads the row once for its maximum and once more for its sum."""
    row = tl.program_id(0).to(tl.int64)
    peak = to_fp32(tl.load(logits + row * stride))
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        z = to_fp32(tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf")))
        peak = tl.maximum(peak, tl.max(z, 0))
    total = tl.zeros_like(peak)
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        z = to_fp32(tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf")))
        total += tl.sum(tl.exp(z - peak), 0)
    target = tl.load(targets + row)
    target_logit = to_fp32(tl.load(logits + row * stride + target, mask=target != ignore_index, other=0.0))
    tl.store(losses + row, tl.where(target != ignore_index, tl.log(total) - (target_logit - peak), 0.0))


@jit
def forward_kernel(
    logits, targets, losses, peaks, totals, M, V, padded_V, full_V, stride, ignore_index,
    GRADIENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 4, and with GRADIENT step 3: the losses of ROWS rows.

    Tiles of BLOCK columns cover the first `full_V` columns without masks; masked tiles of TAIL columns cover the rest.
    A target outside of [0, V) makes its row's loss NaN and reads no memory. The loss is computed from differences of
    logits, so an offset that all logits of a row share costs no precision.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # 64-bit offsets: 65,536 rows of 50,304 logits exceed 2^31. Rows beyond M read row M - 1 and are never stored.
    base = logits + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * stride  # (ROWS, 1)
    peak = to_fp32(tl.max(tl.load(base), 1))  # the first logit of each row
    total = tl.zeros_like(peak)
    for first in range(0, full_V, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        z = to_fp32(tl.load(base + cols, eviction_policy="evict_last"))
        peak, total = add_tile(z, peak, total)
    for first in range(full_V, V, TAIL):
        cols = first + tl.arange(0, TAIL)[None, :]
        z = to_fp32(tl.load(base + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last"))
        peak, total = add_tile(z, peak, total)
    target = tl.load(targets + rows, mask=rows < M, other=0)
    is_class = (target >= 0) & (target < V)
    target_logit = tl.max(to_fp32(tl.load(base + tl.where(is_class, target, 0)[:, None])), 1)
    loss = tl.where(is_class, tl.log(total) - (target_logit - peak), float("nan"))
    is_counted = target != ignore_index
    tl.store(losses + rows, tl.where(is_counted, loss, 0.0), mask=rows < M)
    tl.store(peaks + rows, peak, mask=rows < M)
    tl.store(totals + rows, total, mask=rows < M)
    if GRADIENT:
        tl.debug_barrier()  # every warp must load `target_logit` before any warp writes over the logits
        scale = compute_gradient_scale(total, is_class, is_counted)
        for first in range(0, full_V, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            z = to_fp32(tl.load(base + cols, eviction_policy="evict_first"))
            z = tl.where(is_counted[:, None], z, float("-inf"))
            dz = exp(z - peak[:, None]) * scale[:, None]
            tl.store(base + cols, dz, mask=(rows < M)[:, None])
        for first in range(full_V, padded_V, TAIL):
            cols = first + tl.arange(0, TAIL)[None, :]
            z = to_fp32(tl.load(base + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_first"))
            z = tl.where(is_counted[:, None], z, float("-inf"))
            dz = exp(z - peak[:, None]) * scale[:, None]
            tl.store(base + cols, dz, mask=(rows < M)[:, None] & (cols < padded_V))
        tl.debug_barrier()  # the gradient of the target replaces what another warp may have written
        dz = exp(target_logit - peak) * scale - 1
        tl.store(base + target[:, None], dz[:, None], mask=(is_counted & is_class & (rows < M))[:, None])


@jit
def add_tile(z, peak, total):
    """Return the largest logit and the sum of exponentials of each row after one more tile, (ROWS, columns)."""
    new_peak = tl.maximum(peak, tl.max(z, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # if all logits so far are -inf, avoid -inf - -inf
    return new_peak, total * exp(peak - shift) + tl.sum(exp(z - shift[:, None]), 1)


@jit
def exp(x):
    """Return exp(x). `tl.exp` takes three instructions more, because it also handles results below 2^-126."""
    return tl.exp2(x * LOG2E)


@jit
def compute_gradient_scale(total, is_class, is_counted):
    """Return the factor of exp(z - peak) in the gradient of each row: 0 if ignored, NaN if the target is no class.

    One division per row replaces one per logit.
    """
    return tl.where(is_counted, tl.where(is_class, 1 / total, float("nan")), 0.0)


@jit
def backward_kernel(
    logits, targets, peaks, totals, dlosses, out, M, V, padded_V, stride, ignore_index,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of logits, multiplied by the gradient of each row's loss.

    dz is 0 where z is -inf, as in padding columns.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    offs = rows.to(tl.int64)[:, None] * stride + cols  # (ROWS, BLOCK)
    z = to_fp32(tl.load(logits + offs, mask=(rows < M)[:, None] & (cols < V), other=float("-inf")))
    target = tl.load(targets + rows, mask=rows < M, other=ignore_index)
    peak = tl.load(peaks + rows, mask=rows < M, other=0.0)
    total = tl.load(totals + rows, mask=rows < M, other=1.0)
    dloss = tl.load(dlosses + rows, mask=rows < M, other=0.0)
    is_counted = target != ignore_index
    scale = compute_gradient_scale(total, (target >= 0) & (target < V), is_counted) * dloss
    z = tl.where(is_counted[:, None], z, float("-inf"))
    dz = exp(z - peak[:, None]) * scale[:, None]
    is_target = (cols == target[:, None]) & is_counted[:, None]
    dz -= tl.where(is_target, dloss[:, None], 0.0)
    tl.store(out + offs, dz, mask=(rows < M)[:, None] & (cols < padded_V))


@kernel_op("cross_entropy")
def forward_op(logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (0 for an ignored target), peak and total of each row."""
    return run_forward(logits, targets, vocab_size, ignore_index, gradient=False)


def run_forward(
    logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, peaks and totals of contiguous logits, (M, V).

    With `gradient`, also write the gradient of the sum of the losses over the logits.
    """
    M, padded_V = logits.shape
    losses = allocate_per_row(logits)
    peaks = allocate_per_row(logits)
    totals = allocate_per_row(logits)
    options, rows = select_tiles("cross_entropy_forward", M, padded_V)
    full_V = vocab_size // options["BLOCK"] * options["BLOCK"]
    tail = min(options["BLOCK"], next_power_of_2(padded_V - full_V))
    launch(
        forward_kernel, (-(-M // rows),), logits, targets, losses, peaks, totals, M, vocab_size, padded_V, full_V,
        padded_V, ignore_index, GRADIENT=gradient, ROWS=rows, TAIL=tail, **options,
    )  # fmt: skip
    return losses, peaks, totals


def select_tiles(kernel: str, M: int, V: int) -> tuple[dict[str, int], int]:
    """Return a kernel's options, with BLOCK, and its rows per program. Tiles are not larger than the logits, (M, V)."""
    options = select_config(kernel, V)
    rows = min(next_power_of_2(M), options.pop("rows"))
    options["BLOCK"] = min(next_power_of_2(V), options.pop("block"))
    return options, rows


@kernel_op("cross_entropy_backward")
def backward_op(
    dlosses: Tensor, logits: Tensor, targets: Tensor, peaks: Tensor, totals: Tensor, vocab_size: int, ignore_index: int
) -> Tensor:
    """Return the gradient of the logits, (M, V), in a new tensor."""
    M, padded_V = logits.shape
    out = torch.empty_like(logits)
    options, rows = select_tiles("cross_entropy_backward", M, padded_V)
    launch(
        backward_kernel, (-(-M // rows), -(-padded_V // options["BLOCK"])),
        logits, targets, peaks, totals, dlosses, out, M, vocab_size, padded_V, padded_V, ignore_index,
        ROWS=rows, **options,
    )  # fmt: skip
    return out


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, *ctx.options = inputs
    ctx.save_for_backward(logits, targets, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def backward(ctx: Any, dlosses: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return backward_op(dlosses.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy in nats, computed in fp32 (fp64 for fp64).

    Args:
        logits: (..., V).
        targets: int64, the shape of logits without the last dimension.
        ignore_index: targets of this value count neither in the loss nor in the mean.
        reduction: mean over the targets that count (0 if no target counts), or sum.
        vocab_size: columns from this one on are padding; default: no padding.

    Returns:
        A scalar, fp32. On a GPU a target outside of [0, V) makes it NaN: checking the targets would wait for the GPU.

    Raises:
        KernelError: a shape, type, device or option is not supported; in the interpreter also an invalid target.
    """
    check_loss("cross_entropy", logits, targets, vocab_size, ignore_index, reduction)
    V = logits.size(-1) if vocab_size is None else vocab_size
    labels = targets.reshape(-1).contiguous()
    losses, *_ = forward_op(flatten_rows(logits), labels, V, ignore_index)
    return reduce(losses, labels != ignore_index, reduction)


def cost(M: int, V: int, itemsize: int) -> tuple[Cost, Cost]:
    """Return the costs of forward and backward for logits (M, V). Step 3 reads and writes as much as the backward."""
    size = M * V * itemsize
    return Cost(size + 8 * M, 8 * M, 4 * M * V), Cost(size + 16 * M, size, 4 * M * V)


def run_two_pass_step(logits: Tensor, targets: Tensor, ignore_index: int = -1, block: int = 4096) -> Tensor:
    """Run step 1: return the loss of each row of contiguous logits, (M, V)."""
    M, V = logits.shape
    losses = allocate_per_row(logits)
    block = min(next_power_of_2(V), block)
    launch(two_pass_kernel, (M,), logits, targets, losses, V, V, ignore_index, BLOCK=block)
    return losses
