"""Tensor parallelism for models of Hugging Face, by the plan that transformers has for each architecture.

The plan names a style for each layer, such as `model.layers.*.self_attn.q_proj: colwise`. The styles are those of
`tensor_parallel.py`: `colwise` is column parallel, `rowwise` is row parallel, `embedding_rowwise` and
`colwise_gather_output` divide the vocabulary. Queries, keys and values are separate layers here, so a rank's rows are
whole heads without reordering.

`moe_tp_experts` is a stack of experts. Every rank has a part of each expert: 1/N of the channels between its two
matrices. So a token finds all of its experts on every rank, whatever the router chooses, and one all-reduce adds the
partial results of all experts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.tensor_parallel import VocabParallelEmbedding, add_partial_results, create_join
from nanoGPT.distributed.runtime import Runtime

DIVIDED = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
REPLICATED = "replicated"  # beginning of the styles of layers that every rank has in full
EXPERTS = "moe_tp_experts"
STACKS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}  # the parameters of a stack of experts
PER_HEAD = "per_head"  # our style for a parameter with one number for each head
# For architectures without a plan for tensor parallelism in transformers.
PLANS = {
    "gpt_oss": {
        **{f"model.layers.*.self_attn.{kind}_proj": "colwise" for kind in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.sinks": PER_HEAD,
        "model.layers.*.mlp.experts": EXPERTS,
    }
}


@dataclass(frozen=True)
class Part:
    """Which part of a parameter a rank has: the ranges [begin, end) of dimension `dim`, one after the other.

    There are zeros past the end of the parameter. `is_zero` is a bias that only rank 0 has, because the all-reduce adds
    it up; the other ranks have zeros.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    is_zero: bool = False

    @property
    def length(self) -> int:
        """Size of the part in dimension `dim`."""
        return sum(end - begin for begin, end in self.ranges)

    def take(self, source: Any, shape: Sequence[int] | None = None) -> Tensor:
        """Return this part of a tensor, or of the slice of a safetensors file, which has this shape."""
        shape = list(source.shape if shape is None else shape)
        ends = [min(end, shape[self.dim]) for _, end in self.ranges]
        before = (slice(None),) * self.dim
        pieces: list[Tensor] = [
            source[(*before, slice(min(begin, end), end))] for (begin, _), end in zip(self.ranges, ends, strict=True)
        ]
        missing = self.length - sum(piece.size(self.dim) for piece in pieces)
        if missing:
            pieces.append(pieces[0].new_zeros([*shape[: self.dim], missing, *shape[self.dim + 1 :]]))
        part = torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0]
        return torch.zeros_like(part) if self.is_zero else part

    def select_matrix(self, number: int) -> "Part":
        """Return the part of one matrix, if this is the part of a stack of experts, and a file has their matrices.

        Args:
            number: of the matrix among those that are concatenated in the parameter.
        """
        if self.dim == 2:
            return Part(1, self.ranges)
        begin = self.ranges[0][0]
        return Part(0, ((begin, begin + self.ranges[number][1] - self.ranges[number][0]),))


def find_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a model: a style for names of layers."""
    config: Any = model.config
    return {**PLANS.get(config.model_type, {}), **(getattr(model, "_tp_plan", None) or {})}


def find_style(plan: dict[str, str], name: str) -> str | None:
    """Return the style of a layer with this name; None if the plan has none."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def is_supported(model: nn.Module) -> bool:
    """Return whether the plan of a model divides its layers, and whether all its styles are supported."""
    plan = find_plan(model)
    styles = {name: style for name, _ in model.named_modules() if (style := find_style(plan, name)) is not None}
    used = set(styles.values())
    plain = {"embedding_rowwise": nn.Embedding}  # not a subclass, such as Gemma's, which scales the embedding
    if any(type(model.get_submodule(n)) is not plain.get(s, nn.Linear) for n, s in styles.items() if s in DIVIDED):
        return False
    experts = {name for name, style in styles.items() if style == EXPERTS}
    for name, _ in model.named_parameters():
        style = find_style(plan, name)
        if style is not None and style != PER_HEAD and name.rpartition(".")[0] not in experts:
            return False  # a part of a layer that is divided in another way
    known = all(style in (*DIVIDED, EXPERTS) or style.startswith(REPLICATED) for style in used)
    return {"colwise", "rowwise"} <= used and known and all(is_stack(model.get_submodule(name)) for name in experts)


def is_stack(experts: nn.Module) -> bool:
    """Return whether the parameters of a module are the matrices and biases of a stack of experts, as known here."""
    kinds = {name for name, _ in experts.named_parameters()}
    known = all(hasattr(experts, name) for name in ("is_transposed", "is_concatenated"))
    return (
        known
        and {"gate_up_proj", "down_proj"} <= kinds <= STACKS
        and not getattr(experts, "has_post_expert_norm", False)
    )


def divide_params(style: str | None, module: nn.Module, rank: int, ranks: int) -> dict[str, Part]:
    """Return this rank's part of each parameter of a layer that is divided.

    Args:
        style: of the layer.
        module: the layer, with full parameters.
        rank, ranks: which part, of how many.
    """
    shapes = {kind: param.shape for kind, param in module.named_parameters(recurse=False)}
    if style == EXPERTS:
        return divide_experts(shapes, module.is_transposed, module.is_concatenated, rank, ranks)  # type: ignore[arg-type]
    if style == "rowwise":
        parts = {"weight": Part(1, (divide(shapes["weight"][1], rank, ranks),))}
        if "bias" in shapes:
            parts["bias"] = Part(0, ((0, shapes["bias"][0]),), is_zero=rank > 0)
        return parts
    return {kind: Part(0, (divide(shape[0], rank, ranks),)) for kind, shape in shapes.items() if style in DIVIDED}


def divide(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of one rank. Only a vocabulary is not a multiple of the ranks; it is padded."""
    size = -(-length // ranks)
    return rank * size, (rank + 1) * size


def divide_experts(
    shapes: dict[str, torch.Size], is_transposed: bool, is_concatenated: bool, rank: int, ranks: int
) -> dict[str, Part]:
    """Return this rank's part of each parameter of a stack of experts.

    Args:
        shapes: of the full parameters; `gate_up_proj` is (experts, 2 I, C), or (experts, C, 2 I) if it is transposed.
        is_transposed: whether matrices have their inputs first.
        is_concatenated: whether the 2 I outputs are all gates and then all others; if not, they alternate.
        rank, ranks: which part, of how many.
    """
    outputs, inputs = (2, 1) if is_transposed else (1, 2)
    inner = shapes["down_proj"][inputs]
    begin, end = divide(inner, rank, ranks)
    both = ((begin, end), (inner + begin, inner + end)) if is_concatenated else ((2 * begin, 2 * end),)
    parts = {"gate_up_proj": Part(outputs, both), "down_proj": Part(inputs, ((begin, end),))}
    if "gate_up_proj_bias" in shapes:
        parts["gate_up_proj_bias"] = Part(1, both)
    if "down_proj_bias" in shapes:
        parts["down_proj_bias"] = Part(1, ((0, shapes["down_proj_bias"][1]),), is_zero=rank > 0)
    return parts


def find_parts(model: nn.Module, rank: int, ranks: int) -> dict[str, Part]:
    """Return this rank's part of each parameter that the plan of a model divides, by its name."""
    plan, parts = find_plan(model), {}
    for name, module in model.named_modules():
        for kind, part in divide_params(find_style(plan, name), module, rank, ranks).items():
            parts[f"{name}.{kind}"] = part
    for name, param in model.named_parameters():
        if find_style(plan, name) == PER_HEAD:
            parts[name] = Part(0, (divide(len(param), rank, ranks),))
    return parts


def count_divided(model: nn.Module) -> int:
    """Return the number of parameters that the plan of a model divides among the ranks."""
    if not is_supported(model):
        return 0
    parts = find_parts(model, 1, 2)  # as seen by a rank whose biases are zero if they are not divided
    return sum(param.numel() for name, param in model.named_parameters() if name in parts and not parts[name].is_zero)


def find_indivisible(model: nn.Module, ranks: int) -> str | None:
    """Return the name of a layer whose features cannot be divided evenly among the ranks; None if there is none.

    A rank's part of a row of experts must be a multiple of 16 bytes, which torch's grouped products need.
    """
    plan = find_plan(model)
    for name, module in model.named_modules():
        style = find_style(plan, name)
        if style == EXPERTS:
            weight = module.get_parameter("down_proj")
            length = weight.shape[1 if module.is_transposed else 2] * weight.itemsize / 16
        elif style in ("colwise", "rowwise"):
            length = module.get_parameter("weight").shape[0 if style == "colwise" else 1]
        else:
            continue
        if length % ranks:
            return name
    return None


def parallelize_by_plan(model: nn.Module, run: Runtime) -> dict[str, Part]:
    """Shrink a model on the meta device to this rank's part, in place, and let it communicate.

    Returns:
        The part of each parameter that is divided, by its name.
    """
    plan, parts = find_plan(model), find_parts(model, run.rank, run.world_size)
    full = dict(model.named_parameters(remove_duplicate=False))
    for name, module in list(model.named_modules()):
        style = find_style(plan, name)
        if style in ("rowwise", EXPERTS):
            module.register_forward_hook(add_partial_results)
        elif style == "colwise_gather_output":
            module.register_forward_hook(create_join(run.world_size, len(module.get_parameter("weight"))))
        elif style == "embedding_rowwise":
            rows, columns = module.get_parameter("weight").shape
            with torch.device("meta"):
                model.set_submodule(name, VocabParallelEmbedding(-(-rows // run.world_size), columns))
    for name, part in parts.items():
        path, _, kind = name.rpartition(".")
        shape = list(full[name].shape)
        shape[part.dim] = part.length
        empty = torch.empty(shape, dtype=full[name].dtype, device="meta")
        setattr(model.get_submodule(path), kind, nn.Parameter(empty, requires_grad=False))
    return parts
