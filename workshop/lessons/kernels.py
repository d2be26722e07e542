"""Helpers of notebooks 4 and 4b: count memory traffic, guard bands, the accuracy rule, checkers, and tables.

`workshop/lessons/roofline.py` draws the roofline.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

BAND = 16  # elements in a guard band


class MemoryTraffic(TorchDispatchMode):
    """The bytes that each torch operation reads and writes.

    Attributes:
        rows: the name of each operation, and the bytes that it reads and writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        bytes_read = sum(arg.nbytes for arg in args if isinstance(arg, Tensor))
        self.rows.append((str(operation), bytes_read, result.nbytes))
        return result

    def print_rows(self, unit: int) -> int:
        """Print the traffic of each operation in units of `unit` bytes, and return the total in bytes."""
        print("operation                reads (sizes of x)  writes (sizes of x)")
        for operation, bytes_read, bytes_written in self.rows:
            print(f"{operation:24} {bytes_read / unit:18.3f} {bytes_written / unit:20.3f}")
        return sum(bytes_read + bytes_written for _, bytes_read, bytes_written in self.rows)


def add_guard_bands(values: Tensor) -> tuple[Tensor, Tensor]:
    """Copy values between two bands of NaN; return the copy and the full buffer."""
    buffer = torch.full((values.numel() + 2 * BAND,), math.nan, dtype=values.dtype)
    return buffer[BAND:-BAND].view(values.shape).copy_(values), buffer


def bands_are_intact(buffer: Tensor) -> bool:
    """Return whether both guard bands of a buffer contain only NaN, which means that no program wrote into them."""
    return bool(buffer[:BAND].isnan().all() and buffer[-BAND:].isnan().all())


def max_error(result: Tensor, exact: Tensor) -> float:
    """Return the largest absolute error; NaN counts as infinity."""
    return (result.double() - exact).abs().nan_to_num(nan=math.inf).max().item()


def is_accurate(result: Tensor, eager: Tensor, exact: Tensor, factor: float = 2.0) -> bool:
    """Return whether the error is at most `factor` times the error of eager torch, plus one rounding error."""
    rounding = exact.abs().max().item() * torch.finfo(result.dtype).eps
    return max_error(result, exact) <= factor * max_error(eager, exact) + rounding


def run_torch_layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return torch's LayerNorm of each row."""
    return F.layer_norm(x, (x.size(-1),), weight)


def run_torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def bind_targets(function: Callable[[Tensor, Tensor], Tensor], V: int) -> Callable[[Tensor], Tensor]:
    """Return a function of the logits only: the loss function with four fixed targets below V."""
    targets = torch.arange(4) * (V - 1) // 3
    return lambda z: function(z, targets)


def print_gradients(target_p: Tensor, columns: Sequence[Tensor]) -> None:
    """Print the exact gradient at the target, and three rounded ones, for each probability."""
    print("gradient at the target:")
    print("     p             exact   p rounded to bfloat16   p rounded to fp16   fp16, 1 subtracted in fp32")
    for p, numbers in zip(target_p, zip(*columns, strict=True), strict=True):
        print(f"{p:.4f}" + "".join(f"{n:{width}.6f}" for n, width in zip(numbers, (18, 24, 20, 29), strict=True)))


def run_forward_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the result, and the gradients of its sum with fixed random weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [result.detach(), *torch.autograd.grad(result, leaves, weights.to(result.dtype))]


def compare_with_torch(name: str, kernel: Callable, eager: Callable, shapes: Sequence[tuple], factor: float) -> None:
    """Run a kernel's operator between guard bands, and print its errors and torch's for the result and gradients.

    Args:
        name: of the operator.
        kernel: its function.
        eager: torch's function.
        shapes: of its arguments.
        factor: how many times torch's error the gradients may have; the result may have twice its error.

    Raises:
        AssertionError: an error is too large.
    """
    inputs = [torch.randn(shape) for shape in shapes]
    results = run_forward_backward(kernel, [add_guard_bands(values)[0] for values in inputs])
    eager_results = run_forward_backward(eager, inputs)
    exact = run_forward_backward(eager, [values.double() for values in inputs])
    errors = [(max_error(r, x), max_error(e, x)) for r, e, x in zip(results, eager_results, exact, strict=True)]
    (kernel_error, torch_error), gradient_errors = errors[0], [max(pair) for pair in zip(*errors[1:], strict=True)]
    print(f"{name:17} {str(shapes[0]):17}{kernel_error:10.1e}{torch_error:10.1e}", end="")
    print("{:13.1e}{:10.1e}".format(*gradient_errors))
    factors = [2.0] + [factor] * len(shapes)
    assert all(is_accurate(*each) for each in zip(results, eager_results, exact, factors, strict=True))


def to_bits(values: Tensor) -> bytes:
    """Return the bytes of a tensor, to compare it bitwise."""
    return values.numpy().tobytes()


def make_fp64_leaf(*shape: int) -> Tensor:
    """Return random numbers in fp64 that require a gradient, for `gradcheck`."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def print_spills(norm_facts: Mapping[tuple[int, int], tuple[int, Mapping[str, Any]]]) -> None:
    """Print registers and spills for each width of a row, and check that only rows beyond 128 elements spill.

    Args:
        norm_facts: for each (width, warps), the size of the tile, and what was read from the machine code.
    """
    print("    N  warps  elements per thread  registers per thread  spill instructions  stack per thread (bytes)")
    for (N, warps), (tile, facts) in norm_facts.items():
        elements = tile // (32 * warps)
        print(f"{N:5} {warps:6} {elements:20} {facts['registers']:21} {facts['spill_instructions']:19}", end="")
        print(f" {facts['stack_bytes']:25}")
        assert (facts["spill_instructions"] > 0) == (facts["stack_bytes"] > 0) == (elements > 128)
        assert facts["registers"] <= 255


def print_attention_kernels(facts_of: Mapping[tuple[str, str], Mapping[str, Any]], find_dots: Callable) -> None:
    """Print tile, registers, spills and tensor-core instructions of each compiled variant of attention.

    Args:
        facts_of: for each (name, architecture), what was read from the machine code.
        find_dots: returns the tensor-core instructions in a text of PTX.
    """
    print("kernel                    target  tile      warps  registers  shared (KiB)  spill instructions")
    for (name, architecture), facts in facts_of.items():
        tile = f"{facts['constants']['BLOCK']} x {facts['constants']['STEP']}"
        print(f"{name:25} {architecture:7} {tile:10}{facts['num_warps']:5}{facts['registers']:11}", end="")
        print(f"{facts['shared_bytes'] // 1024:14}{facts['spill_instructions']:20}")
        instructions = find_dots(facts["texts"]["ptx"])
        shortened = instructions[0].rpartition(",")[0] or instructions[0] if instructions else ""
        print("    tensor cores:", f"{len(instructions)} x {shortened}" if instructions else "none")
        assert (facts["spill_instructions"] > 0) == ("half" in name)


def check_softmax(softmax: Callable[[Tensor], Tensor]) -> list[str]:
    """Return the problems of softmax(z), which should return the softmax of each row of (M, N) logits in their type."""
    problems, generator = [], torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.float16):
        for M, N, scale in ((1, 1, 1), (3, 6, 1), (2, 1000, 3), (2, 33, 100)):
            z = (scale * torch.randn(M, N, generator=generator)).to(dtype)
            y, exact = softmax(add_guard_bands(z)[0]), z.double().softmax(1)
            if y.dtype != dtype or y.shape != z.shape:
                problems.append(f"{dtype} {(M, N)}: the result is {y.dtype} {tuple(y.shape)}")
            elif not is_accurate(y, z.softmax(1), exact, factor=4):
                error = max_error(y, exact)
                problems.append(f"{dtype} {(M, N)}, logits up to {z.max():.0f}: the max error is {error:.1e}")
    return problems


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return LayerNorm without the mean: y = x r w, with r = 1 / sqrt(mean(x^2) + eps)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def check_rms_backward(backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[str]:
    """Return the problems of backward(dy, x, weight), which should return the gradients of rms_norm: (dx, dW)."""
    x, weight, dy = make_fp64_leaf(3, 7), make_fp64_leaf(7), torch.randn(3, 7, dtype=torch.float64)
    exact = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    errors = [max_error(g, e) for g, e in zip(backward(dy, x.detach(), weight.detach()), exact, strict=True)]
    names = zip(("dx", "dW"), errors, strict=True)
    return [f"the max error of {name} is {error:.1e}" for name, error in names if error > 1e-10]
