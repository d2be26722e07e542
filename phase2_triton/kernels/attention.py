"""Causal attention, forward and backward, with no (T, T) matrix in memory (FlashAttention-2, Dao 2023).

    s = q @ k^T * scale        p = softmax of s over the keys up to the query's own        y = dropout(p) @ v

A program keeps a block of queries and goes over blocks of keys with each row's highest score so far (`top`) and sum of
exponentials (`total`): a higher score shrinks what was summed before. All exponentials are powers of two. One number a
row is saved, lse = top + log2(total), from which the backward makes p again, block by block:

    p = exp2(s * log2(e) - lse)           dv = dropout(p)^T @ dy        delta = rowsum(p * dp) = rowsum(dy * y)
    dp = dropout's share of dy @ v^T      ds = p * (dp - delta)         dq = scale * ds @ k      dk = scale * ds^T @ q

dq is a sum over keys, dk and dv are sums over queries: two kernels, each with sums of its own, so nothing is added by
atomics and no bit changes from run to run. Both make s and dp, which is two products more than one kernel would make.
A query sees the keys up to its own, so only the blocks on the diagonal need a mask; the same mask hides keys past T.
Steps of the forward: 1 all keys at once, 2 online softmax with a mask on every block, 3 only on the diagonal.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_flop_count

from phase2_triton.kernels.checks import check_tensors
from phase2_triton.kernels.core import (
    HALVES,
    Cost,
    KernelError,
    config,
    constexpr,
    jit,
    kernel_op,
    launch,
    result_dtype,
    tile,
    tl,
    to_fp32,
)

LOG2E, WIDEST = constexpr(math.log2(math.e)), 128  # channels of a head, at most


def reference(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None, keep: Tensor | None = None
) -> Tensor:
    """Causal attention in plain torch; `keep`: what dropout keeps, (B, nh, T, T)."""
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    p = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (p if keep is None else p * keep / (1 - dropout_p)) @ v


@jit
def load_rows(x, first, stride, T, HS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CHECK: tl.constexpr):
    """(ROWS, BLOCK_D) of a head's (T, HS) matrix from row `first`, zeros beyond its edges; CHECK: it may pass row T."""
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = x + tl.cast(first, tl.int64) * stride + (rows.to(tl.int64) * stride + cols)  # one addition in a loop
    if CHECK or HS != BLOCK_D:
        return tl.load(at, mask=(first + rows < T) & (cols < HS), other=0.0)
    return tl.load(at)


@jit
def store_rows(x, values, first, stride, T, HS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    rows, cols = first + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    tl.store(x + (rows.to(tl.int64) * stride + cols), values, mask=(rows < T) & (cols < HS))


@jit
def all_keys_kernel(
    q, k, v, y, T, scale, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    """Step 1: a block of queries against all keys, which is plain, but long rows of scores do not fit in registers."""
    first, head = tl.program_id(0) * BLOCK, tl.cast(tl.program_id(1), tl.int64) * T * HS
    query = load_rows(q + head, first, HS, T, HS, BLOCK_D, BLOCK, True)
    key = load_rows(k + head, 0, HS, T, HS, BLOCK_D, KEYS, True)
    seen = first + tl.arange(0, BLOCK)[:, None] >= tl.arange(0, KEYS)[None, :]  # (BLOCK, KEYS)
    scores = tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -float("inf"))
    p = tl.exp(scores - tl.max(scores, 1, keep_dims=True))
    value = load_rows(v + head, 0, HS, T, HS, BLOCK_D, KEYS, True)
    out = tl.dot(p.to(value.dtype), value, input_precision="ieee") / tl.sum(p, 1, keep_dims=True)
    store_rows(y + head, out, first, HS, T, HS, BLOCK_D, BLOCK)


@jit
def of_head(x, which, heads, batch_stride, head_stride):
    """Where a head's matrix begins; `which` counts heads through all batches."""
    return x + tl.cast(which // heads, tl.int64) * batch_stride + tl.cast(which % heads, tl.int64) * head_stride


@jit
def kept(seed, queries, keys, which, dropout):
    """What dropout keeps, by Philox of 7 rounds (Salmon et al. 2011): the same in every kernel that asks."""
    bits, _, _, _ = tl.philox(seed, keys, queries, which, 0, n_rounds=7)
    return tl.uint_to_uniform_float(bits) >= dropout


@jit
def forward_kernel(
    q, k, v, y, lse, seed, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    T, heads, scale, dropout, SPLIT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 3: BLOCK queries a program, STEP keys at a time; SPLIT: no mask off the diagonal."""
    blocks = (T + BLOCK - 1) // BLOCK
    which = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK  # the longest rows begin first
    seed = tl.load(seed) if DROPOUT else 0
    query = load_rows(of_head(q, which, heads, q_batch, q_head), first, q_row, T, HS, BLOCK_D, BLOCK, True)
    k, v = of_head(k, which, heads, k_batch, k_head), of_head(v, which, heads, v_batch, v_head)
    acc = tl.full(query.shape, 0.0, lse.dtype.element_ty)
    total = tl.sum(acc, -1, keep_dims=True)  # zeros, (BLOCK, 1)
    top = total - float("inf")
    queries, unit = first + tl.arange(0, BLOCK)[:, None], scale * LOG2E
    diagonal = first // STEP * STEP if SPLIT else 0
    for MASKED in tl.static_range(2):
        for start in range(diagonal if MASKED else 0, tl.minimum(first + BLOCK, T) if MASKED else diagonal, STEP):
            keys = start + tl.arange(0, STEP)[None, :]
            key = load_rows(k, start, k_row, T, HS, BLOCK_D, STEP, MASKED)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # (BLOCK, STEP)
            if MASKED:
                scores = tl.where(queries >= keys, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, -1, keep_dims=True) * unit)
            p = tl.exp2(scores * unit - higher)  # scaled here, where it is one multiply-add
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, -1, keep_dims=True)
            if DROPOUT:
                p = tl.where(kept(seed, queries, keys, which, dropout), p, 0.0)
            value = load_rows(v, start, v_row, T, HS, BLOCK_D, STEP, MASKED)
            acc = tl.dot(p.to(value.dtype), value, acc * shrink, input_precision=PRECISION, out_dtype=acc.dtype)
            top = higher
    y = of_head(y, which, heads, tl.cast(T, tl.int64) * heads * HS, HS)
    store_rows(y, acc * (1 / (total * (1 - dropout))), first, heads * HS, T, HS, BLOCK_D, BLOCK)
    tl.store(lse + (which.to(tl.int64) * T + queries), top + tl.log2(total), mask=queries < T)


@jit
def backward_kernel(
    a, da, b, db, y, lse, delta, out, out_v, seed, a_batch, a_head, a_row, da_batch, da_head, da_row,
    b_batch, b_head, b_row, db_batch, db_head, db_row, T, heads, scale, dropout,
    DQ: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """DQ: dq and delta of BLOCK queries, STEP keys at a time, from q, dy, k, v as a, da, b, db.

    Or dk and dv of BLOCK keys, STEP queries at a time, from k, v, q, dy; queries past T are zeros and add nothing.
    """
    blocks = (T + BLOCK - 1) // BLOCK
    which = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = tl.program_id(0) % blocks * BLOCK  # the first keys are seen by the most queries, and begin first
    if DQ:
        first = (blocks - 1) * BLOCK - first
    seed = tl.load(seed) if DROPOUT else 0
    own, row, batch = first + tl.arange(0, BLOCK)[:, None], heads * HS, tl.cast(T, tl.int64) * heads * HS
    a = load_rows(of_head(a, which, heads, a_batch, a_head), first, a_row, T, HS, BLOCK_D, BLOCK, True)
    da = load_rows(of_head(da, which, heads, da_batch, da_head), first, da_row, T, HS, BLOCK_D, BLOCK, True)
    b, db = of_head(b, which, heads, b_batch, b_head), of_head(db, which, heads, db_batch, db_head)
    lse, delta = lse + which.to(tl.int64) * T, delta + which.to(tl.int64) * T
    acc = tl.full(a.shape, 0.0, lse.dtype.element_ty)
    if DQ:
        ys = load_rows(of_head(y, which, heads, batch, HS), first, row, T, HS, BLOCK_D, BLOCK, True)
        slope = tl.sum(to_fp32(da) * to_fp32(ys), -1, keep_dims=True)
        tl.store(delta + own, slope, mask=own < T)
        height = tl.load(lse + own, mask=own < T, other=0.0)
        low, middle, high = 0, first // STEP * STEP, tl.minimum(first + BLOCK, T)
    else:
        acc_v = acc
        low, middle, high = first // STEP * STEP, (first + BLOCK + STEP - 1) // STEP * STEP, T
    for UPPER in tl.static_range(2):
        for start in range(middle if UPPER else low, high if UPPER else tl.minimum(middle, high), STEP):
            others = start + tl.arange(0, STEP)[None, :]
            b_rows = load_rows(b, start, b_row, T, HS, BLOCK_D, STEP, UPPER or not DQ)
            db_rows = load_rows(db, start, db_row, T, HS, BLOCK_D, STEP, UPPER or not DQ)
            if not DQ:
                height = tl.load(lse + others, mask=others < T, other=0.0)
                slope = tl.load(delta + others, mask=others < T, other=0.0)
            p = tl.dot(a, tl.trans(b_rows), input_precision=PRECISION) * (scale * LOG2E) - height
            if (UPPER == 1) == DQ:  # on the diagonal
                p = tl.where(own >= others if DQ else others >= own, p, -float("inf"))
            p = tl.exp2(p)
            dp = tl.dot(da, tl.trans(db_rows), input_precision=PRECISION)
            if DROPOUT:
                keep = kept(seed, own if DQ else others, others if DQ else own, which, dropout)
                dp = tl.where(keep, dp * (1 / (1 - dropout)), 0.0)
            if not DQ:
                used = tl.where(keep, p, 0.0) if DROPOUT else p
                acc_v = tl.dot(used.to(db_rows.dtype), db_rows, acc_v, input_precision=PRECISION, out_dtype=acc.dtype)
            slopes = (p * (dp - slope)).to(b_rows.dtype)
            acc = tl.dot(slopes, b_rows, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    store_rows(of_head(out, which, heads, batch, HS), acc * scale, first, row, T, HS, BLOCK_D, BLOCK)
    if not DQ:
        acc_v = acc_v * (1 / (1 - dropout))
        store_rows(of_head(out_v, which, heads, batch, HS), acc_v, first, row, T, HS, BLOCK_D, BLOCK)


def run(
    kernel: Any, name: str, strided: tuple[Tensor, ...], others: tuple[Tensor | None, ...], seed: Tensor | None,
    dropout_p: float, scale: float, **flags: bool,
) -> None:  # fmt: skip
    """Launch a program for each block of rows of each head."""
    B, nh, T, hs = strided[0].shape
    kind = "_fp32" if strided[0].dtype not in HALVES else "" if seed is None else "_dropout"
    chosen = config(name + kind, hs)
    block, step, together = chosen.pop("block"), chosen.pop("step"), chosen.pop("heads", 1)
    if together > 1:  # in the interpreter, where few programs are fast: tiles get a dimension of heads in front
        while 16 < block >= 2 * T:
            block, step, together = block // 2, step // 2, together * 2
        together = max(1, min(together, B * nh & -(B * nh)))  # a power of two that divides their number
    strided = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in strided)
    rounding = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"  # of fp32 alone
    launch(
        kernel, (B * nh // together * -(-T // block),), *strided, *others, seed,
        *(stride for x in strided for stride in x.stride()[:3]), T, nh, scale, dropout_p,
        DROPOUT=seed is not None, PRECISION=rounding, HEADS=together, HS=hs, BLOCK_D=tile(hs, 16),
        BLOCK=block, STEP=step, **flags, **chosen,
    )  # fmt: skip


@kernel_op("causal_attention", flops=lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v))  # of all pairs, as torch's
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor]:
    """y over memory of (B, T, nh, hs), and log2 of each row's sum of exponentials, (B, nh, T)."""
    B, nh, T, hs = q.shape
    y = q.new_empty(B, T, nh, hs).transpose(1, 2)
    lse = q.new_empty(B, nh, T, dtype=torch.promote_types(q.dtype, torch.float32))
    run(forward_kernel, "attention_forward", (q, k, v), (y, lse), seed, dropout_p, scale, SPLIT=True)
    return y, lse


@kernel_op("causal_attention_backward", flops=lambda dy, q, *_, **__: 5 * sdpa_flop_count(q, q, q) // 2)
def backward_op(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seed: Tensor | None,
    dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, in memory as y is."""
    B, nh, T, hs = q.shape
    dq, dk, dv = (q.new_empty(B, T, nh, hs).transpose(1, 2) for _ in range(3))
    y, delta = y.transpose(1, 2).contiguous(), torch.empty_like(lse)  # no copy, unless saving it changed its layout
    rest = (seed, dropout_p, scale)
    run(backward_kernel, "attention_dq", (q, dy, k, v), (y, lse, delta, dq, None), *rest, DQ=True)
    run(backward_kernel, "attention_dkv", (k, v, q, dy), (None, lse, delta, dk, dv), *rest, DQ=False)
    return dq, dk, dv


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, seed, ctx.dropout_p, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, seed)
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy, *ctx.saved_tensors, ctx.dropout_p, ctx.scale), None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None) -> Tensor:
    """`F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale)`.

    Args:
        q: (B, nh, T, hs), hs up to 128; views into a packed projection are not copied.
        k, v: of the same shape.
        dropout_p: of the attention weights, below 1; follows torch's seed, by masks of its own.
        scale: of the scores; default: 1 / sqrt(hs).

    Returns:
        (B, nh, T, hs) over memory of (B, T, nh, hs): heads lie side by side for the projection that follows.

    Raises:
        KernelError: a shape, type, device or number that does not fit.
    """
    check_tensors("causal_attention", q=q, k=k, v=v)
    q, k, v = (x.to(result_dtype(x)) for x in (q, k, v))
    check(q, k, v, dropout_p, scale)
    seed = torch.randint(2**63 - 1, (1,), device=q.device) if dropout_p > 0 else None
    return forward_op(q, k, v, seed, dropout_p, q.size(-1) ** -0.5 if scale is None else scale)[0]


def check(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None) -> None:
    problem = None
    if not (q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.dim() == 4 and q.size(-1) > 0):
        kinds = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (q, k, v))
        problem = f"q, k and v are {kinds}: give three of one type and one shape (B, nh, T, hs)"
    elif q.size(-1) > WIDEST:
        problem = f"heads are {q.size(-1)} wide, above {WIDEST}: use F.scaled_dot_product_attention or the reference"
    elif not 0 <= dropout_p < 1:
        problem = f"dropout_p is {dropout_p}: give a probability from 0 to below 1"
    elif scale is not None and not 0 < scale < math.inf:
        problem = f"scale is {scale}: give a positive number, or None for 1 / sqrt(hs)"
    if problem:
        raise KernelError(f"causal_attention: {problem}")


def cost(B: int, nh: int, T: int, hs: int, itemsize: int) -> tuple[Cost, Cost]:
    """Forward and backward; FLOPs: 2 and 5 products over the pairs that causality leaves; workspace: delta."""
    matrix, rows, pairs = B * nh * T * hs * itemsize, 4 * B * nh * T, B * nh * T * (T + 1) // 2
    return Cost(3 * matrix, matrix + rows, 4 * pairs * hs), Cost(5 * matrix + rows, 3 * matrix, 10 * pairs * hs, rows)
