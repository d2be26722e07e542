"""The linear head and the cross-entropy together: loss and gradients from hidden states, without storing all logits.

    z = x @ W^T        loss = sum of cross_entropy(z)        dx = dz @ W        dW = dz^T @ x

For 65,536 tokens of GPT-2 the logits take 6.6 GB in bfloat16, and their gradient as much again. They are not needed all
at once. For each chunk of rows the forward does all of the work:

1. It computes the logits of the chunk, z = x @ W^T.
2. It computes their losses and writes the gradient dz over the logits (step 3 of `cross_entropy.py`).
3. It computes the chunk's dx and adds to dW. The logits of the chunk are then no longer needed.

So the forward computes all three matrix products. The backward only multiplies dx and dW by the gradient of the loss
(Wijmans et al. 2025 and Liger, Hsu et al. 2024, do the same).

A chunk is as large as a limit in bytes allows. Many small chunks would use the tensor cores poorly and read and write
dW more often. dW is summed over chunks in fp32: the 8 bits of bfloat16 would lose what the later chunks add.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy
from phase2_triton.kernels.checks import check_loss, check_number, check_tensors
from phase2_triton.kernels.core import Cost, KernelError, flatten_rows, kernel_op, result_dtype

CHUNK_BYTES = 512 * 2**20  # of logits at a time


def reference(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return the same loss in plain torch, with all logits. For the arguments see `linear_cross_entropy`."""
    return cross_entropy.reference(F.linear(x, weight), targets, **options)


def chunk_rows(M: int, V: int, itemsize: int, chunk_bytes: int) -> int:
    """Return the number of rows per chunk.

    Chunks have equal sizes, except that the last may be smaller. A chunk exceeds `chunk_bytes` only if a single row
    does.
    """
    chunks = max(1, -(-M * V * itemsize // chunk_bytes))
    return max(1, -(-M // chunks))


def flops(x: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Return the FLOPs of the matrix products that `forward_op` computes, from the shapes of its arguments."""
    need_dx, need_dw = args[-3:-1]
    return 2 * x[0] * x[1] * weight[0] * (1 + need_dx + need_dw)


@kernel_op("linear_cross_entropy", flops=flops)
def forward_op(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, ignore_index: int,
    need_dx: bool, need_dw: bool, chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of the losses of contiguous x, (M, K), and its gradients dx and dW (empty where not needed)."""
    (M, K), V = x.shape, weight.size(0)
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    w = weight.to(dtype)  # (V, K)
    dw = weight.new_zeros(V, K, dtype=sum_dtype) if need_dw else weight.new_empty(0, dtype=sum_dtype)
    rows = chunk_rows(M, V, dtype.itemsize, chunk_bytes)
    losses, dx = [], [x.new_empty(0, K)]
    for x_chunk, labels in zip(x.split(rows), targets.split(rows), strict=True):
        h = x_chunk.to(dtype)  # (rows, K)
        z = h @ w.t()  # (rows, V): the logits; run_forward writes their gradient over them
        gradient = need_dx or need_dw
        chunk_losses, *_ = cross_entropy.run_forward(z, labels, V, ignore_index, gradient)
        losses.append(chunk_losses)
        if need_dx:
            dx.append((z @ w).to(x.dtype))
        if need_dw:
            add_product(dw, z, h)
    return torch.cat(losses).sum(), torch.cat(dx), dw.to(weight.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total += a.T @ b` in the type of total. For half types the tensor cores sum in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda and type(total) is not Tensor:  # torch.compile traces this, and cannot compile the addmm below
        total.add_(torch.mm(a.t(), b, out_dtype=total.dtype))
    elif a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))


@kernel_op("linear_cross_entropy_backward")
def backward_op(dloss: Tensor, dx: Tensor, dw: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx and dw multiplied by the gradient of the loss, dloss.

    The product is computed in the type of dloss, because a loss scale of 65,536 is beyond float16. `source` is the
    tensor that dx or dw is a gradient of. It connects this operator to the autograd graph, so that a second derivative
    raises an error.
    """
    return (dx.to(dloss.dtype) * dloss).to(dx.dtype), (dw * dloss).to(dw.dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, *_ = inputs
    ctx.need_dx, ctx.need_dw = inputs[-3:-1]
    ctx.save_for_backward(*output[1:], weight if ctx.need_dw else x)
    ctx.mark_non_differentiable(*output[1:])


def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = backward_op(dloss, *ctx.saved_tensors)
    return dx if ctx.need_dx else None, dw if ctx.need_dw else None, *[None] * 6


forward_op.register_autograd(backward, setup_context=setup_context)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -1,
    reduction: str = "mean",
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return `cross_entropy(linear(x, weight), targets)`. Under autocast the matrix products use autocast's type.

    Args:
        x: hidden states, (..., K).
        weight: the weight of the linear head, (V, K).
        targets: int64, the shape of x without the last dimension.
        ignore_index: targets of this value count neither in the loss nor in the mean.
        reduction: mean over the targets that count (0 if no target counts), or sum.
        chunk_bytes: largest size of the logits of one chunk.

    Returns:
        A scalar, fp32. On a GPU a target outside of [0, V) makes it NaN: checking the targets would wait for the GPU.

    Raises:
        KernelError: a shape, type, device or option is not supported; in the interpreter also an invalid target.
    """
    name = "linear_cross_entropy"
    check_tensors(name, x=x, weight=weight)
    if x.dim() == 0 or weight.dim() != 2 or weight.size(1) != x.size(-1) or weight.size(0) == 0:
        raise KernelError(
            f"{name}: weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}: pass (V, K) and (..., K)"
        )
    check_loss(name, x, targets, weight.size(0), ignore_index, reduction)
    check_number(name, "chunk_bytes", chunk_bytes, 1)
    labels = targets.reshape(-1).contiguous()
    has_grad = torch.is_grad_enabled()
    total, _, _ = forward_op(
        flatten_rows(x), weight.contiguous(), labels, result_dtype(x), ignore_index,
        has_grad and x.requires_grad, has_grad and weight.requires_grad, chunk_bytes,
    )  # fmt: skip
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


def cost(M: int, K: int, V: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Cost:
    """Return the cost of loss and gradients for x, (M, K), and weight, (V, K).

    There are three matrix products. Each logit is written twice (logit, gradient) and read three times (by the kernel
    and for dx and dW).
    """
    rows = chunk_rows(M, V, itemsize, chunk_bytes)
    chunks = -(-M // rows)
    logits, hidden, head = M * V * itemsize, M * K * itemsize, V * K * itemsize
    dw_bytes = chunks * V * K * 4  # every chunk reads and writes all of dW, in fp32
    workspace = rows * (V + K) * itemsize + head
    read = 3 * logits + 2 * hidden + 2 * chunks * head + dw_bytes
    return Cost(read, 2 * logits + hidden + dw_bytes, 6 * M * K * V + 8 * M * V, workspace)
