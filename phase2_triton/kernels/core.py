"""The parts that all kernels share: where they run, how they are registered and launched, tile sizes and costs.

Triton compiles kernels for a GPU. Where there is no GPU, Triton's interpreter (`TRITON_INTERPRET=1`, set by importing
`phase2_triton`) runs the same kernels as numpy code on CPU tensors, one program after another. Without Triton, `jit`
returns the kernel functions unchanged and `unavailable_reason` reports why they cannot run. The `reference` function
in each kernel file is plain torch and works everywhere.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
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
except ImportError:  # Triton has no package for this platform
    triton, tl = None, SimpleNamespace(constexpr=None)

CONFIG_FILE = Path(__file__).with_name("configs.json")
HALF_TYPES = (torch.float16, torch.bfloat16)
# The interpreter of Triton 3.6 uses arrays of one element as indices, which numpy 2.4 does not allow.
TRITON_IS_TOO_OLD = (
    triton is not None and TorchVersion(triton.__version__) < "3.7" and TorchVersion(numpy.__version__) >= "2.4"
)


class KernelError(ValueError):
    """An input that a kernel does not support. The message is one sentence that says what to pass instead."""


def jit(kernel: Callable[..., Any]) -> Any:
    """Apply `triton.jit` to a kernel function, or return it unchanged where Triton is not installed."""
    return kernel if triton is None else triton.jit(kernel)


def constexpr(value: Any) -> Any:
    """Wrap a constant so that kernels may read it as a global variable."""
    return value if triton is None else tl.constexpr(value)


LOG2E = constexpr(math.log2(math.e))  # exp(x) is exp2(x * LOG2E)


def hash_sources(pattern: str = "*.*") -> str:
    """Return a digest of the kernels' files. With the same Triton, equal files compile to the same code."""
    files = sorted(Path(__file__).parent.glob(pattern))
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


# torch.compile stores compiled graphs on disk. Its key contains the names of custom operators, but not their code.
torch.compiler.config.cache_key_tag += hash_sources()


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels of this process, on CPU tensors."""
    return IS_INTERPRETED


def speed_up_interpreter() -> None:
    """Leave out work of Triton 3.9's interpreter that has no effect, but takes a third of an interpreted step's time.

    The interpreter patches Triton's language at every launch and at every call of a function inside a kernel, and
    restores it after the launch. Patching it once for each function is enough, because this process compiles no kernel.
    For each sum and product of integers, it also computes whether they overflow, but reports it in debug mode only.
    """
    from triton.runtime import interpreter

    patch_language = functools.cache(interpreter._patch_lang)

    def patch_once(function: Any) -> Any:
        patch_language(function)
        return interpreter._LangPatchScope()  # a scope without changes: there is nothing to restore after the launch

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


@dataclass
class Recorder:
    """The launches recorded for an architecture. The GPU need not exist. See `record_launches`."""

    architecture: str
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


RECORDERS: list[Recorder] = []  # the innermost is last; a list, because torch.compile can trace accesses to a list


@contextlib.contextmanager
def record_launches(architecture: str) -> Iterator[Recorder]:
    """Record kernel launches instead of running them.

    Inside this context the kernels' functions accept meta tensors and select their tile sizes for `architecture`.
    """
    recorder = Recorder(architecture)
    RECORDERS.append(recorder)
    try:
        yield recorder
    finally:
        RECORDERS.remove(recorder)


def unavailable_reason(device_type: str) -> str | None:
    """Return why kernels cannot run on tensors of this device type, or None if they can."""
    if RECORDERS:
        return None
    if triton is None:
        return "Triton is not installed (its packages are for Linux only)"
    if is_interpreted():
        if type(tl.sum).__name__ != "InterpretedFunction":
            return "Triton was imported before phase2_triton: set TRITON_INTERPRET=1 before Python starts"
        if TRITON_IS_TOO_OLD:
            return "Triton 3.6 cannot interpret with numpy 2.4: install 'numpy<2.4', or a torch with a newer Triton"
        if device_type == "cpu":
            return None
        return f"TRITON_INTERPRET=1 is set, and the interpreter runs kernels on the CPU only, not on {device_type}"
    if device_type == "cuda":
        return None
    return f"compiled kernels run on cuda and not on {device_type}: set TRITON_INTERPRET=1 to run them on the CPU"


def result_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a kernel's result: autocast's type if autocast is on, else the type of x.

    The next matrix product would round the result to autocast's type anyway. fp64 stays fp64, as in torch's autocast.
    """
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64:  # autocast has no settings for meta tensors
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def allocate_per_row(x: Tensor) -> Tensor:
    """Allocate one number for each row of x, (M, N), in the type that kernels compute in: fp32, or fp64 for fp64."""
    return x.new_empty(x.size(0), dtype=torch.promote_types(x.dtype, torch.float32))


def flatten_rows(x: Tensor) -> Tensor:
    """Return x, (..., N), as a contiguous (M, N) tensor: a view where the layout allows it, else a copy."""
    return x.reshape(-1, x.size(-1)).contiguous()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)`.

    Do nothing if the tensors are fake or meta tensors: torch then only needs the shapes and types of the results.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if RECORDERS:
        RECORDERS[-1].launches.append((kernel, args, options))
    elif 0 in grid:  # no rows: there is nothing to write
        return
    elif not is_interpreted():
        with torch.cuda.device_of(tensors[0]):  # this may differ from the current device
            torch.library.wrap_triton(kernel)[grid](*args, **options)
    elif not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        kernel[grid](*args, **options)


def kernel_op(name: str, mutates: Iterable[str] = (), flops: Callable[..., int] | None = None) -> Callable[..., Any]:
    """Register a function that allocates its outputs and launches kernels as `torch.ops.phase2_triton.<name>`.

    Where kernels are compiled, the operator is a `triton_op`: torch.compile can trace its launches. Where they are
    interpreted, it is a `custom_op`, which torch.compile does not trace, because a triton_op fails there. torch.compile
    and fake tensors get the shapes and types of the results from the function itself, run without its launches.

    Args:
        name: unique name of the operator.
        mutates: names of the arguments that the operator writes to; such an operator has no autograd formula.
        flops: function of the shapes of the arguments and of `out_shape` that returns FLOPs, for `FlopCounterMode`.
    """

    def register(function: Callable[..., Any]) -> Any:
        qualified_name = f"phase2_triton::{name}"
        op: Any
        if is_interpreted() or triton is None:
            schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
            op = torch.library.custom_op(
                qualified_name,
                compute_bfloat16_in_fp32(function, set(mutates)),
                mutates_args=tuple(mutates),
                schema=schema,
            )
            op.register_fake(function)
        else:
            op = torch.library.triton_op(qualified_name, function, mutates_args=tuple(mutates))
        if flops is not None:
            register_flop_formula(getattr(torch.ops.phase2_triton, name))(flops)
        return op

    return register


def compute_bfloat16_in_fp32(function: Callable[..., Any], mutates: set[str]) -> Callable[..., Any]:
    """Wrap an operator's function so that the interpreter computes in fp32 where bfloat16 is given.

    The interpreter of Triton 3.9 computes bfloat16 wrongly, without an error. The wrapper replaces every bfloat16
    argument (a tensor, or the type to compute in) by fp32. It then rounds the results, and the arguments that the
    operator writes to, to the types that the function returns for meta tensors.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call_in_fp32(*args: Any) -> Any:
        is_bfloat16 = [arg is torch.bfloat16 or getattr(arg, "dtype", None) is torch.bfloat16 for arg in args]
        if not any(is_bfloat16):
            return function(*args)
        fp32_args = [
            arg if not narrow else arg.float() if isinstance(arg, Tensor) else torch.float32
            for arg, narrow in zip(args, is_bfloat16, strict=True)
        ]
        results = function(*fp32_args)
        for name, arg, fp32_arg, narrow in zip(names, args, fp32_args, is_bfloat16, strict=False):
            if narrow and name in mutates:
                arg.copy_(fp32_arg)
        meta_results = function(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
        if isinstance(results, tuple):
            return tuple(result.to(meta.dtype) for result, meta in zip(results, meta_results, strict=True))
        return None if results is None else results.to(meta_results.dtype)

    return call_in_fp32


@dataclass(frozen=True)
class Cost:
    """The minimum cost of one call: bytes read and written in device memory, FLOPs, and bytes of scratch memory."""

    read: int
    written: int
    flops: int
    workspace: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        workspace = max(self.workspace, other.workspace)
        return Cost(self.read + other.read, self.written + other.written, self.flops + other.flops, workspace)

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Return the minimum time by the roofline model: the slower of memory and arithmetic."""
        return max((self.read + self.written) / bytes_per_second, self.flops / flops_per_second)


def architecture_with_version(architecture: str) -> str:
    """Return the name of rows that are only for this version of Triton, such as "sm_90 with Triton 3.6"."""
    version = "none" if triton is None else ".".join(triton.__version__.split(".")[:2])
    return f"{architecture} with Triton {version}"


@functools.cache
def load_config_table() -> dict[str, dict[str, list[dict[str, int]]]]:
    """Load configs.json: kernel name -> architecture -> rows of tile sizes, sorted by `up_to`."""
    return json.loads(CONFIG_FILE.read_text())


def current_architecture() -> str:
    """Return the name of this process's device in `configs.json`: "interpreter", or for example "sm_90"."""
    if RECORDERS:
        return RECORDERS[-1].architecture
    if is_interpreted():
        return "interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def find_rows(kernel: str) -> list[dict[str, int]]:
    """Return the rows of a kernel in configs.json that apply to this process."""
    rows, architecture = load_config_table()[kernel], current_architecture()
    names = (architecture_with_version(architecture), architecture, "cuda")
    return next(rows[name] for name in names if name in rows)


def select_config(kernel: str, size: int) -> dict[str, int]:
    """Return the tile sizes and warps for a kernel: the first row of its table whose `up_to` is at least `size`.

    Rows for this architecture with this version of Triton come before those for all versions, because versions compile
    a kernel differently. Architectures that have not been tuned use the rows of `cuda`.

    Args:
        kernel: a key of configs.json.
        size: the size that the rows of this kernel are sorted by, such as the width of a row.

    Raises:
        KernelError: the table has no row for this size.
    """
    for row in find_rows(kernel):
        if size <= row["up_to"]:
            return {key: value for key, value in row.items() if key != "up_to"}
    raise KernelError(f"{kernel}: size {size} is larger than this kernel supports: use the reference function")


def next_power_of_2(size: int, minimum: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `minimum`. Triton's tiles need powers of two."""
    return max(minimum, 1 << max(size - 1, 0).bit_length())


@jit
def to_fp32(x):
    """Convert a loaded value to fp32, the type that kernels compute in. fp64 stays fp64."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


# A constant, because torch.compile of torch 2.11 cannot trace a question about the type of a kernel.
IS_INTERPRETED = type(to_fp32).__name__ == "InterpretedFunction"

if IS_INTERPRETED:
    speed_up_interpreter()
