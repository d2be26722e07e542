"""Hugging Face's GPT-2 directories: config.json beside safetensors files, read and written.

A directory is read only if this project's model computes what `transformers` would: what config.json says of the
activation, the norms, attention's scale and the tied head is supported or refused. Nothing in it is ignored silently.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanoGPT.checkpoint.state import EMBEDDING, HEAD, LazyTensors, are_tied
from nanoGPT.errors import ConfigError, is_out_of_memory
from nanoGPT.files import ABSENT, list_directory, read_document, retry_reads, size_of
from nanoGPT.model import GPTConfig

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) in GPT-2
GPT2_VOCAB = 50257
INDEX = "model.safetensors.index.json"
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
# What `transformers` takes for a field that config.json leaves out.
DEFAULTS = {"vocab_size": GPT2_VOCAB, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
# Fields that change the model, and the only value that this project's model has for each.
FIXED = {
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# Other names of a field, which win over its own.
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def download(name: str) -> Path:
    """OpenAI's weights from the Hugging Face hub (extra `web`)."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=["config.json", "model.safetensors"]))
    except ImportError:
        raise ConfigError(f"--init_from={name} needs `.venv/bin/pip install -e '.[web]'`") from None
    except Exception as error:
        raise ConfigError(
            f"{name} could not be downloaded ({type(error).__name__}): check the network, or give a directory"
        ) from None


def read_hf(folder: Path) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """A Hugging Face GPT-2 directory: `config.json` and safetensors in one or several files.

    Raises:
        ConfigError: another architecture, or files that do not fit it.
    """
    try:
        shape = read_hf_config(folder / "config.json")
        weights = LazyTensors(hf_readers(folder))
        head = weights.readers.pop(HEAD, None)
        if head and not are_tied(head(), weights[EMBEDDING]):
            raise ConfigError(
                f"{folder} has an {HEAD} that differs from {EMBEDDING}, and this model has one tensor for both: "
                "give a GPT-2 with a tied head"
            )
        return shape, weights
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{folder} is no Hugging Face GPT-2 with safetensors ({type(error).__name__}: {str(error)[:200]}): give "
            "another directory"
        ) from None


def read_hf_config(path: Path) -> GPTConfig:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: another architecture, or a field that makes another model of it than this project's.
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: it is no such file.
    """
    found = json.loads(read_document(path))
    if found.get("model_type") != "gpt2":
        raise ConfigError(f"{path.parent} holds a {found.get('model_type')} model: only gpt2 is known here")
    hf: dict[str, Any] = {**DEFAULTS, "activation_function": "gelu_new", **FIXED, **found}
    hf |= {name: found[alias] for alias, name in ALIASES.items() if alias in found}
    allowed = {name: (value,) for name, value in FIXED.items()} | {"n_inner": (None, 4 * hf["n_embd"])}
    for name, values in {**allowed, "activation_function": tuple(GELUS)}.items():
        if hf[name] not in values:
            raise ConfigError(
                f"{path} has {name}={repr(hf[name])[:200]}, and this model can only be one with "
                f"{' or '.join(map(repr, values))}: give another GPT-2"
            )
    gelu = GELUS[hf["activation_function"]]
    return GPTConfig(hf["n_layer"], hf["n_head"], hf["n_embd"], hf["n_positions"], True, hf["vocab_size"], 0.0, gelu)


def hf_readers(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Return a function that reads each tensor, by its name here.

    Raises:
        ConfigError: a file is missing or is no file, or two tensors have one name.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    origin: dict[str, str] = {}
    for file in hf_files(folder):
        for key in retry_reads(file, partial(hf_keys, file)):
            name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
            if name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask
                continue
            if name in readers:
                raise ConfigError(
                    f"{folder} has {name} twice, in {origin[name]} and in {file.name}: remove the file that does not "
                    "belong to the model"
                )
            readers[name], origin[name] = partial(read_hf_tensor, file, key, name.endswith(CONV1D)), file.name
    return readers


def hf_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a directory, all of which are regular files.

    Raises:
        ConfigError: there is none, one that the index names is missing, or one is something else.
    """
    names = {name for name in list_directory(folder) if name.endswith(".safetensors")}
    try:
        needed = set(json.loads(read_document(folder / INDEX))["weight_map"].values())
    except ABSENT:
        needed = set()
    if missing := sorted(needed - names):
        raise ConfigError(
            f"{folder / INDEX} names {missing[0]}, which is not there: copy all {len(needed)} files of the model"
        )
    if not names:
        raise ConfigError(f"{folder} has no safetensors: save the model again with `save_pretrained` of transformers")
    for name in sorted(names):
        if size_of(folder / name) is None:  # opening a FIFO would wait for ever
            raise ConfigError(f"{folder / name} is not a regular file: give another directory")
    return [folder / name for name in sorted(names)]


def hf_keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def read_hf_tensor(file: Path, key: str, transposed: bool) -> Tensor:
    """One tensor of a safetensors file, which is mapped: what is not looked at is not read.

    Raises:
        ConfigError: it cannot be read, or is of a type that torch does not know.
    """
    try:
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key} of {file} cannot be read ({str(error)[:200]}): give another directory") from None
    return tensor.t() if transposed and tensor.dim() == 2 else tensor


def hf_tensors(shape: GPTConfig, weights: Mapping[str, Tensor], rows: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors as `transformers` names and lays them out, one at a time: Conv1D transposed, padding rows dropped."""
    for name, value in weights.items():
        value = value[:rows] if name == EMBEDDING else value
        yield name, (value.t() if name.endswith(CONV1D) else value).contiguous()
        if not shape.bias and (".ln_" in name or name.endswith(CONV1D)):  # Hugging Face's GPT-2 always has biases
            yield name.removesuffix("weight") + "bias", torch.zeros(value.shape[0], dtype=value.dtype)


def write_hf(
    folder: Path, shape: GPTConfig, weights: Mapping[str, Tensor], rows: int, file_bytes: int = 2 << 30
) -> None:
    """Write a directory that `transformers` opens, in as many files as keep each below a size.

    Args:
        weights: read one at a time; a file's are in memory together.
        rows: the tokenizer's vocabulary; embedding rows from here on are padding.
        file_bytes: of one file at most, unless a single tensor is larger.
    """
    files: list[dict[str, int]] = []  # of each, its tensors' bytes by name
    held: dict[str, Tensor] = {}
    for name, tensor in hf_tensors(shape, weights, rows):
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > file_bytes:
            files.append(write_hf_file(folder, len(files), held))
            held = {}
        held[name] = tensor
    files.append(write_hf_file(folder, len(files), held))
    name_hf_files(folder, files)
    write_hf_config(folder, shape, rows)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors lets nobody else read it


def write_hf_file(folder: Path, index: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    save_file(tensors, folder / f"part-{index}.safetensors", metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def name_hf_files(folder: Path, files: list[dict[str, int]]) -> None:
    """Name them as transformers looks them up: model.safetensors, or numbered ones and an index."""
    one = len(files) == 1
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, name in enumerate(["model.safetensors"] if one else names):
        (folder / f"part-{i}.safetensors").rename(folder / name)
    if not one:
        where = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": sum(sum(each.values()) for each in files)}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_hf_config(folder: Path, shape: GPTConfig, rows: int) -> None:
    end = rows - 1 if rows == GPT2_VOCAB else None  # GPT-2's <|endoftext|>
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu" if shape.gelu == "none" else "gelu_new",
        **{name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd")},
        "n_positions": shape.block_size,
        "vocab_size": rows,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
