"""Step 2 of attention's backward: causal attention with five matrix products, which sums dq with atomic additions.

The forward is that of `attention.py`, and so are the formulas. There, two kernels of the backward both compute s and
dp: seven products. Here, one kernel computes s and dp once per tile, and from them its part of dv, dk and dq:

    s = k @ q^T        dp = v @ dy^T        dv += p @ dy        dk += ds @ q        dq += ds^T @ k

A program keeps the sums dk and dv of its keys in registers. All programs of a head add to the same rows of dq, in a
buffer in fp32. On a GPU the order of these additions changes from run to run, and so do the last bits of dq: results
are not bitwise identical. This is the price of two products less, together with the bytes of the buffer.

Three kernels: `prepare_kernel` computes delta = rowsum(dy * y) and fills the buffer with zeros,
`five_products_kernel` does all products, and `finish_kernel` scales dq and rounds it to its type.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_flop_count

from phase2_triton.kernels import attention
from phase2_triton.kernels.attention import (
    dropout_mask,
    head_pointer,
    launch_blocks,
    load_block,
    load_rows,
    setup_context,
    store_block,
)
from phase2_triton.kernels.core import LOG2E, Cost, KernelError, jit, kernel_op, tl, to_fp32


@jit
def prepare_kernel(
    dy, y, delta, dq_sum, seed, dy_batch, dy_head, dy_row, T, heads,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dy * y) of BLOCK queries, and set their rows of dq_sum to 0."""
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = tl.program_id(0) % blocks * BLOCK
    row, batch = heads * HS, tl.cast(T, tl.int64) * heads * HS  # strides of y and dq_sum: (B, T, nh, hs) in memory
    dy_block = load_block(dy, head, heads, dy_batch, dy_head, dy_row, first, T, HS, BLOCK_D, BLOCK)
    y_block = load_block(y, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)
    product = to_fp32(dy_block) * to_fp32(y_block)
    rows = first + tl.arange(0, BLOCK)[:, None]
    tl.store(delta + (head.to(tl.int64) * T + rows), tl.sum(product, -1, keep_dims=True), mask=rows < T)
    store_block(dq_sum, tl.zeros_like(product), head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)


@jit
def finish_kernel(
    dq, dq_sum, seed, dq_batch, dq_head, dq_row, T, heads,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute dq = SCALE * dq_sum of BLOCK queries, in the type of dq."""
    blocks = (T + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks * HEADS + (tl.arange(0, HEADS)[:, None, None] if HEADS > 1 else 0)
    first = tl.program_id(0) % blocks * BLOCK
    row, batch = heads * HS, tl.cast(T, tl.int64) * heads * HS  # strides of dq_sum: (B, T, nh, hs) in memory
    total = load_block(dq_sum, head, heads, batch, HS, row, first, T, HS, BLOCK_D, BLOCK)
    store_block(dq, total * SCALE, head, heads, dq_batch, dq_head, dq_row, first, T, HS, BLOCK_D, BLOCK)


@jit
def add_rows(
    x, values, first, stride, T, HEADS: tl.constexpr, HS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add a (ROWS, BLOCK_D) tile to rows `first` to `first + ROWS` of a head's (T, HS) matrix, atomically."""
    rows = first + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    is_inside = (rows < T) & (cols < HS)
    if HEADS > 1:
        is_inside = is_inside[None, :, :]  # Triton 3.6 does not add this dimension itself, as it does for a store
    tl.atomic_add(x + (rows.to(tl.int64) * stride + cols), values, mask=is_inside, sem="relaxed")


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
            p = tl.exp2(tl.minimum(p, 0.0, propagate_nan=tl.PropagateNan.ALL))  # p <= 1, also for large scores
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
            add_rows(dq_sum, dq_tile, start, row, T, HEADS, HS, BLOCK_D, STEP)
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
    dq, dk, dv = (q.new_empty(B, T, nh, hs).transpose(1, 2) for _ in range(3))
    dq_sum = lse.new_empty(B, T, nh, hs)
    y = y.transpose(1, 2).contiguous()  # copies only if saving y for the backward changed its layout
    delta = torch.empty_like(lse)
    launch_blocks(prepare_kernel, "attention_atomic_rows", (dy,), (y, delta, dq_sum), None, 0.0, scale)
    outputs = (lse, delta, dq_sum, dk, dv)
    launch_blocks(five_products_kernel, "attention_atomic", (k, v, q, dy), outputs, seed, dropout_p, scale)
    launch_blocks(finish_kernel, "attention_atomic_rows", (dq,), (dq_sum,), None, 0.0, scale)
    return dq, dk, dv


def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy, *ctx.saved_tensors, ctx.dropout_p, ctx.scale), None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def causal_attention_atomic(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Return `causal_attention(q, k, v, dropout_p, scale)`, with the backward pass of five products.

    On a GPU, the last bits of the gradient of q change from run to run. Arguments and result are those of
    `causal_attention`.

    Raises:
        KernelError: as `causal_attention`; also under `torch.use_deterministic_algorithms`.
    """
    if torch.are_deterministic_algorithms_enabled():
        raise KernelError(
            "causal_attention_atomic: the backward pass is not deterministic, and torch.use_deterministic_algorithms "
            "is on: use causal_attention"
        )
    return attention.call_operator(forward_op, "causal_attention_atomic", q, k, v, dropout_p, scale)


def cost(B: int, nh: int, T: int, hs: int, itemsize: int) -> tuple[Cost, Cost]:
    """Return the costs of forward and backward. The forward is that of `attention.py`.

    The backward also writes zeros into the fp32 buffer of dq, adds to it, and reads it. Each row of the buffer counts
    once for the additions, although every program of later keys adds to it again: the L2 cache can serve these.
    """
    matrix, row_values, pairs = B * nh * T * hs, 4 * B * nh * T, B * nh * T * (T + 1) // 2
    read = 6 * matrix * itemsize + 2 * 4 * matrix + 2 * row_values  # q, k, v, y, dy twice; the buffer twice
    written = 3 * matrix * itemsize + 2 * 4 * matrix + row_values
    backward_cost = Cost(read, written, 10 * pairs * hs, row_values + 4 * matrix)
    return attention.cost(B, nh, T, hs, itemsize)[0], backward_cost
