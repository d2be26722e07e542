"""What `make bench-kernels` measures: each kernel beside torch's ways of computing the same, on the same tensors.

On a GPU the shapes are those of GPT-2, 124M to 1.5B, with 16,384 tokens in bfloat16. In the interpreter, whose times
say nothing about a GPU, they are small and fp32: the same code runs, and the result is labelled.
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

from phase2_triton.kernels import adamw, attention, cross_entropy, embedding, gelu, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import Cost

GPT2_WIDTHS = {"124M": (768, 12), "350M": (1024, 16), "774M": (1280, 20), "1.5B": (1600, 25)}


@dataclass
class Case:
    """One computation, the ways to do it, and what the chip must at least do for it.

    A contender takes the inputs and returns what gradients are taken of; or, where `steps`, does all its work when
    called.
    """

    kernel: str
    shape: str
    inputs: tuple[Any, ...]
    contenders: dict[str, Callable[..., Any]]
    forward: Cost
    backward: Cost | None  # None where the forward does everything, or there is none
    steps: bool = False
    context: dict[str, Callable[[], AbstractContextManager]] = field(default_factory=dict)

    def within(self, contender: str) -> AbstractContextManager:
        """What a contender must run in, such as a choice of SDPA's backend."""
        return self.context.get(contender, nullcontext)()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def leaf(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()


def cases(device: torch.device, kernels: set[str], widths: list[str]) -> Iterator[Case]:
    """Every case of these kernels, one after another, so that only one holds memory."""
    small = device.type == "cpu"
    dtype = torch.float32 if small else torch.bfloat16
    for name in widths:
        C, heads = (64, 2) if small else GPT2_WIDTHS[name]
        B, T, V = (2, 64, 512) if small else (16, 1024, 50304)
        sizes = (device, dtype, B, T, C, heads, V)
        for kernel, make in MAKERS.items():
            if kernel in kernels:
                yield make("small" if small else name, *sizes)
        if small:  # one size says all that the interpreter has to say
            break


def layernorm_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int) -> Case:
    x, branch = (leaf(device, B * T, C, dtype=dtype) for _ in range(2))
    weight, bias = (leaf(device, C, dtype=dtype) for _ in range(2))

    def plain(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, F.layer_norm(total, (C,), weight, bias)

    contenders = {"ours": layernorm.add_layer_norm, "eager": plain, "compile": compiled(plain)}
    costs = layernorm.cost(B * T, C, dtype.itemsize, branch=True)
    return Case("add + layernorm", f"{name}: {B * T} x {C}", (x, branch, weight, bias), contenders, *costs)


def norm_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int) -> Case:
    x = leaf(device, B * T, C, dtype=dtype)
    weight, bias = (leaf(device, C, dtype=dtype) for _ in range(2))

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (C,), weight, bias)

    contenders: dict[str, Callable[..., Any]] = {
        "ours": layernorm.layer_norm,
        "eager": plain,
        "compile": compiled(plain),
    }
    if importlib.util.find_spec("liger_kernel") and device.type == "cuda":
        from liger_kernel.transformers.functional import liger_layer_norm

        contenders["liger"] = lambda x, w, b: liger_layer_norm(x, w, b, 1e-5)
    costs = layernorm.cost(B * T, C, dtype.itemsize)
    return Case("layernorm", f"{name}: {B * T} x {C}", (x, weight, bias), contenders, *costs)


def cross_entropy_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int
) -> Case:
    logits, targets = leaf(device, B * T, V, dtype=dtype), torch.randint(V, (B * T,), device=device)

    def plain(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    contenders = {"ours": cross_entropy.cross_entropy, "eager": plain, "compile": compiled(plain)}
    return Case(
        "cross-entropy", f"{B * T} x {V}", (logits, targets), contenders, *cross_entropy.cost(B * T, V, dtype.itemsize)
    )


def head_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int) -> Case:
    x, weight = leaf(device, B * T, C, dtype=dtype), leaf(device, V, C, dtype=dtype)
    targets = torch.randint(V, (B * T,), device=device)

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def products(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The three bare products, for the logits' gradient any tensor of their size: what cannot be saved."""
        with torch.no_grad():
            z = x @ weight.t()
            return (z @ weight).sum() + (z.t() @ x).sum()

    ours = linear_cross_entropy.linear_cross_entropy
    contenders = {"ours": both(ours), "eager": both(plain), "compile": both(compiled(plain)), "products": products}
    if hasattr(F, "linear_cross_entropy"):
        contenders["F.linear_cross_entropy"] = both(lambda x, w, t: F.linear_cross_entropy(x, w, t))
    if importlib.util.find_spec("liger_kernel") and device.type == "cuda":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        contenders["liger"] = both(lambda x, w, t: liger_fused_linear_cross_entropy(x, w, t))
    cost = linear_cross_entropy.cost(B * T, C, V, dtype.itemsize)
    return Case(
        "linear + cross-entropy", f"{name}: {B * T} x {C} x {V}", (x, weight, targets), contenders, cost, None, True
    )


def both(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Forward and backward in one call."""
    return lambda *inputs: torch.autograd.grad(function(*inputs), [x for x in inputs if x.requires_grad])


def attention_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, *_: int
) -> Case:
    packed = leaf(device, B, T, 3, heads, C // heads, dtype=dtype)
    q, k, v = packed.detach().permute(2, 0, 3, 1, 4).unbind()
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    contenders: dict[str, Callable[..., Any]] = {"ours": attention.causal_attention, "sdpa": plain}
    context: dict[str, Callable[[], AbstractContextManager]] = {}
    if device.type == "cuda":
        for label, backend in (("sdpa flash", SDPBackend.FLASH_ATTENTION), ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION)):
            contenders[label] = plain
            context[label] = partial(sdpa_kernel, backend)
    costs = attention.cost(B, heads, T, C // heads, dtype.itemsize)
    shape = f"{name}: {B} x {heads} x {T} x {C // heads}"
    return Case("attention", shape, inputs, contenders, *costs, context=context)


def gelu_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int) -> Case:
    x, bias = leaf(device, B * T, 4 * C, dtype=dtype), leaf(device, 4 * C, dtype=dtype)

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias)

    contenders = {"ours": gelu.bias_gelu, "eager": plain, "compile": compiled(plain)}
    costs = gelu.cost(B * T, 4 * C, dtype.itemsize)
    return Case("bias + gelu", f"{name}: {B * T} x {4 * C}", (x, bias), contenders, *costs)


def linear_gelu_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, *_: int) -> Case:
    x, weight, bias = (leaf(device, *shape, dtype=dtype) for shape in ((B * T, C), (4 * C, C), (4 * C,)))

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias))

    def in_two(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gelu.bias_gelu(F.linear(x, weight), bias)

    contenders = {"ours": gelu.linear_gelu, "product, bias_gelu": in_two, "eager": plain, "compile": compiled(plain)}
    costs = gelu.linear_cost(B * T, 4 * C, C, dtype.itemsize)
    return Case("linear + gelu", f"{name}: {B * T} x {C} x {4 * C}", (x, weight, bias), contenders, *costs)


def embedding_case(
    name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int
) -> Case:
    idx = torch.randint(V, (B, T), device=device)
    wte, wpe = leaf(device, V, C, dtype=torch.float32), leaf(device, T, C, dtype=torch.float32)

    def plain(idx: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
        return F.embedding(idx, wte) + wpe[: idx.size(1)]

    contenders = {"ours": embedding.embedding, "eager": plain, "compile": compiled(plain)}
    costs = embedding.cost(B, T, V, C, 4)
    return Case("embedding", f"{name}: {B} x {T} x {C} of {V}", (idx, wte, wpe), contenders, *costs)


def adamw_case(name: str, device: torch.device, dtype: torch.dtype, B: int, T: int, C: int, heads: int, V: int) -> Case:
    layers = 2 if device.type == "cpu" else C // 64
    shapes = [
        (V, C),
        (T, C),
        *[s for _ in range(layers) for s in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C), (C,), (C,))],
    ]
    optimizers: dict[str, Callable[..., Any]] = {}
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    for label, make in (
        ("ours", adamw.TritonAdamW),
        ("fused", lambda p, **o: torch.optim.AdamW(p, fused=True, **o)),
        ("foreach", lambda p, **o: torch.optim.AdamW(p, foreach=True, **o)),
    ):
        params = [leaf(device, *shape, dtype=torch.float32) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizers[label] = make(params, lr=1e-3, weight_decay=0.1).step
    cost = adamw.cost(elements, 4, len(shapes))
    return Case("adamw", f"{name}: {elements / 1e6:.0f}M in {len(shapes)}", (), optimizers, cost, None, True)


MAKERS: dict[str, Callable[..., Case]] = {
    "layernorm": norm_case,
    "add_layernorm": layernorm_case,
    "cross_entropy": cross_entropy_case,
    "loss": head_case,
    "attention": attention_case,
    "gelu": gelu_case,
    "linear_gelu": linear_gelu_case,
    "embedding": embedding_case,
    "adamw": adamw_case,
}
