"""What every kernel shares: where it runs, how it is registered and launched, its configuration, its cost.

Triton compiles for a GPU. Where there is none, `TRITON_INTERPRET=1` runs the same kernels as numpy on CPU tensors, one
program after another; importing `phase2_triton` sets it there. Without Triton, `jit` leaves the kernels uncompiled and
`unavailable_reason` says so; the references in each file work anywhere.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import register_flop_formula

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for this platform
    triton, tl = None, SimpleNamespace(constexpr=None)

TABLE = Path(__file__).with_name("configs.json")
HALVES = (torch.float16, torch.bfloat16)
# Triton 3.6 makes indices of one-element arrays, as numpy 2.4 no longer allows.
TOO_OLD = triton is not None and TorchVersion(triton.__version__) < "3.7" and TorchVersion(numpy.__version__) >= "2.4"


class KernelError(ValueError):
    """Tensors that a kernel cannot take; one sentence that says what to give."""


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, where there is Triton."""
    return kernel if triton is None else triton.jit(kernel)


def constexpr(value: Any) -> Any:
    """A constant that kernels may read as a global."""
    return value if triton is None else tl.constexpr(value)


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels of this process, on CPU tensors."""
    return triton is not None and type(to_fp32).__name__ == "InterpretedFunction"


def patch_once() -> None:
    """Adapt Triton's language to the interpreter once a launch.

    Triton 3.9 does it again at every call of a function inside a kernel, where it changes nothing any more: a quarter
    of the time that an interpreted step takes.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_if_needed(function: Any) -> Any:
        patched = not tl.core.is_builtin(tl.load)  # by the launch that runs now
        return None if patched and function.__globals__.get("tl") is tl else patch(function)

    interpreter._patch_lang = patch_if_needed


@dataclass
class Recorder:
    """Launches for an architecture that need not be there: recorded, not run. See `recording`."""

    architecture: str
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


RECORDERS: list[Recorder] = []  # the innermost last; a list, since torch.compile can look into one


@contextlib.contextmanager
def recording(architecture: str) -> Iterator[Recorder]:
    """Within it, functions take meta tensors, choose their configurations for `architecture` and launch nothing."""
    recorder = Recorder(architecture)
    RECORDERS.append(recorder)
    try:
        yield recorder
    finally:
        RECORDERS.remove(recorder)


def unavailable_reason(device_type: str) -> str | None:
    """Why kernels cannot run on tensors of this device, or None where they can."""
    if RECORDERS:
        return None
    if triton is None:
        return "Triton is not installed, which there is for Linux only"
    if interpreting():
        if type(tl.sum).__name__ != "InterpretedFunction":
            return "Triton was imported before phase2_triton: set TRITON_INTERPRET=1 before Python starts"
        if TOO_OLD:
            return "Triton 3.6 cannot interpret with numpy 2.4: install 'numpy<2.4', or a torch with a newer Triton"
        return (
            None if device_type == "cpu" else f"TRITON_INTERPRET=1 is set, which is for the CPU and not {device_type}"
        )
    if device_type == "cuda":
        return None
    return f"compiled kernels run on cuda and not on {device_type}: TRITON_INTERPRET=1 would interpret them on the CPU"


def result_dtype(x: Tensor) -> torch.dtype:
    """Autocast's type inside its context, where the next matrix product would round to it anyway; else that of x.

    As torch's autocast does, it leaves fp64 alone.
    """
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64:  # the first it does not know
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rows_of(x: Tensor) -> Tensor:
    """A number for each row of (M, N), in the type that kernels compute in: fp32, or fp64 for fp64."""
    return x.new_empty(x.size(0), dtype=torch.promote_types(x.dtype, torch.float32))


def flat(x: Tensor) -> Tensor:
    """(..., N) as a contiguous (M, N): a view where the layout allows, else a copy."""
    return x.reshape(-1, x.size(-1)).contiguous()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid]`, or nothing where tensors are fake: then only shapes and types are asked for."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if RECORDERS:
        RECORDERS[-1].launches.append((kernel, args, options))
    elif 0 in grid:  # no rows: there is nothing to write
        return
    elif not interpreting():
        with torch.cuda.device_of(tensors[0]):  # which need not be the current one
            torch.library.wrap_triton(kernel)[grid](*args, **options)
    elif not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        kernel[grid](*args, **options)


def kernel_op(name: str, mutates: Iterable[str] = (), flops: Callable[..., int] | None = None) -> Callable[..., Any]:
    """Register a function that allocates its outputs and launches kernels as `torch.ops.phase2_triton.<name>`.

    Compiled, it is a `triton_op`, into which torch.compile sees. Interpreted, it is a `custom_op`, opaque: triton_op
    fails there. Its own body, with launches left out, tells shapes and types to torch.compile and fake tensors.

    Args:
        name: unique.
        mutates: arguments that are written to; such an op has no autograd formula.
        flops: from the shapes of the arguments and `out_shape`, for `FlopCounterMode`.
    """

    def register(function: Callable[..., Any]) -> Any:
        full = f"phase2_triton::{name}"
        op: Any
        if interpreting() or triton is None:
            schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
            op = torch.library.custom_op(
                full, widened(function, set(mutates)), mutates_args=tuple(mutates), schema=schema
            )
            op.register_fake(function)
        else:
            op = torch.library.triton_op(full, function, mutates_args=tuple(mutates))
        if flops is not None:
            register_flop_formula(getattr(torch.ops.phase2_triton, name))(flops)
        return op

    return register


def widened(function: Callable[..., Any], mutates: set[str]) -> Callable[..., Any]:
    """Interpret bfloat16 in fp32: the interpreter's own bfloat16 is silently wrong (Triton 3.9).

    Where bfloat16 is given, as a tensor or as the type to compute in, the function gets fp32 in its place. Results, and
    arguments that are written to, are rounded to the types that it gives on meta tensors.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wide_function(*args: Any) -> Any:
        narrow = [arg is torch.bfloat16 or getattr(arg, "dtype", None) is torch.bfloat16 for arg in args]
        if not any(narrow):
            return function(*args)
        wider = [
            arg if not is_narrow else arg.float() if isinstance(arg, Tensor) else torch.float32
            for arg, is_narrow in zip(args, narrow, strict=True)
        ]
        results = function(*wider)
        for name, arg, value, is_narrow in zip(names, args, wider, narrow, strict=False):
            if is_narrow and name in mutates:
                arg.copy_(value)
        types = function(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
        if isinstance(results, tuple):
            return tuple(result.to(like.dtype) for result, like in zip(results, types, strict=True))
        return None if results is None else results.to(types.dtype)

    return wide_function


@dataclass(frozen=True)
class Cost:
    """What one call needs at least: bytes read and written in device memory, FLOPs, and bytes of scratch memory."""

    read: int
    written: int
    flops: int
    workspace: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        workspace = max(self.workspace, other.workspace)
        return Cost(self.read + other.read, self.written + other.written, self.flops + other.flops, workspace)

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The roofline: no implementation is faster than the slower of memory and arithmetic."""
        return max((self.read + self.written) / bytes_per_second, self.flops / flops_per_second)


@functools.cache
def table() -> dict[str, dict[str, list[dict[str, int]]]]:
    return json.loads(TABLE.read_text())


def architecture() -> str:
    """The name under which `configs.json` lists this process's device: interpreter, or sm_90 and its like."""
    if RECORDERS:
        return RECORDERS[-1].architecture
    if interpreting():
        return "interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def config(kernel: str, size: int) -> dict[str, int]:
    """The tile sizes and warps for a kernel: the first row of its table whose `up_to` is at least `size`.

    An architecture that was not tuned takes the rows of `cuda`.

    Args:
        kernel: a key of configs.json.
        size: the width that its rows are sorted by.

    Raises:
        KernelError: no row is that wide.
    """
    rows = table()[kernel]
    for row in rows.get(architecture(), rows["cuda"]):
        if size <= row["up_to"]:
            return {key: value for key, value in row.items() if key != "up_to"}
    raise KernelError(f"{kernel}: a width of {size} is more than its kernels were made for: use the reference")


def tile(size: int, least: int = 1) -> int:
    """The power of two from `size` upwards: what Triton's ranges are made of."""
    return max(least, 1 << max(size - 1, 0).bit_length())


@jit
def to_fp32(x):
    """Compute in fp32 whatever was loaded, but fp64 in fp64."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


if interpreting():
    patch_once()
