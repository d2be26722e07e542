"""What the shipped kernels compile to for real GPUs, with no GPU at hand.

    TRITON_INTERPRET=0 python -m bench.kernel_resources            # the table
    TRITON_INTERPRET=0 python -m bench.kernel_resources --write    # also bench/results/kernel-resources.json

Each public function is called on meta tensors of GPT-2's shapes, so that its own code chooses tiles, warps and types;
the launches are recorded and compiled ahead of time. From the machine code: registers a thread, the stack that spilled
values live on, spill instructions, shared memory, and which tensor-core instructions are there.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.results import RESULTS
from phase2_triton.kernels import cross_entropy, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import recording

ARCHITECTURES = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KiB of shared memory that a program may take
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "float64": "fp64"}
TENSOR_CORES = ("mma.sync", "wgmma", "tcgen05")
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def labels(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def there_and_back(result: Tensor | tuple[Tensor, ...]) -> None:
    results = result if isinstance(result, tuple) else (result,)
    sum((r.float().sum() for r in results), start=torch.zeros((), device="meta")).backward()


def calls() -> dict[str, Callable[[], Any]]:
    """Every public function at the widths of GPT-2 124M and 1.5B, in bfloat16 as autocast gives it."""
    found: dict[str, Callable[[], Any]] = {}
    for C, heads in ((768, 12), (1600, 25)):
        w, b = leaf(C, dtype=torch.float32), leaf(C, dtype=torch.float32)
        x, stream = leaf(8192, C), leaf(8192, C, dtype=torch.float32)
        head = leaf(50304, C, dtype=torch.float32)
        found[f"layer_norm {C}"] = lambda x=x, w=w, b=b: layernorm.layer_norm(x, w, b)
        found[f"add_layer_norm {C}"] = lambda s=stream, x=x, w=w: layernorm.add_layer_norm(s, x, w)
        found[f"linear_cross_entropy {C}"] = lambda x=x, h=head: linear_cross_entropy.linear_cross_entropy(
            x, h, labels(8192)
        )
    for V in (75, 50304):
        found[f"cross_entropy {V}"] = lambda V=V: cross_entropy.cross_entropy(leaf(8192, V), labels(8192))
    return found


def signature(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Types, constants and known divisibility of a launch's arguments, as Triton's own launcher finds them."""
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        value = args[i] if i < len(args) else options[name]
        if isinstance(value, Tensor):
            types[name] = "*" + TYPES[str(value.dtype).removeprefix("torch.")]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif value is None or i >= len(args) or (isinstance(value, int) and value == 1):
            types[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Compile one launch and read what its machine code takes."""
    types, constants, attributes = signature(kernel, args, options)
    chosen = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    source = ASTSource(kernel, types, constants, attributes)
    built = triton.compile(source, target=target, options={**chosen, "enable_fp_fusion": True})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = output(BINARIES / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = output(BINARIES / "nvdisasm", "-c", file.name)
    return {
        "tiles": {key: value for key, value in options.items() if isinstance(value, int) and key not in chosen},
        **chosen,
        "registers": number("REG", usage),
        "stack_bytes": number("STACK", usage),
        "spill_instructions": len(re.findall(r"\b(?:STL|LDL)\b", assembly)),
        "shared_bytes": built.metadata.shared,
        "tensor_cores": [name for name in TENSOR_CORES if name in built.asm["ptx"]],
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]+\*/", assembly, flags=re.MULTILINE)),
    }


def output(*words: str | Path) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


def number(name: str, usage: str) -> int:
    return max(int(found) for found in re.findall(rf"\b{name}:(\d+)", usage))


def launches(architecture: str) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of all calls: once each, by a name made of call and kernel."""
    seen = set()
    for call, function in calls().items():
        with recording(architecture) as recorder:
            there_and_back(function())
        for kernel, args, options in recorder.launches:
            name = f"{call}: {kernel.__name__}"
            if name not in seen:
                seen.add(name)
                yield name, kernel, args, options


def report() -> dict[str, dict[str, Any]]:
    """For each architecture and launch: what it compiles to."""
    work = [(architecture, *launch) for architecture in ARCHITECTURES for launch in launches(architecture)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: compiled(*job[2:], job[0]), work))
    result: dict[str, dict[str, Any]] = {architecture: {} for architecture in ARCHITECTURES}
    for (architecture, name, *_), facts in zip(work, found, strict=True):
        result[architecture][name] = facts
    return result


def main(write: bool) -> None:
    result = report()
    for architecture, kernels in result.items():
        for name, facts in kernels.items():
            print(f"{architecture} {name:48} {facts}")
    if write:
        (RESULTS / "kernel-resources.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main("--write" in sys.argv)
