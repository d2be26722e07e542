"""Token + position embedding, forward and backward.

    out[b, t] = wte[idx[b, t]] + wpe[first_position + t]
    dwte[v] = sum of dout[b, t] where idx[b, t] = v        dwpe[first_position + t] = sum over b of dout[b, t]

The forward loads two rows and writes their sum, without a tensor in between. In the backward, many tokens add to the
same row of dwte, and the order of these additions decides the last bits.

With atomic additions, this order would change from run to run on a GPU. The steps of the backward are instead:
1. A stable sort of the tokens. Equal tokens are then neighbours, and the gradients of each row of dwte form one
   segment of the sorted order. A program takes some rows of dwte and sums their segments from begin to end.
2. A frequent token has a long segment, and all other programs would wait for its program. Therefore windows of fixed
   length are summed first, in parallel. Where a window contains only one token, the row of that token adds the sum of
   the window. The windows begin at fixed places, so the order of the additions is fixed too.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from phase2_triton.kernels.checks import check_number, check_tensors
from phase2_triton.kernels.core import (
    Cost,
    KernelError,
    is_interpreted,
    jit,
    kernel_op,
    launch,
    select_config,
    tl,
    to_fp32,
)

INTEGERS = (torch.int64, torch.int32)


def reference(idx: Tensor, wte: Tensor, wpe: Tensor, first_position: int = 0) -> Tensor:
    """Return the embeddings in plain torch."""
    return wte[idx] + wpe[first_position : first_position + idx.size(1)]


@jit
def forward_kernel(
    idx, wte, wpe, out, tokens, T, V, C, first_position, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program computes a tile of ROWS tokens and BLOCK channels.

    A token that is not in the vocabulary makes its row NaN and reads no memory.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < tokens) & (cols[None, :] < C)
    token = tl.load(idx + rows, mask=rows < tokens, other=0)  # int64: V * C can exceed 2^31
    is_known = ((token >= 0) & (token < V))[:, None]
    v = to_fp32(tl.load(wte + token[:, None] * C + cols[None, :], mask=mask & is_known, other=0.0))  # (ROWS, BLOCK)
    v += to_fp32(tl.load(wpe + (first_position + rows % T)[:, None] * C + cols[None, :], mask=mask, other=0.0))
    tl.store(out + rows[:, None] * C + cols[None, :], tl.where(is_known, v, float("nan")), mask=mask)


@jit
def positions_kernel(dout, dwpe, B, T, C, P, first_position, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program computes a tile of dwpe, (P, C): the sum over b, in order. Positions without tokens get zeros."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = (rows - first_position).to(tl.int64)
    mask = ((t >= 0) & (t < T))[:, None] & (cols[None, :] < C)
    total = to_fp32(tl.zeros((ROWS, BLOCK), dwpe.dtype.element_ty))
    for b in range(B):
        total += to_fp32(tl.load(dout + (b * T + t)[:, None] * C + cols[None, :], mask=mask, other=0.0))
    offs = rows.to(tl.int64)[:, None] * C + cols[None, :]  # (ROWS, BLOCK)
    tl.store(dwpe + offs, total, mask=(rows[:, None] < P) & (cols[None, :] < C))


@jit
def windows_kernel(
    dout, tokens, order, sums, windows, C, WINDOWS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum each window of LENGTH neighbours in the sorted order that contains only one token.

    Args:
        dout: gradients, (B * T, C).
        tokens: the sorted tokens, (B * T,).
        order: the unsorted index of each sorted token, (B * T,).
        sums: the result, (windows, C); windows with several tokens are not written.
    """
    window = tl.program_id(0).to(tl.int64) * WINDOWS + tl.arange(0, WINDOWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first_token = tl.load(tokens + window * LENGTH, mask=window < windows, other=-1)
    last_token = tl.load(tokens + window * LENGTH + LENGTH - 1, mask=window < windows, other=-2)
    is_uniform = (first_token == last_token)[:, None]
    place = window[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]  # (WINDOWS, LENGTH)
    row = tl.load(order + place, mask=is_uniform, other=0)[:, :, None]
    mask = is_uniform[:, :, None] & (cols[None, None, :] < C)
    total = tl.sum(to_fp32(tl.load(dout + row * C + cols[None, None, :], mask=mask, other=0.0)), 1)  # (WINDOWS, BLOCK)
    tl.store(sums + window[:, None] * C + cols[None, :], total, mask=is_uniform & (cols[None, :] < C))


@jit
def load_gradients(dout, order, place, mask, cols, C):
    """Load the gradients at one place of the sorted order for each row: (ROWS, BLOCK)."""
    row = tl.load(order + place, mask=mask, other=0)
    return to_fp32(
        tl.load(dout + row[:, None] * C + cols[None, :], mask=mask[:, None] & (cols[None, :] < C), other=0.0)
    )


@jit
def tokens_kernel(
    dout, order, bounds, sums, dwte, V, C,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes a tile of dwte. A row without tokens gets zeros.

    Args:
        dout: gradients, (B * T, C).
        order: the unsorted index of each sorted token, (B * T,).
        bounds: the segment of row v is bounds[v] to bounds[v + 1], (V + 1,).
        sums: of the windows, (windows, C).
        dwte: the result, (V, C).
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(bounds + rows, mask=rows < V, other=0)  # (ROWS,)
    end = tl.load(bounds + rows + 1, mask=rows < V, other=0)
    total = to_fp32(tl.zeros((ROWS, BLOCK), dwte.dtype.element_ty))
    # A segment has three parts: single gradients before its windows, full windows, single gradients after them.
    first_window = (begin + LENGTH - 1) // LENGTH
    windows = tl.maximum(end // LENGTH - first_window, 0)  # windows that lie completely in the segment
    head_end = tl.where(windows > 0, first_window * LENGTH, end)
    for i in range(tl.max(head_end - begin, 0)):
        total += load_gradients(dout, order, begin + i, begin + i < head_end, cols, C)
    for i in range(tl.max(windows, 0)):
        mask = (i < windows)[:, None] & (cols[None, :] < C)
        total += tl.load(sums + (first_window + i)[:, None] * C + cols[None, :], mask=mask, other=0.0)
    tail_begin = head_end + windows * LENGTH
    for i in range(tl.max(end - tail_begin, 0)):
        total += load_gradients(dout, order, tail_begin + i, tail_begin + i < end, cols, C)
    offs = rows.to(tl.int64)[:, None] * C + cols[None, :]  # (ROWS, BLOCK)
    tl.store(dwte + offs, total, mask=(rows[:, None] < V) & (cols[None, :] < C))


@kernel_op("embedding")
def forward_op(idx: Tensor, wte: Tensor, wpe: Tensor, first_position: int) -> Tensor:
    """Return the embeddings, (B, T, C), of contiguous tensors."""
    (B, T), (V, C) = idx.shape, wte.shape
    check_tokens(idx, V)
    options = select_config("embedding_forward", C)
    rows = options.pop("rows")
    block = options.pop("block")
    out = wte.new_empty(B, T, C)
    launch(
        forward_kernel, (-(-B * T // rows), -(-C // block)), idx, wte, wpe, out, B * T, T, V, C, first_position,
        ROWS=rows, BLOCK=block, **options,
    )  # fmt: skip
    return out


def check_tokens(idx: Tensor, V: int) -> None:
    """Check that all tokens are in the vocabulary, but only in the interpreter: on a GPU the check would wait for it.

    Raises:
        KernelError: names a token that is not.
    """
    if not is_interpreted() or isinstance(idx, FakeTensor) or idx.is_meta or idx.numel() == 0:
        return
    smallest, largest = idx.aminmax()
    if smallest < 0 or largest >= V:
        invalid = smallest if smallest < 0 else largest
        raise KernelError(f"embedding: token {int(invalid)} is not in the vocabulary of {V}: use 0 to {V - 1}")


@kernel_op("embedding_positions_backward")
def positions_op(dout: Tensor, first_position: int, block_size: int) -> Tensor:
    """Return dwpe, (block_size, C), for a contiguous gradient dout, (B, T, C)."""
    B, T, C = dout.shape
    options = select_config("embedding_positions", C)
    rows = options.pop("rows")
    block = options.pop("block")
    dwpe = dout.new_empty(block_size, C)
    launch(
        positions_kernel, (-(-block_size // rows), -(-C // block)), dout, dwpe, B, T, C, block_size, first_position,
        ROWS=rows, BLOCK=block, **options,
    )  # fmt: skip
    return dwpe


@kernel_op("embedding_tokens_backward")
def tokens_op(dout: Tensor, idx: Tensor, V: int) -> Tensor:
    """Return dwte, (V, C), for a contiguous gradient dout, (B, T, C)."""
    C = dout.size(-1)
    tokens, order = torch.sort(idx.reshape(-1), stable=True)
    bounds = torch.searchsorted(tokens, torch.arange(V + 1, device=idx.device))  # row v: bounds[v] to bounds[v + 1]
    options = select_config("embedding_windows", C)
    length = options.pop("length")
    windows_per_program = options.pop("windows")
    block = options.pop("block")
    windows = idx.numel() // length
    sums = dout.new_empty(windows, C, dtype=torch.promote_types(dout.dtype, torch.float32))
    launch(
        windows_kernel, (windows // windows_per_program + 1, -(-C // block)), dout, tokens, order, sums, windows, C,
        WINDOWS=windows_per_program, LENGTH=length, BLOCK=block, **options,
    )  # fmt: skip
    options = select_config("embedding_tokens", V)
    rows = options.pop("rows")
    dwte = dout.new_empty(V, C)
    launch(
        tokens_kernel, (-(-V // rows), -(-C // block)), dout, order, bounds, sums, dwte, V, C,
        LENGTH=length, ROWS=rows, BLOCK=block, **options,
    )  # fmt: skip
    return dwte


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    idx, wte, wpe, ctx.first_position = inputs
    ctx.save_for_backward(idx)
    ctx.V, ctx.block_size = wte.size(0), wpe.size(0)


def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    (idx,), dout = ctx.saved_tensors, dout.contiguous()
    _, need_dwte, need_dwpe, _ = ctx.needs_input_grad
    dwte = tokens_op(dout, idx, ctx.V) if need_dwte else None
    dwpe = positions_op(dout, ctx.first_position, ctx.block_size) if need_dwpe else None
    return None, dwte, dwpe, None


forward_op.register_autograd(backward, setup_context=setup_context)


def embedding(idx: Tensor, wte: Tensor, wpe: Tensor, first_position: int = 0) -> Tensor:
    """Return the sum of token and position embeddings, in the type of the weights, also under autocast.

    Args:
        idx: int64 or int32 tokens, (B, T).
        wte: token embeddings, (V, C).
        wpe: position embeddings, (block_size, C), of the type of wte.
        first_position: the position of the first column of idx.

    Returns:
        (B, T, C). On a GPU a token that is not in the vocabulary makes its row NaN and adds nothing to the gradient of
        wte: checking the tokens would wait for the GPU.

    Raises:
        KernelError: a shape, type or device is not supported; in the interpreter also an unknown token.
    """
    check_tensors("embedding", wte=wte, wpe=wpe)
    if not isinstance(idx, Tensor) or idx.dim() != 2 or idx.dtype not in INTEGERS or idx.device != wte.device:
        actual = f"{tuple(idx.shape)}, {idx.dtype}, on {idx.device}" if isinstance(idx, Tensor) else type(idx).__name__
        raise KernelError(f"embedding: idx is {actual}: pass (B, T) of int64 on {wte.device}")
    check_number("embedding", "first_position", first_position, 0)
    if wte.dim() != 2 or wpe.dim() != 2 or wte.size(1) != wpe.size(1) or wte.dtype != wpe.dtype:
        actual = f"wte is {tuple(wte.shape)} of {wte.dtype} and wpe {tuple(wpe.shape)} of {wpe.dtype}"
        raise KernelError(f"embedding: {actual}: pass two matrices of the same width and type")
    if wte.numel() == 0:
        raise KernelError(f"embedding: wte is {tuple(wte.shape)}: pass at least one token and one channel")
    if first_position + idx.size(1) > wpe.size(0):
        raise KernelError(
            f"embedding: {idx.size(1)} tokens from position {first_position} do not fit into the {wpe.size(0)} rows of "
            "wpe: pass fewer tokens"
        )
    return forward_op(idx.long().contiguous(), wte.contiguous(), wpe.contiguous(), first_position)


def cost(B: int, T: int, V: int, C: int, itemsize: int, P: int | None = None) -> tuple[Cost, Cost]:
    """Return the costs of forward and backward for (B, T) tokens and weights of `itemsize` bytes.

    P is the number of rows of wpe, by default T. The workspace of the backward contains the sorted tokens, their
    indices, the bounds of the segments and the sums of the windows.
    """
    tokens, row, positions = B * T, C * itemsize, P or T
    forward_cost = Cost((tokens + T) * row + 8 * tokens, tokens * row, tokens * C)
    sums = tokens // select_config("embedding_windows", C)["length"] * C * max(4, itemsize)
    workspace = 16 * tokens + 8 * (V + 1) + sums
    backward_cost = Cost(2 * tokens * row + 8 * tokens, (V + positions) * row, 2 * tokens * C, workspace)
    return forward_cost, backward_cost
