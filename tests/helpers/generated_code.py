"""Generate the code that torch.compile would run on an H100, on a machine without a GPU, and compile its kernels.

    TRITON_INTERPRET=0 python -m tests.helpers.generated_code all gpt2    # the values of --kernels and of --model

A model is traced with fake tensors on the CPU. Just before Inductor generates code, its graphs are moved to a GPU,
whose properties are made up. Inductor then chooses and writes kernels for this GPU. Triton and ptxas compile each of
them.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled

import torch
import torch._functorch.config
import torch._inductor.config
import triton
import triton.language as tl
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget

from bench.kernels.machine_code import inspect_machine_code
from nanoGPT.model import make_shape
from phase2_triton.apply import apply_kernels

H100 = {"type": "cuda", "name": "H100", "gcnArchName": "", "major": 9, "minor": 0, "multi_processor_count": 132}
H100 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
H100 |= {"shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 227 << 10, "warp_size": 32}
H100 |= {"L2_cache_size": 50 << 20, "total_memory": 80 << 30}
ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: SimpleNamespace(**H100),
    "get_device_capability": lambda device=None: (9, 0),
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
}
SHAPE = {"n_layer": 2, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "dropout": 0.1}
KERNEL = re.compile(r"= async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.DOTALL)
# Inductor uses a configuration of its own kernels only if it has at most 16 spill instructions, of 4 bytes each.
MAX_INDUCTOR_SPILL = 64
RUN, COMPILE = GraphLowering.run, triton.compile


def install_fake_gpu() -> None:
    """Let torch and Triton report one H100, until the process ends."""
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, answer)
        setattr(CudaInterface, name.lstrip("_"), answer)
    torch.accelerator.is_available = lambda: False  # else Dynamo asks for a stream, and a CUDA build for a driver
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)


class CodeGeneratedError(Exception):
    """Raised instead of running the generated code."""


def move(value: Any, device: str = "cuda:0") -> Any:
    """Return a fake tensor, or a device, on another device; any other value as it is."""
    if isinstance(value, FakeTensor):
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return torch.device(device) if isinstance(value, torch.device) else value


def run_on_gpu(graph: GraphLowering, *inputs: Any) -> Any:
    """Move all nodes of a graph to the GPU before it is lowered."""
    for node in graph.module.graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), move)
        node.meta["val"] = map_aggregate(node.meta.get("val"), move)
    return RUN(graph, *map(move, inputs))


def call_flash_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: None, dropout_p: float, is_causal: bool) -> Tensor:
    """Call the operator that SDPA selects on a GPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


@contextlib.contextmanager
def collect_code(sources: list[str]) -> Iterator[None]:
    """Append all code that Inductor generates inside this context to `sources`, and run none of it."""

    def keep_code(graph: GraphLowering) -> Any:
        sources.append(graph.codegen()[0].value)
        return SimpleNamespace(call=print)  # it is never called

    options = {"joint_graph_constant_folding": False, "fx_graph_cache": False, "compile_threads": 1}
    with (
        FakeTensorMode(),
        mock.patch.object(GraphLowering, "run", run_on_gpu),
        mock.patch.object(GraphLowering, "compile_to_module", keep_code),
        mock.patch.object(F, "scaled_dot_product_attention", call_flash_attention),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context"),  # this and the next three would use the GPU
        mock.patch.object(fuse_attention, "_sfdp_init"),
        mock.patch.object(pad_mm, "_pad_mm_init"),
        mock.patch.object(misc_patterns, "_misc_patterns_init"),
        mock.patch("phase2_triton.apply.unavailable_reason", lambda _: None),
        mock.patch("phase2_triton.kernels.checks.unavailable_reason", lambda _: None),
        torch._inductor.config.patch(options),
        torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        contextlib.suppress(CodeGeneratedError),
    ):
        yield


def compile_graph(function: Callable[..., Any], *inputs: Any) -> None:
    """Compile a function, which must be one graph, and its backward pass, but do not run them."""

    def generate(graph: Any, inputs: Any, **options: Any) -> Any:
        compile_fx_inner(graph, [move(x, "cpu") for x in inputs], **options)
        return stop

    def stop(*_: Any) -> None:
        raise CodeGeneratedError

    backend = lambda graph, inputs: compile_fx(graph, inputs, inner_compile=generate)  # noqa: E731
    torch.compile(function, fullgraph=True, backend=backend)(*inputs)


def compile_kernel(name: str, source: str) -> list[Any]:
    """Compile a kernel of the generated code, once for each configuration that Inductor would try on the GPU."""
    compiled: list[Any] = []

    def compile_and_keep(*args: Any, **options: Any) -> Any:
        compiled.append(COMPILE(*args, **options))
        return compiled[-1]

    with (
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.object(triton, "compile", compile_and_keep),
    ):
        tuner = getattr(PyCodeCache.load(source), name)
        for config in tuner.configs:
            tuner._precompile_config(config)
    return compiled


def find_problems(name: str, source: str) -> list[str]:
    """Compile a kernel of the generated code, and return what is wrong with it."""
    facts = [inspect_machine_code(each) for each in compile_kernel(name, source)]
    allowed = MAX_INDUCTOR_SPILL if name.startswith("triton_") else 0
    problems = {
        "fp64": any(each["has_fp64"] for each in facts) and "cos(" not in source,  # CUDA reduces large angles in fp64
        "spills": min(each["stack_bytes"] for each in facts) > allowed,
        "serialized wgmma": any(each["serialized_wgmma"] for each in facts),
    }
    return [problem for problem, has_problem in problems.items() if has_problem]


@triton.jit
def planted_kernel(x, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i) * factor
    tl.store(x + i, values / tl.sum(values, 0))


def scale(x: Tensor) -> Tensor:
    """Call a kernel with two mistakes: a Python float, which Inductor passes as fp64, and too large a tile."""
    y = x.clone()
    planted_kernel[(1,)](y, 0.1, BLOCK=32768)
    return y


def main(case: str, architecture: str) -> None:
    install_fake_gpu()
    sources: list[str] = []
    with collect_code(sources), torch.autocast("cpu", torch.bfloat16):
        if case == "planted":
            compile_graph(scale, torch.zeros(32768))
        model = make_shape({**SHAPE, "model": architecture}).create_model()
        apply_kernels(model, case)
        idx = torch.zeros(8, model.config.block_size, dtype=torch.int64)
        compile_graph(model, idx, idx)
    # Without the numbers at the end of Inductor's names, many kernels are the same.
    names = [(re.sub(r"_\d+$", "", name), name, text) for code in sources for name, text in KERNEL.findall(code)]
    kernels = dict.fromkeys((short, text.replace(name, short)) for short, name, text in names)
    print(json.dumps([[name, find_problems(name, source)] for name, source in kernels]))


if __name__ == "__main__":
    main(*sys.argv[1:])
