"""Tensor parallelism for GPT-2 and Llama: every rank stores and computes a part of every layer (Shoeybi et al. 2019).

    column parallel       the first layers of attention and MLP (c_attn, c_fc, q_proj, up_proj, ...): a rank has some
                          output features, which are some heads and some channels of the MLP
    row parallel          the last layers of attention and MLP (c_proj, o_proj, down_proj): a rank has the matching
                          input features, and an all-reduce adds the partial results
    vocabulary parallel   embedding and head: a rank has some rows; an all-reduce adds embeddings, an all-gather joins
                          logits

Weights stay where they are. A token of B sequences moves 2 L + 1 all-reduces of B x C numbers, for L blocks, and one
all-gather of B x V logits. The input of a column-parallel layer is the full activation, so nothing moves between c_attn
and c_proj, or between c_fc and c_proj. It is written here for inference; training needs an all-reduce in the backward
pass of the column-parallel layers as well.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nanoGPT.checkpoint.sources import find_tied_names
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT

MODELS = ("gpt2", "llama")
COLUMN_PARALLEL = (
    "attn.c_attn",
    "mlp.c_fc",
    "attn.q_proj",
    "attn.k_proj",
    "attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROW_PARALLEL = ("attn.c_proj", "mlp.c_proj", "attn.o_proj", "mlp.down_proj")
VOCABULARY_PARALLEL = ("transformer.wte", "model.embed_tokens", "lm_head")


class VocabParallelEmbedding(nn.Embedding):
    """An embedding with the rows of this rank. Ids of other ranks give zeros here; the all-reduce adds their rows."""

    def forward(self, idx: Tensor) -> Tensor:
        """Return the embeddings, (B, T, C), of (B, T) token ids."""
        local = idx - self.num_embeddings * dist.get_rank()
        is_local = (local >= 0) & (local < self.num_embeddings)
        x = super().forward(local.masked_fill(~is_local, 0)).masked_fill(~is_local[..., None], 0.0)  # (B, T, C)
        dist.all_reduce(x)
        return x


def check_heads(heads: int, ranks: int) -> None:
    """Check that the heads can be divided among the ranks.

    Raises:
        ConfigError: they cannot.
    """
    if heads % ranks:
        raise ConfigError(
            f"--spread=tp divides the {heads} key-value heads of the model among {ranks} ranks: use "
            "--spread=fsdp, or a number of ranks that divides the heads"
        )


def parallelize(model: GPT, rank: int, ranks: int) -> None:
    """Shrink a model on the meta device to this rank's part, in place, and let it communicate.

    Args:
        model: on the meta device, with the full shapes.
        rank, ranks: of the default process group.

    Raises:
        ConfigError: the model is not in MODELS, or the number of ranks does not divide the key-value heads.
    """
    shape = model.config
    if shape.model not in MODELS:
        raise ConfigError(f"--spread=tp does not support --model={shape.model}: use --spread=fsdp")
    check_heads(getattr(shape, "n_kv_head", shape.n_head), ranks)
    for name, full in list(model.named_parameters()):
        path, _, kind = name.rpartition(".")
        part = nn.Parameter(take_part(full, name, rank, ranks), requires_grad=False)
        setattr(model.get_submodule(path), kind, part)
    name = shape.VOCABULARY[0]
    with torch.device("meta"):
        embedding = VocabParallelEmbedding(*model.get_parameter(name).shape)
    embedding.weight = model.get_parameter(name)
    model.set_submodule(name.removesuffix(".weight"), embedding)
    for tied, source in find_tied_names(shape).items():
        model.get_submodule(tied.removesuffix(".weight")).weight = model.get_parameter(source)
    for path, module in model.named_modules():
        if path.endswith(ROW_PARALLEL):
            module.register_forward_hook(add_partial_results)
    model.lm_head.register_forward_hook(create_join(ranks, shape.vocab_size))


def create_join(ranks: int, vocab_size: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a forward hook that all-gathers the logits of a head whose rows are divided among the ranks."""

    def join_logits(_module: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        parts = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(parts, logits.contiguous())
        return torch.cat(parts, dim=-1)[..., :vocab_size]  # (B, T, V)

    return join_logits


def add_partial_results(_module: nn.Module, _inputs: Any, partial: Tensor) -> Tensor:
    """Sum the outputs of a row-parallel layer over the ranks, in place."""
    dist.all_reduce(partial)
    return partial


def take_part(full: Tensor, name: str, rank: int, ranks: int) -> Tensor:
    """Return this rank's part of a full parameter. It is a view where possible.

    Args:
        full: the parameter.
        name: its name in the model.
        rank, ranks: which part, of how many.
    """
    path, _, kind = name.rpartition(".")
    if path.endswith(COLUMN_PARALLEL):
        full = group_heads_by_rank(full, ranks) if path.endswith("c_attn") else full
        return full.tensor_split(ranks)[rank]
    if path.endswith(ROW_PARALLEL):
        if kind == "weight":
            return full.tensor_split(ranks, dim=1)[rank]
        return full if rank == 0 else torch.zeros_like(full)  # the all-reduce must add the bias once
    if path in VOCABULARY_PARALLEL:
        rows = -(-len(full) // ranks)
        return F.pad(full[rank * rows : (rank + 1) * rows], (0, 0, 0, max(0, (rank + 1) * rows - len(full))))[:rows]
    return full


def group_heads_by_rank(full: Tensor, ranks: int) -> Tensor:
    """Reorder the rows of a query-key-value weight or bias so that each rank's slice has whole heads.

    The 3C rows are the queries of all heads, then the keys, then the values: a slice of 3C / N rows would have only
    queries. Afterwards they are the queries, keys and values of rank 0's heads, then those of rank 1's, and so on.
    """
    return full.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
