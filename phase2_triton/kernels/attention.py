"""Causal attention, forward and backward, without a (T, T) matrix in memory (FlashAttention-2, Dao 2023).

    s = q @ k^T * scale        p = softmax of s over the keys up to the query's position        y = dropout(p) @ v

Forward: a program loads one block of queries and loops over blocks of keys (online softmax). For each query it keeps
the largest score so far (`row_max`) and the sum of exponentials (`row_sum`). When a larger score appears, it scales
down the sums that it has so far. All exponentials are powers of two (exp2). The forward saves one number per query,
lse = row_max + log2(row_sum), and the backward recomputes p from it, block by block:

    p = exp2(s * log2(e) - lse)                       dv = dropout(p)^T @ dy
    dp = dy @ v^T, with dropout's mask and scale      delta = rowsum(p * dp) = rowsum(dy * y)
    ds = p * (dp - delta)                             dq = scale * ds @ k        dk = scale * ds^T @ q

Backward: dq is a sum over keys, dk and dv are sums over queries. `dq_kernel` computes dq, and `dkv_kernel` dk and dv.
Every program adds up its own sums. There are no atomic additions, so results are bitwise identical in every run. Both
kernels compute s and dp: seven matrix products, where one kernel that adds to dq atomically needs five.

A query attends only to keys up to its own position. Therefore only the blocks on the diagonal need a mask. The same
mask hides keys beyond T.

Steps of the forward:
1. All keys at once.
2. Online softmax, with a mask on every block.
3. Online softmax, with a mask on the diagonal blocks only.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_flop_count

from phase2_triton.kernels.checks import check_attention, check_tensors
from phase2_triton.kernels.core import (
    HALF_TYPES,
    LOG2E,
    Cost,
    jit,
    kernel_op,
    launch,
    next_power_of_2,
    result_dtype,
    select_config,
    tl,
    to_fp32,
)


def reference(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None, keep: Tensor | None = None
) -> Tensor:
    """Return causal attention in plain torch. `keep` is dropout's mask, (B, nh, T, T): True where p is kept."""
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    p = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (p if keep is None else p * keep / (1 - dropout_p)) @ v


@jit
def load_rows(x, first, stride, T, HS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CHECK: tl.constexpr):
    """Load rows `first` to `first + ROWS` of a head's (T, HS) matrix as a (ROWS, BLOCK_D) tile.

    Elements beyond the edges of the matrix are zeros. CHECK: the tile may pass row T, so the rows need a mask.
    """
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    # Only `first` changes in a loop. With these parentheses an iteration needs a single addition for the pointers.
    ptrs = x + tl.cast(first, tl.int64) * stride + (rows.to(tl.int64) * stride + cols)
    if CHECK or HS != BLOCK_D:
        return tl.load(ptrs, mask=(first + rows < T) & (cols < HS), other=0.0)
    return tl.load(ptrs)


@jit
def store_rows(x, values, first, stride, T, HS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Store a (ROWS, BLOCK_D) tile as rows `first` to `first + ROWS` of a head's (T, HS) matrix."""
    rows = first + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    tl.store(x + (rows.to(tl.int64) * stride + cols), values, mask=(rows < T) & (cols < HS))


@jit
def all_keys_kernel(
    q, k, v, y, T,
    SCALE: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Step 1: a block of queries attends to all keys at once. Long rows of scores do not fit into registers."""
    first = tl.program_id(0) * BLOCK
    head_offset = tl.cast(tl.program_id(1), tl.int64) * T * HS
    query = load_rows(q + head_offset, first, HS, T, HS, BLOCK_D, BLOCK, True)  # (BLOCK, BLOCK_D)
    key = load_rows(k + head_offset, 0, HS, T, HS, BLOCK_D, KEYS, True)  # (KEYS, BLOCK_D)
    visible = first + tl.arange(0, BLOCK)[:, None] >= tl.arange(0, KEYS)[None, :]  # (BLOCK, KEYS)
    scores = tl.where(visible, tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE, -float("inf"))
    p = tl.exp(scores - tl.max(scores, 1, keep_dims=True))
    value = load_rows(v + head_offset, 0, HS, T, HS, BLOCK_D, KEYS, True)
    out = tl.dot(p.to(value.dtype), value, input_precision="ieee") / tl.sum(p, 1, keep_dims=True)
    store_rows(y + head_offset, out, first, HS, T, HS, BLOCK_D, BLOCK)


@jit
def head_pointer(x, head, heads, batch_stride, head_stride):
    """Return the pointer to a head's matrix. `head` counts through the heads of all sequences of the batch."""
    return x + tl.cast(head // heads, tl.int64) * batch_stride + tl.cast(head % heads, tl.int64) * head_stride


@jit
def load_block(
    x, head, heads, batch_stride, head_stride, row_stride, first, T,
    HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load rows `first` to `first + BLOCK` of a head as a (BLOCK, BLOCK_D) tile, with a mask."""
    x = head_pointer(x, head, heads, batch_stride, head_stride)
    return load_rows(x, first, row_stride, T, HS, BLOCK_D, BLOCK, True)


@jit
def store_block(
    x, values, head, heads, batch_stride, head_stride, row_stride, first, T,
    HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a (BLOCK, BLOCK_D) tile as rows `first` to `first + BLOCK` of a head."""
    x = head_pointer(x, head, heads, batch_stride, head_stride)
    store_rows(x, values, first, row_stride, T, HS, BLOCK_D, BLOCK)


@jit
def dropout_mask(seed, queries, keys, head, DROPOUT: tl.constexpr):
    """Return which weights dropout keeps, by Philox with 7 rounds (Salmon et al. 2011).

    The mask depends only on (seed, head, query, key), so the forward and both backward kernels compute the same mask.
    """
    bits, _, _, _ = tl.philox(seed, keys, queries, head, 0, n_rounds=7)
    return tl.uint_to_uniform_float(bits) >= DROPOUT


@jit
def forward_kernel(
    q, k, v, y, lse, seed, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    T, heads, SCALE: tl.constexpr, DROPOUT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 3: a program computes y for BLOCK queries and loops over the keys, STEP at a time.

    SPLIT: blocks below the diagonal get no mask (step 3). HEADS > 1: a program takes this many heads at once, as a
    leading dimension of all tiles. This makes the interpreter faster; on a GPU HEADS is 1.
    """
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK  # the last queries have the most keys, so they start first
    seed = tl.load(seed) if DROPOUT > 0 else 0
    query = load_block(q, head, heads, q_batch, q_head, q_row, first, T, HS, BLOCK_D, BLOCK)
    k = head_pointer(k, head, heads, k_batch, k_head)
    v = head_pointer(v, head, heads, v_batch, v_head)
    acc = tl.full(query.shape, 0.0, lse.dtype.element_ty)  # (BLOCK, BLOCK_D)
    row_sum = tl.sum(acc, -1, keep_dims=True)  # zeros, (BLOCK, 1)
    row_max = row_sum - float("inf")
    queries = first + tl.arange(0, BLOCK)[:, None]
    score_scale: tl.constexpr = SCALE * LOG2E
    diagonal = first // STEP * STEP if SPLIT else 0  # the first key block that needs a mask
    for MASKED in tl.static_range(2):
        for start in range(diagonal if MASKED else 0, tl.minimum(first + BLOCK, T) if MASKED else diagonal, STEP):
            keys = start + tl.arange(0, STEP)[None, :]
            key = load_rows(k, start, k_row, T, HS, BLOCK_D, STEP, MASKED)  # (STEP, BLOCK_D)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # (BLOCK, STEP)
            if MASKED:
                scores = tl.where(queries >= keys, scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, -1, keep_dims=True) * score_scale)
            p = tl.exp2(scores * score_scale - new_max)  # scaling here is part of one multiply-add
            correction = tl.exp2(row_max - new_max)
            row_sum = row_sum * correction + tl.sum(p, -1, keep_dims=True)
            if DROPOUT > 0:
                p = tl.where(dropout_mask(seed, queries, keys, head, DROPOUT), p, 0.0)
            value = load_rows(v, start, v_row, T, HS, BLOCK_D, STEP, MASKED)  # (STEP, BLOCK_D)
            acc = tl.dot(p.to(value.dtype), value, acc * correction, input_precision=PRECISION, out_dtype=acc.dtype)
            row_max = new_max
    y = head_pointer(y, head, heads, tl.cast(T, tl.int64) * heads * HS, HS)  # (B, T, nh, hs) in memory
    store_rows(y, acc * (1 / (row_sum * (1 - DROPOUT))), first, heads * HS, T, HS, BLOCK_D, BLOCK)
    tl.store(lse + (head.to(tl.int64) * T + queries), row_max + tl.log2(row_sum), mask=queries < T)


@jit
def dq_kernel(
    q, dy, k, v, y, lse, delta, dq, seed, q_batch, q_head, q_row, dy_batch, dy_head, dy_row,
    k_batch, k_head, k_row, v_batch, v_head, v_row, T, heads,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK queries in a loop over the keys, STEP at a time, and delta, which `dkv_kernel` reads.

    delta = rowsum(dy * y)        ds = p * (dropout(dy @ v^T) - delta)        dq = SCALE * sum over keys of ds @ k
    """
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK  # the last queries have the most keys, so they start first
    seed = tl.load(seed) if DROPOUT > 0 else 0
    queries = first + tl.arange(0, BLOCK)[:, None]
    row, batch = heads * HS, tl.cast(T, tl.int64) * heads * HS  # strides of y and dq: (B, T, nh, hs) in memory
    query = load_block(q, head, heads, q_batch, q_head, q_row, first, T, HS, BLOCK_D, BLOCK)  # (BLOCK, BLOCK_D)
    dy_block = load_block(dy, head, heads, dy_batch, dy_head, dy_row, first, T, HS, BLOCK_D, BLOCK)
    k = head_pointer(k, head, heads, k_batch, k_head)
    v = head_pointer(v, head, heads, v_batch, v_head)
    lse, delta = lse + head.to(tl.int64) * T, delta + head.to(tl.int64) * T
    acc = tl.full(query.shape, 0.0, lse.dtype.element_ty)  # (BLOCK, BLOCK_D)
    y_block = load_block(y, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)
    row_delta = tl.sum(to_fp32(dy_block) * to_fp32(y_block), -1, keep_dims=True)  # (BLOCK, 1)
    tl.store(delta + queries, row_delta, mask=queries < T)
    row_lse = tl.load(lse + queries, mask=queries < T, other=0.0)
    diagonal, end = first // STEP * STEP, tl.minimum(first + BLOCK, T)
    for MASKED in tl.static_range(2):  # keys before the diagonal, then keys on the diagonal
        for start in range(diagonal if MASKED else 0, end if MASKED else tl.minimum(diagonal, end), STEP):
            keys = start + tl.arange(0, STEP)[None, :]
            key = load_rows(k, start, k_row, T, HS, BLOCK_D, STEP, MASKED)  # (STEP, BLOCK_D)
            value = load_rows(v, start, v_row, T, HS, BLOCK_D, STEP, MASKED)
            p = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (SCALE * LOG2E) - row_lse  # (BLOCK, STEP)
            if MASKED:
                p = tl.where(queries >= keys, p, -float("inf"))
            p = tl.exp2(tl.minimum(p, 0.0, propagate_nan=tl.PropagateNan.ALL))  # p <= 1, also for large scores
            dp = tl.dot(dy_block, tl.trans(value), input_precision=PRECISION)  # (BLOCK, STEP)
            if DROPOUT > 0:
                keep = dropout_mask(seed, queries, keys, head, DROPOUT)
                dp = tl.where(keep, dp * (1 / (1 - DROPOUT)), 0.0)
            ds = (p * (dp - row_delta)).to(key.dtype)
            acc = tl.dot(ds, key, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    store_block(dq, acc * SCALE, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)


@jit
def dkv_kernel(
    k, v, q, dy, lse, delta, dk, dv, seed, k_batch, k_head, k_row, v_batch, v_head, v_row,
    q_batch, q_head, q_row, dy_batch, dy_head, dy_row, T, heads,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK keys in a loop over the queries, STEP at a time. All tiles are transposed: p is p^T.

    dv = sum over queries of dropout(p)^T @ dy        dk = SCALE * sum over queries of ds^T @ q        ds as above

    Queries beyond T are loaded as zeros and add nothing.
    """
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = tl.program_id(0) % blocks * BLOCK  # the first keys have the most queries, so they start first
    seed = tl.load(seed) if DROPOUT > 0 else 0
    keys = first + tl.arange(0, BLOCK)[:, None]
    row, batch = heads * HS, tl.cast(T, tl.int64) * heads * HS  # strides of dk and dv: (B, T, nh, hs) in memory
    key = load_block(k, head, heads, k_batch, k_head, k_row, first, T, HS, BLOCK_D, BLOCK)  # (BLOCK, BLOCK_D)
    value = load_block(v, head, heads, v_batch, v_head, v_row, first, T, HS, BLOCK_D, BLOCK)
    q = head_pointer(q, head, heads, q_batch, q_head)
    dy = head_pointer(dy, head, heads, dy_batch, dy_head)
    lse, delta = lse + head.to(tl.int64) * T, delta + head.to(tl.int64) * T
    dk_acc = tl.full(key.shape, 0.0, lse.dtype.element_ty)  # (BLOCK, BLOCK_D)
    dv_acc = dk_acc
    begin, middle = first // STEP * STEP, (first + BLOCK + STEP - 1) // STEP * STEP
    for AFTER in tl.static_range(2):  # queries on the diagonal, then queries after the diagonal
        for start in range(middle if AFTER else begin, T if AFTER else tl.minimum(middle, T), STEP):
            queries = start + tl.arange(0, STEP)[None, :]
            query = load_rows(q, start, q_row, T, HS, BLOCK_D, STEP, True)  # (STEP, BLOCK_D)
            dy_tile = load_rows(dy, start, dy_row, T, HS, BLOCK_D, STEP, True)
            row_lse = tl.load(lse + queries, mask=queries < T, other=0.0)  # (1, STEP)
            row_delta = tl.load(delta + queries, mask=queries < T, other=0.0)
            p = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (SCALE * LOG2E) - row_lse  # (BLOCK, STEP)
            if AFTER == 0:
                p = tl.where(queries >= keys, p, -float("inf"))
            p = tl.exp2(tl.minimum(p, 0.0, propagate_nan=tl.PropagateNan.ALL))
            dp = tl.dot(value, tl.trans(dy_tile), input_precision=PRECISION)  # (BLOCK, STEP)
            kept_p = p
            if DROPOUT > 0:
                keep = dropout_mask(seed, queries, keys, head, DROPOUT)
                kept_p = tl.where(keep, p, 0.0)  # divided by 1 - DROPOUT below
                dp = tl.where(keep, dp * (1 / (1 - DROPOUT)), 0.0)
            kept_p = kept_p.to(dy_tile.dtype)
            dv_acc = tl.dot(kept_p, dy_tile, dv_acc, input_precision=PRECISION, out_dtype=dv_acc.dtype)
            ds = (p * (dp - row_delta)).to(query.dtype)
            dk_acc = tl.dot(ds, query, dk_acc, input_precision=PRECISION, out_dtype=dk_acc.dtype)
    store_block(dk, dk_acc * SCALE, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)
    store_block(dv, dv_acc * (1 / (1 - DROPOUT)), head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)


def launch_blocks(
    kernel: Any, name: str, strided: tuple[Tensor, ...], others: tuple[Tensor, ...], seed: Tensor | None,
    dropout_p: float, scale: float, **flags: bool,
) -> None:  # fmt: skip
    """Launch one program for each block of rows of each head.

    Args:
        kernel: `forward_kernel`, `dq_kernel` or `dkv_kernel`.
        name: its key in configs.json, without the suffix for fp32 or dropout.
        strided: (B, nh, T, hs) inputs, which the kernel reads by their strides.
        others: the kernel's other tensors.
        seed: for dropout's mask; None: no dropout.
        dropout_p: probability of dropout.
        scale: factor of the scores.
        flags: the kernel's other constants.
    """
    B, nh, T, hs = strided[0].shape
    suffix = "_fp32" if strided[0].dtype not in HALF_TYPES else "" if seed is None else "_dropout"
    options = select_config(name + suffix, hs)
    block = options.pop("block")
    step = options.pop("step")
    heads = options.pop("heads", 1)  # heads per program
    if heads > 1:  # only in the interpreter, which is faster with few programs
        while 16 < block >= 2 * T:
            block, step, heads = block // 2, step // 2, heads * 2
        heads = max(1, min(heads, B * nh & -(B * nh)))  # a power of two that divides the number of heads
    strided = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in strided)
    fp32_precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"  # no effect on half types
    strides = [stride for x in strided for stride in x.stride()[:3]]
    launch(
        kernel, (B * nh // heads * -(-T // block),), *strided, *others, seed, *strides, T, nh,
        SCALE=scale, DROPOUT=0.0 if seed is None else dropout_p, PRECISION=fp32_precision, HEADS=heads, HS=hs,
        BLOCK_D=next_power_of_2(hs, 16), BLOCK=block, STEP=step, **flags, **options,
    )  # fmt: skip


# FLOPs of all (query, key) pairs, without the savings by causality, as torch counts them for SDPA.
@kernel_op("causal_attention", flops=lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v))
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return y, (B, nh, T, hs) in the memory layout of (B, T, nh, hs), and lse, (B, nh, T)."""
    B, nh, T, hs = q.shape
    y = q.new_empty(B, T, nh, hs).transpose(1, 2)
    lse = q.new_empty(B, nh, T, dtype=torch.promote_types(q.dtype, torch.float32))
    launch_blocks(forward_kernel, "attention_forward", (q, k, v), (y, lse), seed, dropout_p, scale, SPLIT=True)
    return y, lse


@kernel_op("causal_attention_backward", flops=lambda dy, q, *_, **__: 5 * sdpa_flop_count(q, q, q) // 2)
def backward_op(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seed: Tensor | None,
    dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv, in the same memory layout as y."""
    B, nh, T, hs = q.shape
    dq, dk, dv = (q.new_empty(B, T, nh, hs).transpose(1, 2) for _ in range(3))
    y = y.transpose(1, 2).contiguous()  # copies only if saving y for the backward changed its layout
    delta = torch.empty_like(lse)
    options = (seed, dropout_p, scale)
    launch_blocks(dq_kernel, "attention_dq", (q, dy, k, v), (y, lse, delta, dq), *options)
    launch_blocks(dkv_kernel, "attention_dkv", (k, v, q, dy), (lse, delta, dk, dv), *options)
    return dq, dk, dv


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, seed, ctx.dropout_p, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, seed)
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy, *ctx.saved_tensors, ctx.dropout_p, ctx.scale), None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None) -> Tensor:
    """Return `F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale)`.

    Args:
        q: (B, nh, T, hs), hs up to 128. Views into a packed projection are not copied.
        k, v: the same shape as q.
        dropout_p: probability of dropout on the attention weights, in [0, 1). The masks depend on torch's seed, but
            they are not the masks of torch's own attention.
        scale: factor of the scores; default: 1 / sqrt(hs).

    Returns:
        (B, nh, T, hs) in the memory layout of (B, T, nh, hs), so that the next projection needs no copy.

    Raises:
        KernelError: a shape, type, device or number is not supported.
    """
    check_tensors("causal_attention", q=q, k=k, v=v)
    q, k, v = (x.to(result_dtype(x)) for x in (q, k, v))
    check_attention(q, k, v, dropout_p, scale)
    seed = torch.randint(2**63 - 1, (1,), device=q.device) if dropout_p > 0 else None
    return forward_op(q, k, v, seed, dropout_p, q.size(-1) ** -0.5 if scale is None else scale)[0]


def cost(B: int, nh: int, T: int, hs: int, itemsize: int) -> tuple[Cost, Cost]:
    """Return the costs of forward and backward.

    FLOPs are 2 matrix products forward and 5 backward, over the (query, key) pairs that the causal mask leaves. The
    workspace of the backward is delta.
    """
    matrix = B * nh * T * hs * itemsize
    row_values = 4 * B * nh * T  # bytes of lse, and of delta
    pairs = B * nh * T * (T + 1) // 2
    forward_cost = Cost(3 * matrix, matrix + row_values, 4 * pairs * hs)
    backward_cost = Cost(5 * matrix + row_values, 3 * matrix, 10 * pairs * hs, row_values)
    return forward_cost, backward_cost
