"""Generate the code that torch.compile would run on a GPU, on a machine without one, and compile its kernels.

`generate_code` traces a module with fake tensors on the device of `fake_cuda.py`. Dynamo, AOTAutograd and Inductor do
their usual work, and this module takes the code that Inductor would execute. `compile_kernels` gives every Triton
kernel in this code to Triton and to ptxas, with the types and constants that Inductor chose.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

TRITON_COMPILE = triton.compile
KERNEL = re.compile(r"= async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.DOTALL)


class CodeGeneratedError(Exception):
    """Raised instead of running the generated code."""


@dataclass
class GeneratedCode:
    """What torch.compile generated for the forward and the backward pass of one module.

    Attributes:
        sources: the generated Python modules.
        copied_bytes: bytes that are copied because Inductor could not let a Triton kernel write into its argument.
    """

    sources: list[str]
    copied_bytes: int

    def find_kernels(self) -> list[tuple[str, str]]:
        """Return name and source of each Triton kernel, without the number at the end of Inductor's names.

        A kernel that two graphs have in common then has the same source.
        """
        kernels = [kernel for code in self.sources for kernel in KERNEL.findall(code)]
        return [(short := re.sub(r"_\d+$", "", name), source.replace(name, short)) for name, source in kernels]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Call the operator that SDPA selects for half types on a GPU. A CPU build of torch cannot select it itself."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


@contextlib.contextmanager
def collect_code(sources: list[str]) -> Iterator[None]:
    """Append all code that Inductor generates inside this context to `sources`, and run none of it."""

    class Module:
        def call(self, *_: Any) -> None:
            raise CodeGeneratedError

    def keep_code(graph: GraphLowering) -> Any:
        sources.append(graph.codegen()[0].value)
        return Module()

    def skip(*_: Any) -> None:
        """Do nothing: the replaced functions run small examples on the GPU to prepare patterns."""

    options = {"joint_graph_constant_folding": False, "fx_graph_cache": False, "compile_threads": 1}
    with (
        mock.patch.object(GraphLowering, "compile_to_module", keep_code),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash_attention),
        mock.patch.object(fuse_attention, "_sfdp_init", skip),
        mock.patch.object(pad_mm, "_pad_mm_init", skip),
        mock.patch.object(misc_patterns, "_misc_patterns_init", skip),
        torch._inductor.config.patch(options),
        torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        yield


def generate_code(function: Callable[..., Any], *inputs: Any) -> GeneratedCode:
    """Return the code that torch.compile generates for the forward and the backward pass of a function.

    Call it after `install_fake_gpu`, inside a FakeTensorMode.

    Args:
        function: a module or a function; it must compile to one graph.
        inputs: fake tensors on cuda:0.
    """
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    sources: list[str] = []
    with collect_code(sources), contextlib.suppress(CodeGeneratedError):
        torch.compile(function, fullgraph=True)(*inputs)
    return GeneratedCode(sources, ReinplaceCounters.get_total_missed_bytes())


def compile_kernel(name: str, source: str) -> list[Any]:
    """Compile a kernel of the generated code, once for each configuration that Inductor would try on the GPU.

    Returns:
        The compiled kernels, with their code in `asm`.
    """
    compiled: list[Any] = []

    def compile_and_keep(*args: Any, **options: Any) -> Any:
        compiled.append(TRITON_COMPILE(*args, **options))
        return compiled[-1]

    with (
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),  # keep the driver of fake_cuda.py
        mock.patch.object(triton, "compile", compile_and_keep),
    ):
        tuner = getattr(PyCodeCache.load(source), name)
        assert isinstance(tuner, CachingAutotuner)
        for config in tuner.configs:
            tuner._precompile_config(config)
    return compiled
