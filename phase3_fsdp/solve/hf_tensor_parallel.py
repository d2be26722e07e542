"""Tensor parallelism for dense models of Hugging Face, by the plan that transformers has for each architecture.

The plan names a style for each layer, such as `model.layers.*.self_attn.q_proj: colwise`. The styles are those of
`tensor_parallel.py`: `colwise` is column parallel, `rowwise` is row parallel, `embedding_rowwise` and
`colwise_gather_output` divide the vocabulary. Queries, keys and values are separate layers here, so a rank's rows are
whole heads without reordering. Mixtures of experts use other styles, which this module does not support.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanoGPT.distributed.runtime import Runtime
from phase3_fsdp.solve.tensor_parallel import VocabParallelEmbedding, add_partial_results, create_join

DIVIDED = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
REPLICATED = "replicated"  # beginning of the styles of layers that every rank has in full


@dataclass(frozen=True)
class Part:
    """Which part of a parameter a rank has: [begin, end) in dimension `dim`, with zeros past the end of the parameter.

    `is_zero` is a bias that only rank 0 has, because the all-reduce adds it up; the other ranks have zeros.
    """

    dim: int
    begin: int
    end: int
    is_zero: bool = False


def find_style(plan: dict[str, str], name: str) -> str | None:
    """Return the style of a layer with this name; None if the plan has none."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def is_supported(model: nn.Module) -> bool:
    """Return whether the plan of a model divides its layers, and has only styles of dense models."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    styles = {name: style for name, _ in model.named_modules() if (style := find_style(plan, name)) is not None}
    used = set(styles.values())
    plain = {"embedding_rowwise": nn.Embedding}  # not a subclass, such as Gemma's, which scales the embedding
    if any(type(model.get_submodule(n)) is not plain.get(s, nn.Linear) for n, s in styles.items() if s in DIVIDED):
        return False
    covers_experts = any(find_style(plan, name) for name, _ in model.named_parameters())
    known = all(style in DIVIDED or style.startswith(REPLICATED) for style in used)
    return {"colwise", "rowwise"} <= used and known and not covers_experts


def count_divided(model: nn.Module) -> int:
    """Return the number of parameters that the plan of a model divides among the ranks."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    params: dict[Tensor, int] = {}
    for name, module in model.named_modules():
        style = find_style(plan, name)
        for kind, param in module.named_parameters(recurse=False):
            if style in DIVIDED and not (style == "rowwise" and kind == "bias"):
                params[param] = param.numel()
    return sum(params.values())


def find_indivisible(model: nn.Module, ranks: int) -> str | None:
    """Return the name of a layer whose features cannot be divided evenly among the ranks; None if there is none."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    for name, module in model.named_modules():
        dimension = {"colwise": 0, "rowwise": 1}.get(find_style(plan, name) or "")
        if dimension is not None and next(module.parameters()).shape[dimension] % ranks:
            return name
    return None


def parallelize_by_plan(model: nn.Module, run: Runtime) -> dict[str, Part]:
    """Shrink a model on the meta device to this rank's part, in place, and let it communicate.

    Returns:
        The part of each parameter that is divided, by its name.
    """
    plan: dict[str, str] = getattr(model, "_tp_plan", {})
    parts: dict[str, Part] = {}
    for name, module in list(model.named_modules()):
        style = find_style(plan, name)
        if style not in DIVIDED:
            continue
        full = dict(module.named_parameters(recurse=False))
        rows, columns = full["weight"].shape
        if style == "rowwise":
            shape = {"weight": (rows, columns // run.world_size), "bias": (rows,)}
            begin = run.rank * shape["weight"][1]
            parts[f"{name}.weight"] = Part(1, begin, begin + shape["weight"][1])
            parts[f"{name}.bias"] = Part(0, 0, rows, is_zero=run.rank > 0)
            module.register_forward_hook(add_partial_results)
        else:
            size = -(-rows // run.world_size)  # only the rows of the vocabulary are padded
            shape = {"weight": (size, columns), "bias": (size,)}
            for kind in full:
                parts[f"{name}.{kind}"] = Part(0, run.rank * size, (run.rank + 1) * size)
            if style == "colwise_gather_output":
                module.register_forward_hook(create_join(run.world_size, rows))
        if style == "embedding_rowwise":
            with torch.device("meta"):
                module = VocabParallelEmbedding(*shape["weight"])
            model.set_submodule(name, module)
        for kind, param in full.items():
            empty = torch.empty(shape[kind], dtype=param.dtype, device="meta")
            setattr(module, kind, nn.Parameter(empty, requires_grad=False))
    return parts


def read_part(file: Path, name: str, part: Part) -> Tensor:
    """Return a part of a tensor in a safetensors file. Only this part is read from the disk."""
    with safe_open(file, "pt") as opened:
        source: Any = opened.get_slice(name)
        length = source.get_shape()[part.dim]
        begin, end = min(part.begin, length), min(part.end, length)
        tensor: Tensor = source[begin:end] if part.dim == 0 else source[:, begin:end]
    if part.is_zero:
        return torch.zeros_like(tensor)
    missing = part.end - part.begin - (end - begin)
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[part.dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=part.dim)
