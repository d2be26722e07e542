"""Bias + GELU, and the matrix product that ends in it, forward and backward (Hendrycks & Gimpel 2016).

    exact: y = v cdf(v)        dy/dv = cdf(v) + v pdf(v)        v = x + b, and the normal distribution's cdf and pdf
    tanh:  y = v s(2u)         dy/dv = s(2u) + v s(2u) (1 - s(2u)) 2u'        u = sqrt(2/pi) (v + 0.044715 v^3)

with the logistic function s, as (1 + tanh(u)) / 2 = s(2u). The backward works the slope out anew from v: a read of v
costs no more than one of the slope would, and v is what the product left.

Steps: 1 bias and GELU in one pass over the product: a read and a write; 2 in the product's epilogue, while its tile
is still in registers: the read is gone, and without a gradient so is the write of v. The backward is the same for both:
the gradient of v, and dB by persistent programs as in LayerNorm; two plain products remain, which are torch's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phase2_triton.kernels.checks import check_tensors
from phase2_triton.kernels.core import (
    Cost,
    KernelError,
    config,
    flat,
    jit,
    kernel_op,
    launch,
    result_dtype,
    tl,
    to_fp32,
)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Step 2 in plain torch."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


@jit
def share_and_slope(v, TANH: tl.constexpr):
    """y / v, and dy/dv.

    In fp32, 1 - cdf is the pdf times a polynomial in 1 / (1 + 0.2975 t), fitted to a relative error of 4e-8: the
    exponential serves twice, small values keep their digits, and interpreted it is many times as fast as tl.erf.
    """
    t = tl.minimum(tl.abs(v), 100.0)  # what follows is constant long before, and powers of t must not overflow
    if TANH:
        e = tl.exp(-1.5957691216057308 * t * (1 + 0.044715 * t * t))
        share = tl.where(v < 0, e, 1.0) / (1 + e)
        density = e / ((1 + e) * (1 + e)) * 1.5957691216057308 * (1 + 0.134145 * t * t)
    else:
        density = tl.exp(-0.5 * t * t) * 0.3989422804014327
        if v.dtype == tl.float64:
            share = 0.5 * (1 + tl.erf(v * 0.7071067811865476))
        else:
            u = 1 / (1 + 0.2975 * t)
            ratio = -0.243558094 + u * (0.628068907 + u * (-0.443398386 + 0.0979134098 * u))
            ratio = 0.296763884 + u * (0.305292654 + u * (0.224944728 + u * (0.387257347 + u * ratio)))
            tail = density * (2.97418855e-05 + u * ratio)
            share = tl.where(v < 0, tail, 1 - tail)
    return share, share + v * density


@jit
def forward_kernel(
    x, bias, y, M, N, HAS_BIAS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Step 1: a tile a program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None] * N + cols[None, :]  # (ROWS, BLOCK)
    v = to_fp32(tl.load(x + at, mask=inside, other=0.0))
    if HAS_BIAS:
        v += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
    share, _ = share_and_slope(v, TANH)
    tl.store(y + at, v * share, mask=inside)


@jit
def backward_kernel(
    dy, x, bias, dx, db, M, N,
    HAS_BIAS: tl.constexpr, SUM: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of a tile of rows at a time, and with SUM this program's share of dB, its own row of `db`."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    db_sum = tl.zeros((BLOCK,), db.dtype.element_ty)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        at = rows[:, None] * N + cols[None, :]
        v = to_fp32(tl.load(x + at, mask=inside, other=0.0))
        if HAS_BIAS:
            v += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
        _, slope = share_and_slope(v, TANH)
        d = to_fp32(tl.load(dy + at, mask=inside, other=0.0)) * slope
        tl.store(dx + at, d, mask=inside)
        if SUM:
            db_sum += tl.sum(d, 0)
    if SUM:
        tl.store(db + program * N + cols, db_sum, mask=cols < N)


@jit
def linear_kernel(
    x, weight, bias, y, pre, M, N, K,
    HAS_BIAS: tl.constexpr, SAVE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Step 2: a (ROWS, COLS) tile of x @ weight.T a program, summed in fp32, and its epilogue.

    Programs start in order: GROUP tiles down, then the next column of tiles, so that those which run at one time share
    their rows of x and of weight in the L2 cache.
    """
    program, down, across = tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)  # the last group may be lower
    within = program % (GROUP * across)
    rows = (first + within % height) * ROWS + tl.arange(0, ROWS)
    cols = within // height * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    # rows and columns beyond the end repeat the last one: cheaper than a mask, and never stored
    x_at = x + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * K + depth[None, :]  # (ROWS, DEPTH)
    weight_at = weight + tl.minimum(cols, N - 1).to(tl.int64)[None, :] * K + depth[:, None]  # (DEPTH, COLS)
    v = to_fp32(tl.zeros((ROWS, COLS), pre.dtype.element_ty))
    for k in range(0, K, DEPTH):
        a = tl.load(x_at + k, mask=depth[None, :] < K - k, other=0.0)
        b = tl.load(weight_at + k, mask=depth[:, None] < K - k, other=0.0)
        v = tl.dot(a, b, v, input_precision=PRECISION, out_dtype=v.dtype)
    if HAS_BIAS:
        v += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
    rounded = v.to(pre.dtype.element_ty)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    if SAVE:
        tl.store(pre + at, rounded, mask=inside)
    v = to_fp32(rounded)  # the backward will read the rounded one
    share, _ = share_and_slope(v, TANH)
    tl.store(y + at, v * share, mask=inside)


@kernel_op("bias_gelu")
def forward_op(x: Tensor, bias: Tensor | None, tanh: bool, dtype: torch.dtype) -> Tensor:
    """GELU of contiguous (M, N) x, plus its bias."""
    M, N = x.shape
    chosen = config("gelu_forward", N)
    rows, block = chosen.pop("rows"), chosen.pop("block")
    y = torch.empty_like(x, dtype=dtype)
    launch(
        forward_kernel, (-(-M // rows), -(-N // block)), x, bias, y, M, N,
        HAS_BIAS=bias is not None, TANH=tanh, ROWS=rows, BLOCK=block, **chosen,
    )  # fmt: skip
    return y


@kernel_op("bias_gelu_backward")
def backward_op(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, sum_db: bool) -> tuple[Tensor, Tensor]:
    """dx, and dB in fp32 (empty where not asked for), from contiguous (M, N) tensors."""
    M, N = x.shape
    chosen = config("gelu_backward", N)
    rows, block, programs = chosen.pop("rows"), chosen.pop("block"), chosen.pop("programs")
    programs = max(1, min(programs, -(-M // rows)))
    dx = torch.empty_like(x)
    db = x.new_empty((programs, N) if sum_db else (0,), dtype=torch.promote_types(x.dtype, torch.float32))
    launch(
        backward_kernel, (programs, -(-N // block)), dy, x, bias, dx, db, M, N,
        HAS_BIAS=bias is not None, SUM=sum_db, TANH=tanh, ROWS=rows, BLOCK=block, **chosen,
    )  # fmt: skip
    return dx, db.sum(0) if sum_db else db


@kernel_op("linear_gelu", flops=lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[0])
def linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor]:
    """GELU of contiguous (M, K) x times (N, K) weight transposed; with `save` also what went into it, else empty."""
    (M, K), N = x.shape, weight.size(0)
    chosen = config("linear_gelu" if dtype.itemsize == 2 else "linear_gelu_single", N)
    rows, cols, depth, group = (chosen.pop(name) for name in ("rows", "cols", "depth", "group"))
    y = x.new_empty((M, N), dtype=dtype)
    pre = x.new_empty((M, N) if save else (0,), dtype=dtype)
    launch(
        linear_kernel, (-(-M // rows) * -(-N // cols),),
        x.to(dtype), weight.to(dtype), bias, y, pre, M, N, K,
        HAS_BIAS=bias is not None, SAVE=save, TANH=tanh,
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        ROWS=rows, COLS=cols, DEPTH=depth, GROUP=group, **chosen,
    )  # fmt: skip
    return y, pre


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.tanh, _ = inputs
    ctx.save_for_backward(x, bias)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    dx, db = backward_op(dy.contiguous(), x, bias, ctx.tanh, bias is not None)
    return dx, None if bias is None else db.to(bias.dtype), None, None


def linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.tanh, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])


@kernel_op(
    "linear_gelu_backward",
    flops=lambda dy, x, weight, pre, tanh, need_dx, need_dw, *_, **__: 2 * dy[0] * dy[1] * x[1] * (need_dx + need_dw),
)
def linear_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, pre: Tensor, tanh: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dW and dB, empty where not needed; an operator, so that a second derivative is refused, not half right."""
    dpre, db = backward_op(dy, pre, None, tanh, need_db)
    dx = (dpre @ weight.to(dpre.dtype)).to(x.dtype) if need_dx else x.new_empty(0)
    dw = (dpre.t() @ x.to(dpre.dtype)).to(weight.dtype) if need_dw else weight.new_empty(0)
    return dx, dw, db


def linear_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
    dx, dw, db = linear_backward_op(dy.contiguous(), *ctx.saved_tensors, ctx.tanh, need_dx, need_dw, need_db)
    found = dx if need_dx else None, dw if need_dw else None, db.to(ctx.bias_dtype) if need_db else None
    return *found, None, None, None


forward_op.register_autograd(backward, setup_context=setup_context)
linear_op.register_autograd(linear_backward, setup_context=linear_setup_context)


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """GELU of x + bias; under autocast the result has autocast's type.

    Args:
        x: (..., N), of any layout; one that is not contiguous is copied first.
        bias: (N,) or None.
        approximate: none (exact) or tanh, as in torch.

    Raises:
        KernelError: a shape, type, device or option that does not fit.
    """
    check("bias_gelu", approximate, x, None, bias)
    y = forward_op(flat(x), None if bias is None else bias.contiguous(), approximate == "tanh", result_dtype(x))
    return y.view(x.shape)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """GELU of linear(x, weight, bias); under autocast both factors are rounded to autocast's type first.

    fp32 factors are multiplied in fp32, or in TF32 where `torch.set_float32_matmul_precision` allows it.

    Args:
        x: (..., K), of any layout; one that is not contiguous is copied first.
        weight: (N, K), as in nn.Linear; of the type of x, unless under autocast.
        bias: (N,) or None; it is added in fp32 (fp64 in fp64).
        approximate: none (exact) or tanh, as in torch.

    Raises:
        KernelError: a shape, type, device or option that does not fit.
    """
    check("linear_gelu", approximate, x, weight, bias)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    bias = None if bias is None else bias.contiguous()
    y, _ = linear_op(flat(x), weight.contiguous(), bias, approximate == "tanh", result_dtype(x), save)
    return y.view(*x.shape[:-1], weight.size(0))


def check(kernel: str, approximate: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_tensors(kernel, x=x, **({"weight": weight} if kernel == "linear_gelu" else {}), bias=bias)
    if approximate not in ("none", "tanh"):
        raise KernelError(f"{kernel}: approximate={approximate!r} is unknown: give none or tanh")
    if x.dim() == 0 or x.size(-1) == 0:
        raise KernelError(f"{kernel}: x of shape {tuple(x.shape)} has no last dimension: give (..., width)")
    width = x.size(-1)
    if weight is not None:
        if weight.dim() != 2 or weight.size(1) != width or weight.size(0) == 0:
            raise KernelError(f"{kernel}: weight is {tuple(weight.shape)}: give (N, {width}), as x is wide")
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise KernelError(f"{kernel}: weight is {weight.dtype} and x {x.dtype}: give one type, or use autocast")
        width = weight.size(0)
    if bias is not None and bias.shape != (width,):
        raise KernelError(f"{kernel}: bias is {tuple(bias.shape)}: give ({width},), as the result is wide")


def cost(M: int, N: int, itemsize: int, bias: bool = True) -> tuple[Cost, Cost]:
    """`bias_gelu` forward and backward on (M, N) elements of `itemsize` bytes, with an fp32 bias."""
    size, params = M * N * itemsize, 4 * N * bias
    back = Cost(2 * size + params, size + params, 35 * M * N, config("gelu_backward", N)["programs"] * params)
    return Cost(size + params, size, 30 * M * N), back


def linear_cost(M: int, N: int, K: int, itemsize: int, bias: bool = True) -> tuple[Cost, Cost]:
    """`linear_gelu` on factors of `itemsize` bytes: one product there, and with v saved, two back."""
    x, weight, y, params = M * K * itemsize, N * K * itemsize, M * N * itemsize, 4 * N * bias
    products = Cost(2 * y + weight + x, x + weight, 4 * M * N * K, workspace=y)  # the gradient of v is read twice
    return Cost(x + weight + params, 2 * y, 2 * M * N * K + 30 * M * N), cost(M, N, itemsize, bias)[1] + products
