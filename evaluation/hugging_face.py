"""Causal language models of Hugging Face, dense or mixture of experts, spread over the ranks (extra `web`).

The model is built with its parameters on the meta device, which have no memory, and its buffers on the CPU: those of
rotary embeddings are computed, and no file has them. Each rank then reads its part of every parameter from the
safetensors files: with fsdp and offload its rows, with tp what the plan of transformers says. A rank never stores more
than its part.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from evaluation.costs import ModelSize, Spread
from evaluation.generation import LanguageModel
from evaluation.identity import digest_files
from evaluation.prompts import TextCodec
from evaluation.tensor_parallel import check_heads
from evaluation.units import find_ends, find_units, shard_for_generation
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from phase3_fsdp.fsdp import put_parameters_on_meta

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from evaluation.hf_codec import HfCodec
    from evaluation.hf_files import fill_parts
    from evaluation.hf_model import HfModel
    from evaluation.hf_tensor_parallel import (
        Part,
        count_divided,
        find_indivisible,
        is_supported,
        parallelize_by_plan,
    )
except ImportError:
    raise ConfigError(
        "models of Hugging Face other than GPT-2 need the extra `web`: run `.venv/bin/pip install -e '.[web]'`"
    ) from None


CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of the names of their classes
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


class OpenedHf:
    """A Hugging Face model whose weights have not been read. See `OpenedModel`.

    Args:
        folder: with config.json, safetensors files and a tokenizer.

    Raises:
        ConfigError: transformers cannot read it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self.size = measure_hf(self._build(torch.float32), self.config)
        except Exception as error:
            raise ConfigError(
                f"{folder} is not a causal language model that transformers can build ({str(error)[:200]}): use "
                "another directory"
            ) from None
        check_supported(self.config, folder)
        self.name, self.weights = str(folder), digest_files(str(folder))
        self.codec: TextCodec = HfCodec(folder, self.config)
        self.context = find_context(self.config)

    def load(self, spread: Spread, run: Runtime) -> LanguageModel:
        """Read this rank's part of the weights. Collective.

        Raises:
            ConfigError: a file is damaged, or lacks a parameter.
        """
        model = self._build(run.dtype)
        parts: dict[str, Part] = {}
        if run.world_size > 1 and spread == "tp":
            check_plan(model, self.folder, self.size, run.world_size)
            parts = parallelize_by_plan(model, run)
        elif run.world_size > 1 or spread == "offload":
            shard_for_generation(model, list(find_layers(model)), spread == "offload", run)
        try:
            fill_parts(model, self.folder, torch.device("cpu") if spread == "offload" else run.device, parts)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"the safetensors files of {self.folder} cannot be read ({str(error)[:200]}): copy the files again",
                on_one_rank=True,
            ) from None
        move_buffers(model, run.device)
        return HfModel(model.eval(), self.codec.ids, run.device)

    def _build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model with its parameters on the meta device."""
        with put_parameters_on_meta(), no_init_weights():  # a parameter that is never written needs no memory
            model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=dtype).requires_grad_(False)
        model.tie_weights()  # type: ignore[operator]
        return model


def find_context(config: Any) -> int:
    """Return the largest number of tokens of a sequence.

    With longrope, it is `original_max_position_embeddings`. If one sequence of a batch is longer, `transformers` uses
    other positions for all of them, so answers would depend on the batch.
    """
    rope = {"rope_type": "default", **(getattr(config, "rope_parameters", None) or {})}
    context = int(getattr(config, "max_position_embeddings", 2048))
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return min(context, int(original)) if rope["rope_type"] == "longrope" and original else context


def check_supported(config: Any, folder: Path) -> None:
    """Check that the attention and the files of a model are of a kind that this program supports.

    Raises:
        ConfigError: they are not, or the weights are those of another kind of model, such as BERT.
    """
    names = getattr(config, "architectures", None) or []
    if names and not any(name.endswith(CAUSAL) for name in names):
        raise ConfigError(f"{folder} is a {names[0]}, not a causal language model: use another model")
    unknown = {*(getattr(config, "layer_types", None) or [])} - SUPPORTED_LAYERS
    if getattr(config, "alibi", False) or config.model_type == "bloom":
        unknown.add("ALiBi attention")
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if method not in (None, "mxfp4"):
        unknown.add(f"{method} weights")
    if unknown:
        raise ConfigError(f"{folder} has {min(unknown)}, which this program does not support: use another model")


def find_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model: its ModuleList with most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers to shard: use another model")
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def measure_hf(model: nn.Module, config: Any) -> ModelSize:
    """Return the sizes of a model on the meta device."""
    layers = tuple(sum(p.numel() for p in layer.parameters()) for layer in find_layers(model))
    params = sum(p.numel() for p in model.parameters())
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    params_of_ends = [sum(p.numel() for p in end.parameters()) for end in find_ends(model)]
    return ModelSize(
        layers,
        params - sum(layers),
        params - count_divided(model),
        config.hidden_size,
        kv_heads * head_size,
        kv_heads if is_supported(model) else 0,
        config.vocab_size,
        tuple(tuple(find_units(layer).values()) for layer in find_layers(model)),
        tuple(params_of_ends),
    )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to a device; its parameters stay where they are."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def check_plan(model: nn.Module, folder: Path, size: ModelSize, ranks: int) -> None:
    """Check that a model can be divided by tensor parallelism.

    Raises:
        ConfigError: it has no plan that this program supports, or the ranks do not divide its heads or channels.
    """
    if not size.kv_heads:
        raise ConfigError(f"{folder} has no tensor-parallel plan that this program supports: use --spread=fsdp")
    check_heads(size.kv_heads, ranks)
    if name := find_indivisible(model, ranks):
        raise ConfigError(
            f"--spread=tp cannot divide {name} of the model among {ranks} ranks: use --spread=fsdp, or another number "
            "of ranks"
        )
