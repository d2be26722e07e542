"""Token + position embedding, forward and backward.

    out[b, t] = wte[idx[b, t]] + wpe[first + t]
    dwte[v] = sum of dout[b, t] where idx[b, t] = v        dwpe[first + t] = sum over b of dout[b, t]

The forward gathers two rows and writes their sum, with no tensor in between. In the backward many programs have
something for the same row of dwte, and the order of their sums decides the last bits.

Steps of the backward: 1 atomic sums, in another order in each run on a GPU; 2 the tokens are sorted, equal ones keeping
their order, so that those of a row of dwte are neighbours: its segment. A program takes some rows and adds up their
segments from the first to the last; 3 a frequent token has a long segment, for which all others would wait: windows of
the sorted tokens are summed first, all at one time, and where a window is of one token throughout, the row takes that
sum instead of its parts. The cuts are at fixed places, so the order is fixed too.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from phase2_triton.kernels.checks import check_number, check_tensors
from phase2_triton.kernels.core import (
    Cost,
    KernelError,
    config,
    interpreting,
    jit,
    kernel_op,
    launch,
    tl,
    to_fp32,
)

INTEGERS = (torch.int64, torch.int32)


def reference(idx: Tensor, wte: Tensor, wpe: Tensor, first: int = 0) -> Tensor:
    """The embeddings in plain torch."""
    return wte[idx] + wpe[first : first + idx.size(1)]


@jit
def forward_kernel(
    idx, wte, wpe, out, tokens, T, V, C, first, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A tile of tokens and channels a program; a token that is not in the vocabulary gives NaN and reads nothing."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < tokens) & (cols[None, :] < C)
    token = tl.load(idx + rows, mask=rows < tokens, other=0)  # int64: V * C can pass 2^31
    known = ((token >= 0) & (token < V))[:, None]
    v = to_fp32(tl.load(wte + token[:, None] * C + cols[None, :], mask=inside & known, other=0.0))
    v += to_fp32(tl.load(wpe + (first + rows % T)[:, None] * C + cols[None, :], mask=inside, other=0.0))
    tl.store(out + rows[:, None] * C + cols[None, :], tl.where(known, v, float("nan")), mask=inside)


@jit
def positions_kernel(dout, dwpe, B, T, C, P, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of dwpe, (P, C): over b in order; rows that no token stands at are zero."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = (rows - first).to(tl.int64)
    used = ((t >= 0) & (t < T))[:, None] & (cols[None, :] < C)
    total = to_fp32(tl.zeros((ROWS, BLOCK), dwpe.dtype.element_ty))
    for b in range(B):
        total += to_fp32(tl.load(dout + (b * T + t)[:, None] * C + cols[None, :], mask=used, other=0.0))
    at = rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(dwpe + at, total, mask=(rows[:, None] < P) & (cols[None, :] < C))


@jit
def atomic_kernel(dout, idx, dwte, tokens, V, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Step 1: each token adds its row to dwte, whenever it gets to it."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(idx + rows, mask=rows < tokens, other=-1)
    inside = ((token >= 0) & (token < V))[:, None] & (cols[None, :] < C)
    d = to_fp32(tl.load(dout + rows[:, None] * C + cols[None, :], mask=inside, other=0.0))
    tl.atomic_add(dwte + token[:, None] * C + cols[None, :], d, mask=inside)


@jit
def windows_kernel(
    dout, tokens, order, sums, windows, C, WINDOWS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Step 3: sums of LENGTH gradients that are neighbours in the sorted order, where all are of one token."""
    window = tl.program_id(0).to(tl.int64) * WINDOWS + tl.arange(0, WINDOWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(tokens + window * LENGTH, mask=window < windows, other=-1)
    end = tl.load(tokens + window * LENGTH + LENGTH - 1, mask=window < windows, other=-2)
    uniform = (begin == end)[:, None]
    at = window[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]  # (WINDOWS, LENGTH)
    row = tl.load(order + at, mask=uniform, other=0)[:, :, None]
    inside = uniform[:, :, None] & (cols[None, None, :] < C)
    total = tl.sum(to_fp32(tl.load(dout + row * C + cols[None, None, :], mask=inside, other=0.0)), 1)
    tl.store(sums + window[:, None] * C + cols[None, :], total, mask=uniform & (cols[None, :] < C))


@jit
def gathered(dout, order, at, inside, cols, C):
    """The gradients that stand at one place of the sorted order for each row: (ROWS, BLOCK)."""
    row = tl.load(order + at, mask=inside, other=0)
    return to_fp32(
        tl.load(dout + row[:, None] * C + cols[None, :], mask=inside[:, None] & (cols[None, :] < C), other=0.0)
    )


@jit
def tokens_kernel(
    dout, order, bounds, sums, dwte, V, C,
    WINDOWED: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 2 and, WINDOWED, 3: a tile of dwte; a row whose segment is empty is zero."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(bounds + rows, mask=rows < V, other=0)
    end = tl.load(bounds + rows + 1, mask=rows < V, other=0)
    total = to_fp32(tl.zeros((ROWS, BLOCK), dwte.dtype.element_ty))
    single = end  # up to here rows are added one by one
    if WINDOWED:
        low = (begin + LENGTH - 1) // LENGTH
        windows = tl.maximum(end // LENGTH - low, 0)  # whole ones
        single = tl.where(windows > 0, low * LENGTH, end)
    for i in range(tl.max(single - begin, 0)):
        total += gathered(dout, order, begin + i, begin + i < single, cols, C)
    if WINDOWED:
        for i in range(tl.max(windows, 0)):
            inside = (i < windows)[:, None] & (cols[None, :] < C)
            total += tl.load(sums + (low + i)[:, None] * C + cols[None, :], mask=inside, other=0.0)
        rest = single + windows * LENGTH
        for i in range(tl.max(end - rest, 0)):
            total += gathered(dout, order, rest + i, rest + i < end, cols, C)
    at = rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(dwte + at, total, mask=(rows[:, None] < V) & (cols[None, :] < C))


@kernel_op("embedding")
def forward_op(idx: Tensor, wte: Tensor, wpe: Tensor, first: int) -> Tensor:
    """(B, T, C), from contiguous tensors."""
    (B, T), (V, C) = idx.shape, wte.shape
    refuse_unknown(idx, V)
    chosen = config("embedding_forward", C)
    rows, block = chosen.pop("rows"), chosen.pop("block")
    out = wte.new_empty(B, T, C)
    launch(
        forward_kernel, (-(-B * T // rows), -(-C // block)), idx, wte, wpe, out, B * T, T, V, C, first,
        ROWS=rows, BLOCK=block, **chosen,
    )  # fmt: skip
    return out


def refuse_unknown(idx: Tensor, V: int) -> None:
    """Where looking is free, refuse tokens that are not in the vocabulary."""
    if not interpreting() or isinstance(idx, FakeTensor) or idx.is_meta or idx.numel() == 0:
        return
    least, most = idx.aminmax()
    if least < 0 or most >= V:
        wrong = least if least < 0 else most
        raise KernelError(f"embedding: token {int(wrong)} is not in the vocabulary of {V}: give 0 to {V - 1}")


@kernel_op("embedding_positions_backward")
def positions_op(dout: Tensor, first: int, block_size: int) -> Tensor:
    """dwpe, (block_size, C), from a contiguous (B, T, C) gradient."""
    B, T, C = dout.shape
    chosen = config("embedding_positions", C)
    rows, block = chosen.pop("rows"), chosen.pop("block")
    dwpe = dout.new_empty(block_size, C)
    launch(
        positions_kernel, (-(-block_size // rows), -(-C // block)), dout, dwpe, B, T, C, block_size, first,
        ROWS=rows, BLOCK=block, **chosen,
    )  # fmt: skip
    return dwpe


@kernel_op("embedding_tokens_backward")
def tokens_op(dout: Tensor, idx: Tensor, V: int) -> Tensor:
    """dwte, (V, C), from a contiguous (B, T, C) gradient."""
    C = dout.size(-1)
    tokens, order = torch.sort(idx.reshape(-1), stable=True)
    bounds = torch.searchsorted(tokens, torch.arange(V + 1, device=idx.device))  # row v: from v to v + 1
    chosen = config("embedding_windows", C)
    length, windows, block = chosen.pop("length"), chosen.pop("windows"), chosen.pop("block")
    whole = idx.numel() // length
    sums = dout.new_empty(whole, C, dtype=torch.promote_types(dout.dtype, torch.float32))
    launch(
        windows_kernel, (whole // windows + 1, -(-C // block)), dout, tokens, order, sums, whole, C,
        WINDOWS=windows, LENGTH=length, BLOCK=block, **chosen,
    )  # fmt: skip
    chosen = config("embedding_tokens", V)
    rows = chosen.pop("rows")
    dwte = dout.new_empty(V, C)
    launch(
        tokens_kernel, (-(-V // rows), -(-C // block)), dout, order, bounds, sums, dwte, V, C,
        WINDOWED=True, LENGTH=length, ROWS=rows, BLOCK=block, **chosen,
    )  # fmt: skip
    return dwte


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    idx, wte, wpe, ctx.first = inputs
    ctx.save_for_backward(idx)
    ctx.V, ctx.block_size = wte.size(0), wpe.size(0)


def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    (idx,), dout = ctx.saved_tensors, dout.contiguous()
    _, need_dwte, need_dwpe, _ = ctx.needs_input_grad
    dwte = tokens_op(dout, idx, ctx.V) if need_dwte else None
    return None, dwte, positions_op(dout, ctx.first, ctx.block_size) if need_dwpe else None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def embedding(idx: Tensor, wte: Tensor, wpe: Tensor, first: int = 0) -> Tensor:
    """The tokens' rows of wte plus their positions' of wpe, in the weights' type, also under autocast.

    Args:
        idx: int64 or int32 tokens, (B, T).
        wte: (V, C).
        wpe: (block_size, C), of the type of wte.
        first: the position of the first column of idx.

    Returns:
        (B, T, C). On a GPU, where looking would wait for it, a token that is not in the vocabulary makes its row NaN
        and has no part in the gradient of wte.

    Raises:
        KernelError: a shape, type or device that does not fit; in the interpreter also a token.
    """
    check_tensors("embedding", wte=wte, wpe=wpe)
    if not isinstance(idx, Tensor) or idx.dim() != 2 or idx.dtype not in INTEGERS or idx.device != wte.device:
        given = f"{tuple(idx.shape)}, {idx.dtype}, on {idx.device}" if isinstance(idx, Tensor) else type(idx).__name__
        raise KernelError(f"embedding: idx is {given}: give (B, T) of int64 on {wte.device}")
    check_number("embedding", "first", first, 0)
    if wte.dim() != 2 or wpe.dim() != 2 or wte.size(1) != wpe.size(1) or wte.dtype != wpe.dtype:
        given = f"wte is {tuple(wte.shape)} of {wte.dtype} and wpe {tuple(wpe.shape)} of {wpe.dtype}"
        raise KernelError(f"embedding: {given}: give two matrices of one width and type")
    if wte.numel() == 0:
        raise KernelError(f"embedding: wte is {tuple(wte.shape)}: give at least one token and one channel")
    if first + idx.size(1) > wpe.size(0):
        last = f"{idx.size(1)} tokens from position {first}"
        raise KernelError(f"embedding: {last} do not fit into the {wpe.size(0)} rows of wpe: give fewer")
    return forward_op(idx.long().contiguous(), wte.contiguous(), wpe.contiguous(), first)


def cost(B: int, T: int, V: int, C: int, itemsize: int, P: int | None = None) -> tuple[Cost, Cost]:
    """Forward and backward of (B, T) tokens with weights of `itemsize` bytes; P rows of wpe, by default T.

    The workspace is the sorted tokens, their order, the segments' bounds and the windows' sums.
    """
    tokens, row, positions = B * T, C * itemsize, P or T
    there = Cost((tokens + T) * row + 8 * tokens, tokens * row, tokens * C)
    sums = tokens // config("embedding_windows", C)["length"] * C * max(4, itemsize)
    back = Cost(2 * tokens * row + 8 * tokens, (V + positions) * row, 2 * tokens * C, 16 * tokens + 8 * (V + 1) + sums)
    return there, back


def atomic_step(dout: Tensor, idx: Tensor, V: int) -> Tensor:
    """Step 1 of the backward: dwte of a contiguous (B, T, C) gradient, summed by atomics, in fp32 or fp64."""
    tokens, C = idx.numel(), dout.size(-1)
    dwte = dout.new_zeros(V, C, dtype=torch.promote_types(dout.dtype, torch.float32))
    launch(atomic_kernel, (-(-tokens // 16), -(-C // 64)), dout, idx, dwte, tokens, V, C, ROWS=16, BLOCK=64)
    return dwte


def sorted_step(dout: Tensor, idx: Tensor, V: int) -> Tensor:
    """Step 2 of the backward: dwte by whole segments."""
    tokens, order = torch.sort(idx.reshape(-1), stable=True)
    bounds = torch.searchsorted(tokens, torch.arange(V + 1, device=idx.device))
    C = dout.size(-1)
    dwte = dout.new_empty(V, C)
    launch(
        tokens_kernel, (-(-V // 16), -(-C // 64)), dout, order, bounds, dout, dwte, V, C,
        WINDOWED=False, LENGTH=1, ROWS=16, BLOCK=64,
    )  # fmt: skip
    return dwte
