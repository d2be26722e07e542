"""LayerNorm, and residual add + LayerNorm, forward and backward (Ba et al. 2016).

    y = (x - mean(x)) * rstd(x) * weight + bias,    rstd(x) = 1 / sqrt(var(x) + eps)

A row is loaded once and stays in registers, so the forward reads x and writes y and that is all. The backward needs
sums along a row (for dx) and down the columns (for dW and dB); both are had from one reading of x and dy:

    xhat = (x - mean) * rstd        g = dy * weight
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))        dW = sum of dy * xhat        dB = sum of dy

Steps: forward 1 one row a program, 2 a tile of rows; backward 1 atomic sums, whose order and so whose last bits change
from run to run on a GPU, 2 persistent programs, each summing its own rows, then a sum over programs: deterministic.
"""

from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.checks import check_number, check_tensors
from phase2_triton.kernels.core import (
    Cost,
    KernelError,
    config,
    flat,
    jit,
    kernel_op,
    launch,
    result_dtype,
    rows_of,
    tile,
    tl,
    to_fp32,
)

WIDEST = 16384  # what a program can hold of a row


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm of the last dimension in plain torch."""
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).square().mean(-1, keepdim=True)
    y = (x - mean) * torch.rsqrt(var + eps) * weight
    return y if bias is None else y + bias


@jit
def one_row_kernel(x, weight, bias, y, mean, rstd, N, eps, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Step 1 of the forward: a program takes one row, which is plain and leaves short rows too little work."""
    row = tl.program_id(0).to(tl.int64)  # a row begins past 2^31 in a large tensor
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    v = to_fp32(tl.load(x + row * N + cols, mask=inside, other=0.0))
    m = tl.sum(v, 0) / N
    centred = tl.where(inside, v - m, 0.0)  # lanes beyond the row must not count in the variance
    r = 1 / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    out = centred * r * to_fp32(tl.load(weight + cols, mask=inside, other=0.0))
    if HAS_BIAS:
        out += to_fp32(tl.load(bias + cols, mask=inside, other=0.0))
    tl.store(y + row * N + cols, out, mask=inside)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)


@jit
def forward_kernel(
    x, branch, weight, bias, total, y, mean, rstd, M, N, eps,
    HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step 2 of the forward: a tile of rows a program; the residual's sum is made, and stored, on the way."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None] * N + cols[None, :]  # (ROWS, BLOCK)
    v = to_fp32(tl.load(x + at, mask=inside, other=0.0))
    if HAS_BRANCH:
        v += to_fp32(tl.load(branch + at, mask=inside, other=0.0))
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        v = to_fp32(rounded)  # the backward will read the rounded sum
    m = tl.sum(v, 1) / N
    centred = tl.where(inside, v - m[:, None], 0.0)
    r = 1 / tl.sqrt(tl.sum(centred * centred, 1) / N + eps)
    out = centred * r[:, None] * to_fp32(tl.load(weight + cols, mask=cols < N, other=0.0))[None, :]
    if HAS_BIAS:
        out += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
    tl.store(y + at, out, mask=inside)
    tl.store(mean + rows, m, mask=rows < M)
    tl.store(rstd + rows, r, mask=rows < M)


@jit
def backward_kernel(
    dy, dtotal, x, weight, mean, rstd, dx, dw, db, M, N,
    HAS_DTOTAL: tl.constexpr, HAS_BIAS: tl.constexpr, ATOMIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of a tile of rows at a time, and this program's share of dW and dB: its own row of them, or by atomics."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    w = to_fp32(tl.load(weight + cols, mask=cols < N, other=0.0))
    dw_sum = tl.zeros_like(w)
    db_sum = tl.zeros_like(w)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        at = rows[:, None] * N + cols[None, :]
        r = to_fp32(tl.load(rstd + rows, mask=rows < M, other=0.0))[:, None]
        v = to_fp32(tl.load(x + at, mask=inside, other=0.0))
        xhat = tl.where(inside, (v - to_fp32(tl.load(mean + rows, mask=rows < M, other=0.0))[:, None]) * r, 0.0)
        d = to_fp32(tl.load(dy + at, mask=inside, other=0.0))
        g = d * w[None, :]
        out = r * (g - (tl.sum(g, 1) / N)[:, None] - xhat * (tl.sum(g * xhat, 1) / N)[:, None])
        if HAS_DTOTAL:  # the residual stream goes on beside the norm: its gradient is added
            out += to_fp32(tl.load(dtotal + at, mask=inside, other=0.0))
        tl.store(dx + at, out, mask=inside)
        dw_sum += tl.sum(d * xhat, 0)
        db_sum += tl.sum(d, 0)
    if ATOMIC:
        tl.atomic_add(dw + cols, dw_sum, mask=cols < N)
        if HAS_BIAS:
            tl.atomic_add(db + cols, db_sum, mask=cols < N)
    else:
        tl.store(dw + program * N + cols, dw_sum, mask=cols < N)
        if HAS_BIAS:
            tl.store(db + program * N + cols, db_sum, mask=cols < N)


@kernel_op("layer_norm")
def forward_op(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the sum x + branch (empty without one), and each row's mean and rstd, from contiguous (M, N) tensors."""
    M, N = x.shape
    chosen = config("layernorm_forward", N)
    rows = min(tile(M), chosen.pop("rows"))
    y, mean, rstd = torch.empty_like(x, dtype=dtype), rows_of(x), rows_of(x)
    total = x.new_empty(0) if branch is None else torch.empty_like(x)
    launch(
        forward_kernel, (-(-M // rows),), x, branch, weight, bias, total, y, mean, rstd, M, N, eps,
        HAS_BRANCH=branch is not None, HAS_BIAS=bias is not None, ROWS=rows, BLOCK=tile(N), **chosen,
    )  # fmt: skip
    return y, total, mean, rstd


@kernel_op("layer_norm_backward")
def backward_op(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dW and dB (empty without a bias), from contiguous (M, N) tensors."""
    M, N = x.shape
    chosen = config("layernorm_backward", N)
    rows = min(tile(M), chosen.pop("rows"))
    programs = max(1, min(chosen.pop("programs"), -(-M // rows)))
    dx, dw = torch.empty_like(x), mean.new_empty(programs, N)
    db = torch.empty_like(dw) if has_bias else mean.new_empty(0)
    launch(
        backward_kernel, (programs,), dy, dtotal, x, weight, mean, rstd, dx, dw, db, M, N,
        HAS_DTOTAL=dtotal is not None, HAS_BIAS=has_bias, ATOMIC=False, ROWS=rows, BLOCK=tile(N), **chosen,
    )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype), db.sum(0).to(weight.dtype) if has_bias else db


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, weight, bias, _, _ = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if branch is None else total, weight, mean, rstd)
    ctx.branch_dtype, ctx.has_bias = None if branch is None else branch.dtype, bias is not None
    ctx.mark_non_differentiable(mean, rstd)


def backward(ctx: Any, dy: Tensor, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    has_branch = ctx.branch_dtype is not None
    along = dtotal.contiguous() if has_branch else None
    dx, dw, db = backward_op(dy.contiguous(), along, x, weight, mean, rstd, ctx.has_bias)
    return dx, dx.to(ctx.branch_dtype) if has_branch else None, dw, db if ctx.has_bias else None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm of the last dimension; under autocast the result has autocast's type.

    Args:
        x: (..., N), of any layout; one that is not contiguous is copied first.
        weight: (N,).
        bias: (N,) or None.
        eps: added to the variance.

    Raises:
        KernelError: a shape, type or device that does not fit.
    """
    check("layer_norm", x, None, weight, bias, eps)
    y, *_ = forward_op(flat(x), None, *dense(weight, bias), eps, result_dtype(x))
    return y.view(x.shape)


def add_layer_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`total = x + branch` and `layer_norm(total)`, with x read once: (total in the type of x, its norm).

    Args:
        x: the residual stream, (..., N).
        branch: what is added to it, of the same shape; its type may be narrower.
        weight: (N,).
        bias: (N,) or None.
        eps: added to the variance.

    Raises:
        KernelError: a shape, type or device that does not fit.
    """
    check("add_layer_norm", x, branch, weight, bias, eps)
    y, total, *_ = forward_op(flat(x), flat(branch), *dense(weight, bias), eps, result_dtype(x))
    return total.view(x.shape), y.view(x.shape)


def dense(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.contiguous(), None if bias is None else bias.contiguous()


def check(kernel: str, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    check_tensors(kernel, x=x, branch=branch, weight=weight, bias=bias)
    if x.dim() == 0 or x.size(-1) == 0:
        raise KernelError(f"{kernel}: x of shape {tuple(x.shape)} has no last dimension to normalise: give (..., N)")
    if branch is not None and branch.shape != x.shape:
        raise KernelError(f"{kernel}: branch is {tuple(branch.shape)} and x {tuple(x.shape)}: give two of one shape")
    check_number(kernel, "eps", eps, 0)
    if x.size(-1) > WIDEST:
        raise KernelError(f"{kernel}: rows are {x.size(-1)} wide, above {WIDEST}: use F.layer_norm or the reference")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise KernelError(f"{kernel}: {name} is {tuple(tensor.shape)}: give one of ({x.size(-1)},), as x is wide")


def cost(M: int, N: int, itemsize: int, branch: bool = False, bias: bool = True) -> tuple[Cost, Cost]:
    """Forward and backward of (M, N) elements of `itemsize` bytes, with fp32 parameters."""
    params = 4 * N * (1 + bias)
    size, streams = M * N * itemsize, 2 if branch else 1
    there = Cost(streams * size + params, streams * size + 8 * M, 8 * M * N)
    programs = config("layernorm_backward", N)["programs"]
    back = Cost((1 + streams) * size + 8 * M + 4 * N, size + params, 13 * M * N, programs * params)
    return there, back


def step_1(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The forward by one row a program; x is (M, N) and contiguous."""
    M, N = x.shape
    y, mean, rstd = torch.empty_like(x), rows_of(x), rows_of(x)
    launch(one_row_kernel, (M,), x, weight, bias, y, mean, rstd, N, eps, HAS_BIAS=bias is not None, BLOCK=tile(N))
    return y


def atomic_step(dy: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """Step 1 of the backward: dx, dW and dB of (M, N) tensors, summed by atomics."""
    M, N = x.shape
    _, _, mean, rstd = forward_op(x, None, weight, None, eps, x.dtype)
    dx, dw, db = torch.empty_like(x), torch.zeros_like(mean[:1].expand(N)), torch.zeros_like(mean[:1].expand(N))
    launch(
        backward_kernel, (M,), dy, None, x, weight, mean, rstd, dx, dw, db, M, N,
        HAS_DTOTAL=False, HAS_BIAS=True, ATOMIC=True, ROWS=1, BLOCK=tile(N),
    )  # fmt: skip
    return dx, dw, db
