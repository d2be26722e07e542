"""Llama, with the parameter names of Hugging Face's Llama: `--model=llama`.

Compared with GPT-2, blocks have RMSNorm instead of LayerNorm, rotary instead of learned positions, several query heads
for each head of keys and values (grouped-query attention), and SwiGLU instead of GELU; no layer has a bias (Touvron et
al. 2023). Shape comments use the letters of `model.py`, `nkv` heads of keys and values, and `I` channels of the MLP.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoGPT import observers
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, Attention, Cache, ModelConfig


@dataclass
class Flags(observers.Flags):
    """The shape of a Llama, in addition to the flags of GPT-2."""

    n_kv_head: int | None = None
    """heads of keys and values, a divisor of n_head; None: n_head"""
    intermediate_size: int | None = None
    """channels inside the MLP; None: 8/3 of n_embd, rounded up to a multiple of 64"""
    rope_theta: float = 10000.0
    """base of the wavelengths of rotary positions"""
    norm_eps: float = 1e-5
    """added to the mean square in RMSNorm"""
    tie_embeddings: bool = False
    """use one matrix for the embedding and the head"""

    def check(self, world_size: int) -> None:
        """Check the shape.

        Raises:
            ConfigError: it is not that of a Llama.
        """
        config: Any = self  # of a trainer, with these flags
        kv_heads = config.n_head if config.n_kv_head is None else config.n_kv_head
        if kv_heads < 1 or config.n_head % kv_heads:
            raise ConfigError(f"--n_kv_head={kv_heads} does not divide --n_head={config.n_head}: use a divisor of it")
        if config.n_embd // config.n_head % 2:
            raise ConfigError(
                f"--n_embd={config.n_embd} --n_head={config.n_head} makes heads of {config.n_embd // config.n_head} "
                "channels, and rotary positions need an even number: change one of them"
            )
        for name in ("intermediate_size", "rope_theta", "norm_eps"):
            if (value := getattr(config, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name}={value} is out of range: use a finite value above 0")
        if config.bias:
            raise ConfigError("--bias=True has no effect with --model=llama, which has no biases: remove it")


@dataclass
class LlamaConfig(ModelConfig):
    """The shape of a Llama. n_kv_head and intermediate_size are replaced by their defaults if they are None."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    n_kv_head: int | None = None
    intermediate_size: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    model: Literal["llama"] = "llama"

    BLOCKS = "model.layers"
    RESIDUAL = ("o_proj.weight", "down_proj.weight")
    VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")

    def __post_init__(self) -> None:
        self.n_kv_head = self.n_kv_head or self.n_head
        self.intermediate_size = self.intermediate_size or 64 * math.ceil(8 * self.n_embd / 3 / 64)

    def create_model(self) -> "Llama":
        return Llama(self)

    def flops_per_token(self) -> int:
        """Return the FLOPs of forward and backward per token: 6N + 12 L C T, with N as for GPT-2.

        N is the number of parameters in matrix products, so an embedding that is not tied to the head does not count.
        """
        params = self.count_params() - (0 if self.tie_embeddings else self.vocab_size * self.n_embd)
        return 6 * params + 12 * self.n_layer * self.n_embd * self.block_size


Shape = LlamaConfig


class HuggingFace:
    """How `transformers` describes a Llama. It uses the same names and layouts of parameters."""

    # Fields that change the model, with the only values that this model supports.
    ALLOWED: dict[str, list[Any]] = {
        "hidden_act": ["silu"],
        "attention_bias": [False],
        "mlp_bias": [False],
        "pretraining_tp": [1],
        "rope_type": ["default"],
    }

    @staticmethod
    def read_fields(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return the fields of a config.json with the defaults of `transformers`, and the values that are allowed."""
        scaling = fields.get("rope_scaling") or {}  # takes precedence, as in `transformers`
        scaling = {"rope_type": scaling["type"], **scaling} if "type" in scaling else scaling
        rope = {"rope_theta": fields.get("rope_theta", 10000.0), "rope_type": "default"}
        rope |= {**(fields.get("rope_parameters") or {}), **scaling}
        defaults = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
        fields = {**defaults, "max_position_embeddings": 2048, **fields, **rope}
        head_sizes = [None, fields["hidden_size"] // fields["num_attention_heads"]]
        return {"head_dim": None, **fields}, {**HuggingFace.ALLOWED, "head_dim": head_sizes}

    @staticmethod
    def read_shape(fields: dict[str, Any]) -> LlamaConfig:
        """Return the shape that the fields of `read_fields` describe."""
        return LlamaConfig(
            fields["num_hidden_layers"],
            fields["num_attention_heads"],
            fields["hidden_size"],
            fields["max_position_embeddings"],
            fields["vocab_size"],
            fields.get("num_key_value_heads"),
            fields["intermediate_size"],
            fields["rope_theta"],
            fields.get("rms_norm_eps", 1e-6),
            fields.get("tie_word_embeddings", False),
        )

    @staticmethod
    def list_parameters(shape: LlamaConfig) -> list[str]:
        """Return the names of all parameters. The code of the model may have been changed, so they are listed here."""
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        parts = [
            *attention,
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        ]
        layers = [f"model.layers.{i}.{part}.weight" for i in range(shape.n_layer) for part in parts]
        head = [] if shape.tie_embeddings else ["lm_head.weight"]
        return ["model.embed_tokens.weight", *layers, "model.norm.weight", *head]

    @staticmethod
    def write_fields(shape: LlamaConfig) -> dict[str, Any]:
        """Return the fields of a config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.n_embd,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.n_layer,
            "num_attention_heads": shape.n_head,
            "num_key_value_heads": shape.n_kv_head,
            "max_position_embeddings": shape.block_size,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,  # of transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "hidden_act": "silu",
            "attention_dropout": shape.dropout,
            "tie_word_embeddings": shape.tie_embeddings,
        }


def compute_rotation(positions: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of rotary positions (Su et al. 2021).

    The two numbers i and i + hs/2 of a head are the coordinates of a point, which is rotated by p / theta^(2i/hs).

    Args:
        positions: p, (T,) or (B, T).
        head_size: hs.
        theta: the base of the wavelengths.

    Returns:
        Two fp32 tensors, (T, hs/2) or (B, 1, T, hs/2).
    """
    halves = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions[..., None] / theta**halves
    angles = angles[:, None] if positions.dim() == 2 else angles
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the queries or keys of all heads, (B, nh, T, hs)."""
    first, second = x.float().chunk(2, dim=-1)  # (B, nh, T, hs/2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class LlamaAttention(Attention):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        C, self.head_size = config.n_embd, config.n_embd // config.n_head
        kv_heads = config.n_kv_head or config.n_head
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(C, kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(C, C, bias=False)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.rope_theta, self.block_size, self.dropout = config.rope_theta, config.block_size, config.dropout
        self.queries_per_key = config.n_head // kv_heads

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        B, T, _ = x.size()
        q = self.q_proj(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh, T, hs); nh: the heads of this rank
        k = self.k_proj(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nkv, T, hs)
        v = self.v_proj(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nkv, T, hs)
        positions = (cache.first_position if cache else 0) + torch.arange(T, device=x.device)  # (T,), or (B, T)
        cos, sin = compute_rotation(positions, self.head_size, self.rope_theta)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v, self.block_size)  # (B, nkv, T so far, hs)
        # Every backend of attention supports as many heads of keys as of queries; not every one supports fewer.
        k, v = (heads.repeat_interleave(self.queries_per_key, dim=1) for heads in (k, v))
        y = self.attend(q, k, v, cache)  # (B, nh, T, hs)
        return self.resid_dropout(self.o_proj(y.transpose(1, 2).reshape(B, T, -1)))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.intermediate_size or config.n_embd
        self.gate_proj = nn.Linear(config.n_embd, hidden, bias=False)
        self.up_proj = nn.Linear(config.n_embd, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))  # I channels inside


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(GPT):
    """Llama. With `tie_embeddings`, `lm_head.weight` and `model.embed_tokens.weight` are one parameter."""

    def __init__(self, config: LlamaConfig) -> None:
        nn.Module.__init__(self)  # without the modules of GPT-2
        self.config = config
        embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": embedding,
                "layers": nn.ModuleList([LlamaBlock(config) for _ in range(config.n_layer)]),
                "norm": nn.RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.drop = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = embedding.weight

    def embed(self, idx: Tensor, first_position: int | Tensor) -> Tensor:
        """Embed (B, T) token ids: (B, T, C). Attention adds the positions."""
        return self.model["embed_tokens"](idx)

    def normalize(self, x: Tensor) -> Tensor:
        """Return the input of the head, (B, T, C), for (B, T, C) outputs of the last block."""
        return self.model["norm"](x)
