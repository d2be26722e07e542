"""Read and write Hugging Face's GPT-2 directories: config.json and safetensors files.

A directory is accepted only if this project's model computes the same function as `transformers`. Each field of
config.json about the activation, the norms, the scale of attention and the tied head is either supported or refused.
"""

import hashlib
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

from nanoGPT.checkpoint.training_state import EMBEDDING, HEAD, LazyTensors, are_tied
from nanoGPT.errors import ConfigError, is_out_of_memory
from nanoGPT.files import ABSENT, is_present, list_directory, read_document, retry_reads, size_of
from nanoGPT.model import GPTConfig
from nanoGPT.tokenizer import GPT2_VOCAB, TokenizerIdentity, make_char_identity, make_gpt2_identity

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) in GPT-2
PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's models, by size
LAYER = ("ln_1.weight", "ln_2.weight", *CONV1D)  # the parameters of a layer, without biases
INDEX = "model.safetensors.index.json"
GPT2_TOKENS_SHA256 = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"  # of its tokens, one per line
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
# The default of `transformers` for a field that is not in config.json.
DEFAULTS = {"vocab_size": GPT2_VOCAB, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
# Fields that change the model, with the only value that this project's model supports.
FIXED = {
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# Alternative names of fields. If both are given, `transformers` uses the alternative.
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def download_gpt2(name: str) -> Path:
    """Download OpenAI's GPT-2 weights from the Hugging Face hub, and return their directory.

    Raises:
        ConfigError: the extra `web` is not installed, or the download failed.
    """
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=["config.json", "model.safetensors"]))
    except ImportError:
        raise ConfigError(f"{name} needs the extra `web`: run `.venv/bin/pip install -e '.[web]'`") from None
    except Exception as error:
        raise ConfigError(
            f"{name} could not be downloaded ({type(error).__name__}): check the network, or use a local directory"
        ) from None


def read_hf(folder: Path) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """Read a Hugging Face GPT-2 directory: `config.json`, and one or more safetensors files.

    Returns:
        The shape of the model, and its weights, each of which is read when it is accessed.

    Raises:
        ConfigError: the architecture is not GPT-2, or the files do not match it.
    """
    try:
        shape = read_hf_config(folder / "config.json")
        weights = LazyTensors(create_hf_readers(folder))
        head = weights.readers.pop(HEAD, None)
        if head and not are_tied(head(), weights[EMBEDDING]):
            raise ConfigError(
                f"{folder} has an {HEAD} that differs from {EMBEDDING}, but this model has one tensor for both: "
                "use a GPT-2 with a tied head"
            )
        return shape, weights
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{folder} is not a Hugging Face GPT-2 with safetensors ({type(error).__name__}: {str(error)[:200]}): "
            "use another directory"
        ) from None


def read_hf_config(path: Path) -> GPTConfig:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: the architecture is not GPT-2, or a field has a value that this project's model does not support.
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: the file is not a config.json.
    """
    fields = json.loads(read_document(path))
    if fields.get("model_type") != "gpt2":
        raise ConfigError(f"{path.parent} contains a {fields.get('model_type')} model: use a directory of a gpt2 model")
    hf: dict[str, Any] = {**DEFAULTS, "activation_function": "gelu_new", **FIXED, **fields}
    hf |= {name: fields[alias] for alias, name in ALIASES.items() if alias in fields}
    allowed = {name: (value,) for name, value in FIXED.items()} | {"n_inner": (None, 4 * hf["n_embd"])}
    for name, values in {**allowed, "activation_function": tuple(GELUS)}.items():
        if hf[name] not in values:
            raise ConfigError(
                f"{path} has {name}={repr(hf[name])[:200]}, but this model supports only "
                f"{' or '.join(map(repr, values))}: use another GPT-2"
            )
    gelu = GELUS[hf["activation_function"]]
    return GPTConfig(hf["n_layer"], hf["n_head"], hf["n_embd"], hf["n_positions"], True, hf["vocab_size"], 0.0, gelu)


def read_hf_tokenizer(folder: Path) -> TokenizerIdentity | None:
    """Return the tokenizer of a Hugging Face directory; None if it has no tokenizer.json and no vocab.json.

    A tokenizer with further tokens after GPT-2's 50257 counts as GPT-2's.

    Raises:
        ConfigError: it is another tokenizer than GPT-2's and those of single characters, or the file is not valid.
    """
    try:
        if is_present(folder / "tokenizer.json"):
            model = json.loads(read_document(folder / "tokenizer.json"))["model"]
            vocab, has_merges = model["vocab"], bool(model.get("merges"))
        elif is_present(folder / "vocab.json"):
            vocab, has_merges = json.loads(read_document(folder / "vocab.json")), is_present(folder / "merges.txt")
        else:
            return None
        tokens = sorted(vocab, key=vocab.__getitem__)
        is_gapless = [vocab[token] for token in tokens] == list(range(len(tokens)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the tokenizer of {folder} cannot be read ({type(error).__name__}): copy it again") from None
    if is_gapless and has_merges:
        content = "\n".join(tokens[:GPT2_VOCAB]).encode("utf-8", "replace")
        if hashlib.sha256(content).hexdigest() == GPT2_TOKENS_SHA256:
            return make_gpt2_identity()
    if is_gapless and not has_merges and all(len(token) == 1 for token in tokens):
        return make_char_identity("".join(tokens))
    raise ConfigError(
        f"{folder} has a tokenizer of {len(tokens):,} tokens that is neither GPT-2's nor one of single characters: use "
        "a model with one of these"
    )


def create_hf_readers(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Return, for each parameter name of this project, a function that reads the tensor.

    Raises:
        ConfigError: a file is missing or not a regular file, or two tensors have the same name.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    origin: dict[str, str] = {}
    for file in list_hf_files(folder):
        for key in retry_reads(file, partial(read_hf_keys, file)):
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


def list_hf_files(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files in a directory.

    Raises:
        ConfigError: there is none, a file in the index is missing, or a path is not a regular file.
    """
    names = {name for name in list_directory(folder) if name.endswith(".safetensors")}
    try:
        needed = set(json.loads(read_document(folder / INDEX))["weight_map"].values())
    except ABSENT:
        needed = set()
    if missing := sorted(needed - names):
        raise ConfigError(
            f"{folder / INDEX} lists {missing[0]}, which does not exist: copy all {len(needed)} files of the model"
        )
    if not names:
        raise ConfigError(
            f"{folder} has no safetensors file: save the model again with `save_pretrained` of transformers"
        )
    for name in sorted(names):
        if size_of(folder / name) is None:  # opening a FIFO would block forever
            raise ConfigError(f"{folder / name} is not a regular file: use another directory")
    return [folder / name for name in sorted(names)]


def read_hf_keys(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file."""
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def read_hf_tensor(file: Path, key: str, is_transposed: bool) -> Tensor:
    """Return one tensor of a safetensors file. The file is memory-mapped: only accessed pages are read from the disk.

    Args:
        file: the safetensors file.
        key: the name of the tensor in the file.
        is_transposed: whether the file stores a Conv1D weight, of shape (in, out), which is returned as (out, in).

    Raises:
        ConfigError: the tensor cannot be read, or torch does not know its dtype.
    """
    try:
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key} of {file} cannot be read ({str(error)[:200]}): use another directory") from None
    return tensor.t() if is_transposed and tensor.dim() == 2 else tensor


def convert_to_hf(shape: GPTConfig, weights: Mapping[str, Tensor], rows: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter in the layout of `transformers`.

    Conv1D weights are transposed, and the padding rows of the embedding are dropped.

    Raises:
        ConfigError: the parameters are not those of GPT-2.
    """
    layers = [f"transformer.h.{i}.{name}" for i in range(shape.n_layer) for name in LAYER]
    names = [EMBEDDING, "transformer.wpe.weight", *layers, "transformer.ln_f.weight"]
    biases = [name.removesuffix("weight") + "bias" for name in names[2:]] if shape.bias else []
    if different := sorted({*names, *biases} ^ {*weights}):
        raise ConfigError(
            f"this model is not GPT-2: {different[0]} is only in {'it' if different[0] in weights else 'GPT-2'}; "
            "only GPT-2 can be exported for transformers: use --format=ckpt"
        )
    for name, value in weights.items():
        value = value[:rows] if name == EMBEDDING else value
        yield name, (value.t() if name.endswith(CONV1D) else value).contiguous()
        if not shape.bias and (".ln_" in name or name.endswith(CONV1D)):  # Hugging Face's GPT-2 always has biases
            yield name.removesuffix("weight") + "bias", torch.zeros(value.shape[0], dtype=value.dtype)


def write_hf(
    folder: Path, shape: GPTConfig, weights: Mapping[str, Tensor], rows: int, file_bytes: int = 2 << 30
) -> None:
    """Write a directory that `transformers` can read, with one or more safetensors files.

    Args:
        folder: an existing directory.
        shape: the shape of the model.
        weights: parameters by name. They are read one at a time; those of one file are in memory together.
        rows: vocabulary size of the tokenizer; further rows of the embedding are padding.
        file_bytes: maximum size of a file in bytes. A file with a single tensor may be larger.
    """
    files: list[dict[str, int]] = []  # for each file, the bytes of its tensors by name
    pending: dict[str, Tensor] = {}
    for name, tensor in convert_to_hf(shape, weights, rows):
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > file_bytes:
            files.append(write_hf_file(folder, len(files), pending))
            pending = {}
        pending[name] = tensor
    files.append(write_hf_file(folder, len(files), pending))
    rename_hf_files(folder, files)
    write_hf_config(folder, shape, rows)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors makes its files readable by the owner only


def write_hf_file(folder: Path, index: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Write tensors to part-{index}.safetensors, and return the bytes of each tensor by name."""
    save_file(tensors, folder / f"part-{index}.safetensors", metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def rename_hf_files(folder: Path, files: list[dict[str, int]]) -> None:
    """Rename the parts as `transformers` expects: to model.safetensors, or to numbered files with an index."""
    is_single = len(files) == 1
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, name in enumerate(["model.safetensors"] if is_single else names):
        (folder / f"part-{i}.safetensors").rename(folder / name)
    if not is_single:
        file_of_tensor = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": sum(sum(each.values()) for each in files)}, "weight_map": file_of_tensor}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def write_hf_config(folder: Path, shape: GPTConfig, rows: int) -> None:
    """Write config.json for a model of this shape, with a vocabulary of `rows` tokens."""
    end_of_text = GPT2_VOCAB - 1 if rows >= GPT2_VOCAB else None  # GPT-2's <|endoftext|>
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu" if shape.gelu == "none" else "gelu_new",
        **{name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd")},
        "n_positions": shape.block_size,
        "vocab_size": rows,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
