"""Read directories of Hugging Face: config.json and safetensors files. `nanoGPT.export` writes them.

A directory is accepted only if this project's model computes the same function as `transformers`. Each field of
config.json that changes this function is either supported or refused. The format of GPT-2 is in this file. The file of
another model has a class `HuggingFace`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import Tensor

from nanoGPT.checkpoint.sources import LazyTensors, are_tied, find_tied_names
from nanoGPT.checkpoint.starting_point import sizes_of
from nanoGPT.errors import ConfigError, quote_cause, ran_out_of_memory
from nanoGPT.files import is_present, list_directory, read_document
from nanoGPT.model import MODULES, GPTConfig, ModelConfig, find_architecture
from nanoGPT.prepare.meta import TokenizerIdentity
from nanoGPT.prepare.tokenizer import find_known_tokenizer, make_json_identity

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) in GPT-2
COMPUTED_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # the causal mask, the angles of RoPE
GELUS: dict[str, Literal["none", "tanh"]] = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


class Gpt2Format:
    """How `transformers` describes a GPT-2."""

    # Fields that change the model, with the only value that this model supports: the default of `transformers`.
    FIXED = {
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "num_attention_heads": None,  # another name of n_head, which would take precedence
    }

    @staticmethod
    def read_fields(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return the fields of a config.json with the defaults of `transformers`, and the values that are allowed."""
        fields = {"activation_function": "gelu_new", "n_inner": None, **Gpt2Format.FIXED, **fields}
        allowed: dict[str, list[Any]] = {name: [value] for name, value in Gpt2Format.FIXED.items()}
        return fields, {**allowed, "n_inner": [None, 4 * fields["n_embd"]], "activation_function": [*GELUS]}

    @staticmethod
    def read_shape(fields: dict[str, Any]) -> GPTConfig:
        """Return the shape that the fields of `read_fields` describe."""
        layers, heads, width, positions = (fields[name] for name in ("n_layer", "n_head", "n_embd", "n_positions"))
        gelu = GELUS[fields["activation_function"]]
        return GPTConfig(layers, heads, width, positions, True, fields["vocab_size"], 0.0, gelu)

    @staticmethod
    def list_parameters(shape: GPTConfig) -> list[str]:
        """Return the names of all parameters. The code of the model may have been changed, so they are listed here."""
        parts = ("ln_1.weight", "ln_2.weight", *CONV1D)
        layers = [f"transformer.h.{i}.{part}" for i in range(shape.n_layer) for part in parts]
        norms = [*layers, "transformer.ln_f.weight"]
        biases = [name.removesuffix("weight") + "bias" for name in norms] if shape.bias else []
        return ["transformer.wte.weight", "transformer.wpe.weight", *norms, *biases]

    @staticmethod
    def write_fields(shape: GPTConfig) -> dict[str, Any]:
        """Return the fields of a config.json."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu" if shape.gelu == "none" else "gelu_new",
            **{name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd")},
            "n_positions": shape.block_size,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout),
        }


def find_format(model: str) -> Any:
    """Return the class that describes a model in the fields of `transformers`: Gpt2Format, or that of its file.

    Raises:
        ConfigError: the model has no such class.
    """
    if model == "gpt2":
        return Gpt2Format
    if hf_format := getattr(find_architecture(model), "HuggingFace", None):
        return hf_format
    raise ConfigError(f"--model={model} has no format of Hugging Face: export it with --format=ckpt")


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


def read_hf(folder: Path) -> tuple[ModelConfig, LazyTensors, TokenizerIdentity | None]:
    """Read a Hugging Face directory: `config.json`, and one or more safetensors files.

    Returns:
        The shape of the model, its weights by the names of this project, each of which is read when it is accessed, and
        the tokenizer of `read_hf_tokenizer`.

    Raises:
        ConfigError: this project does not have the architecture, or the files do not match it.
    """
    try:
        shape = read_hf_config(folder / "config.json")
        weights = open_hf_weights(folder, shape.model)
        sizes_of(weights)  # reads the header of every tensor
        for name, source in find_tied_names(shape).items():
            if name in weights and not are_tied(weights.pop(name), weights[source]):
                raise ConfigError(
                    f"{folder} has an {name} that differs from {source}, but this model has one tensor for both: "
                    f"use a {shape.model} with a tied head"
                )
        return shape, weights, read_hf_tokenizer(folder)
    except ConfigError:
        raise
    except Exception as error:  # of many kinds, if the content is arbitrary
        if ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"{folder} is not a Hugging Face model with safetensors ({type(error).__name__}: {quote_cause(error)}): "
            "use another directory"
        ) from None


def read_model_type(path: Path) -> Any:
    """Return the model_type of a config.json; None if the file does not name it."""
    try:
        return json.loads(read_document(path)).get("model_type")
    except (ValueError, AttributeError, RecursionError):
        return None


def read_hf_config(path: Path) -> ModelConfig:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: this project has no such model, or a field has a value that its model does not support.
        ValueError, KeyError, TypeError, AttributeError, RecursionError: the file is not a config.json.
    """
    document = json.loads(read_document(path))
    if (model := document.get("model_type")) not in MODULES:
        raise ConfigError(f"{path.parent} contains a {model} model: use a directory of a {' or '.join(MODULES)} model")
    hf_format = find_format(model)
    fields, allowed = hf_format.read_fields(document)
    for name, values in allowed.items():
        if fields[name] not in values:
            raise ConfigError(
                f"{path} has {name}={repr(fields[name])[:200]}, but this model supports only "
                f"{' or '.join(map(repr, values))}: use another {model}"
            )
    shape: ModelConfig = hf_format.read_shape(fields)
    return shape


def read_hf_tokenizer(folder: Path) -> TokenizerIdentity | None:
    """Return the tokenizer of a Hugging Face directory; None if it has no tokenizer.json and no vocab.json.

    Raises:
        ConfigError: there is no tokenizer.json, and vocab.json is not GPT-2's.
        ValueError, KeyError, TypeError, AttributeError: the file is not a tokenizer.
    """
    if is_present(folder / "tokenizer.json"):
        return make_json_identity(read_document(folder / "tokenizer.json"))
    if not is_present(folder / "vocab.json"):
        return None
    vocab = json.loads(read_document(folder / "vocab.json"))
    if identity := find_known_tokenizer(vocab, is_present(folder / "merges.txt")):
        return identity
    raise ConfigError(f"{folder} has a vocab.json that is not GPT-2's: save its tokenizer as a tokenizer.json")


def open_hf_weights(folder: Path, model: str) -> LazyTensors:
    """Return the tensors of a directory by the names of this project, each of which is read when it is accessed.

    Args:
        folder: with safetensors files.
        model: its model_type.

    Raises:
        ConfigError: there is no file, or two tensors have the same name.
    """
    weights, is_gpt2 = LazyTensors(), model == "gpt2"
    for file in list_hf_files(folder):
        for key in sorted(safe_open(file, "pt").keys()):
            name = f"transformer.{key}" if is_gpt2 and not key.startswith(("transformer.", "lm_head.")) else key
            if name in weights:
                raise ConfigError(f"{folder} has {name} twice: remove the file that does not belong to the model")
            if not name.endswith(COMPUTED_BUFFERS):
                weights.data[name] = partial(read_hf_tensor, file, key, is_gpt2 and name.endswith(CONV1D))
    return weights


def list_hf_files(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files in a directory.

    Raises:
        ConfigError: there is none.
    """
    names = sorted(name for name in list_directory(folder) if name.endswith(".safetensors"))
    if not names:
        raise ConfigError(
            f"{folder} has no safetensors file: save the model again with `save_pretrained` of transformers"
        )
    return [folder / name for name in names]


def read_hf_tensor(file: Path, key: str, is_transposed: bool) -> Tensor:
    """Return one tensor of a safetensors file. The file is memory-mapped: only accessed pages are read from the disk.

    Args:
        file: the safetensors file.
        key: the name of the tensor in the file.
        is_transposed: whether the file stores a Conv1D weight, of shape (in, out), which is returned as (out, in).
    """
    tensor: Tensor = safe_open(file, "pt").get_tensor(key)
    return tensor.t() if is_transposed and tensor.dim() == 2 else tensor
