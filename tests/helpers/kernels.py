"""What the tests of kernels share: guard bands, the tolerance rule, and tensors that are awkward to take."""

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phase2_triton.kernels.core import interpreting

BAND = 64  # elements on each side of a buffer
BESIDE_RESULTS = -7777  # a number: NaN that was made from NaN would not be seen in a band of NaN


def guarded(tensor: Tensor) -> Tensor:
    """The same values in a contiguous buffer between bands of NaN: whatever is read beyond its ends shows.

    Integers stand between bands of a negative number, far from any label.
    """
    around = float("nan") if tensor.is_floating_point() else -(10**9)
    return Bands(around).make(tensor.shape, tensor.dtype).copy_(tensor).requires_grad_(tensor.requires_grad)


class Bands:
    """Buffers between bands of one number; they begin as NaN, so an element that is left unwritten shows."""

    def __init__(self, around: float) -> None:
        self.around = around
        self.buffers: list[Tensor] = []
        self.plain_empty = torch.empty  # also where torch.empty is patched

    def make(self, shape: Any, dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        buffer = self.plain_empty(size + 2 * BAND, dtype=dtype).fill_(self.around)
        self.buffers.append(buffer)
        inner = buffer[BAND : BAND + size]
        return (inner.fill_(float("nan")) if dtype.is_floating_point else inner).view(shape)

    def intact(self) -> bool:
        bands = (band for buffer in self.buffers for band in (buffer[:BAND], buffer[-BAND:]))
        return all(bool((band == self.around).all()) for band in bands)


@contextlib.contextmanager
def guard_bands() -> Iterator[Bands]:
    """Put bands around every buffer that is allocated inside by empty, empty_like or new_empty.

    The buffers begin as NaN, so an element that a kernel leaves unwritten is seen. Fails at the end where a kernel
    wrote into a band.
    """
    bands = Bands(BESIDE_RESULTS)

    def empty(*shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return bands.make(sizes, dtype or torch.get_default_dtype())

    def empty_like(like: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return bands.make(like.shape, dtype or like.dtype)

    def new_empty(self: Tensor, *shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return empty(*shape, dtype=dtype or self.dtype)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(Tensor, "new_empty", new_empty),
    ):
        yield bands
    assert bands.intact(), "a kernel wrote outside a buffer"


def compile_whole(function: Callable[..., Any]) -> Any:
    """torch.compile of a function as one graph.

    Where kernels are interpreted, Inductor would only compile what is around them, with a C++ compiler that takes half
    a minute; a whole run that it compiles is in tests/promises and in tests/phase2/test_training.py.
    """
    return torch.compile(function, fullgraph=True, backend="aot_eager" if interpreting() else "inductor")


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN counts as infinite."""
    if a.numel() == 0:
        return 0.0
    return (a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max().item()


def assert_as_exact_as_torch(
    ours: Callable[..., Any],
    torchs: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    factor: float = 2.0,
    gradient_factor: float | None = None,
    allowed: float = 0.0,
) -> None:
    """Hold the tolerance rule for results and gradients: an error at most `factor` times that of torch.

    Errors are measured against `torchs` in fp64, relative to the largest value; one rounding of the type is always
    allowed. Ours runs between guard bands.

    Args:
        ours: takes the inputs, returns a tensor or a tuple of them.
        torchs: the same in plain torch, for the same type and for fp64.
        inputs: leaves; gradients are taken of those that require them.
        factor: for results.
        gradient_factor: for gradients; default: the same.
        allowed: an error relative to the largest value that is allowed besides, where the problem is ill-conditioned.
    """
    with guard_bands():
        mine = results_and_gradients(ours, tuple(guarded(x.detach()).requires_grad_(x.requires_grad) for x in inputs))
    eager = results_and_gradients(torchs, tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs))
    wide = (x.detach().double() if x.is_floating_point() else x for x in inputs)
    exact = results_and_gradients(
        torchs, tuple(w.requires_grad_(x.requires_grad) for w, x in zip(wide, inputs, strict=True))
    )
    results = len(mine) - sum(x.requires_grad for x in inputs)
    for i, (m, e, x) in enumerate(zip(mine, eager, exact, strict=True)):
        assert m.shape == e.shape and m.dtype == e.dtype, (i, m.shape, e.shape, m.dtype, e.dtype)
        assert_near(m, e, x, factor if i < results else gradient_factor or factor, f"output {i}", allowed)


def assert_near(
    mine: Tensor, eager: Tensor, exact: Tensor, factor: float = 2.0, what: str = "it", allowed: float = 0.0
) -> None:
    """The tolerance rule for one tensor: see `assert_as_exact_as_torch`."""
    scale = exact.abs().max().item() if exact.numel() else 0.0
    limit = factor * gap(eager, exact) + scale * (torch.finfo(mine.dtype).eps + allowed)
    off = gap(mine, exact)
    assert off <= limit, f"{what} is off by {off:.2e}, torch by {gap(eager, exact):.2e}, at a scale of {scale:.1e}"


def results_and_gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The function's results, then the gradients of their sum weighted by fixed random numbers."""
    results = function(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    wanted = [x for x in inputs if x.requires_grad]
    if not wanted:
        return results
    weights = [fixed_normal(r.shape).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, wanted, weights)
    return [*(r.detach() for r in results), *gradients]


def fixed_normal(shape: Any, seed: int = 7) -> Tensor:
    """The same numbers on every device, in fp64."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device())


def fixed_integers(most: int, shape: Any, seed: int = 5) -> Tensor:
    """The same integers below `most` on every device."""
    drawn = torch.randint(most, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def assert_registered(op: Any, args: tuple[Any, ...]) -> None:
    """Assert that torch's own checks of an operator pass: its schema, fake tensors, autograd and AOT tracing."""
    found = torch.library.opcheck(op, args)
    assert len(found) >= 4 and set(found.values()) == {"SUCCESS"}, found


def numbers_converted(kernel, args):
    """Names of arguments that are given as Python numbers and on which the kernel calls `.to`."""
    numbers = {name for name, value in zip(kernel.arg_names, args, strict=False) if isinstance(value, int | float)}
    source = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    converted = {
        node.func.value.id
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        if isinstance(node.func.value, ast.Name)
    }
    return numbers & converted
