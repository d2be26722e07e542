"""The cases that `make bench NAME=kernels` measures: each kernel and torch's implementations, on the same tensors.

On a GPU the shapes are those of GPT-2, 124M to 1.5B, with 16,384 tokens in bfloat16. In the interpreter the tensors are
small and fp32: the same code runs, but its times do not predict a GPU's, and the result is labeled as interpreted.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from phase2_triton.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
from phase2_triton.kernels.core import Cost

GPT2_WIDTHS = {"124M": (768, 12), "350M": (1024, 16), "774M": (1280, 20), "1.5B": (1600, 25)}


@dataclass
class Case:
    """One computation, its implementations (the contenders), and its minimum cost.

    Attributes:
        kernel: name of the computation.
        shape: description of the sizes.
        inputs: the tensors that every contender is called with.
        contenders: functions of the inputs. They return what the backward pass starts from. With `is_step` a
            contender does all its work, the backward pass included, in this one call.
        forward: cost of the forward pass, or of the step.
        backward: cost of the backward pass; None with `is_step`.
        is_step: see contenders.
        contexts: a context manager that a contender must run in, such as the choice of an SDPA backend.
    """

    kernel: str
    shape: str
    inputs: tuple[Any, ...]
    contenders: dict[str, Callable[..., Any]]
    forward: Cost
    backward: Cost | None
    is_step: bool = False
    contexts: dict[str, Callable[[], AbstractContextManager]] = field(default_factory=dict)

    def context_of(self, contender: str) -> AbstractContextManager:
        """Return the context manager that a contender must run in."""
        return self.contexts.get(contender, nullcontext)()


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for fixed shapes."""
    return torch.compile(function, dynamic=False)


def random_leaf(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of normally distributed numbers that requires a gradient."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()


def build_cases(
    device: torch.device, kernels: set[str], widths: list[str], is_small: bool | None = None
) -> Iterator[Case]:
    """Yield every case of these kernels. Only one case uses memory at a time.

    The shape of some kernels, such as cross-entropy, does not depend on the width. They have one case.

    Args:
        is_small: build one small case of each kernel; None: on a CPU.
    """
    is_small = device.type == "cpu" if is_small is None else is_small
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    yielded = set[tuple[str, str]]()
    for name in widths:
        C, heads = (64, 2) if is_small else GPT2_WIDTHS[name]
        B, T, V = (2, 64, 512) if is_small else (16, 1024, 50304)
        sizes = (device, dtype, B, T, C, heads, V)
        for kernel, build in CASE_BUILDERS.items():
            if kernel in kernels:
                case = build("small" if is_small else name, *sizes)
                if (case.kernel, case.shape) not in yielded:
                    yielded.add((case.kernel, case.shape))
                    yield case
                del case
        if is_small:  # more sizes would add no information in the interpreter
            break


def build_add_layernorm_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int
) -> Case:
    x, branch = (random_leaf(device, B * T, C, dtype=dtype) for _ in range(2))
    weight, bias = (random_leaf(device, C, dtype=dtype) for _ in range(2))

    def reference(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, F.layer_norm(total, (C,), weight, bias)

    contenders = {"ours": layernorm.add_layer_norm, "eager": reference, "compile": compile_static(reference)}
    costs = layernorm.cost(B * T, C, dtype.itemsize, branch=True)
    return Case("add + layernorm", f"{name}: {B * T} x {C}", (x, branch, weight, bias), contenders, *costs)


def build_layernorm_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int) -> Case:
    x = random_leaf(device, B * T, C, dtype=dtype)
    weight, bias = (random_leaf(device, C, dtype=dtype) for _ in range(2))

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (C,), weight, bias)

    contenders: dict[str, Callable[..., Any]] = {
        "ours": layernorm.layer_norm,
        "eager": reference,
        "compile": compile_static(reference),
    }
    if importlib.util.find_spec("liger_kernel") and device.type == "cuda":
        from liger_kernel.transformers.functional import liger_layer_norm

        contenders["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, 1e-5)
    costs = layernorm.cost(B * T, C, dtype.itemsize)
    return Case("layernorm", f"{name}: {B * T} x {C}", (x, weight, bias), contenders, *costs)


def build_cross_entropy_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int
) -> Case:
    logits, targets = random_leaf(device, B * T, V, dtype=dtype), torch.randint(V, (B * T,), device=device)

    def reference(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    contenders = {"ours": cross_entropy.cross_entropy, "eager": reference, "compile": compile_static(reference)}
    return Case(
        "cross-entropy", f"{B * T} x {V}", (logits, targets), contenders, *cross_entropy.cost(B * T, V, dtype.itemsize)
    )


def build_loss_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int
) -> Case:
    x, weight = random_leaf(device, B * T, C, dtype=dtype), random_leaf(device, V, C, dtype=dtype)
    targets = torch.randint(V, (B * T,), device=device)

    def reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def compute_products(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute only the three matrix products, a lower limit. The logits replace their gradient, of equal size."""
        with torch.no_grad():
            z = x @ weight.t()
            return z @ weight, z.t() @ x

    ours = linear_cross_entropy.linear_cross_entropy
    contenders = {
        "ours": forward_and_backward(ours),
        "eager": forward_and_backward(reference),
        "compile": forward_and_backward(compile_static(reference)),
        "products": compute_products,
    }
    if hasattr(F, "linear_cross_entropy"):
        contenders["F.linear_cross_entropy"] = forward_and_backward(lambda x, w, t: F.linear_cross_entropy(x, w, t))
    if importlib.util.find_spec("liger_kernel") and device.type == "cuda":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        contenders["liger"] = forward_and_backward(lambda x, w, t: liger_fused_linear_cross_entropy(x, w, t))
    cost = linear_cross_entropy.cost(B * T, C, V, dtype.itemsize)
    return Case(
        "linear + cross-entropy", f"{name}: {B * T} x {C} x {V}", (x, weight, targets), contenders, cost, None, True
    )


def forward_and_backward(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function that runs the forward and the backward pass. It returns the loss and the gradients."""

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        loss = function(*inputs)
        return loss.detach(), *torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])

    return call


def build_attention_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, *_: int
) -> Case:
    packed = random_leaf(device, B, T, 3, heads, C // heads, dtype=dtype)
    q, k, v = packed.detach().permute(2, 0, 3, 1, 4).unbind()
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    contenders: dict[str, Callable[..., Any]] = {"ours": attention.causal_attention, "sdpa": reference}
    contexts: dict[str, Callable[[], AbstractContextManager]] = {}
    if device.type == "cuda":
        for label, backend in (("sdpa flash", SDPBackend.FLASH_ATTENTION), ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION)):
            contenders[label] = reference
            contexts[label] = partial(sdpa_kernel, backend)
    costs = attention.cost(B, heads, T, C // heads, dtype.itemsize)
    shape = f"{name}: {B} x {heads} x {T} x {C // heads}"
    return Case("attention", shape, inputs, contenders, *costs, contexts=contexts)


def build_gelu_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int) -> Case:
    x, bias = random_leaf(device, B * T, 4 * C, dtype=dtype), random_leaf(device, 4 * C, dtype=dtype)

    def reference(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    contenders = {"ours": gelu.bias_gelu, "eager": reference, "compile": compile_static(reference)}
    costs = gelu.cost(B * T, 4 * C, dtype.itemsize)
    return Case("bias + gelu", f"{name}: {B * T} x {4 * C}", (x, bias), contenders, *costs)


def build_embedding_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int
) -> Case:
    idx = torch.randint(V, (B, T), device=device)
    wte, wpe = random_leaf(device, V, C, dtype=torch.float32), random_leaf(device, T, C, dtype=torch.float32)

    def reference(idx: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
        return F.embedding(idx, wte) + wpe[: idx.size(1)]

    contenders = {"ours": embedding.embedding, "eager": reference, "compile": compile_static(reference)}
    costs = embedding.cost(B, T, V, C, 4)
    return Case("embedding", f"{name}: {B} x {T} x {C} of {V}", (idx, wte, wpe), contenders, *costs)


def build_adamw_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int
) -> Case:
    layers = 2 if device.type == "cpu" else C // 64  # 1.5B parameters and three optimizers would need 75 GB
    shapes = [
        (V, C),
        (T, C),
        *[shape for _ in range(layers) for shape in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C), (C,), (C,))],
    ]
    optimizers: dict[str, Callable[..., Any]] = {}
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    for label, build_optimizer in (
        ("ours", adamw.TritonAdamW),
        ("fused", lambda p, **options: torch.optim.AdamW(p, fused=True, **options)),
        ("foreach", lambda p, **options: torch.optim.AdamW(p, foreach=True, **options)),
    ):
        params = [random_leaf(device, *shape, dtype=torch.float32) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizers[label] = build_optimizer(params, lr=1e-3, weight_decay=0.1).step
    cost = adamw.cost(elements, 4, len(shapes))
    shape = f"{elements / 1e6:.0f}M in {len(shapes)}, width {C}"  # not `name`: wide models have more layers
    return Case("adamw", shape, (), optimizers, cost, None, True)


CASE_BUILDERS: dict[str, Callable[..., Case]] = {
    "layernorm": build_layernorm_case,
    "add_layernorm": build_add_layernorm_case,
    "cross_entropy": build_cross_entropy_case,
    "loss": build_loss_case,
    "attention": build_attention_case,
    "gelu": build_gelu_case,
    "embedding": build_embedding_case,
    "adamw": build_adamw_case,
}
