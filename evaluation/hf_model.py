"""A causal language model of transformers as a `LanguageModel`: its cache and its masks."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from evaluation.generation import SlotCache


class HfLayer(CacheLayerMixin):
    """A layer of a `SlotCache` with the interface of transformers."""

    is_compileable = False
    is_sliding = False

    def __init__(self, slots: SlotCache, layer: Any) -> None:
        super().__init__()
        self.slots, self.layer = slots, layer
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store (B, nh, T, hs) keys and values, and return all that the new tokens may read."""
        keys, values = self.layer.extend(key_states, value_states, 0)
        return keys, values

    def get_seq_length(self) -> int:
        return self.slots.longest

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.window if self.slots.row is None else self.slots.longest + query_length, 0


class HfModel:
    """A causal language model of transformers as a `LanguageModel`.

    Args:
        model: the model, spread over the ranks.
        ids: number of token ids of the tokenizer.
        device: of this rank.
    """

    def __init__(self, model: nn.Module, ids: int, device: torch.device) -> None:
        config: Any = model.config
        self.model, self.config, self.device = model, config, device
        self.vocab_size: int = min(ids, config.vocab_size)
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def new_cache(self, slots: int, limit: int) -> SlotCache:
        return SlotCache(self.config.num_hidden_layers, slots, limit, self.device)

    def next_logits(self, ids: Tensor, cache: SlotCache | None, slot: int | None) -> Tensor:
        """Return the fp32 logits of the next token, (B, vocab_size). See `LanguageModel`."""
        if cache is None:
            return self._run(ids, torch.zeros(1, 1, dtype=torch.int64, device=self.device), None)[:, -1].float()
        cache.begin(slot)
        return self._run(ids, cache.positions, cache)[:, -1].float()

    def _run(self, ids: Tensor, first: Tensor, slots: SlotCache | None) -> Tensor:
        """Return the logits of the last token, (B, 1, vocab_size).

        Args:
            ids: (B, T) new tokens.
            first: (B, 1), their first positions.
            slots: the cache of the sequences; None: the tokens read only each other.
        """
        past = Cache(layers=[HfLayer(slots, layer) for layer in slots.layers]) if slots is not None else None
        positions = first + torch.arange(ids.size(1), device=self.device)  # (B, T)
        out = self.model(
            input_ids=ids,
            attention_mask=self._create_masks(positions, slots),
            position_ids=positions,
            past_key_values=past,
            use_cache=past is not None,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[..., : self.vocab_size]
        return logits

    def _create_masks(self, positions: Tensor, slots: SlotCache | None) -> Tensor | dict[str, Tensor]:
        """Return what is added to attention scores: 0 where a token may read, and the lowest number elsewhere.

        A model whose layers differ gets one mask for each kind of layer.
        """
        n_keys = slots.window if slots is not None and slots.row is None else positions.size(1)
        keys = torch.arange(n_keys, device=self.device)
        queries = positions[:, None, :, None]  # (B, 1, T, 1)
        lowest, window = torch.finfo(self.dtype).min, getattr(self.config, "sliding_window", None)
        full = torch.zeros((), dtype=self.dtype, device=self.device).masked_fill(keys > queries, lowest)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        if window is None or kinds == {"full_attention"}:
            return full
        sliding = full.masked_fill(keys <= queries - window, lowest)  # (B, 1, T, T so far)
        return {"full_attention": full, "sliding_attention": sliding} if kinds else sliding
