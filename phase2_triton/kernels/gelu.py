"""Bias + GELU, forward and backward (Hendrycks & Gimpel 2016).

    v = x + bias
    exact: y = v cdf(v)        dy/dv = cdf(v) + v pdf(v)        cdf and pdf of the normal distribution
    tanh:  y = v s(2u)         dy/dv = s(2u) + v s(2u) (1 - s(2u)) 2u'        u = sqrt(2/pi) (v + 0.044715 v^3)

s is the logistic function: (1 + tanh(u)) / 2 = s(2u). In both forms y = v * gate. The backward recomputes the slope
dy/dv from v: reading v costs no more than reading a saved slope, and v exists already as the result of the matrix
product. db is summed by persistent programs, as in LayerNorm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phase2_triton.kernels.checks import check_tensors
from phase2_triton.kernels.core import (
    LOG2E,
    Cost,
    KernelError,
    flatten_rows,
    jit,
    kernel_op,
    launch,
    result_dtype,
    select_config,
    tl,
    to_fp32,
)


def reference(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(x + bias) in plain torch."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


@jit
def compute_gate_and_slope(v, TANH: tl.constexpr):
    """Return the gate y / v and the slope dy/dv.

    In fp32, 1 - cdf is the pdf times a polynomial in 1 / (1 + 0.2975 |v|), fitted to a relative error of 4e-8. One
    exponential then serves for both cdf and pdf, and small values keep their digits. In the interpreter this is also
    many times faster than tl.erf.
    """
    t = tl.minimum(tl.abs(v), 100.0)  # the results are constant long before 100, and powers of t must not overflow
    if TANH:
        e = tl.exp2(t * (1 + 0.044715 * t * t) * (-1.5957691216057308 * LOG2E))
        s = 1 / (1 + e)  # one division for both
        gate = tl.where(v < 0, e * s, s)
        density = e * s * s * (1.5957691216057308 + 0.2140644488178007 * t * t)
    else:
        density = tl.exp2(t * t * (-0.5 * LOG2E)) * 0.3989422804014327
        if v.dtype == tl.float64:
            gate = 0.5 * (1 + tl.erf(v * 0.7071067811865476))
        else:
            root = 1 + 0.2975 * t
            u = tl.rsqrt(root * root)  # 1 / root: a division takes six instructions more
            ratio = -0.243558094 + u * (0.628068907 + u * (-0.443398386 + 0.0979134098 * u))
            ratio = 0.296763884 + u * (0.305292654 + u * (0.224944728 + u * (0.387257347 + u * ratio)))
            tail = density * (2.97418855e-05 + u * ratio)
            gate = tl.where(v < 0, tail, 1 - tail)
    return gate, gate + v * density


@jit
def forward_kernel(
    x, bias, y, M, N, HAS_BIAS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program computes one (ROWS, BLOCK) tile of y."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]  # (ROWS, BLOCK)
    v = to_fp32(tl.load(x + offs, mask=mask, other=0.0))
    if HAS_BIAS:
        v += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
    gate, _ = compute_gate_and_slope(v, TANH)
    tl.store(y + offs, v * gate, mask=mask)


@jit
def backward_kernel(
    dy, x, bias, dx, db, M, N,
    HAS_BIAS: tl.constexpr, SUM: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx in a loop over tiles of rows. SUM: also write this program's part of db into its row of `db`."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    db_sum = tl.zeros((BLOCK,), db.dtype.element_ty)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]  # (ROWS, BLOCK)
        v = to_fp32(tl.load(x + offs, mask=mask, other=0.0))
        if HAS_BIAS:
            v += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
        _, slope = compute_gate_and_slope(v, TANH)
        dv = to_fp32(tl.load(dy + offs, mask=mask, other=0.0)) * slope
        tl.store(dx + offs, dv, mask=mask)
        if SUM:
            db_sum += tl.sum(dv, 0)
    if SUM:
        tl.store(db + program * N + cols, db_sum, mask=cols < N)


@kernel_op("bias_gelu")
def forward_op(x: Tensor, bias: Tensor | None, tanh: bool, dtype: torch.dtype) -> Tensor:
    """Return GELU(x + bias) for contiguous x, (M, N)."""
    M, N = x.shape
    options = select_config("gelu_forward", N)
    rows = options.pop("rows")
    block = options.pop("block")
    y = torch.empty_like(x, dtype=dtype)
    launch(
        forward_kernel, (-(-M // rows), -(-N // block)), x, bias, y, M, N,
        HAS_BIAS=bias is not None, TANH=tanh, ROWS=rows, BLOCK=block, **options,
    )  # fmt: skip
    return y


@kernel_op("bias_gelu_backward")
def backward_op(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, sum_db: bool) -> tuple[Tensor, Tensor]:
    """Return dx, and db in fp32 (empty without `sum_db`), for contiguous dy and x, (M, N)."""
    M, N = x.shape
    options = select_config("gelu_backward", N)
    rows = options.pop("rows")
    block = options.pop("block")
    programs = max(1, min(options.pop("programs"), -(-M // rows)))
    dx = torch.empty_like(x)
    db = x.new_empty((programs, N) if sum_db else (0,), dtype=torch.promote_types(x.dtype, torch.float32))
    launch(
        backward_kernel, (programs, -(-N // block)), dy, x, bias, dx, db, M, N,
        HAS_BIAS=bias is not None, SUM=sum_db, TANH=tanh, ROWS=rows, BLOCK=block, **options,
    )  # fmt: skip
    return dx, db.sum(0) if sum_db else db


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.tanh, _ = inputs
    ctx.save_for_backward(x, bias)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    dx, db = backward_op(dy.contiguous(), x, bias, ctx.tanh, bias is not None)
    return dx, None if bias is None else db.to(bias.dtype), None, None


forward_op.register_autograd(backward, setup_context=setup_context)


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(x + bias). Under autocast the result has autocast's type.

    Args:
        x: (..., N). A tensor that is not contiguous is copied first.
        bias: (N,) or None.
        approximate: none (exact) or tanh, as in torch.

    Raises:
        KernelError: a shape, type, device or option is not supported.
    """
    check_inputs(x, bias, approximate)
    bias = None if bias is None else bias.contiguous()
    y = forward_op(flatten_rows(x), bias, approximate == "tanh", result_dtype(x))
    return y.view(x.shape)


def check_inputs(x: Tensor, bias: Tensor | None, approximate: str) -> None:
    """Check shapes, types and options.

    Raises:
        KernelError: names the argument and what to pass.
    """
    check_tensors("bias_gelu", x=x, bias=bias)
    if approximate not in ("none", "tanh"):
        raise KernelError(f"bias_gelu: approximate={approximate!r} is unknown: use none or tanh")
    if x.dim() == 0 or x.size(-1) == 0:
        raise KernelError(f"bias_gelu: x of shape {tuple(x.shape)} has no last dimension: pass (..., width)")
    if bias is not None and bias.shape != (x.size(-1),):
        raise KernelError(f"bias_gelu: bias has shape {tuple(bias.shape)}: pass ({x.size(-1)},), the width of x")


def cost(M: int, N: int, itemsize: int, bias: bool = True) -> tuple[Cost, Cost]:
    """Return the costs of forward and backward for (M, N) elements of `itemsize` bytes and an fp32 bias."""
    size = M * N * itemsize
    bias_bytes = 4 * N * bias
    workspace = select_config("gelu_backward", N)["programs"] * bias_bytes  # one row of db for each program
    forward_cost = Cost(size + bias_bytes, size, 30 * M * N)
    backward_cost = Cost(2 * size + bias_bytes, size + bias_bytes, 35 * M * N, workspace)
    return forward_cost, backward_cost
