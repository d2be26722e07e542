"""Predict the memory per rank and the communication volume per round of each way to spread a model.

A model has P parameters of b bytes. A is the most that is all-gathered at a time, in parameters, and R a tied embedding
and head, with all else outside the layers. There are N ranks with `slots` sequences each. A round runs the model once:
one token for each sequence.

                   memory per rank                   communication per rank and round (ring algorithm)
    fsdp           P b / N + (R + A) b + cache       all-gather   P b (N-1)/N
    offload        A b + cache                       all-gather   (P + R) b (N-1)/N, after a copy of (P + R) b / N
    tp             about P b / N + cache / N         2 L + 1 all-reduces of slots x C, all-gather of slots x V

`units.py` has the units of FSDP, and explains A: a unit counts twice while it computes, and with fsdp the one before
it once. With offload, R is all-gathered for the embedding and again for the head. `fully_shard` pads rows to a multiple
of N, which makes P slightly larger. The cache of a sequence of T tokens has 2 L T C_kv b bytes, where C_kv is the
number of key channels.
"""

from dataclasses import dataclass
from typing import Literal

from evaluation.tensor_parallel import MODELS, take_part
from evaluation.units import find_units
from nanoGPT.checkpoint.sources import find_tied_names
from nanoGPT.costs import ring_bytes
from nanoGPT.model import ModelConfig

Spread = Literal["fsdp", "offload", "tp"]
SPREADS: tuple[Spread, ...] = ("fsdp", "offload", "tp")
RESERVE = 0.9  # fraction of a device's memory that may be planned; the rest is for activations and the allocator


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that matter for generation, in elements.

    Attributes:
        layers: parameters of each layer.
        root: parameters outside the layers.
        replicated: parameters that tensor parallelism does not divide.
        channels: of the residual stream (C).
        kv_channels: of the keys of one layer (heads times head size).
        kv_heads: key heads, which tensor parallelism divides; 0: the model does not support tensor parallelism.
        vocab_size: rows of the head.
        units: the units of FSDP in each layer, as in `units.find_units`.
        ends: the embedding and the head, if they are units of FSDP; they are part of `root`.
        vocabularies: number of matrices with a row for each token id; 1 if embedding and head are tied.
    """

    layers: tuple[int, ...]
    root: int
    replicated: int
    channels: int
    kv_channels: int
    kv_heads: int
    vocab_size: int
    units: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...] = ()
    vocabularies: int = 1

    @property
    def params(self) -> int:
        """Number of parameters."""
        return sum(self.layers) + self.root


def measure_gpt(shape: ModelConfig) -> ModelSize:
    """Return the sizes of a model of this project."""
    model = shape.create_on_meta()
    layers = tuple(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    params = dict(model.named_parameters())
    full = [param.numel() for name, param in params.items() if take_part(param, name, 1, 2).numel() == param.numel()]
    kv_heads = getattr(shape, "n_kv_head", shape.n_head)
    return ModelSize(
        layers,
        sum(param.numel() for param in params.values()) - sum(layers),
        sum(full),
        shape.n_embd,
        shape.n_embd // shape.n_head * kv_heads,
        kv_heads if shape.model in MODELS else 0,
        shape.vocab_size,
        tuple(tuple(find_units(block).values()) for block in model.blocks),
        vocabularies=len({*shape.VOCABULARY} - {*find_tied_names(shape)}),
    )


def cache_bytes(size: ModelSize, tokens: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of one sequence of `tokens` tokens."""
    return 2 * len(size.layers) * tokens * size.kv_channels * itemsize


@dataclass(frozen=True)
class SpreadCosts:
    """The costs of one way to spread a model, in bytes per rank.

    Attributes:
        weights: resident weights on the device.
        all_gathered: layers that are all-gathered at the same time, and the parameters outside the layers.
        cache: keys and values of all slots at the full length.
        host: weights in CPU memory.
        network: communication volume per round (ring algorithm).
        copied: bytes copied from CPU memory to the device per round.
    """

    weights: float
    all_gathered: float
    cache: float
    host: float
    network: float
    copied: float

    @property
    def memory(self) -> float:
        """Bytes on the device."""
        return self.weights + self.all_gathered + self.cache


def predict(spread: Spread, size: ModelSize, ranks: int, slots: int, tokens: int, itemsize: int) -> SpreadCosts:
    """Return the costs of one way to spread a model.

    Args:
        spread: fsdp, offload or tp.
        size: of the model.
        ranks: world size.
        slots: sequences per rank; with tp, in total.
        tokens: largest length of a sequence.
        itemsize: bytes of a parameter.
    """
    weights = size.params * itemsize
    cache = slots * cache_bytes(size, tokens, itemsize)
    if spread == "tp":
        reductions = 2 * len(size.layers) + 1
        logits = -(-size.vocab_size // ranks) * ranks  # rows of the head are padded to a multiple of the ranks
        padding = size.vocabularies * (logits - size.vocab_size) * size.channels
        divided = size.params - size.replicated + padding
        part = itemsize * (divided / ranks + size.replicated)
        network = reductions * ring_bytes("all-reduce", slots * size.channels * itemsize, ranks)
        network += ring_bytes("all-gather", slots * logits * itemsize, ranks)
        return SpreadCosts(part, 0.0, cache / ranks, 0.0, network, 0.0)
    is_offloaded = spread == "offload"
    if ranks == 1 and not is_offloaded:
        return SpreadCosts(weights, 0.0, cache, 0.0, 0.0, 0.0)
    root = size.root - sum(size.ends)
    gathered = itemsize * (find_gathered_peak(size, is_offloaded) + (0 if is_offloaded else root))
    moved = weights + (itemsize * root if is_offloaded else 0)
    network, shard = ring_bytes("all-gather", moved, ranks), weights / ranks
    if is_offloaded:
        return SpreadCosts(0.0, gathered, cache, shard, network, moved / ranks)
    return SpreadCosts(shard, gathered, cache, 0.0, network, 0.0)


def find_gathered_peak(size: ModelSize, is_offloaded: bool) -> int:
    """Return the most parameters that FSDP has all-gathered at a time, in parameters and flat buffers.

    Follow one forward pass of `units.py`. One rank needs no flat buffers, but has a second copy of a parameter while it
    copies it from CPU memory.
    """
    peak = 2 * max(size.root - sum(size.ends), *size.ends, 0)
    copied = 0  # the buffer that FSDP frees when the next unit has been copied
    for layer in size.units:
        for number, unit in enumerate(layer):
            rest = layer[0] if number else 0  # of the layer
            peak = max(peak, rest + 2 * unit + copied)
            copied = 0 if is_offloaded else unit
    return peak


def choose_spread(
    size: ModelSize, ranks: int, slots: int, tokens: int, itemsize: int, device_bytes: float | None
) -> tuple[Spread | None, str]:
    """Return the way to spread a model, and the reason. None: no way fits.

    Tensor parallelism moves only activations, so it comes first; fsdp and offload move all weights in every round.

    Args:
        device_bytes: memory of one device; None: unknown, everything fits.
    """
    limit = float("inf") if device_bytes is None else RESERVE * device_bytes
    needs = {each: predict(each, size, ranks, slots, tokens, itemsize).memory for each in SPREADS}
    if ranks == 1 and needs["fsdp"] <= limit:
        return "fsdp", "the full model fits on one rank"
    divides = size.kv_heads > 0 and size.kv_heads % ranks == 0
    if divides and ranks > 1 and needs["tp"] <= limit:
        return "tp", "weights stay where they are, and only activations are communicated"
    why_not = "it does not fit with tp" if divides else f"tp needs a number of ranks that divides {size.kv_heads} heads"
    why_not = why_not if size.kv_heads else "tp does not support this model"
    if ranks > 1 and needs["fsdp"] <= limit:
        return "fsdp", why_not
    if needs["offload"] <= limit:
        return "offload", f"a device has {limit / 1e9:,.1f} GB for it, and its share of the model does not fit"
    need = f"it needs {min(needs.values()) / 1e9:,.1f} GB per rank, and a device has {limit / 1e9:,.1f} GB for it"
    return None, f"{need}: use more ranks, a smaller --batch_size or a smaller --tokens"


def describe(spread: Spread, costs: SpreadCosts) -> str:
    """Return one line about the memory and the communication of a way."""
    parts = [f"{costs.weights / 1e6:,.1f} MB of weights"]
    if costs.all_gathered:
        parts.append(f"{costs.all_gathered / 1e6:,.1f} MB of all-gathered layers")
    parts.append(f"{costs.cache / 1e6:,.1f} MB of keys and values")
    host = f" (and {costs.host / 1e6:,.1f} MB of weights in CPU memory)" if costs.host else ""
    copies = f", {costs.copied / 1e6:,.1f} MB copied from CPU memory" if costs.copied else ""
    volume = f"communication per round {costs.network / 1e6:,.3f} MB{copies}"
    return f"{spread}: memory per rank {' + '.join(parts)}{host}; {volume}"
