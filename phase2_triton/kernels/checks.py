"""Checks of the kernels' arguments. Each error is one sentence that says what to pass instead."""

import math
from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.core import HALF_TYPES, KernelError, is_interpreted, unavailable_reason

OPTIONAL = ("branch", "bias")  # arguments that may be None
MAX_HEAD_SIZE = 128  # channels per head


def check_tensors(kernel: str, **tensors: Any) -> None:
    """Check that all tensors are dense, of a supported type and on one device where Triton can run.

    Raises:
        KernelError: names the argument and what to pass.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None or name not in OPTIONAL}
    for name, tensor in present.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise KernelError(f"{kernel}: {name} is {kind}: pass a dense tensor")
    (first_name, first), *_ = present.items()
    if reason := unavailable_reason(first.device.type):
        raise KernelError(f"{kernel}: {first_name} is on {first.device}, where kernels cannot run: {reason}")
    for name, tensor in present.items():
        if tensor.device != first.device:
            raise KernelError(
                f"{kernel}: {name} is on {tensor.device} but {first_name} is on {first.device}: move one of them"
            )
        if tensor.dtype not in (torch.float32, torch.float64, *HALF_TYPES):
            raise KernelError(f"{kernel}: {name} is {tensor.dtype}: pass float32, bfloat16, float16 or float64")


def check_number(kernel: str, name: str, value: float, minimum: float = -math.inf) -> None:
    """Check that a value is a number of at least `minimum`.

    Raises:
        KernelError: names the argument and the range.
    """
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat) and minimum <= value < math.inf:
        return
    valid = "a number" if minimum == -math.inf else f"a number of at least {minimum}"
    raise KernelError(f"{kernel}: {name}={value!r} is not valid: pass {valid}")


def check_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None) -> None:
    """Check shapes, types and numbers of the arguments of attention.

    Raises:
        KernelError: names the argument and what to pass.
    """
    problem = None
    if not (q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.dim() == 4 and q.size(-1) > 0):
        actual = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (q, k, v))
        problem = f"q, k and v are {actual}: pass three tensors of one type and one shape (B, nh, T, hs)"
    elif q.size(-1) > MAX_HEAD_SIZE:
        problem = (
            f"heads have {q.size(-1)} channels, and the kernel supports up to {MAX_HEAD_SIZE}: use "
            "F.scaled_dot_product_attention or the reference"
        )
    elif not 0 <= dropout_p < 1:
        problem = f"dropout_p={dropout_p} is out of range: use a probability in [0, 1)"
    elif scale is not None and not 0 < scale < math.inf:
        problem = f"scale={scale} is out of range: use a positive number, or None for 1 / sqrt(hs)"
    if problem:
        raise KernelError(f"causal_attention: {problem}")


def check_loss(
    kernel: str, x: Tensor, targets: Tensor, V: int | None, ignore_index: int, reduction: str
) -> None:  # fmt: skip
    """Check the arguments that both losses share.

    Args:
        kernel: name of the loss, for the error message.
        x: the logits, or the hidden states from which V logits per row are computed.
        targets: the class of each row of x.
        V: number of classes; None: the width of x.
        ignore_index, reduction: the options of the loss.

    Raises:
        KernelError: names the argument and what to pass.
    """
    check_tensors(kernel, x=x)
    if x.dim() == 0 or x.size(-1) == 0:
        raise KernelError(f"{kernel}: x has shape {tuple(x.shape)}: pass a tensor with a last dimension")
    if (shape := getattr(targets, "shape", None)) != x.shape[:-1]:
        raise KernelError(
            f"{kernel}: targets have shape {shape and tuple(shape)}: pass {tuple(x.shape[:-1])}, as for x"
        )
    if targets.dtype != torch.int64 or targets.device != x.device:
        raise KernelError(f"{kernel}: targets are {targets.dtype} on {targets.device}: pass int64 on {x.device}")
    if reduction not in ("mean", "sum"):
        raise KernelError(f"{kernel}: reduction={reduction!r} is unknown: use mean or sum")
    check_number(kernel, "ignore_index", ignore_index)
    V = x.size(-1) if V is None else V
    if kernel == "cross_entropy" and not 0 < V <= x.size(-1):
        raise KernelError(f"{kernel}: vocab_size={V} is out of range: use 1 to {x.size(-1)}, the columns of the logits")
    # Reading the targets is free on a CPU. On a GPU it would wait for the device, so it is left out there.
    if is_interpreted() and not torch.compiler.is_compiling() and targets.numel() and not targets.is_meta:
        is_invalid = (targets != ignore_index) & ((targets < 0) | (targets >= V))
        if is_invalid.any():
            problem = f"target {targets[is_invalid][0]} is not one of {V} classes"
            raise KernelError(f"{kernel}: {problem}: use 0 to {V - 1}, or ignore_index={ignore_index}")
