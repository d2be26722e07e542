"""Let a model compute with Triton kernels. The model's own code does not change.

    model = GPT(model_args)
    for line in apply_kernels(model, "layernorm,loss"):
        print(line)

Each module that uses a kernel becomes an instance of a subclass whose `forward` calls the kernel; `print(model)` shows
these classes. Parameter names and the state dict stay the same, so any checkpoint opens with and without kernels. If
Triton cannot run on the device, the model does not change, and one line gives the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoGPT.distributed.algorithms import AMPERE
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.model import GPT, MLP, Attention, Block, Cache
from nanoGPT.optim import configure_optimizer, param_groups
from nanoGPT.train_config import TrainConfig
from phase2_triton.changes import find_change
from phase2_triton.kernels.adamw import TritonAdamW
from phase2_triton.kernels.attention import causal_attention
from phase2_triton.kernels.checks import MAX_HEAD_SIZE
from phase2_triton.kernels.core import KernelError, is_interpreted, unavailable_reason
from phase2_triton.kernels.embedding import embedding
from phase2_triton.kernels.gelu import bias_gelu
from phase2_triton.kernels.layernorm import add_layer_norm, layer_norm
from phase2_triton.kernels.linear_cross_entropy import linear_cross_entropy

KERNELS = ("adamw", "attention", "embedding", "gelu", "layernorm", "loss")
ADAPTING = ("all", "auto", "triton")  # values of --kernels that leave out what a phase or a model does not support
# Inductor fuses what most other kernels fuse, SDPA has its own attention, and torch's fused AdamW moves the same bytes.
AUTO_COMPILED = ("loss",)
AUTO_EAGER = ("attention", "embedding", "gelu", "layernorm", "loss")


class ModelError(ConfigError, KernelError):
    """A model that a kernel would change, or that it does not support."""


@dataclass
class TritonConfig(TrainConfig):
    """GPT-2 training with Triton kernels. On a CPU the kernels are interpreted, so the default model is small."""

    GPU_DEFAULTS = {**TrainConfig.GPU_DEFAULTS, "kernels": "auto"}

    kernels: str = "all"
    """kernels to use: all, none, auto, or a list such as layernorm,loss from
    adamw,attention,embedding,gelu,layernorm,loss. The default on a GPU is auto: loss with --compile=True, else all but
    adamw; on a CPU auto selects none"""
    batch_size: int = 8
    """sequences per micro-batch"""
    block_size: int = 32
    """tokens per sequence"""
    n_layer: int = 2
    """number of transformer blocks"""
    n_head: int = 2
    """attention heads per block"""
    max_iters: int = 50
    """total number of optimizer steps"""
    warmup_iters: int = 15
    """steps of linear learning rate warm-up"""
    eval_interval: int = 25
    """steps between evaluations"""
    eval_iters: int = 16
    """micro-batches per evaluation, in total over all ranks"""

    def check(self, world_size: int) -> None:
        check_kernels(self, KERNELS)


def check_kernels(config: Any, supported: Sequence[str] = KERNELS[1:]) -> None:
    """Check `config.kernels`, by default for phases 1 and 3: the kernel of AdamW cannot update shards.

    Raises:
        ConfigError: as `choose_kernels`.
    """
    choose_kernels(config.kernels, "cuda", config.compile, config.n_embd // config.n_head, supported)


def choose_kernels(
    kernels: str, device_type: str, is_compiled: bool, head_size: int, supported: Sequence[str] = KERNELS
) -> frozenset[str]:
    """Return the kernels that a value of `--kernels` means on a device. Only `auto` depends on the device.

    `auto` selects the kernels that are expected to be faster than torch's operations. docs/choosing.md gives the
    reasons and a measurement.

    Args:
        kernels: the value of the flag: all (or triton), none, auto, or a list such as layernorm,loss.
        device_type: the type of the device that the model runs on.
        is_compiled: whether torch.compile compiles the model.
        head_size: channels of an attention head. auto leaves out attention if its kernel does not support them, or if
            the GPU has too little shared memory for it.
        supported: the kernels of the trainer.

    Raises:
        ConfigError: a name is not one of these kernels.
        ModelError: the heads are too wide for the kernel of attention.
    """
    word, names = kernels.strip().lower(), {*supported}
    if word == "none" or (word == "auto" and device_type != "cuda"):
        return frozenset()
    if word == "auto":
        is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE
        names = {*(AUTO_COMPILED if is_compiled else AUTO_EAGER)}
        names -= {"attention"} if is_old or head_size > MAX_HEAD_SIZE else set()
    elif word not in ADAPTING:
        names = {name.strip() for name in word.split(",")}
    for name in sorted(names - {*supported}):
        reason = "AdamW's kernel does not update shards" if name in KERNELS else f"there is no kernel {name!r}"
        advice = did_you_mean(name, [*supported]) or f": use all, none, auto, or some of {','.join(supported)}"
        raise ConfigError(f"--kernels={kernels}: {reason}{advice}")
    if "attention" in names and head_size > MAX_HEAD_SIZE:
        raise ModelError(
            f"--n_embd and --n_head make heads of {head_size} channels, and the attention kernel supports up to "
            f"{MAX_HEAD_SIZE}: use more heads, or --kernels without attention"
        )
    return frozenset(names)


class KernelLayerNorm(nn.LayerNorm):
    """The `layernorm` kernel. Under autocast its result already has the type of the next matrix product."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


class KernelAttention(Attention):
    """The `attention` kernel, for full sequences. Generation with a cache uses torch's attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None) -> Tensor:
        if cache is not None:
            return super().attend(q, k, v, cache)
        return causal_attention(q, k, v, self.dropout if self.training else 0.0)


class KernelMLP(MLP):
    """The `gelu` kernel. It also adds the bias of `c_fc`, so the matrix product writes its result only once."""

    def forward(self, x: Tensor) -> Tensor:
        h = bias_gelu(F.linear(x, self.c_fc.weight), self.c_fc.bias, self.gelu.approximate)
        return self.dropout(self.c_proj(h))


class KernelBlock(Block):
    """The `layernorm` kernel in a block: `ln_2` also adds the attention's result to the residual stream."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        norm = self.ln_2
        x, h = add_layer_norm(x, self.attn(self.ln_1(x), cache), norm.weight, norm.bias, norm.eps)
        return x + self.mlp(h)


class KernelModel(GPT):
    """The `embedding` and `loss` kernels, if they are in `kernels`. The loss kernel never stores all logits."""

    kernels: frozenset[str]

    def embed(self, idx: Tensor, first_position: int | Tensor) -> Tensor:
        if "embedding" not in self.kernels or isinstance(first_position, Tensor):
            return super().embed(idx, first_position)
        wte, wpe = self.transformer["wte"], self.transformer["wpe"]
        assert isinstance(wte, nn.Embedding) and isinstance(wpe, nn.Embedding)
        return embedding(idx, wte.weight, wpe.weight, first_position)

    def compute_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if "loss" not in self.kernels:
            return super().compute_loss(x, targets)
        return linear_cross_entropy(self.normalize(x), self.lm_head.weight, targets, ignore_index=-1)


@cache
def add_methods(name: str, bases: Any) -> Any:
    """Return a subclass of the second class with the methods of the first. Equal arguments return one class."""
    return type(name, bases, {})


KERNEL_CLASSES = (KernelLayerNorm, KernelAttention, KernelMLP, KernelBlock, KernelModel)


def has_kernels(model: nn.Module) -> bool:
    """Return whether a module of the model computes with a kernel."""
    return any(isinstance(module, KERNEL_CLASSES) for module in model.modules())


def check_model(model: GPT) -> None:
    """Check that the model is one of this project's, without kernels.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(model, GPT):
        raise ModelError(
            f"apply_kernels: the model is a {type(model).__name__}: pass a GPT, before it is compiled or wrapped"
        )
    if has_kernels(model):
        raise ModelError("apply_kernels: the model already has kernels: name all kernels in one call")


# The name of the kernel, the class of the baseline, the class that replaces it, and the description that is printed.
REPLACEMENTS: tuple[tuple[str, type[nn.Module], type[nn.Module], str], ...] = (
    ("gelu", MLP, KernelMLP, "bias + GELU between the matrix products"),
    ("layernorm", nn.LayerNorm, KernelLayerNorm, "LayerNorm"),
    ("layernorm", Block, KernelBlock, "residual add + LayerNorm"),
)


def describe_auto(names: frozenset[str], device_type: str) -> str:
    """Return a line with the kernels of the model that `auto` has selected, and the reason."""
    selected = ",".join(sorted(names)) or "none"
    if device_type != "cuda":
        reason = f"on {device_type}, kernels could only run in Triton's interpreter, which is slow"
    elif names <= set(AUTO_COMPILED):
        reason = "torch.compile fuses the other operations, or calls a faster kernel for them"
    else:
        reason = "without torch.compile, they replace separate operations; torch's AdamW is fused already"
    return f"kernels: auto selects {selected}: {reason}"


def apply_kernels(model: GPT, kernels: str = "all", device: str | None = None, is_compiled: bool = False) -> list[str]:
    """Change a model, in place, so that it computes with Triton kernels.

    Args:
        model: a plain GPT on its device, before it is compiled, wrapped or sharded.
        kernels: all, none, auto, or a list such as "layernorm,loss". `adamw` has no effect here: see
            `kernel_optimizer`.
        device: the type of the device that the model will run on; default: the device of its parameters.
        is_compiled: whether the model will be compiled. Only auto depends on it.

    Returns:
        One line for each change, or one line with the reason why nothing changed.

    Raises:
        ConfigError: as `choose_kernels`.
        ModelError: the model is not one of this project's, or a kernel of a list does not compute what the model does.
            `all` and `auto` leave out such a kernel.
    """
    check_model(model)
    device_type = device or next(model.parameters()).device.type
    head_size = model.config.n_embd // model.config.n_head
    names = choose_kernels(kernels, device_type, is_compiled, head_size)
    changes = {name: change for name in sorted(names - {"adamw"}) if (change := find_change(model, name))}
    lines, word = [], kernels.strip().lower()
    if word in ADAPTING:
        names -= changes.keys()
        lines = [describe_auto(names, device_type)] if word == "auto" else []
        lines += [f"kernels: {word} leaves out {name}, because {change}" for name, change in changes.items()]
    if not names:
        return [*lines, "kernels: none, the model uses torch's operations"]
    if reason := unavailable_reason(device_type):
        return [*lines, f"kernels: none, the model uses torch's operations: {reason}"]
    if changes and word not in ADAPTING:
        raise ModelError(
            "the kernels would not compute what the model does: "
            f"{'; '.join(f'{k}: {v}' for k, v in changes.items())}: use "
            f"--kernels={','.join(sorted(names - changes.keys())) or 'none'}"
        )
    lines += replace_modules(model, names)
    if is_interpreted():
        lines.append(
            "kernels are interpreted on the CPU, which is slow: use this for study and debugging, or --kernels=none"
        )
    return lines


def replace_modules(model: GPT, names: frozenset[str]) -> list[str]:
    """Give the modules of a model the classes that use kernels. Return one line for each change."""
    lines = []
    for name, plain_class, kernel_class, description in REPLACEMENTS:
        modules = [module for module in model.modules() if type(module) is plain_class] if name in names else []
        for module in modules:
            module.__class__ = kernel_class
        if modules:
            lines.append(f"kernels: {name}: {len(modules)} x {description}")
    if "attention" in names:
        modules = [module for module in model.modules() if isinstance(module, Attention)]
        for module in modules:
            module.__class__ = add_methods("KernelAttention", (KernelAttention, type(module)))
        lines.append(f"kernels: attention: {len(modules)} x causal flash attention")
    if names & {"embedding", "loss"}:
        model.__class__ = add_methods(f"Kernel{type(model).__name__}", (KernelModel, type(model)))
        model.kernels = names  # type: ignore[assignment]
    if "embedding" in names:
        lines.append("kernels: embedding: token + position embedding in one kernel, with a sorted backward pass")
    if "loss" in names:
        lines.append("kernels: loss: linear head + cross-entropy in chunks, without storing all logits")
    return lines


def kernel_optimizer(model: GPT, config: TritonConfig) -> torch.optim.Optimizer:
    """Return the configuration's optimizer. AdamW uses the Triton kernel if `--kernels` includes it and it can run."""
    device_type = next(model.parameters()).device.type
    names = choose_kernels(config.kernels, device_type, config.compile, config.n_embd // config.n_head)
    if config.optimizer != "adamw" or "adamw" not in names or unavailable_reason(device_type):
        return configure_optimizer(model, config)
    groups = param_groups(model, config.weight_decay)
    return TritonAdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def apply_configured_kernels(model: GPT, config: Any, run: Runtime) -> bool:
    """Change a model as `config.kernels` says, and print the changes. Return whether it now has kernels."""
    for line in apply_kernels(model, config.kernels, run.device.type, config.compile):
        run.print0(line)
    return has_kernels(model)
