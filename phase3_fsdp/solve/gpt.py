"""This project's GPT, spread over the ranks for generation.

Three ways (`--spread`):

    fsdp       each rank stores 1/N of every layer; a layer is all-gathered before it runs and freed after it
    offload    the same, with the shards in CPU memory; they are copied to the GPU before the all-gather
    tp         tensor parallelism: each rank stores and computes 1/N of every layer; weights never move
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp import fsdp
from phase3_fsdp.fsdp import FsdpConfig
from phase3_fsdp.solve import tensor_parallel
from phase3_fsdp.solve.costs import PREFETCH, Spread
from phase3_fsdp.solve.generation import SlotCache


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
        layers = None
        if cache is not None:
            layers = cache.begin_token() if slot is None else cache.begin_prompt(slot)
        return self.model(ids, caches=layers)[:, -1, : self.vocab_size].float()

    def score(self, ids: Tensor, context_tokens: int) -> float:
        """Return the total loss, in nats, of the tokens of (1, T) after the first `context_tokens`."""
        targets = ids[:, 1:].clone()
        targets[:, : max(0, context_tokens - 1)] = -1
        return float(self.model(ids[:, :-1], targets)) * int((targets >= 0).sum())


def spread_gpt(shape: GPTConfig, weights: Mapping[str, Tensor], spread: Spread, run: Runtime) -> GPT:
    """Return a GPT whose weights are spread over the ranks, in the dtype of the Runtime. Collective.

    It is built on the meta device. Each rank then reads one parameter after the other, and keeps its part.

    Args:
        shape: of the model; dropout is not used.
        weights: full parameters by name, each read when it is accessed.
        spread: fsdp, offload or tp.
        run: this rank's Runtime.
    """
    with torch.device("meta"):
        model = GPT(replace(shape, dropout=0.0)).to(run.dtype)
    model.eval().requires_grad_(False)
    if run.world_size == 1 and spread != "offload":
        fill_parts(model, weights, run)
    elif spread == "tp":
        tensor_parallel.parallelize(model, run.rank, run.world_size)
        fill_parts(model, weights, run)
    else:
        config = FsdpConfig(
            fsdp_cpu_offload=spread == "offload",
            # Offload needs little memory with small units: the attention and the MLP of a block, if they are large.
            fsdp_min_num_params=fsdp.DEFAULT_MIN_NUM_PARAMS if spread == "offload" and is_large(shape) else None,
            fsdp_prefetch=PREFETCH,
            init_from="weights",
        )
        fsdp.shard_model(model, config, run)
        free_after_forward(model)
        fsdp.init_shards(model, config, run, weights)
    return model


def is_large(shape: GPTConfig) -> bool:
    """Return whether the attention of a block has enough parameters for a separate FSDP unit."""
    return 4 * shape.n_embd**2 >= fsdp.DEFAULT_MIN_NUM_PARAMS


def free_after_forward(model: nn.Module) -> None:
    """Let the root unit be freed after the forward pass as well: without a backward pass, nothing needs it."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(True, recurse=False)


@torch.no_grad()
def fill_parts(model: GPT, weights: Mapping[str, Tensor], run: Runtime) -> None:
    """Allocate a model from `tensor_parallel.parallelize` and copy this rank's part of every full parameter."""
    fsdp.allocate_shards(model, run.device)
    model.lm_head.weight = model.transformer["wte"].weight  # type: ignore[assignment]  # one parameter again
    for name, param in model.named_parameters():
        param.copy_(tensor_parallel.take_part(weights[name], name, run.rank, run.world_size))
