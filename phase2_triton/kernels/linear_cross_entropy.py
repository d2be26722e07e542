"""The loss head: hidden states to loss and gradients without ever holding all logits.

    z = x @ W^T        loss = sum of cross_entropy(z)        dx = dz @ W        dW = dz^T @ x

For 65,536 tokens of GPT-2 the logits are 6.6 GB in bfloat16, and as much again for their gradient. They are not needed
all at once: a chunk of rows is multiplied out, its losses found and its gradient written over it (step 3 of
`cross_entropy.py`), both products of the backward are taken at once, and the chunk is forgotten. So the forward
does all the work, three matrix products in all, and the backward only scales by the gradient of the loss (Wijmans et
al. 2025, and Liger, Hsu et al. 2024, do likewise).

The chunk is as large as a limit of bytes allows: many small ones starve the matrix units and add to dW more often.
dW is summed over chunks in fp32: in bfloat16 its 8 bits would lose what the later chunks add.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy as given
from phase2_triton.kernels.checks import check_loss, check_number, check_tensors
from phase2_triton.kernels.core import Cost, KernelError, flat, kernel_op, result_dtype

CHUNK_BYTES = 512 * 2**20  # of logits at a time


def reference(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The same in plain torch, with all logits; see `linear_cross_entropy`."""
    return given.reference(F.linear(x, weight), targets, **options)


def chunk_rows(M: int, V: int, itemsize: int, chunk_bytes: int) -> int:
    """Rows of a chunk: all chunks alike, none above the limit, unless one row is."""
    chunks = max(1, -(-M * V * itemsize // chunk_bytes))
    return max(1, -(-M // chunks))


def flops(x: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Two for each multiplication and addition of the products that were asked for."""
    need_dx, need_dw = args[-3:-1]
    return 2 * x[0] * x[1] * weight[0] * (1 + need_dx + need_dw)


@kernel_op("linear_cross_entropy", flops=flops)
def forward_op(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, ignore_index: int, smoothing: float, z_loss: float,
    need_dx: bool, need_dw: bool, chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of the losses of contiguous (M, K) rows, and its gradients dx and dW, empty where not needed."""
    (M, K), V = x.shape, weight.size(0)
    accumulator = torch.promote_types(x.dtype, torch.float32)
    w = weight.to(dtype)
    dw = weight.new_zeros(V, K, dtype=accumulator) if need_dw else weight.new_empty(0, dtype=accumulator)
    rows = chunk_rows(M, V, dtype.itemsize, chunk_bytes)
    losses, dx = [], [x.new_empty(0, K)]
    for part, labels in zip(x.split(rows), targets.split(rows), strict=True):
        h = part.to(dtype)  # (rows, K)
        z = h @ w.t()  # (rows, V), and then its gradient
        gradient = need_dx or need_dw
        losses.append(given.run_forward(z, labels, V, ignore_index, smoothing, z_loss, gradient)[0])
        if need_dx:
            dx.append((z @ w).to(x.dtype))
        if need_dw:
            add_product(dw, z, h)
    return torch.cat(losses).sum(dtype=torch.float64).to(accumulator), torch.cat(dx), dw.to(weight.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a.T @ b` in the type of total: halves are multiplied by tensor cores that sum in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda and type(total) is not Tensor:  # a compiler traces; its addmm knows no such type
        total.add_(torch.mm(a.t(), b, out_dtype=total.dtype))
    elif a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))


@kernel_op("linear_cross_entropy_backward")
def backward_op(dloss: Tensor, dx: Tensor, dw: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients times that of the loss, multiplied in its type: a loss scale of 65,536 is beyond float16.

    `of` is what they are gradients of: there is no second derivative, and autograd is to say so.
    """
    return (dx.to(dloss.dtype) * dloss).to(dx.dtype), (dw * dloss).to(dw.dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, *_ = inputs
    ctx.need_dx, ctx.need_dw = inputs[-3:-1]
    ctx.save_for_backward(*output[1:], weight if ctx.need_dw else x)
    ctx.mark_non_differentiable(*output[1:])


def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = backward_op(dloss, *ctx.saved_tensors)
    return dx if ctx.need_dx else None, dw if ctx.need_dw else None, *[None] * 8


forward_op.register_autograd(backward, setup_context=setup_context)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """`cross_entropy(linear(x, weight), targets)`; under autocast the products are in autocast's type.

    Args:
        x: hidden states, (..., K).
        weight: the head's, (V, K).
        targets: int64, of the shape of x without its last dimension.
        ignore_index: targets of this value count neither in the loss nor in the mean.
        label_smoothing: what is taken from the target and spread over all classes, from 0 up to 1.
        z_loss: weight of the squared logsumexp.
        reduction: mean over the targets that count (0 where none does), or sum.
        chunk_bytes: of logits that are held at a time.

    Returns:
        A scalar, fp32. On a GPU, where looking would wait for it, a target that is no class makes it NaN.

    Raises:
        KernelError: a shape, type, device or option that does not fit; in the interpreter also a target.
    """
    name = "linear_cross_entropy"
    check_tensors(name, x=x, weight=weight)
    if x.dim() == 0 or weight.dim() != 2 or weight.size(1) != x.size(-1) or weight.size(0) == 0:
        raise KernelError(f"{name}: weight is {tuple(weight.shape)} and x {tuple(x.shape)}: give (V, K) and (..., K)")
    check_loss(name, x, targets, weight.size(0), ignore_index, label_smoothing, z_loss, reduction)
    check_number(name, "chunk_bytes", chunk_bytes, 1)
    labels = targets.reshape(-1).contiguous()
    grad = torch.is_grad_enabled()
    total, _, _ = forward_op(
        flat(x), weight.contiguous(), labels, result_dtype(x), ignore_index,
        label_smoothing, z_loss, grad and x.requires_grad, grad and weight.requires_grad, chunk_bytes,
    )  # fmt: skip
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


def cost(M: int, K: int, V: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Cost:
    """Loss and gradients of (M, K) hidden states: three products, and each logit written and read twice."""
    rows = chunk_rows(M, V, itemsize, chunk_bytes)
    chunks = -(-M // rows)
    logits, hidden, head = M * V * itemsize, M * K * itemsize, V * K * itemsize
    sums = 2 * chunks * V * K * 4  # dW is read and written for each chunk
    workspace = rows * (V + K) * itemsize + head
    read = 3 * logits + 2 * hidden + 2 * chunks * head + sums // 2
    return Cost(read, 2 * logits + hidden + sums // 2, 6 * M * K * V + 8 * M * V, workspace)
