"""What the shipped kernels compile to for real GPUs, with no GPU at hand.

    python -m bench.kernels.resources                # the table
    python -m bench.kernels.resources --json sm_90   # the same for a program, and for an H100 alone
    python -m bench.kernels.resources --write        # into bench/results/kernel-resources.json

Each public function is called on meta tensors of GPT-2's shapes, so that its own code chooses tiles, warps and types;
the launches are recorded and compiled ahead of time. From the machine code: registers a thread, the stack that spilled
values live on, spill instructions, shared memory, and which tensor-core instructions are there.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # what is interpreted cannot be compiled

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.tables.records import RESULTS
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from phase2_triton.kernels import (
    adamw,
    attention,
    core,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
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


def calls(tokens: int = 8192) -> dict[str, Callable[[], None]]:
    """Every public function, forward and backward, at the widths of GPT-2 124M and 1.5B, in autocast's types."""
    found: dict[str, Callable[[], None]] = {"adamw": adamw_step}

    def add(name: str, function: Callable[..., Any], *args: Any) -> None:
        found[name] = lambda: there_and_back(function(*args))

    for C, heads in ((768, 12), (1600, 25)):
        x, stream, wide = leaf(tokens, C), leaf(tokens, C, dtype=torch.float32), leaf(tokens, 4 * C)
        gain, bias, wide_bias = (leaf(n, dtype=torch.float32) for n in (C, C, 4 * C))
        wte, wpe = leaf(50304, C, dtype=torch.float32), leaf(1024, C, dtype=torch.float32)
        idx, up = labels(tokens // 1024, 1024), leaf(4 * C, C)
        qkv = leaf(tokens // 1024, 1024, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
        add(f"layer_norm {C}", layernorm.layer_norm, x, gain, bias)
        add(f"add_layer_norm {C}", layernorm.add_layer_norm, stream, x, gain)
        add(f"linear_cross_entropy {C}", linear_cross_entropy.linear_cross_entropy, x, wte, labels(tokens))
        add(f"causal_attention {C}", attention.causal_attention, *qkv.unbind())
        add(f"causal_attention {C} with dropout", attention.causal_attention, *qkv.unbind(), 0.1)
        add(f"bias_gelu {4 * C}", gelu.bias_gelu, wide, wide_bias)
        add(f"linear_gelu {4 * C}", gelu.linear_gelu, x, up, wide_bias)
        add(f"embedding {C}", embedding.embedding, idx, wte, wpe)
    qkv = leaf(3, tokens // 1024, 16, 1024, 128)
    add("causal_attention of 128 channels", attention.causal_attention, *qkv.unbind())
    add("causal_attention in fp32", attention.causal_attention, *qkv[..., :64].float().unbind())
    for V in (75, 50304):
        add(f"cross_entropy {V}", cross_entropy.cross_entropy, leaf(tokens, V), labels(tokens))
    return found


def adamw_step() -> None:
    params = [leaf(768, 768, dtype=torch.float32), leaf(768, dtype=torch.float32)]
    for param in params:
        param.grad = torch.empty_like(param)
    adamw.TritonAdamW(params).step()


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


def label(kernel: Any, _: tuple[Any, ...], options: dict[str, Any]) -> str:
    """A kernel by its name and by what is switched on in it."""
    return " ".join([kernel.__name__, *(name for name, value in options.items() if value is True)])


def kernel_key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What two launches have in common that one compilation will do for."""
    return kernel.__module__, kernel.__name__, *signature(kernel, args, options), options


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Compile one launch and read what its machine code takes."""
    types, constants, attributes = signature(kernel, args, options)
    chosen: dict[str, Any] = {
        key: options[key] for key in ("num_warps", "num_stages", "enable_fp_fusion") if key in options
    }
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    source = ASTSource(kernel, types, constants, attributes)
    built = triton.compile(source, target=target, options=chosen)
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
        "has_dot": "tt.dot" in built.asm["ttir"],
        "tensor_cores": [name for name in TENSOR_CORES if name in built.asm["ptx"]],
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]+\*/", assembly, flags=re.MULTILINE)),
    }


def output(*words: str | Path) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


def number(name: str, usage: str) -> int:
    return max(int(found) for found in re.findall(rf"\b{name}:(\d+)", usage))


def recorded(architecture: str, call: Callable[[], None]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of a call, as it would make them on that architecture."""
    with recording(architecture) as recorder:
        call()
    return recorder.launches


def sources() -> str:
    """A digest of all files that the kernels are made from: with the same Triton they compile to the same code."""
    files = sorted(Path(core.__file__).parent.glob("*.*"))
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def report(architectures: Sequence[str] = tuple(ARCHITECTURES)) -> dict[str, Any]:
    """For each architecture, and each kernel that each call launches: what it compiles to."""
    jobs: dict[tuple[str, str], tuple[Any, ...]] = {}
    for architecture in architectures:
        for name, call in calls().items():
            for launched in recorded(architecture, call):
                jobs[architecture, f"{name}: {label(*launched)}"] = launched
    distinct = {repr((where, kernel_key(*job))): (*job, where) for (where, _), job in jobs.items()}
    with ThreadPoolExecutor(2) as pool:
        facts = dict(zip(distinct, pool.map(lambda job: compiled(*job), distinct.values()), strict=True))
    kernels: dict[str, dict[str, Any]] = {architecture: {} for architecture in architectures}
    for (where, name), job in jobs.items():
        kernels[where][name] = facts[repr((where, kernel_key(*job)))]
    return {"triton": triton.__version__, "sources": sources(), "kernels": kernels}


def main(words: list[str]) -> None:
    if unknown := set(words) - {*ARCHITECTURES, "--json", "--write"}:
        raise ConfigError(f"{min(unknown)} is unknown: give --json, --write or one of {', '.join(ARCHITECTURES)}")
    asked = [name for name in ARCHITECTURES if name in words and "--write" not in words]
    result = report(asked or list(ARCHITECTURES))
    if "--json" in words:
        print(json.dumps(result))
        return
    for architecture, kernels in result["kernels"].items():
        for name, facts in kernels.items():
            print(f"{architecture} {name:60} {facts}")
    if "--write" in words:
        (RESULTS / "kernel-resources.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
