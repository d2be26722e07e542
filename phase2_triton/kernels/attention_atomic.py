"""Causal attention with a backward pass of five matrix products, which adds up dq with atomic additions.

The forward is that of `attention.py`, and so are the formulas. There, the backward has two kernels, and both compute s
and dp: seven products. Here, one kernel computes s and dp once for each tile, and from them its part of dv, dk and dq:

    s = k @ q^T        dp = v @ dy^T        dv += p @ dy        dk += ds @ q        dq += ds^T @ k

A program keeps the sums dk and dv of its keys. All programs of a head add to the same dq, in fp32, with atomic
additions. On a GPU their order changes from run to run, and so do the last bits of dq. That is the price of two
products less: results are not bitwise identical. Under `torch.use_deterministic_algorithms`, attention uses seven
products.

A kernel of its own computes delta = rowsum(dy * y) first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_flop_count

from phase2_triton.kernels import attention
from phase2_triton.kernels.attention import (
    check_inputs,
    dropout_mask,
    head_pointer,
    launch_blocks,
    load_block,
    load_rows,
    setup_context,
    store_block,
)
from phase2_triton.kernels.checks import check_tensors
from phase2_triton.kernels.core import LOG2E, Cost, jit, kernel_op, result_dtype, tl, to_fp32


@jit
def delta_kernel(
    dy, q, y, delta, seed, dy_batch, dy_head, dy_row, q_batch, q_head, q_row, T, heads,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dy * y) of BLOCK queries. y is (B, T, nh, hs) in memory."""
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = tl.program_id(0) % blocks * BLOCK
    row, batch = heads * HS, tl.cast(T, tl.int64) * heads * HS
    dy_block = load_block(dy, head, heads, dy_batch, dy_head, dy_row, first, T, HS, BLOCK_D, BLOCK)
    y_block = load_block(y, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)
    rows = first + tl.arange(0, BLOCK)[:, None]
    row_delta = tl.sum(to_fp32(dy_block) * to_fp32(y_block), -1, keep_dims=True)  # (BLOCK, 1)
    tl.store(delta + (head.to(tl.int64) * T + rows), row_delta, mask=rows < T)


@jit
def add_rows(x, values, first, stride, T, HS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Add a (ROWS, BLOCK_D) tile to rows `first` to `first + ROWS` of a head's (T, HS) matrix, atomically."""
    rows = first + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    tl.atomic_add(x + (rows.to(tl.int64) * stride + cols), values, mask=(rows < T) & (cols < HS), sem="relaxed")


@jit
def five_products_kernel(
    k, v, q, dy, lse, delta, dq_sum, dk, dv, seed, k_batch, k_head, k_row, v_batch, v_head, v_row,
    q_batch, q_head, q_row, dy_batch, dy_head, dy_row, T, heads,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK keys in a loop over the queries, STEP at a time, and add to dq_sum = dq / SCALE."""
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = tl.program_id(0) % blocks * BLOCK  # the first keys have the most queries, so they start first
    seed = tl.load(seed) if DROPOUT > 0 else 0
    keys = first + tl.arange(0, BLOCK)[:, None]
    row, batch = heads * HS, tl.cast(T, tl.int64) * heads * HS  # strides of dq, dk and dv: (B, T, nh, hs) in memory
    key = load_block(k, head, heads, k_batch, k_head, k_row, first, T, HS, BLOCK_D, BLOCK)  # (BLOCK, BLOCK_D)
    value = load_block(v, head, heads, v_batch, v_head, v_row, first, T, HS, BLOCK_D, BLOCK)
    q = head_pointer(q, head, heads, q_batch, q_head)
    dy = head_pointer(dy, head, heads, dy_batch, dy_head)
    dq_sum = head_pointer(dq_sum, head, heads, batch, HS)
    lse, delta = lse + head.to(tl.int64) * T, delta + head.to(tl.int64) * T
    dk_acc = tl.full(key.shape, 0.0, lse.dtype.element_ty)  # (BLOCK, BLOCK_D)
    dv_acc = dk_acc
    # The loop has two parts: queries on the diagonal, then queries after the diagonal.
    begin, middle = first // STEP * STEP, (first + BLOCK + STEP - 1) // STEP * STEP
    for AFTER in tl.static_range(2):
        for start in range(middle if AFTER else begin, T if AFTER else tl.minimum(middle, T), STEP):
            queries = start + tl.arange(0, STEP)[None, :]
            query = load_rows(q, start, q_row, T, HS, BLOCK_D, STEP, True)  # (STEP, BLOCK_D)
            dy_tile = load_rows(dy, start, dy_row, T, HS, BLOCK_D, STEP, True)
            row_lse = tl.load(lse + queries, mask=queries < T, other=0.0)  # (1, STEP)
            row_delta = tl.load(delta + queries, mask=queries < T, other=0.0)
            p = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (SCALE * LOG2E) - row_lse  # (BLOCK, STEP)
            if AFTER == 0:  # on the diagonal
                p = tl.where(queries >= keys, p, -float("inf"))
            p = tl.exp2(p)
            dp = tl.dot(value, tl.trans(dy_tile), input_precision=PRECISION)  # (BLOCK, STEP)
            kept_p = p
            if DROPOUT > 0:
                keep = dropout_mask(seed, queries, keys, head, DROPOUT)
                dp = tl.where(keep, dp * (1 / (1 - DROPOUT)), 0.0)
                kept_p = tl.where(keep, p, 0.0)
            dv_acc = tl.dot(
                kept_p.to(dy_tile.dtype), dy_tile, dv_acc, input_precision=PRECISION, out_dtype=dv_acc.dtype
            )
            ds = (p * (dp - row_delta)).to(query.dtype)
            dk_acc = tl.dot(ds, query, dk_acc, input_precision=PRECISION, out_dtype=dk_acc.dtype)
            dq_tile = tl.dot(tl.trans(ds), key, input_precision=PRECISION, out_dtype=dk_acc.dtype)  # (STEP, BLOCK_D)
            add_rows(dq_sum, dq_tile, start, row, T, HS, BLOCK_D, STEP)
    store_block(dk, dk_acc * SCALE, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)
    store_block(dv, dv_acc * (1 / (1 - DROPOUT)), head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)


@kernel_op("causal_attention_atomic", flops=lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v))
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return y and lse, as the forward of `attention.py`, whose backward differs."""
    return attention.run_forward(q, k, v, seed, dropout_p, scale)


@kernel_op("causal_attention_atomic_backward", flops=lambda dy, q, *_, **__: 5 * sdpa_flop_count(q, q, q) // 2)
def backward_op(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seed: Tensor | None,
    dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv, in the same memory layout as y."""
    B, nh, T, hs = q.shape
    dk, dv = (q.new_empty(B, T, nh, hs).transpose(1, 2) for _ in range(2))
    dq_sum = lse.new_zeros(B, T, nh, hs)
    y = y.transpose(1, 2).contiguous()  # copies only if saving y for the backward changed its layout
    delta = torch.empty_like(lse)
    launch_blocks(delta_kernel, "attention_delta", (dy, q), (y, delta), None, 0.0, scale)
    outputs = (lse, delta, dq_sum, dk, dv)
    launch_blocks(five_products_kernel, "attention_five_products", (k, v, q, dy), outputs, seed, dropout_p, scale)
    return (dq_sum * scale).to(q.dtype).transpose(1, 2), dk, dv


def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy, *ctx.saved_tensors, ctx.dropout_p, ctx.scale), None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def causal_attention_atomic(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Return `causal_attention(q, k, v, dropout_p, scale)`, with the backward pass of five products.

    On a GPU, the last bits of dq change from run to run. Under `torch.use_deterministic_algorithms`, the deterministic
    backward pass of `causal_attention` is used instead. Arguments, result and errors are those of `causal_attention`.
    """
    if torch.are_deterministic_algorithms_enabled():
        return attention.causal_attention(q, k, v, dropout_p, scale)
    check_tensors("causal_attention_atomic", q=q, k=k, v=v)
    q, k, v = (x.to(result_dtype(x)) for x in (q, k, v))
    check_inputs(q, k, v, dropout_p, scale)
    seed = torch.randint(2**63 - 1, (1,), device=q.device) if dropout_p > 0 else None
    return forward_op(q, k, v, seed, dropout_p, q.size(-1) ** -0.5 if scale is None else scale)[0]


def cost(B: int, nh: int, T: int, hs: int, itemsize: int) -> Cost:
    """Return the cost of the backward with five products. dq is summed in fp32, and then converted.

    Atomic additions of later tiles are not counted: the L2 cache can serve them.
    """
    matrix, row_values, pairs = B * nh * T * hs, 4 * B * nh * T, B * nh * T * (T + 1) // 2
    read = 6 * matrix * itemsize + 2 * matrix * 4 + 2 * row_values  # dy twice; dq_sum is added to, and converted
    written = 3 * matrix * itemsize + 2 * matrix * 4 + row_values  # zeros and sums in dq_sum
    return Cost(read, written, 10 * pairs * hs, row_values + 4 * matrix)
