"""Offsets of elements are 64-bit numbers in every kernel: an int32 offset wraps around at 2^31 elements.

The kernels run on small tensors, and every 32-bit product is checked. Such a product may count rows, columns, heads or
programs, of which there are few here, but not elements. So a 32-bit offset is found without 2^31 elements.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from phase2_triton.kernels import adamw, attention, core, cross_entropy, embedding, gelu, layernorm
from tests.helpers.kernels import import_variant

if not core.is_interpreted():
    pytest.skip("the check changes Triton's interpreter", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

LIMIT = 1024  # the smallest product that is refused; the tensors below have more elements, and fewer rows and columns


def refuse_wide_products() -> Any:
    """Return a context in which a kernel raises an error if a 32-bit product reaches LIMIT."""
    multiply = InterpreterBuilder.create_mul

    def create_mul(self: Any, a: Any, b: Any) -> Any:
        product = multiply(self, a, b)
        is_wide = product.data.dtype.kind in "iu" and product.data.dtype.itemsize == 4
        assert not is_wide or abs(product.data.astype("int64")).max(initial=0) < LIMIT, "a 32-bit offset"
        return product

    return mock.patch.object(InterpreterBuilder, "create_mul", create_mul)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def call_embedding(kernels: Any) -> None:
    kernels.embedding(torch.arange(132).view(4, 33) % 70, draw(70, 64), draw(40, 64), 3).sum().backward()


def call_gelu(kernels: Any) -> None:
    kernels.bias_gelu(draw(70, 64), draw(64)).sum().backward()


def call_layer_norm(kernels: Any) -> None:
    total, normalized = kernels.add_layer_norm(draw(70, 64), draw(70, 64), draw(64), draw(64))
    (total.sum() + normalized.sum()).backward()


def call_cross_entropy(kernels: Any) -> None:
    kernels.cross_entropy(draw(70, 64), torch.arange(70) % 64).backward()


def call_attention(kernels: Any) -> None:
    config = {"block": 64, "step": 64, "heads": 2}
    with mock.patch.object(kernels, "select_config", lambda *_: dict(config)):
        kernels.causal_attention(*(draw(2, 3, 210, 8) for _ in range(3))).sum().backward()


def call_adamw(kernels: Any) -> None:
    param = nn.Parameter(torch.ones(300_000))
    param.sum().backward()
    kernels.TritonAdamW([param]).step()


# The calls of each module, and its kernels that only show a step of its development.
CALLS: dict[ModuleType, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    adamw: (call_adamw, ()),
    attention: (call_attention, ("all_keys_kernel",)),
    cross_entropy: (call_cross_entropy, ("two_pass_kernel",)),
    embedding: (call_embedding, ()),
    gelu: (call_gelu, ()),
    layernorm: (call_layer_norm, ("one_row_kernel", "tile_kernel")),
}


def narrow_each_offset(module: ModuleType, steps: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the source of a module with one conversion to int64 left out, for each of them, with its line."""
    source, variants = Path(str(module.__file__)).read_text(), []
    for match in re.finditer(r"\.to\(tl\.int64\)|tl\.cast\(([^()]*(?:\(\w+\))?), tl\.int64\)", source):
        before, after = source[: match.start()], source[match.end() :]
        if re.findall(r"^def (\w+)\(", before, re.MULTILINE)[-1] not in steps:
            variants.append((before + (match[1] or "") + after, source.splitlines()[before.count("\n")].strip()))
    return variants


@pytest.mark.parametrize("module", CALLS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_32_bit_offset_is_caught_in_every_kernel(module, tmp_path):
    """The kernels as they are pass the check. With any one of their conversions to int64 left out, they fail it."""
    call, steps = CALLS[module]
    source = Path(module.__file__).read_text()
    variants = narrow_each_offset(module, steps)
    assert len(variants) >= 1
    with refuse_wide_products():
        call(import_variant(tmp_path, module, f"{call.__name__}_correct", []))
        for i, (variant, line) in enumerate(variants):
            kernels = import_variant(tmp_path, module, f"{call.__name__}_{i}", [(source, variant)])
            try:
                call(kernels)
            except Exception as error:
                assert "a 32-bit offset" in str(error.__cause__ or error), line
            else:
                pytest.fail(f"an offset in 32 bits is not caught: {line}")
