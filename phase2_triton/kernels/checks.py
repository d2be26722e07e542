"""What kernels refuse, in one sentence each."""

import math
from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.core import HALVES, KernelError, interpreting, unavailable_reason

OPTIONAL = ("branch", "bias")  # arguments that may be None


def check_tensors(kernel: str, **tensors: Any) -> None:
    """Refuse what is no dense tensor of a type to compute with, on one device where Triton can run.

    Raises:
        KernelError: names the argument and what to give.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None or name not in OPTIONAL}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise KernelError(f"{kernel}: {name} is {what}: give a dense tensor")
    (first, leader), *_ = given.items()
    if reason := unavailable_reason(leader.device.type):
        raise KernelError(f"{kernel}: {first} is on {leader.device}, where it cannot run: {reason}")
    for name, tensor in given.items():
        if tensor.device != leader.device:
            raise KernelError(
                f"{kernel}: {name} is on {tensor.device} but {first} on {leader.device}: move one of them"
            )
        if tensor.dtype not in (torch.float32, torch.float64, *HALVES):
            raise KernelError(f"{kernel}: {name} is {tensor.dtype}: give float32, bfloat16, float16 or float64")


def check_number(kernel: str, name: str, value: float, least: float = -math.inf, below: float = math.inf) -> None:
    """Refuse what is no number, or not in the range from `least` up to, not with, `below`.

    Raises:
        KernelError: names the argument and the range.
    """
    if not isinstance(value, int | float | torch.SymInt | torch.SymFloat) or not least <= value < below:
        end = "" if below == math.inf else f" up to, not with, {below}"
        raise KernelError(
            f"{kernel}: {name}={value!r}: give a number" + (f" from {least}{end}" if least > -math.inf else "")
        )


def check_loss(
    kernel: str, x: Tensor, targets: Tensor, V: int | None, ignore_index: int, smoothing: float, z_loss: float,
    reduction: str,
) -> None:  # fmt: skip
    """What both losses refuse; `x` are the logits, or the hidden states of which V logits are made."""
    check_tensors(kernel, x=x)
    if x.dim() == 0 or x.size(-1) == 0:
        raise KernelError(f"{kernel}: x is {tuple(x.shape)}: give one with a last dimension")
    if (shape := getattr(targets, "shape", None)) != x.shape[:-1]:
        raise KernelError(f"{kernel}: targets are {shape and tuple(shape)}: give {tuple(x.shape[:-1])}, as x has")
    if targets.dtype != torch.int64 or targets.device != x.device:
        raise KernelError(f"{kernel}: targets are {targets.dtype} on {targets.device}: give int64 on {x.device}")
    if reduction not in ("mean", "sum"):
        raise KernelError(f"{kernel}: reduction={reduction!r} is unknown: give mean or sum")
    check_number(kernel, "label_smoothing", smoothing, 0, 1)
    check_number(kernel, "z_loss", z_loss, 0)
    check_number(kernel, "ignore_index", ignore_index)
    V = x.size(-1) if V is None else V
    if kernel == "cross_entropy" and not 0 < V <= x.size(-1):
        raise KernelError(f"{kernel}: vocab_size={V} of {x.size(-1)} columns: give 1 to that many")
    if interpreting() and not torch.compiler.is_compiling() and targets.numel() and not targets.is_meta:
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= V))
        if wrong.any():
            label = f"target {targets[wrong][0]} is not one of {V} classes"
            raise KernelError(f"{kernel}: {label}: give 0 to {V - 1}, or ignore_index={ignore_index}")
