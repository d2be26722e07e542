"""Causal language models of Hugging Face, dense or mixture of experts, spread over the ranks (extra `web`).

The model is built with its parameters on the meta device, which have no memory, and its buffers on the CPU: those of
rotary embeddings are computed, and no file has them. Each rank then reads its part of every parameter from the
safetensors files: with fsdp and offload its rows, with tp what the plan of transformers says. A rank never stores more
than its part.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F

from nanoGPT.checkpoint.hugging_face import list_hf_files, read_hf_keys
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.errors import ConfigError
from nanoGPT.job.run_description import digest_weights
from phase3_fsdp import fsdp
from phase3_fsdp.solve.costs import PREFETCH, ModelSize, Spread
from phase3_fsdp.solve.generation import LanguageModel, SlotCache
from phase3_fsdp.solve.gpt import free_after_forward
from phase3_fsdp.solve.hf_codec import HfCodec
from phase3_fsdp.solve.hf_tensor_parallel import (
    Part,
    count_divided,
    find_indivisible,
    is_supported,
    parallelize_by_plan,
    read_part,
)
from phase3_fsdp.solve.prompts import TextCodec

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.initialization import no_init_weights
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
except ImportError:
    raise ConfigError(
        "models of Hugging Face other than GPT-2 need the extra `web`: run `.venv/bin/pip install -e '.[web]'`"
    ) from None


SCORED_ROWS = 512  # tokens whose losses are computed at a time
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


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
        return self.slots.longest + query_length, 0


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
        layers = cache.begin_token() if slot is None else cache.begin_prompt(slot)
        adapter = Cache(layers=[HfLayer(cache, layer) for layer in layers])
        return self._run(ids, cache.positions, adapter)[:, -1].float()

    def score(self, ids: Tensor, context_tokens: int) -> float:
        """Return the total loss, in nats, of the tokens of (1, T) after the first `context_tokens`."""
        first = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        logits = self._run(ids[:, :-1], first, None, keep=0)[0, context_tokens - 1 :]  # (T, V)
        chunks = zip(logits.split(SCORED_ROWS), ids[0, context_tokens:].split(SCORED_ROWS), strict=True)
        return sum(float(F.cross_entropy(rows.float(), wanted, reduction="sum")) for rows, wanted in chunks)

    def _run(self, ids: Tensor, first: Tensor, cache: Any, keep: int = 1) -> Tensor:
        """Return the logits of the last `keep` tokens (0: all), (B, T, vocab_size).

        Args:
            ids: (B, T) new tokens.
            first: (B, 1), their first positions.
            cache: of transformers; None: the tokens read only each other.
            keep: number of tokens whose logits are needed.
        """
        positions = first + torch.arange(ids.size(1), device=self.device)  # (B, T)
        out = self.model(
            input_ids=ids,
            attention_mask=self._create_masks(positions, ids.size(1) > 1 or cache is None),
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits[..., : self.vocab_size]
        return logits

    def _create_masks(self, positions: Tensor, reads_only_itself: bool) -> Tensor | dict[str, Tensor]:
        """Return what is added to attention scores: 0 where a token may read, and the lowest number elsewhere.

        A model whose layers differ gets one mask for each kind of layer.
        """
        longest = positions.size(1) if reads_only_itself else int(positions.max()) + 1
        keys = torch.arange(longest, device=self.device)
        queries = keys[None] if reads_only_itself else positions  # (B, T)
        queries = queries[:, None, :, None]  # (B, 1, T, 1)
        lowest, window = torch.finfo(self.dtype).min, getattr(self.config, "sliding_window", None)
        full = torch.zeros((), dtype=self.dtype, device=self.device).masked_fill(keys > queries, lowest)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        if window is None or kinds == {"full_attention"}:
            return full
        sliding = full.masked_fill(keys <= queries - window, lowest)  # (B, 1, T, T so far)
        return {"full_attention": full, "sliding_attention": sliding} if kinds else sliding


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
        self.name = f"{folder} ({digest_weights(str(folder))})"
        self.codec: TextCodec = HfCodec(folder, self.config)
        self.context = int(getattr(self.config, "max_position_embeddings", 2048))

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
            shard_layers(model, spread == "offload", run)
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
        with parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        model.tie_weights()  # type: ignore[operator]
        return model


def check_supported(config: Any, folder: Path) -> None:
    """Check that the attention and the files of a model are of a kind that this program supports.

    Raises:
        ConfigError: they are not.
    """
    unknown = {*(getattr(config, "layer_types", None) or [])} - SUPPORTED_LAYERS
    if getattr(config, "alibi", False) or config.model_type == "bloom":
        unknown.add("ALiBi attention")
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if method not in (None, "mxfp4"):
        unknown.add(f"{method} weights")
    if unknown:
        raise ConfigError(f"{folder} has {min(unknown)}, which this program does not support: use another model")


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are built in this context have parameters on the meta device and buffers on the CPU."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with no_init_weights():  # a parameter that is never written needs no memory
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


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
    return ModelSize(
        layers,
        params - sum(layers),
        params - count_divided(model),
        config.hidden_size,
        kv_heads * head_size,
        kv_heads if is_supported(model) else 0,
        config.vocab_size,
    )


def shard_layers(model: nn.Module, is_offloaded: bool, run: Runtime) -> None:
    """Apply `fully_shard` to each layer and then to the model. Every unit is freed after its forward pass."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh(run.device.type, (run.world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype),
        "offload_policy": CPUOffloadPolicy(run.device.type != "cpu") if is_offloaded else OffloadPolicy(),
    }
    layers = list(find_layers(model))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    free_after_forward(model)
    fsdp.set_prefetching([model, *layers], PREFETCH)


@torch.no_grad()
def fill_parts(model: nn.Module, folder: Path, device: torch.device, parts: dict[str, Part]) -> None:
    """Allocate the parameters, and read this rank's part of each from the safetensors files of a directory.

    Args:
        model: on the meta device, spread over the ranks.
        folder: with the files.
        device: of the parameters.
        parts: with tensor parallelism, this rank's part of each parameter that is divided.

    Raises:
        ConfigError: a parameter has no tensor in the files, or another shape.
    """
    fsdp.allocate_shards(model, device)
    model.tie_weights()  # type: ignore[operator]  # one parameter again
    files = {key: file for file in list_hf_files(folder) for key in read_hf_keys(file)}
    for name, param in model.named_parameters():
        begin, end = fsdp.own_rows(param) if param.dim() else (0, 1)
        if name in parts and name in files:
            rows = read_part(files[name], name, parts[name])
        else:
            rows = read_rows(files, name, begin, end, folder)
        target = local_shard(param)
        if rows.shape != target.shape:
            raise ConfigError(
                f"{folder} has {name} of another shape than its config.json: copy the files again", on_one_rank=True
            )
        target.copy_(rows)
    for name, buffer in model.named_buffers():
        if name in files:
            buffer.copy_(read_rows(files, name, 0, len(buffer), folder))


def read_rows(files: dict[str, Path], name: str, begin: int, end: int, folder: Path) -> Tensor:
    """Return rows [begin, end) of a parameter. Only these rows are read from the disk.

    A mixture of experts has one parameter for all experts of a layer, with one row per expert. A file may have one
    tensor per expert instead, or the 4-bit numbers of gpt-oss (MXFP4), which become bfloat16 here.

    Raises:
        ConfigError: the files have the parameter in no form that this program knows.
    """
    if name in files:
        return read_slice(files[name], name, begin, end)
    packed = [f"{name}_blocks", f"{name}_scales"]
    if all(key in files for key in packed):
        blocks, scales = (read_slice(files[key], key, begin, end) for key in packed)
        return convert_moe_packed_tensors(blocks, scales)
    layer, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    first, last = (begin, end) if end > begin else (0, 1)  # a rank without experts needs the shape of one
    experts = [[f"{layer}.{expert}.{part}.weight" for part in parts] for expert in range(first, last)]
    if not parts or any(key not in files for keys in experts for key in keys):
        raise ConfigError(
            f"{folder} has no tensor for {name}: this program cannot read the files of this architecture, or one is "
            "missing; copy the files again, or use another model",
            on_one_rank=True,
        )
    rows = torch.stack([torch.cat([read_slice(files[key], key, 0, None) for key in keys]) for keys in experts])
    return rows[: end - begin]


def read_slice(file: Path, key: str, begin: int, end: int | None) -> Tensor:
    """Return rows [begin, end) of a tensor in a safetensors file."""
    with safe_open(file, "pt") as opened:
        part = opened.get_slice(key)
        tensor: Tensor = part[begin:end] if part.get_shape() else opened.get_tensor(key)
        return tensor


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
    if size.kv_heads % ranks:
        raise ConfigError(
            f"--spread=tp divides the {size.kv_heads} key heads of the model among the ranks, but there are {ranks}: "
            "use --spread=fsdp, or a number of ranks that divides the heads"
        )
    if name := find_indivisible(model, ranks):
        raise ConfigError(
            f"--spread=tp cannot divide {name} of the model among {ranks} ranks: use --spread=fsdp, or another number "
            "of ranks"
        )
