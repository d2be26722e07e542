"""Put kernels into an untouched `GPT` from outside: names and state dict stay, so any checkpoint opens with or without.

    model = GPT(model_args)
    for line in apply_kernels(model, "layernorm,loss"):
        print(line)

A module that takes a kernel becomes an instance of a subclass whose `forward` calls it; `print(model)` shows which.
Without Triton, or on a device where it cannot run, the model is left as it is and one line says why.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.model import GPT, MLP, Block, CausalSelfAttention, KVCache
from nanoGPT.optim import configure_optimizer, param_groups
from nanoGPT.train_config import TrainConfig
from phase2_triton.kernels.adamw import TritonAdamW
from phase2_triton.kernels.attention import WIDEST, causal_attention
from phase2_triton.kernels.core import KernelError, interpreting, unavailable_reason
from phase2_triton.kernels.embedding import embedding
from phase2_triton.kernels.gelu import bias_gelu
from phase2_triton.kernels.layernorm import add_layer_norm, layer_norm
from phase2_triton.kernels.linear_cross_entropy import linear_cross_entropy

KERNELS = ("adamw", "attention", "embedding", "gelu", "layernorm", "loss")


@dataclass
class TritonConfig(TrainConfig):
    """GPT-2 training with Triton kernels. On a CPU, where they are interpreted, the default model is a small one."""

    kernels: str = "all"
    """all | none | some of adamw,attention,embedding,gelu,layernorm,loss"""
    block_size: int = 32
    """tokens per sequence"""
    n_layer: int = 2
    """transformer blocks"""
    n_head: int = 2
    """attention heads per block"""
    n_embd: int = 64
    """channels; a multiple of n_head"""
    learning_rate: float = 5e-3
    """peak learning rate"""
    min_lr: float = 5e-4
    """learning rate at the end of the cosine"""
    max_iters: int = 20
    """optimizer steps of the whole run"""
    warmup_iters: int = 5
    """steps of linear warm-up"""
    eval_interval: int = 10
    """steps between evaluations"""
    eval_iters: int = 16
    """micro-batches per evaluation, of all ranks together"""

    def check(self, world_size: int) -> None:
        width = self.n_embd // self.n_head
        if "attention" in parse_kernels(self.kernels) and width > WIDEST:
            raise ConfigError(
                f"--n_embd={self.n_embd} --n_head={self.n_head} makes heads of {width} channels, and the attention "
                f"kernel takes up to {WIDEST}: use more heads, or --kernels without attention"
            )


def parse_kernels(kernels: str, known: str = f"all, none, or some of {','.join(KERNELS)}") -> frozenset[str]:
    """The kernels that `all`, `none` or a list such as `layernorm,loss` names.

    Args:
        known: what to advise where a name is none.

    Raises:
        ConfigError: a name that is none of them.
    """
    names = [name.strip().lower() for name in kernels.split(",")]
    if names in (["all"], ["none"]):
        return frozenset(KERNELS if names == ["all"] else ())
    for name in names:
        if name not in KERNELS:
            close = did_you_mean(name, list(KERNELS))
            raise ConfigError(f"--kernels={kernels}: there is no kernel {name!r}{close or ': give ' + known}")
    return frozenset(names)


class KernelLayerNorm(nn.LayerNorm):
    """`layernorm`: in the type that the next product computes in."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


class KernelAttention(CausalSelfAttention):
    """`attention`: the whole context at once; a step of cached generation stays torch's."""

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        if cache is not None:
            return super().forward(x, cache)
        B, T, C = x.size()
        heads = (part.view(B, T, self.n_head, C // self.n_head) for part in self.c_attn(x).split(C, dim=2))
        q, k, v = (head.transpose(1, 2) for head in heads)  # (B, nh, T, hs) each, a view of the projection
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)  # its memory is (B, T, nh, hs)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class KernelMLP(MLP):
    """`gelu`: the first bias is added on the way, so the product writes its result once."""

    def forward(self, x: Tensor) -> Tensor:
        h = bias_gelu(F.linear(x, self.c_fc.weight), self.c_fc.bias, self.gelu.approximate)
        return self.dropout(self.c_proj(h))


class KernelBlock(Block):
    """`layernorm`: attention's result is added to the residual stream by the norm that reads it next."""

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        norm = self.ln_2
        x, h = add_layer_norm(x, self.attn(self.ln_1(x), cache), norm.weight, norm.bias, norm.eps)
        return x + self.mlp(h)


class KernelGPT(GPT):
    """`embedding` and `loss`, as far as they were chosen. With the loss kernel there are no logits to return."""

    kernels: frozenset[str]

    def embed(self, idx: Tensor, seen: int) -> Tensor:
        if "embedding" not in self.kernels:
            return super().embed(idx, seen)
        wte, wpe = self.transformer["wte"], self.transformer["wpe"]
        assert isinstance(wte, nn.Embedding) and isinstance(wpe, nn.Embedding)
        return embedding(idx, wte.weight, wpe.weight, seen)

    def head(self, x: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        if "loss" not in self.kernels:
            return super().head(x, targets)
        return None, linear_cross_entropy(x, self.lm_head.weight, targets, ignore_index=-1)


def check_untouched(model: GPT) -> None:
    """Refuse a model whose own code would be lost: kernels take the place of `forward`s that are the baseline's.

    Raises:
        KernelError: says which module is not the baseline's.
    """
    if type(model) is not GPT:
        advice = "a GPT before it is compiled, wrapped, subclassed or given kernels"
        raise KernelError(f"apply_kernels: the model is a {type(model).__name__}: give {advice}")
    for name, module in model.named_modules():
        if type(module) in (KernelLayerNorm, KernelAttention, KernelMLP, KernelBlock):
            raise KernelError(f"apply_kernels: {name} has a kernel already: name all that are wanted in one call")
        if name.rpartition(".")[2] in ("c_fc", "lm_head") and type(module) is not nn.Linear:
            raise KernelError(f"apply_kernels: {name} is a {type(module).__name__}: a kernel would pass it by")
    if model.lm_head.bias is not None:
        raise KernelError("apply_kernels: lm_head has a bias, which the loss's kernel would leave out: remove it")


REPLACED: tuple[tuple[str, type[nn.Module], type[nn.Module], str], ...] = (
    ("attention", CausalSelfAttention, KernelAttention, "causal flash attention"),
    ("gelu", MLP, KernelMLP, "bias + GELU between the products"),
    ("layernorm", nn.LayerNorm, KernelLayerNorm, "LayerNorm"),
    ("layernorm", Block, KernelBlock, "residual add + LayerNorm"),
)


def apply_kernels(model: GPT, kernels: str = "all", device: str | None = None) -> list[str]:
    """Change a model so that it computes with kernels.

    Args:
        model: an untouched GPT on its device, before it is compiled, wrapped or sharded.
        kernels: all, none, or a list such as "layernorm,loss"; `adamw` is the optimizer's: `kernel_optimizer`.
        device: the type of device on which it will run; by default the one on which its parameters are.

    Returns:
        What was changed, a line each; or one line that says why nothing was.

    Raises:
        ConfigError: a name that is no kernel.
        KernelError: a model that is not the baseline's, or has kernels already.
    """
    names = parse_kernels(kernels)
    check_untouched(model)
    if not names:
        return ["kernels: none, everything is torch's own"]
    if reason := unavailable_reason(device or next(model.parameters()).device.type):
        return [f"kernels: none, torch's own run instead: {reason}"]
    lines = []
    for name, plain, kernel, words in REPLACED:
        modules = [module for module in model.modules() if type(module) is plain] if name in names else []
        for module in modules:
            module.__class__ = kernel
        if modules:
            lines.append(f"kernels: {name}: {len(modules)} x {words}")
    if names & {"embedding", "loss"}:
        model.__class__, model.kernels = KernelGPT, names  # type: ignore[assignment]
    if "embedding" in names:
        lines.append("kernels: embedding: token + position in one pass, with a sorted backward")
    if "loss" in names:
        lines.append("kernels: loss: the head and the cross-entropy together, without holding the logits")
    if interpreting():
        lines.append("kernels are interpreted: slow, and there to be stepped through; --kernels=none turns them off")
    return lines


def kernel_optimizer(model: GPT, config: TritonConfig) -> torch.optim.Optimizer:
    """The optimizer that the configuration names; AdamW is the kernel's where that was chosen and can run."""
    device = next(model.parameters()).device
    if config.optimizer != "adamw" or "adamw" not in parse_kernels(config.kernels) or unavailable_reason(device.type):
        return configure_optimizer(model, config)
    groups = param_groups(model, config.weight_decay)
    return TritonAdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
