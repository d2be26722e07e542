"""Compile the shipped kernels for real GPUs, without a GPU, and compare what they use with a table.

    python -m bench.kernels.resources            # compile for A100, H100 and B200, print the rows and what is wrong
    python -m bench.kernels.resources --write    # also write the rows into bench/kernels/resources.json

Each public function is called on meta tensors with the shapes of GPT-2, so its own code selects tiles, warps and types.
The launches are recorded and compiled ahead of time. A row of the table has the registers per thread, the bytes of
shared memory per program and the kind of tensor-core instructions for each architecture.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.kernels.machine_code import inspect_machine_code
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import report_errors
from phase2_triton.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
from phase2_triton.kernels.core import record_launches

TABLE = Path(__file__).with_suffix(".json")
ARCHITECTURES = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # maximum shared memory per program, in KiB
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "float64": "fp64"}
COMPILE_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
Rows = dict[str, dict[str, list[Any]]]  # call and kernel -> architecture -> registers, shared bytes, tensor cores


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

    def add(name: str, function: Callable[..., Any], *args: Any) -> None:
        calls[name] = lambda: run_backward(function(*args))

    for C, heads in ((768, 12), (1600, 25)):
        x = meta_leaf(tokens, C)
        residual = meta_leaf(tokens, C, dtype=torch.float32)
        hidden = meta_leaf(tokens, 4 * C)
        weight, bias, hidden_bias = (meta_leaf(n, dtype=torch.float32) for n in (C, C, 4 * C))
        wte, wpe = meta_leaf(50304, C, dtype=torch.float32), meta_leaf(1024, C, dtype=torch.float32)
        idx = meta_labels(tokens // 1024, 1024)
        qkv = meta_leaf(tokens // 1024, 1024, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
        add(f"layer_norm {C}", layernorm.layer_norm, x, weight, bias)
        add(f"add_layer_norm {C}", layernorm.add_layer_norm, residual, x, weight)
        add(f"linear_cross_entropy {C}", linear_cross_entropy.linear_cross_entropy, x, wte, meta_labels(tokens))
        add(f"causal_attention {C}", attention.causal_attention, *qkv.unbind())
        add(f"causal_attention {C} with dropout", attention.causal_attention, *qkv.unbind(), 0.1)
        add(f"bias_gelu {4 * C}", gelu.bias_gelu, hidden, hidden_bias)
        add(f"embedding {C}", embedding.embedding, idx, wte, wpe)
    qkv = meta_leaf(3, tokens // 1024, 16, 1024, 128)
    add("causal_attention of 128 channels", attention.causal_attention, *qkv.unbind())
    add("causal_attention in fp32", attention.causal_attention, *qkv[..., :64].float().unbind())
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


def compile_for(architecture: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile one launch for an architecture, as Triton's launcher would on such a GPU."""
    source = ASTSource(kernel, *build_signature(kernel, args, options))
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    compile_options = {name: options[name] for name in COMPILE_OPTIONS if name in options}
    return triton.compile(source, target=target, options=compile_options)


def record_call(architecture: str, call: Callable[[], None]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the launches that a call would make on an architecture."""
    with record_launches(architecture) as recorder:
        call()
    return recorder.launches


def list_launches(architecture: str) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the launches of all calls, by call and kernel. Of launches that compile to the same code, only the first.

    The name of a kernel includes its options that are on.
    """
    launches, keys = {}, set()
    for name, call in build_calls().items():
        for kernel, args, options in record_call(architecture, call):
            key = repr((kernel.__module__, kernel.__name__, build_signature(kernel, args, options), options))
            if key not in keys:
                keys.add(key)
                flags = [option for option, value in options.items() if value is True]
                launches[" ".join([f"{name}: {kernel.__name__}", *flags])] = (kernel, args, options)
    return launches


def find_problems(name: str, architecture: str, facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with a compiled kernel: spilled registers, too much shared memory, slow products."""
    problems = []
    if facts["stack_bytes"]:
        problems.append(f"spills {facts['stack_bytes']} bytes of registers")
    if facts["shared_bytes"] > ARCHITECTURES[architecture] * 1024:
        problems.append(f"needs {facts['shared_bytes']} bytes of shared memory")
    if facts["has_dot"] and not facts["tensor_cores"] and "fp32" not in name:  # exact fp32 products do not use them
        problems.append("has a tl.dot without tensor cores")
    if facts["serialized_wgmma"]:
        problems.append("has wgmma instructions that wait for each other")
    return [f"{name} on {architecture} {problem}" for problem in problems]


def compile_rows() -> tuple[Rows, list[str]]:
    """Compile every launch for all architectures. Return the rows of the table, and what is wrong."""
    jobs = [(name, arch, *launch) for arch in ARCHITECTURES for name, launch in list_launches(arch).items()]
    rows: Rows = {}
    problems = []
    with ThreadPoolExecutor(2) as pool:
        facts_of_jobs = pool.map(lambda job: inspect_machine_code(compile_for(*job[1:])), jobs)
        for (name, architecture, *_), facts in zip(jobs, facts_of_jobs, strict=True):
            cells = [facts["registers"], facts["shared_bytes"], *facts["tensor_cores"][:1]]
            rows.setdefault(name, {})[architecture] = cells
            problems += find_problems(name, architecture, facts)
    return rows, problems


def compare_with_table(rows: Rows) -> list[str]:
    """Return how the rows differ from the table. With another version of Triton, only the names are compared."""
    table = json.loads(TABLE.read_text())
    if triton.__version__ == table["triton"]:
        different = [name for name in rows if rows[name] != table["rows"].get(name)]
    else:
        different = [name for name in rows if name not in table["rows"]]
    missing = [name for name in table["rows"] if name not in rows]
    return [f"{name} is not as in {TABLE.name}" for name in different + missing]


def main(words: list[str]) -> int:
    """Print the rows and what is wrong, and return the exit code: 1 if something is wrong, else 0.

    Raises:
        ConfigError: a word is unknown.
    """
    if unknown := set(words) - {"--write"}:
        raise ConfigError(f"{min(unknown)} is unknown: use --write or no option")
    rows, problems = compile_rows()
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    print(*lines, sep="\n")
    if words:
        text = ",\n".join(lines)
        TABLE.write_text(f'{{"triton": {json.dumps(triton.__version__)}, "rows": {{\n{text}\n}}}}\n')
    problems += compare_with_table(rows)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
