"""Weights in and out: a run's checkpoints, nanoGPT's ckpt.pt, and Hugging Face's GPT-2 directories.

    python -m nanoGPT.export --out_dir=out/my-run --to=exported                  # Hugging Face: AutoModel opens it
    python -m nanoGPT.export --out_dir=out/my-run --to=exported --format=ckpt    # nanoGPT's sample.py opens it

The newest whole checkpoint of the run is taken, whatever phase and number of ranks wrote it.
"""

import dataclasses
import json
import shutil
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanoGPT.cli import command_line
from nanoGPT.config import C
from nanoGPT.data import TokenData, load_tokenizer
from nanoGPT.exits import ConfigError, one_sentence
from nanoGPT.files import is_present
from nanoGPT.manifest import Checkpoint, Damaged, NewFiles, check_training, manifests, verify_files
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.schemas import TokenizerIdentity
from nanoGPT.state import EMBEDDING, HEAD, SHAPE, Lazily, check_resumed, read_ckpt, read_payload, save_ckpt

if TYPE_CHECKING:
    from nanoGPT.runtime import Runtime

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) in GPT-2
GPT2_VOCAB, PADDED_VOCAB = 50257, 50304


def tokenizer_rows(tokenizer: TokenizerIdentity) -> int:
    """Rows of the embedding for a tokenizer: GPT-2's 50257 are padded to 50304, a multiple of 64."""
    return PADDED_VOCAB if tokenizer["vocab_size"] == GPT2_VOCAB else int(tokenizer["vocab_size"])


def starting_point(
    config: C, data: TokenData, checkpoint: Checkpoint | None, trains: bool = True
) -> tuple[C, GPTConfig, Mapping[str, Tensor] | None]:
    """Return where a run begins.

    Args:
        config: as asked for.
        data: what it reads.
        checkpoint: what it resumes, if it does.
        trains: the run goes on as the checkpoint's run; False: it only evaluates the weights.

    Returns:
        The configuration with the shape that the model really has, the model's own configuration, and its weights,
        or None when they are drawn (scratch) or come with the optimizer (resume).

    Raises:
        ConfigError: the shape, context or tokenizer of what is loaded does not fit what was asked for.
    """
    weights = None
    if checkpoint:
        check_training(checkpoint.path, checkpoint.manifest)
        if trains:
            check_resumed(config, data, checkpoint)
        shape = GPTConfig.of(checkpoint.manifest["model_args"])
    elif config.init_from == "scratch":
        rows = config.vocab_size or tokenizer_rows(data.tokenizer)
        shape = GPTConfig.of({**dataclasses.asdict(config), "vocab_size": rows})
    else:
        shape, weights = read_weights(config.init_from)
        if config.block_size > shape.block_size:
            raise ConfigError(
                f"--block_size={config.block_size} is longer than the {shape.block_size} positions that "
                f"{config.init_from} has: use --block_size={shape.block_size} or less"
            )
        shape.block_size = config.block_size
        positions = weights["transformer.wpe.weight"][: config.block_size]
        weights = ChainMap({"transformer.wpe.weight": positions}, weights)  # type: ignore[arg-type]
    if shape.vocab_size < data.tokenizer["vocab_size"]:
        raise ConfigError(
            f"the model has {shape.vocab_size} rows of vocabulary, but {config.dataset} needs "
            f"{data.tokenizer['vocab_size']}: use a dataset of the same tokenizer, or a larger --vocab_size"
        )
    shape.dropout = config.dropout
    return dataclasses.replace(config, **{name: getattr(shape, name) for name in SHAPE}), shape, weights


def newest_whole(out_dir: Path) -> Checkpoint:
    """Return the newest checkpoint of a run that verifies; for one process. Nothing is renamed.

    Raises:
        ConfigError: there is none, or one could not be read.
    """
    is_changing = True
    while is_changing:  # a training run deletes old checkpoints, and has newer ones by then
        is_changing = False
        for path, manifest in manifests(out_dir):
            try:
                verify_files(path, manifest)
                check_training(path, manifest)
                return Checkpoint(path, manifest)
            except Damaged as reason:
                is_changing = is_changing or not is_present(path)
                if is_present(path):
                    print(f"skipping {path.name}: {reason}", file=sys.stderr)
    raise ConfigError(f"there is no whole checkpoint under {out_dir}: train first, or give the --out_dir of a run")


def newest_on_all(out_dir: Path, run: "Runtime") -> Checkpoint:
    """Return the newest checkpoint that verifies, on every rank; rank 0 reads it. Nothing is renamed. Collective.

    Raises:
        ConfigError: there is none, or it could not be read.
    """
    found: tuple[Checkpoint | None, str] = (None, "")
    if run.is_main:
        try:
            found = newest_whole(out_dir), ""
        except ConfigError as error:
            found = None, str(error)
    checkpoint, refusal = run.gather(found)[0]
    if checkpoint is None:
        raise ConfigError(refusal)
    return checkpoint


def read_weights(source: str) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """Weights by parameter name, from a run's directory, a nanoGPT directory, a Hugging Face one, or a GPT-2 by name.

    Raises:
        ConfigError: none of these is there.
    """
    folder = Path(source)
    if source.startswith("gpt2") and not folder.is_dir():
        folder = download(source)
    if (folder / "checkpoints").is_dir():
        checkpoint = newest_whole(folder)
        return fitting(source, checkpoint.manifest["model_args"], read_payload(checkpoint.path).model)
    if (folder / "ckpt.pt").is_file():
        state, rest = read_ckpt(folder / "ckpt.pt")
        return fitting(source, rest.get("model_args"), state.model)
    if (folder / "config.json").is_file():
        shape, weights = read_hf(folder)
        return fitting(source, dataclasses.asdict(shape), weights)
    raise ConfigError(
        f"{source} holds neither checkpoints/, ckpt.pt nor config.json: give a run's or a model's directory"
    )


def fitting(source: str, model_args: Any, weights: Mapping[str, Tensor]) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """The shape that `model_args` describes, with weights that fit it.

    Raises:
        ConfigError: it describes no GPT-2, or a parameter is missing, unknown, or of another shape.
    """
    try:
        shape = GPTConfig.of(model_args)
        with torch.device("meta"):
            expected = {name: tuple(p.shape) for name, p in GPT(shape).named_parameters()}
        if shape.n_embd % shape.n_head:
            raise ValueError(f"n_embd {shape.n_embd} is not divisible by n_head {shape.n_head}")
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(f"{source} does not describe a GPT-2 ({error}): give another directory") from None
    for name in sorted(expected.keys() | weights.keys()):
        wanted, found = expected.get(name), tuple(weights[name].shape) if name in weights else None
        if found != wanted:
            raise ConfigError(f"{source} has {name} of shape {found} where its model has {wanted}: give another one")
    return shape, weights


# ---- Hugging Face


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
        hf = json.loads((folder / "config.json").read_text())
        if hf.get("model_type") != "gpt2":
            raise ConfigError(f"{folder} holds a {hf.get('model_type')} model: only gpt2 is known here")
        readers: dict[str, Callable[[], Tensor]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                keys = list(opened.keys())
            for key in keys:
                name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
                if name != HEAD and not name.endswith((".attn.bias", ".attn.masked_bias")):
                    readers[name] = partial(read_hf_tensor, file, key, name.endswith(CONV1D))
        weights = Lazily(readers)
        gelu = "none" if hf.get("activation_function") == "gelu" else "tanh"
        return GPTConfig(
            hf["n_layer"], hf["n_head"], hf["n_embd"], hf["n_positions"], True, len(weights[EMBEDDING]), 0.0, gelu
        ), weights
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} is no Hugging Face GPT-2 with safetensors ({type(error).__name__}: {error})"
        ) from None


def read_hf_tensor(file: Path, key: str, transposed: bool) -> Tensor:
    """One tensor of a safetensors file, which is mapped: what is not looked at is not read."""
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor.t() if transposed else tensor


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


def check_free(folder: Path, format: str) -> None:
    """Refuse to write over what is there."""
    own = {"hf": ("config.json", "model*.safetensors*", "tokenizer*", "vocab.json", "merges.txt"), "ckpt": ("ckpt.pt",)}
    there = [folder] if folder.is_file() else [path for name in own[format] for path in folder.glob(name)]
    if there:
        raise ConfigError(f"{there[0]} is there already: remove it, or give another directory as --to")


def main(out_dir: str, to: str, format: Literal["hf", "ckpt"] = "hf") -> None:
    """Export a run's newest checkpoint, whatever phase and number of ranks wrote it.

    Args:
        out_dir: the run.
        to: directory to write.
        format: hf, for transformers; ckpt, for nanoGPT, with the optimizer.
    """
    checkpoint, folder = newest_whole(Path(out_dir)), Path(to)
    check_free(folder, format)
    manifest = checkpoint.manifest
    shape = GPTConfig.of(manifest["model_args"])
    folder.mkdir(parents=True, exist_ok=True)
    # Nothing is there before all is; a state larger than the memory goes through files.
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as temporary,
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch,
    ):
        try:
            if format == "hf":
                weights = read_payload(checkpoint.path).model
                tokenizer = manifest["data"]["tokenizer"]
                write_hf(Path(temporary), shape, weights, tokenizer["vocab_size"])
                load_tokenizer(tokenizer).write_hf(Path(temporary))
            else:
                state = read_payload(checkpoint.path, Path(scratch))
                save_ckpt(NewFiles(Path(temporary)), state, checkpoint.step, manifest)
        except (RuntimeError, OSError, SafetensorError) as error:  # what torch and safetensors make of a full disk
            raise ConfigError(f"--to={to} could not be written ({error}): free some space") from None
        for file in sorted(Path(temporary).iterdir()):
            file.replace(folder / file.name)
    print(f"{checkpoint.path.name} of {out_dir} is in {folder} as {format}")


if __name__ == "__main__":
    with one_sentence():
        command_line(main, sys.argv[1:])
