"""Helpers for tests of kernels: guard bands, the tolerance rule, random tensors, and changed copies of kernels."""

import ast
import contextlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phase2_triton.kernels.core import is_interpreted

BAND = 64  # elements on each side of a buffer
RESULT_BAND = -7777  # not NaN: a NaN that a kernel writes into a band of NaN would not be detected


def guard(tensor: Tensor) -> Tensor:
    """Copy a tensor into a contiguous buffer between bands of NaN, so that an out-of-bounds read makes the result NaN.

    Around integers, the bands contain a negative number that is far from any label.
    """
    band_value = float("nan") if tensor.is_floating_point() else -(10**9)
    copy = GuardedBuffers(band_value).allocate(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


class GuardedBuffers:
    """Buffers between bands of one value. They are filled with NaN, so that an unwritten element is visible."""

    def __init__(self, band_value: float) -> None:
        self.band_value = band_value
        self.buffers: list[Tensor] = []
        self.original_empty = torch.empty  # `guard_bands` patches torch.empty

    def allocate(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        buffer = self.original_empty(size + 2 * BAND, dtype=dtype, device=device).fill_(self.band_value)
        self.buffers.append(buffer)
        inner = buffer[BAND : BAND + size]
        return (inner.fill_(float("nan")) if dtype.is_floating_point else inner).view(shape)

    def are_bands_intact(self) -> bool:
        buffers = [buffer for buffer in self.buffers if not buffer.is_meta]
        bands = (band for buffer in buffers for band in (buffer[:BAND], buffer[-BAND:]))
        return all(bool((band == self.band_value).all()) for band in bands)


@contextlib.contextmanager
def guard_bands() -> Iterator[GuardedBuffers]:
    """Put bands around every buffer that empty, empty_like or new_empty allocate inside this context.

    The buffers are filled with NaN, so that an element that a kernel does not write is visible.

    Raises:
        AssertionError: at the end of the context, if a kernel wrote into a band.
    """
    buffers = GuardedBuffers(RESULT_BAND)

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return buffers.allocate(sizes, dtype or torch.get_default_dtype(), device or torch.get_default_device())

    def empty_like(like: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return buffers.allocate(like.shape, dtype or like.dtype, like.device)

    def new_empty(self: Tensor, *shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return empty(*shape, dtype=dtype or self.dtype, device=self.device)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(Tensor, "new_empty", new_empty),
    ):
        yield buffers
    assert buffers.are_bands_intact(), "a kernel wrote outside of a buffer"


def compile_full_graph(function: Callable[..., Any]) -> Any:
    """Compile a function with torch.compile as one graph.

    If kernels are interpreted, the backend is aot_eager: Inductor would compile only the code around the kernels, and
    its C++ compiler takes half a minute. tests/promises and tests/phase2/test_training.py train with Inductor.
    """
    return torch.compile(function, fullgraph=True, backend="aot_eager" if is_interpreted() else "inductor")


def gap(a: Tensor, b: Tensor) -> float:
    """Return the max absolute difference. NaN counts as infinite."""
    if a.numel() == 0:
        return 0.0
    return (a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max().item()


def assert_as_exact_as_torch(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    factor: float = 2.0,
    gradient_factor: float | None = None,
    allowed: float = 0.0,
) -> None:
    """Assert that the error of every result and gradient is at most `factor` times the error of torch.

    The error is the max difference from `reference` in fp64. One rounding error of the data type, relative to the
    largest value, is always allowed. `function` runs between guard bands.

    Args:
        function: function of the inputs that returns a tensor or a tuple of tensors.
        reference: the same function in plain torch; runs in the data type of the inputs and in fp64.
        inputs: leaf tensors; gradients are computed for those that require them.
        factor: factor for results.
        gradient_factor: factor for gradients; default: `factor`.
        allowed: additional error, relative to the largest value, for ill-conditioned problems.
    """
    with guard_bands():
        guarded_inputs = tuple(guard(x.detach()).requires_grad_(x.requires_grad) for x in inputs)
        actual = compute_results_and_gradients(function, guarded_inputs)
    eager = compute_results_and_gradients(reference, tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs))
    fp64_inputs = (x.detach().double() if x.is_floating_point() else x for x in inputs)
    exact = compute_results_and_gradients(
        reference, tuple(y.requires_grad_(x.requires_grad) for y, x in zip(fp64_inputs, inputs, strict=True))
    )
    num_results = len(actual) - sum(x.requires_grad for x in inputs)
    for i, (a, e, x) in enumerate(zip(actual, eager, exact, strict=True)):
        assert a.shape == e.shape and a.dtype == e.dtype, (i, a.shape, e.shape, a.dtype, e.dtype)
        assert_near(a, e, x, factor if i < num_results else gradient_factor or factor, f"output {i}", allowed)


def assert_near(
    actual: Tensor, eager: Tensor, exact: Tensor, factor: float = 2.0, name: str = "the result", allowed: float = 0.0
) -> None:
    """Assert the tolerance rule of `assert_as_exact_as_torch` for one tensor."""
    scale = exact.abs().max().item() if exact.numel() else 0.0
    limit = factor * gap(eager, exact) + scale * (torch.finfo(actual.dtype).eps + allowed)
    error, torch_error = gap(actual, exact), gap(eager, exact)
    assert error <= limit, f"error of {name}: {error:.2e}, error of torch: {torch_error:.2e}, max value: {scale:.1e}"


def compute_results_and_gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the results of a function, then the gradients of their sum, weighted by fixed random numbers."""
    results = function(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    differentiable = [x for x in inputs if x.requires_grad]
    if not differentiable:
        return results
    weights = [draw_normal(r.shape).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, differentiable, weights)
    return [*(r.detach() for r in results), *gradients]


def draw_normal(shape: Any, seed: int = 7) -> Tensor:
    """Return normally distributed fp64 numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(torch.get_default_device())


def draw_integers(high: int, shape: Any, seed: int = 5) -> Tensor:
    """Return random integers from 0 to `high` - 1, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(high, shape, generator=generator, device="cpu").to(torch.get_default_device())


def assert_registered(op: Any, args: tuple[Any, ...]) -> None:
    """Assert that torch.library.opcheck passes: schema, fake tensors, autograd and AOT tracing of an operator."""
    results = torch.library.opcheck(op, args)
    assert len(results) >= 4 and set(results.values()) == {"SUCCESS"}, results


def find_converted_numbers(kernel, args):
    """Return the names of the arguments that are Python numbers and on which the kernel calls `.to`."""
    numbers = {name for name, value in zip(kernel.arg_names, args, strict=False) if isinstance(value, int | float)}
    source = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    converted = {
        node.func.value.id
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        if isinstance(node.func.value, ast.Name)
    }
    return numbers & converted


def import_variant(folder: Path, module: ModuleType, name: str, replacements: list[tuple[str, str]]) -> Any:
    """Copy a kernel's file, replace text in it, and import the copy as a separate module.

    Args:
        folder: directory for the copy.
        module: the module to copy.
        name: unique name of the copy, and prefix of its operators.
        replacements: pairs of a text in the file and its replacement.
    """
    source = Path(str(module.__file__)).read_text()
    for old, new in replacements:
        assert old in source, old
        source = source.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(source.replace('kernel_op("', f'kernel_op("{name}_'))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
