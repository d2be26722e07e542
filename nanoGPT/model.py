"""GPT-2, with the parameter names of nanoGPT and of Hugging Face's GPT-2.

The architecture is a Transformer decoder with LayerNorm before each sublayer (Radford et al. 2019). Shape comments use
`B` sequences, `T` tokens per sequence, `C` channels, `nh` heads of `hs` = C / nh channels, and `V` vocabulary entries.
"""

import hashlib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoGPT.errors import ConfigError, did_you_mean


class ModelConfig(ABC):
    """The shape of a model, and what trainers need to know of it. Each model extends this class with a dataclass.

    Attributes:
        model: the name of the model, a value of `--model`.
        BLOCKS: the path of the blocks, an nn.ModuleList.
        POSITIONS: the parameter with a row for each position; None if the model has none.
        RESIDUAL: the ends of the names of the projections into the residual stream.
        VOCABULARY: the parameters with a row for each token id.
    """

    model: str
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    dropout: float

    BLOCKS: ClassVar[str]
    POSITIONS: ClassVar[str | None] = None
    RESIDUAL: ClassVar[tuple[str, ...]]
    VOCABULARY: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]  # of the dataclass that extends this class

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Create a shape from a mapping; ignore keys that are not fields."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})

    @abstractmethod
    def create_model(self) -> "GPT":
        """Return a model of this shape. Its weights have no meaning yet."""

    def create_on_meta(self) -> "GPT":
        """Return a model of this shape on the meta device, where tensors need no memory."""
        with torch.device("meta"):
            return self.create_model()

    def count_params(self) -> int:
        """Return the number of parameters. A tied parameter counts once."""
        return sum(param.numel() for param in self.create_on_meta().parameters())

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of a weight: smaller for RESIDUAL, as in GPT-2."""
        return 0.02 / math.sqrt(2 * self.n_layer) if name.endswith(self.RESIDUAL) else 0.02

    @abstractmethod
    def flops_per_token(self) -> int:
        """Return the FLOPs of forward and backward per token."""


@dataclass
class GPTConfig(ModelConfig):
    """The shape of a GPT-2. The first seven fields are nanoGPT's `model_args`."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    bias: bool = True
    vocab_size: int = 50304
    dropout: float = 0.0
    gelu: Literal["none", "tanh"] = (
        "none"  # "none": exact, as in nanoGPT; "tanh": the approximation that OpenAI used in training
    )

    model: Literal["gpt2"] = "gpt2"

    BLOCKS = "transformer.h"
    POSITIONS = "transformer.wpe.weight"
    RESIDUAL = ("c_proj.weight",)
    VOCABULARY = ("transformer.wte.weight",)

    def create_model(self) -> "GPT":
        return GPT(self)

    def flops_per_token(self) -> int:
        """Return the FLOPs of forward and backward per token: 6N + 12 L C T (PaLM, appendix B).

        N is the number of parameters without the position embedding, L is n_layer, and T is block_size.
        """
        params = self.count_params() - self.block_size * self.n_embd
        return 6 * params + 12 * self.n_layer * self.n_embd * self.block_size


Cache = Any  # the keys and values of earlier tokens, for one layer: see KVCache in nanoGPT/sample.py


class Attention(nn.Module):
    """The part of attention that all models share. Their attention modules extend this class."""

    dropout: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None) -> Tensor:
        """Return softmax(q k' / sqrt(hs)) v, (B, nh, T, hs), where each query attends to the keys of earlier tokens.

        Args:
            q: (B, nh, T, hs).
            k, v: (B, nh, T, hs), or those of all tokens so far if there is a cache.
            cache: decides with its mask which keys a query attends to, if it has one.
        """
        mask = cache.mask if cache else None
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and q.size(2) > 1,  # with a cache there is one query, which attends to every key
        )


class CausalSelfAttention(Attention):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.block_size, self.dropout = config.n_head, config.block_size, config.dropout

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        q = q.view(B, T, -1, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs); nh: the heads of this rank
        k = k.view(B, T, -1, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, -1, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.extend(k, v, self.block_size)  # (B, nh, T so far, hs)
        y = self.attend(q, k, v, cache)  # (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, -1)  # concatenate the heads
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate=config.gelu)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2. `lm_head.weight` and `transformer.wte.weight` are tied: one parameter with two names.

    Other models extend this class. They replace `__init__`, `embed` and `normalize`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config: ModelConfig = config
        wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.transformer = nn.ModuleDict(
            {
                "wte": wte,
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.drop = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None, caches: list[Cache] | None = None) -> Tensor:
        """Compute the loss, or without targets the logits of the last token.

        With targets, it returns only the loss. If it returned the logits too, torch.compile would pass a gradient of
        zeros of their size to the backward pass.

        Args:
            idx: int64 token ids, (B, T), T at most block_size.
            targets: the next token for each position, (B, T); the loss ignores positions with -1.
            caches: one per layer when generating; idx then contains only the tokens that are not cached yet.

        Returns:
            With targets the mean cross-entropy in nats, a scalar, computed in fp32. Without targets the logits,
            (B, 1, V).
        """
        x = self.compute_features(idx, caches)  # (B, T, C)
        return self.compute_logits(x[:, [-1]]) if targets is None else self.compute_loss(x, targets)

    def compute_features(self, idx: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Return the output of the last block, (B, T, C), for (B, T) token ids."""
        tokens = idx.size(1) + (caches[0].length if caches else 0)
        if tokens > self.config.block_size:
            raise ValueError(f"{tokens} tokens do not fit into block_size {self.config.block_size}")
        x = self.drop(self.embed(idx, caches[0].first_position if caches else 0))  # (B, T, C)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return x

    def embed(self, idx: Tensor, first_position: int | Tensor) -> Tensor:
        """Embed (B, T) token ids and their positions, which begin at `first_position`: (B, T, C)."""
        positions = first_position + torch.arange(idx.size(1), device=idx.device)  # (T,), or (B, T)
        return self.transformer["wte"](idx) + self.transformer["wpe"](positions)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) for (B, T, C) outputs of the last block."""
        return self.lm_head(self.normalize(x))

    def normalize(self, x: Tensor) -> Tensor:
        """Return the input of the head, (B, T, C), for (B, T, C) outputs of the last block."""
        return self.transformer["ln_f"](x)

    def compute_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of (B, T, C) outputs of the last block with (B, T) targets."""
        logits = self.compute_logits(x)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def compile_by_block(self) -> None:
        """Compile the embedding, each block, and the head with the loss, as separate graphs.

        Between these graphs, hooks can start collectives and wait for them. One graph for the full model would return
        all gradients at its end. All blocks share the compiled code of one block.
        """
        for block in self.blocks:
            block.compile()
        self.embed = torch.compile(self.embed)  # type: ignore[method-assign]
        self.compute_loss = torch.compile(self.compute_loss)  # type: ignore[method-assign]

    @property
    def blocks(self) -> nn.ModuleList:
        blocks = self.get_submodule(self.config.BLOCKS)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize the parameters as in GPT-2.

        The values depend on the seed, the name of the parameter and its shape, but not on the order of the parameters,
        the device or the number of ranks.
        """
        for name, param in self.named_parameters():
            draw_initial_rows(param, name, param.shape, self.config.initial_std(name), seed)


Shape = GPTConfig

MAX_CHUNK_ELEMENTS = 2**16  # at most this many elements (or one row) per generator


def draw_initial_rows(out: Tensor, name: str, shape: torch.Size, std: float, seed: int, begin: int = 0) -> None:
    """Fill `out` with the initial values of consecutive rows of a parameter.

    Each chunk of rows has its own CPU generator, keyed by (seed, parameter name, chunk). A rank therefore draws only
    the chunks that contain its rows, and all ranks draw the same values. One chunk is in memory at a time.

    Args:
        out: rows of the parameter, or all of it, on any device.
        name, shape: of the full parameter.
        std: standard deviation of the values. A vector is a bias, 0, or the gain of a norm, 1.
        seed: of the run.
        begin: the row of the parameter that `out` begins with.
    """
    if len(shape) == 1:
        out.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    size, end = max(1, MAX_CHUNK_ELEMENTS // shape[1:].numel()), begin + len(out)  # rows of a chunk; the last row + 1
    for chunk in range(begin // size, -(-end // size)):
        first, last = chunk * size, min((chunk + 1) * size, shape[0])
        text = f"{seed}/{name}/{chunk}" if chunk else f"{seed}/{name}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        rows = torch.empty(last - first, *shape[1:], device="cpu")
        rows.normal_(std=std, generator=torch.Generator().manual_seed(key))
        part = slice(max(first, begin), min(last, end))
        out[part.start - begin : part.stop - begin].copy_(rows[part.start - first : part.stop - first])
        del rows  # before the next chunk is allocated


def check_buffers(model: nn.Module) -> None:
    """Check that checkpoints, which have only parameters, lose nothing of a model.

    Raises:
        ConfigError: it has a persistent buffer.
    """
    if buffers := model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        raise ConfigError(f"a checkpoint would not have {min(buffers)}: register buffers with persistent=False")


# ---- the models that `--model` names

MODULES = {"gpt2": "nanoGPT.model", "llama": "nanoGPT.options.llama"}


def find_architecture(name: str) -> ModuleType:
    """Return the module of a model. Its class `Shape` is that of the model's shape.

    If it has a dataclass `Flags`, its fields are flags of the trainers. The module is imported only if a run names it.

    Args:
        name: a name in MODULES, or that of a module, such as my_company.mamba.

    Raises:
        ConfigError: there is no such module, or it has no class Shape.
    """
    known = [*MODULES]
    try:
        module = importlib.import_module(MODULES.get(name, name))
    except Exception as error:  # importing a user's module can raise any error
        is_unknown = not isinstance(error, ModuleNotFoundError) or error.name in (name, name.partition(".")[0])
        hint = ": correct the module, or install what it needs"
        if is_unknown and not isinstance(error, SyntaxError):
            hint = did_you_mean(name, known) or f": use {' or '.join(known)}, or add its directory to PYTHONPATH"
        raise ConfigError(f"--model={name} cannot be imported ({type(error).__name__}: {error}){hint}") from None
    shape = getattr(module, "Shape", None)
    if not (isinstance(shape, type) and issubclass(shape, ModelConfig)):
        raise ConfigError(f"--model={name} has no class Shape, so it is no model: use {' or '.join(known)}")
    if getattr(shape, "model", None) != name:
        raise ConfigError(
            f'--model={name}: the class Shape has another name: write `model: Literal["{name}"] = "{name}"`'
        )
    return module


def make_shape(values: Mapping[str, Any]) -> ModelConfig:
    """Return the shape of the model that a configuration of a run or the model_args of a checkpoint describe.

    Keys that are not fields of the shape are ignored. A checkpoint that names no model is of a GPT-2.
    """
    shape: type[ModelConfig] = find_architecture(values.get("model", "gpt2")).Shape
    return shape.from_dict(dict(values))
