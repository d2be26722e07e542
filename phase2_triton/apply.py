"""Let a model compute with Triton kernels. The model's own code does not change.

    model = GPT(model_args)
    for line in apply_kernels(model, "layernorm,loss"):
        print(line)

Each module that uses a kernel becomes an instance of a subclass whose `forward` calls the kernel; `print(model)` shows
these classes. Parameter names and the state dict stay the same, so any checkpoint opens with and without kernels. If
Triton cannot run on the device, the model does not change, and one line gives the reason.
"""

import dataclasses
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
        """Check that the attention kernel supports the heads' size.

        Raises:
            ConfigError: the heads are too wide.
        """
        head_size, names = self.n_embd // self.n_head, parse_kernels(self.select_kernels("cuda"))
        if "attention" in names and head_size > MAX_HEAD_SIZE:
            raise ConfigError(
                f"--n_embd={self.n_embd} --n_head={self.n_head} makes heads of {head_size} channels, and the attention "
                f"kernel supports up to {MAX_HEAD_SIZE}: use more heads, or --kernels without attention"
            )

    def select_kernels(self, device_type: str) -> str:
        """Return the kernels that `--kernels` means on a device: see `select_kernels`."""
        return select_kernels(self.kernels, device_type, self.compile, self.n_embd // self.n_head)


def select_kernels(kernels: str, device_type: str, is_compiled: bool, head_size: int) -> str:
    """Return the kernels that a value of `--kernels` means on a device. Only `auto` depends on the device.

    `auto` selects the kernels that are expected to be faster than torch's operations. docs/choosing.md gives the
    reasons and a measurement.

    Args:
        kernels: the value of the flag.
        device_type: the type of the device that the model runs on.
        is_compiled: whether torch.compile compiles the model.
        head_size: channels of an attention head. auto leaves out attention if its kernel does not support them, or if
            the GPU has too little shared memory for it.

    Returns:
        none, all (which phases 1 and 3 call triton) or a list of kernels.
    """
    word = kernels.strip().lower()
    if word != "auto":
        return "all" if word == "triton" else kernels
    if device_type != "cuda":
        return "none"
    names = AUTO_COMPILED if is_compiled else AUTO_EAGER
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE
    has_attention = head_size <= MAX_HEAD_SIZE and not is_old
    return ",".join(name for name in names if name != "attention" or has_attention)


def parse_kernels(
    kernels: str, valid_values: str = f"all, none, auto, or some of {','.join(KERNELS)}"
) -> frozenset[str]:
    """Parse a value of `--kernels`: `all`, `none` or a list such as `layernorm,loss`. For auto, see `select_kernels`.

    Args:
        kernels: the value of the flag, after `select_kernels`.
        valid_values: the values that the error message suggests.

    Returns:
        The names of the kernels.

    Raises:
        ConfigError: a name is not a kernel.
    """
    names = [name.strip().lower() for name in kernels.split(",")]
    if names in (["all"], ["none"]):
        return frozenset(KERNELS if names == ["all"] else ())
    for name in names:
        if name not in KERNELS:
            suggestion = did_you_mean(name, [*KERNELS])
            advice = suggestion or f": use {valid_values}"
            raise ConfigError(f"--kernels={kernels}: there is no kernel {name!r}{advice}")
    return frozenset(names)


def resolve_kernels(config: TrainConfig, kernels: str, device_type: str) -> str:
    """Return the kernels of a phase that shards its model or optimizer, in the format of `apply_kernels`.

    Args:
        config: its `n_embd`, `n_head` and `compile` are used.
        kernels: a value of `--kernels`. triton and all mean all that these phases support.
        device_type: the type of the device that the model runs on.

    Raises:
        ConfigError: a name is unknown, or it is adamw, whose kernel cannot update shards; or the heads are too wide.
    """
    kernels, supported = kernels.strip().lower(), ",".join(name for name in KERNELS if name != "adamw")
    names = select_kernels(kernels, device_type, config.compile, config.n_embd // config.n_head)
    parsed = parse_kernels(names, f"triton, none, auto, or some of {supported}")
    if kernels in ADAPTING:
        parsed -= {"adamw"}
    if "adamw" in parsed:
        raise ConfigError(f"--kernels={kernels}: AdamW's kernel does not update shards: use --kernels={supported}")
    resolved = ",".join(sorted(parsed)) or "none"
    TritonConfig(n_embd=config.n_embd, n_head=config.n_head, kernels=resolved).check(1)
    return resolved


def apply_resolved_kernels(model: GPT, config: TrainConfig, kernels: str, run: Runtime) -> str:
    """Change a model so that it computes with the kernels of `resolve_kernels`; print the changes, return the names."""
    shaped = dataclasses.replace(config, n_head=model.config.n_head, n_embd=model.config.n_embd)
    resolved = resolve_kernels(shaped, kernels, run.device.type)
    if kernels.lower() != "none":
        requested = kernels if kernels.strip().lower() in ADAPTING else resolved
        for line in apply_kernels(model, requested, run.device.type, config.compile):
            run.print0(line)
    return resolved


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


class ModelError(ConfigError, KernelError):
    """A model that a kernel would change."""


def check_model(model: GPT) -> None:
    """Check that the model is one of this project's, without kernels.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(model, GPT):
        raise ModelError(
            f"apply_kernels: the model is a {type(model).__name__}: pass a GPT, before it is compiled or wrapped"
        )
    for name, module in model.named_modules():
        if isinstance(module, (KernelLayerNorm, KernelAttention, KernelMLP, KernelBlock, KernelModel)):
            raise ModelError(f"apply_kernels: {name} already has a kernel: name all kernels in one call")


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
        ConfigError: a name is not a kernel.
        ModelError: the model is not one of this project's, or a kernel of a list does not compute what the model does.
            `all` and `auto` leave out such a kernel.
    """
    check_model(model)
    device_type = device or next(model.parameters()).device.type
    head_size = model.config.n_embd // model.config.n_head
    names = parse_kernels(select_kernels(kernels, device_type, is_compiled, head_size))
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
    has_kernel = config.optimizer == "adamw" and "adamw" in parse_kernels(config.select_kernels(device_type))
    if not has_kernel or unavailable_reason(device_type):
        return configure_optimizer(model, config)
    groups = param_groups(model, config.weight_decay)
    return TritonAdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
