"""This project's GPT, spread over the ranks for generation.

Three ways (`--spread`):

    fsdp       each rank stores 1/N of every layer; a layer is all-gathered before it runs and freed after it
    offload    the same, with the shards in CPU memory; they are copied to the GPU before the all-gather
    tp         tensor parallelism: each rank stores and computes 1/N of every layer; weights never move
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from evaluation import tensor_parallel
from evaluation.costs import Spread
from evaluation.generation import SlotCache
from evaluation.units import shard_for_generation
from nanoGPT.checkpoint.sources import find_tied_names
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, ModelConfig
from phase3_fsdp import fsdp


class GptModel:
    """A `GPT` as a `LanguageModel`.

    Args:
        model: from `spread_gpt`.
        ids: number of token ids of the tokenizer; larger ids are padding.
        device: on which the model computes. With offload its parameters are in CPU memory.
    """

    def __init__(self, model: GPT, ids: int, device: torch.device) -> None:
        self.model, self.vocab_size, self.device = model, ids, device

    def new_cache(self, slots: int, limit: int) -> SlotCache:
        return SlotCache(self.model.config.n_layer, slots, limit, self.device)

    def next_logits(self, ids: Tensor, cache: SlotCache | None, slot: int | None) -> Tensor:
        """Return the fp32 logits of the next token, (B, vocab_size). See `LanguageModel`."""
        layers = cache.begin(slot) if cache is not None else None
        logits: Tensor = self.model(ids, caches=layers)[:, -1, : self.vocab_size].float()
        return logits


@torch.no_grad()
def spread_gpt(shape: ModelConfig, weights: Mapping[str, Tensor], spread: Spread, run: Runtime) -> GPT:
    """Return a GPT whose weights are spread over the ranks, in the dtype of the Runtime. Collective.

    It is built on the meta device. Each rank then reads one parameter after the other, and keeps its part.

    Args:
        shape: of the model; dropout is not used.
        weights: full parameters by name, each read when it is accessed.
        spread: fsdp, offload or tp.
        run: this rank's Runtime.
    """
    model = dataclasses.replace(shape, dropout=0.0).create_on_meta().to(run.dtype)
    model.eval().requires_grad_(False)
    if spread == "offload" or (spread == "fsdp" and run.world_size > 1):
        shard_for_generation(model, model.blocks, spread == "offload", run)  # type: ignore[arg-type]
        fsdp.allocate_shards(model, torch.device("cpu") if spread == "offload" else run.device)
        for name, param in model.named_parameters():
            fsdp.copy_own_rows(param, weights[name])
        return model
    if run.world_size > 1:
        tensor_parallel.parallelize(model, run.rank, run.world_size)
    fsdp.allocate_shards(model, run.device)
    for name, source in find_tied_names(shape).items():  # one parameter again
        path, _, kind = name.rpartition(".")
        setattr(model.get_submodule(path), kind, model.get_parameter(source))
    for name, param in model.named_parameters():
        param.copy_(tensor_parallel.take_part(weights[name], name, run.rank, run.world_size))
    return model
