"""Bias + GELU, and a matrix product that ends in bias + GELU, forward and backward (Hendrycks & Gimpel 2016).

    v = x + bias
    exact: y = v cdf(v)        dy/dv = cdf(v) + v pdf(v)        cdf and pdf of the normal distribution
    tanh:  y = v s(2u)         dy/dv = s(2u) + v s(2u) (1 - s(2u)) 2u'        u = sqrt(2/pi) (v + 0.044715 v^3)

s is the logistic function: (1 + tanh(u)) / 2 = s(2u). In both forms y = v * gate. The backward recomputes the slope
dy/dv from v: reading v costs no more than reading a saved slope, and v exists already as the result of the matrix
product.

Steps:
1. Bias and GELU in one pass over the result of the matrix product: one read and one write.
2. Bias and GELU in the epilogue of the matrix product, while its tile is still in registers. This saves the read, and
   without a gradient also the write of v.

The backward is the same for both steps: the gradient of v, and db by persistent programs as in LayerNorm. Step 2 adds
two plain matrix products, which torch computes.
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


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(linear(x, weight, bias)) in plain torch."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


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
    """Step 1: each program computes one (ROWS, BLOCK) tile of y."""
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


@jit
def linear_kernel(
    x, weight, bias, y, pre_act, M, N, K,
    HAS_BIAS: tl.constexpr, SAVE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Step 2: each program computes one (ROWS, COLS) tile of x @ weight.T, summed in fp32, and its epilogue.

    SAVE: also store the pre-activation, the input of GELU, in `pre_act`.

    Programs start in the order of their numbers. The tiles are numbered in groups: GROUP tiles down, then the next
    column of tiles. Programs that run at the same time therefore share rows of x and of weight in the L2 cache.
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(M, ROWS)
    col_tiles = tl.cdiv(N, COLS)
    first_row_tile = program // (GROUP * col_tiles) * GROUP
    group_height = tl.minimum(row_tiles - first_row_tile, GROUP)  # the last group may have fewer rows of tiles
    group_index = program % (GROUP * col_tiles)
    rows = (first_row_tile + group_index % group_height) * ROWS + tl.arange(0, ROWS)
    cols = group_index // group_height * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    # Rows and columns beyond the end read the last one again. This is cheaper than a mask, and they are never stored.
    x_ptrs = x + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * K + depth[None, :]  # (ROWS, DEPTH)
    weight_ptrs = weight + tl.minimum(cols, N - 1).to(tl.int64)[None, :] * K + depth[:, None]  # (DEPTH, COLS)
    v = to_fp32(tl.zeros((ROWS, COLS), pre_act.dtype.element_ty))
    for k in range(0, K, DEPTH):
        a = tl.load(x_ptrs + k, mask=depth[None, :] < K - k, other=0.0)
        b = tl.load(weight_ptrs + k, mask=depth[:, None] < K - k, other=0.0)
        v = tl.dot(a, b, v, input_precision=PRECISION, out_dtype=v.dtype)
    if HAS_BIAS:
        v += to_fp32(tl.load(bias + cols, mask=cols < N, other=0.0))[None, :]
    rounded = v.to(pre_act.dtype.element_ty)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows.to(tl.int64)[:, None] * N + cols[None, :]  # (ROWS, COLS)
    if SAVE:
        tl.store(pre_act + offs, rounded, mask=mask)
    v = to_fp32(rounded)  # the backward reads the rounded value, so the forward must use it too
    gate, _ = compute_gate_and_slope(v, TANH)
    tl.store(y + offs, v * gate, mask=mask)


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


@kernel_op("linear_gelu", flops=lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[0])
def linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor]:
    """Return GELU(x @ weight.T + bias) and, with `save`, the pre-activation (else empty).

    Args:
        x: (M, K), contiguous.
        weight: (N, K), contiguous.
        bias: (N,) or None.
        tanh: use the tanh form of GELU.
        dtype: type of the factors and of the results.
        save: return the pre-activation, which the backward needs.
    """
    (M, K), N = x.shape, weight.size(0)
    options = select_config("linear_gelu" if dtype.itemsize == 2 else "linear_gelu_single", N)
    rows = options.pop("rows")
    cols = options.pop("cols")
    depth = options.pop("depth")
    group = options.pop("group")
    y = x.new_empty((M, N), dtype=dtype)
    pre_act = x.new_empty((M, N) if save else (0,), dtype=dtype)
    launch(
        linear_kernel, (-(-M // rows) * -(-N // cols),),
        x.to(dtype), weight.to(dtype), bias, y, pre_act, M, N, K,
        HAS_BIAS=bias is not None, SAVE=save, TANH=tanh,
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        ROWS=rows, COLS=cols, DEPTH=depth, GROUP=group, **options,
    )  # fmt: skip
    return y, pre_act


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
    flops=lambda dy, x, weight, pre_act, tanh, need_dx, need_dw, *_, **__: (
        2 * dy[0] * dy[1] * x[1] * (need_dx + need_dw)
    ),
)
def linear_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, pre_act: Tensor, tanh: bool, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dw and db (empty where not needed).

    This is an operator so that a second derivative raises an error. Without it, autograd would differentiate the two
    matrix products here and ignore the kernel.
    """
    dpre_act, db = backward_op(dy, pre_act, None, tanh, need_db)
    dx = (dpre_act @ weight.to(dpre_act.dtype)).to(x.dtype) if need_dx else x.new_empty(0)
    dw = (dpre_act.t() @ x.to(dpre_act.dtype)).to(weight.dtype) if need_dw else weight.new_empty(0)
    return dx, dw, db


def linear_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
    dx, dw, db = linear_backward_op(dy.contiguous(), *ctx.saved_tensors, ctx.tanh, need_dx, need_dw, need_db)
    return (
        dx if need_dx else None,
        dw if need_dw else None,
        db.to(ctx.bias_dtype) if need_db else None,
        None,
        None,
        None,
    )


forward_op.register_autograd(backward, setup_context=setup_context)
linear_op.register_autograd(linear_backward, setup_context=linear_setup_context)


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(x + bias). Under autocast the result has autocast's type.

    Args:
        x: (..., N). A tensor that is not contiguous is copied first.
        bias: (N,) or None.
        approximate: none (exact) or tanh, as in torch.

    Raises:
        KernelError: a shape, type, device or option is not supported.
    """
    check_inputs("bias_gelu", approximate, x, None, bias)
    bias = None if bias is None else bias.contiguous()
    y = forward_op(flatten_rows(x), bias, approximate == "tanh", result_dtype(x))
    return y.view(x.shape)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(linear(x, weight, bias)). Under autocast both factors are rounded to autocast's type first.

    The product of fp32 factors is computed in fp32, or in TF32 if `torch.set_float32_matmul_precision` allows it.

    Args:
        x: (..., K). A tensor that is not contiguous is copied first.
        weight: (N, K), as in nn.Linear. It must have the type of x, except under autocast.
        bias: (N,) or None, added in fp32 (fp64 in fp64).
        approximate: none (exact) or tanh, as in torch.

    Raises:
        KernelError: a shape, type, device or option is not supported.
    """
    check_inputs("linear_gelu", approximate, x, weight, bias)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    bias = None if bias is None else bias.contiguous()
    y, _ = linear_op(flatten_rows(x), weight.contiguous(), bias, approximate == "tanh", result_dtype(x), save)
    return y.view(*x.shape[:-1], weight.size(0))


def check_inputs(kernel: str, approximate: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Check shapes, types and options; `weight` is None for `bias_gelu`.

    Raises:
        KernelError: names the argument and what to pass.
    """
    check_tensors(kernel, x=x, **({"weight": weight} if kernel == "linear_gelu" else {}), bias=bias)
    if approximate not in ("none", "tanh"):
        raise KernelError(f"{kernel}: approximate={approximate!r} is unknown: use none or tanh")
    if x.dim() == 0 or x.size(-1) == 0:
        raise KernelError(f"{kernel}: x of shape {tuple(x.shape)} has no last dimension: pass (..., width)")
    width = x.size(-1)
    if weight is not None:
        if weight.dim() != 2 or weight.size(1) != width or weight.size(0) == 0:
            raise KernelError(
                f"{kernel}: weight has shape {tuple(weight.shape)}: pass (N, {width}), where {width} is the width of x"
            )
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise KernelError(f"{kernel}: weight is {weight.dtype} and x {x.dtype}: use one type, or autocast")
        width = weight.size(0)
    if bias is not None and bias.shape != (width,):
        raise KernelError(f"{kernel}: bias has shape {tuple(bias.shape)}: pass ({width},), the width of the result")


def cost(M: int, N: int, itemsize: int, bias: bool = True) -> tuple[Cost, Cost]:
    """Return the costs of `bias_gelu` forward and backward for (M, N) elements of `itemsize` bytes and an fp32 bias."""
    size = M * N * itemsize
    bias_bytes = 4 * N * bias
    workspace = select_config("gelu_backward", N)["programs"] * bias_bytes  # one row of db for each program
    forward_cost = Cost(size + bias_bytes, size, 30 * M * N)
    backward_cost = Cost(2 * size + bias_bytes, size + bias_bytes, 35 * M * N, workspace)
    return forward_cost, backward_cost


def linear_cost(M: int, N: int, K: int, itemsize: int, bias: bool = True) -> tuple[Cost, Cost]:
    """Return the costs of `linear_gelu` for factors of `itemsize` bytes.

    The forward has one matrix product and saves the pre-activation; the backward has two matrix products.
    """
    x = M * K * itemsize
    weight = N * K * itemsize
    y = M * N * itemsize
    forward_cost = Cost(x + weight + 4 * N * bias, 2 * y, 2 * M * N * K + 30 * M * N)
    # Both products read the gradient of the pre-activation.
    products = Cost(2 * y + weight + x, x + weight, 4 * M * N * K, workspace=y)
    return forward_cost, cost(M, N, itemsize, bias)[1] + products
