"""Compile the shipped kernels for real GPUs, without a GPU, and report the resources that they use.

    python -m bench.kernels.resources                # print the report
    python -m bench.kernels.resources --json sm_90   # print it as JSON, and only for an H100
    python -m bench.kernels.resources --write        # write them into bench/results/kernel-resources.json

Each public function is called on meta tensors with the shapes of GPT-2, so its own code selects tiles, warps and types.
The launches are recorded and compiled ahead of time. From the machine code we read the registers per thread, the stack
bytes and instructions of spilled registers, the shared memory, and which tensor-core instructions there are.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.kernels.machine_code import inspect_machine_code
from bench.tables.records import RESULTS
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from phase2_triton.kernels import (
    adamw,
    attention,
    attention_atomic,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
from phase2_triton.kernels.core import hash_sources, record_launches

REPORT = RESULTS / "kernel-resources.json"  # one report for each version of Triton
ARCHITECTURES = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # maximum shared memory per program, in KiB
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "float64": "fp64"}


def meta_leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a meta tensor; floating-point types require a gradient."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def meta_labels(*shape: int) -> Tensor:
    """Return a meta tensor of int64."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def run_backward(result: Tensor | tuple[Tensor, ...]) -> None:
    """Run the backward pass of a function's results."""
    results = result if isinstance(result, tuple) else (result,)
    sum((r.float().sum() for r in results), start=torch.zeros((), device="meta")).backward()


def build_calls(tokens: int = 8192) -> dict[str, Callable[[], None]]:
    """Return a call of every public function, forward and backward, with the types that autocast would use.

    The widths are those of GPT-2 124M and 1.5B.
    """
    calls: dict[str, Callable[[], None]] = {"adamw": run_adamw_step}
    atomic = attention_atomic.causal_attention_atomic

    def add(name: str, function: Callable[..., Any], *args: Any) -> None:
        calls[name] = lambda: run_backward(function(*args))

    for C, heads in ((768, 12), (1600, 25)):
        x = meta_leaf(tokens, C)
        residual = meta_leaf(tokens, C, dtype=torch.float32)
        hidden = meta_leaf(tokens, 4 * C)
        weight, bias, hidden_bias = (meta_leaf(n, dtype=torch.float32) for n in (C, C, 4 * C))
        wte, wpe = meta_leaf(50304, C, dtype=torch.float32), meta_leaf(1024, C, dtype=torch.float32)
        idx = meta_labels(tokens // 1024, 1024)
        c_fc_weight = meta_leaf(4 * C, C)
        qkv = meta_leaf(tokens // 1024, 1024, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
        add(f"layer_norm {C}", layernorm.layer_norm, x, weight, bias)
        add(f"add_layer_norm {C}", layernorm.add_layer_norm, residual, x, weight)
        add(f"linear_cross_entropy {C}", linear_cross_entropy.linear_cross_entropy, x, wte, meta_labels(tokens))
        add(f"causal_attention {C}", attention.causal_attention, *qkv.unbind())
        add(f"causal_attention {C} with dropout", attention.causal_attention, *qkv.unbind(), 0.1)
        add(f"causal_attention_atomic {C}", atomic, *qkv.unbind())
        add(f"causal_attention_atomic {C} with dropout", atomic, *qkv.unbind(), 0.1)
        add(f"bias_gelu {4 * C}", gelu.bias_gelu, hidden, hidden_bias)
        add(f"linear_gelu {4 * C}", gelu.linear_gelu, x, c_fc_weight, hidden_bias)
        add(f"embedding {C}", embedding.embedding, idx, wte, wpe)
    qkv = meta_leaf(3, tokens // 1024, 16, 1024, 128)
    add("causal_attention of 128 channels", attention.causal_attention, *qkv.unbind())
    add("causal_attention in fp32", attention.causal_attention, *qkv[..., :64].float().unbind())
    add("causal_attention_atomic of 128 channels", atomic, *qkv.unbind())
    add("causal_attention_atomic in fp32", atomic, *qkv[..., :64].float().unbind())
    for V in (75, 50304):
        add(f"cross_entropy {V}", cross_entropy.cross_entropy, meta_leaf(tokens, V), meta_labels(tokens))
    return calls


def run_adamw_step() -> None:
    """Run one step of TritonAdamW on a matrix and a vector."""
    params = [meta_leaf(768, 768, dtype=torch.float32), meta_leaf(768, dtype=torch.float32)]
    for param in params:
        param.grad = torch.empty_like(param)
    adamw.TritonAdamW(params).step()


def build_signature(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Return the types, constants and known divisibility of a launch's arguments, as Triton's launcher would."""
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


def format_launch(kernel: Any, _: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Return the name of a kernel and of the options that are on."""
    return " ".join([kernel.__name__, *(name for name, value in options.items() if value is True)])


def compilation_key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for launches that compile to the same code."""
    return kernel.__module__, kernel.__name__, *build_signature(kernel, args, options), options


COMPILE_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compile_for(architecture: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile one launch for an architecture, as Triton's launcher would on such a GPU."""
    source = ASTSource(kernel, *build_signature(kernel, args, options))
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    compile_options = {name: options[name] for name in COMPILE_OPTIONS if name in options}
    return triton.compile(source, target=target, options=compile_options)


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Compile one launch for an architecture and return the resources that its machine code uses."""
    compiled = compile_for(architecture, kernel, args, options)
    compile_options = {name: options[name] for name in COMPILE_OPTIONS if name in options}
    constants = {name: value for name, value in options.items() if name not in COMPILE_OPTIONS}
    return {"constants": constants, **compile_options, **inspect_machine_code(compiled)}


def record_call(architecture: str, call: Callable[[], None]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the launches that a call would make on an architecture."""
    with record_launches(architecture) as recorder:
        call()
    return recorder.launches


def build_report(architectures: Sequence[str] = tuple(ARCHITECTURES)) -> dict[str, Any]:
    """Return the resources of each kernel that each call launches, for each architecture."""
    jobs: dict[tuple[str, str], tuple[Any, ...]] = {}
    for architecture in architectures:
        for name, call in build_calls().items():
            for launch in record_call(architecture, call):
                jobs[architecture, f"{name}: {format_launch(*launch)}"] = launch
    # Compile launches with the same key only once.
    compilations = {
        repr((architecture, compilation_key(*launch))): (*launch, architecture)
        for (architecture, _), launch in jobs.items()
    }
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda compilation: compile_launch(*compilation), compilations.values())
        resources = dict(zip(compilations, results, strict=True))
    kernels: dict[str, dict[str, Any]] = {architecture: {} for architecture in architectures}
    for (architecture, name), launch in jobs.items():
        kernels[architecture][name] = resources[repr((architecture, compilation_key(*launch)))]
    return {"sources": hash_sources(), "kernels": kernels}


def main(words: list[str]) -> None:
    if unknown := set(words) - {*ARCHITECTURES, "--json", "--write"}:
        raise ConfigError(f"{min(unknown)} is unknown: use --json, --write or one of {', '.join(ARCHITECTURES)}")
    requested = [name for name in ARCHITECTURES if name in words]
    if requested and "--write" in words:
        raise ConfigError(f"--write needs all architectures: remove {requested[0]}")
    report = build_report(requested or list(ARCHITECTURES))
    if "--write" in words:
        reports = json.loads(REPORT.read_text()) if REPORT.exists() else {}
        REPORT.write_text(json.dumps({**reports, triton.__version__: report}, indent=1) + "\n")
    if "--json" in words:
        print(json.dumps(report))
        return
    for architecture, kernels in report["kernels"].items():
        for name, resources in kernels.items():
            print(f"{architecture} {name:60} {resources}")


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
