"""Export the weights of a run as a Hugging Face directory or as nanoGPT's ckpt.pt.

    python -m nanoGPT.export --out_dir=out/my-run --to=exported                  # Hugging Face: for AutoModel
    python -m nanoGPT.export --out_dir=out/my-run --to=exported --format=ckpt    # nanoGPT: for its sample.py

The newest complete checkpoint of the run is exported, or the one of `--resume_step`. It may come from any phase and any
number of ranks.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanoGPT.checkpoint.ckpt import remove_defaults
from nanoGPT.checkpoint.hugging_face import CONV1D, find_format
from nanoGPT.checkpoint.manifest import find_checkpoint
from nanoGPT.checkpoint.sources import FullState, find_tied_names, order_for_optimizer, read_full_state
from nanoGPT.checkpoint.starting_point import tokenizer_rows
from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.model import GPTConfig, ModelConfig, make_shape
from nanoGPT.prepare.download import TIKTOKEN_FILES, install_gpt2_vocabulary
from nanoGPT.prepare.meta import GPT2_VOCAB, TokenizerIdentity
from nanoGPT.prepare.tokenizer import HuggingFaceTokenizer, load_tokenizer
from nanoGPT.train_config import StepChoice


def check_no_overwrite(folder: Path, format: str) -> None:
    """Check that an export into `folder` overwrites no file.

    Raises:
        ConfigError: a file of this format exists already.
    """
    patterns = {
        "hf": ("config.json", "model*.safetensors*", "tokenizer*", "vocab.json", "merges.txt"),
        "ckpt": ("ckpt.pt",),
    }
    existing = [folder] if folder.is_file() else [path for name in patterns[format] for path in folder.glob(name)]
    if existing:
        raise ConfigError(f"{existing[0]} exists already: remove it, or give another directory as --to")


def main(out_dir: str, to: str, format: Literal["hf", "ckpt"] = "hf", resume_step: StepChoice = None) -> None:
    """Export a checkpoint of a run, from any phase and any number of ranks.

    Args:
        out_dir: directory of the run.
        to: directory to write.
        format: hf for the transformers library; ckpt for nanoGPT, with the optimizer state.
        resume_step: number of updates of the checkpoint, or best (lowest validation loss); None: the newest.

    Raises:
        ConfigError: there is no complete checkpoint, or the files exist already or could not be written.
    """
    checkpoint, folder = find_checkpoint(Path(out_dir), step=resume_step), Path(to)
    check_no_overwrite(folder, format)
    manifest = checkpoint.manifest
    shape = make_shape(manifest["model_args"])
    if format == "hf":
        find_format(shape.model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Files are moved into place only when all are written.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as temporary:
            if format == "hf":
                weights = read_full_state(checkpoint.path).model
                tokenizer = manifest["data"]["tokenizer"]
                ids = tokenizer["vocab_size"]
                rows = ids if shape.vocab_size == tokenizer_rows(tokenizer) else shape.vocab_size
                if rows > ids:
                    print(f"all {rows:,} rows of the vocabulary are exported; the tokenizer has {ids:,} ids")
                write_hf(Path(temporary), shape, weights, rows, find_end_of_text(tokenizer))
                write_hf_tokenizer(Path(temporary), tokenizer)
            else:
                save_ckpt(Path(temporary), read_full_state(checkpoint.path), shape, checkpoint.step, manifest)
            for file in sorted(Path(temporary).iterdir()):
                file.replace(folder / file.name)
    except (RuntimeError, OSError, SafetensorError) as error:  # all can mean a full disk
        remedy = "free some disk space, or choose another directory"
        raise ConfigError(f"--to={to} could not be written ({error}): {remedy}") from None
    print(f"exported {checkpoint.path.name} of {out_dir} to {folder} ({format})")


# ---- nanoGPT's ckpt.pt


def save_ckpt(folder: Path, state: FullState, shape: ModelConfig, step: int, manifest: dict[str, Any]) -> None:
    """Write `ckpt.pt` in nanoGPT's format, with its keys and its order of parameters in the optimizer.

    nanoGPT cannot use the optimizer state of Muon.

    Args:
        folder: an existing directory.
        state: the model and the optimizer.
        shape: of the model.
        step: number of completed updates.
        manifest: of the checkpoint.
    """
    config = manifest["config"]
    weights = {name: state.model[name] for name, _ in shape.create_on_meta().named_parameters()}  # in nanoGPT's order
    order = order_for_optimizer(weights)
    groups = [
        {"params": [torch.empty(0) for name in order if (weights[name].dim() >= 2) == decays], "weight_decay": rate}
        for decays, rate in ((True, config["weight_decay"]), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, config["learning_rate"], (config["beta1"], config["beta2"]))
    states = {i: dict(state.optimizer[name]) for i, name in enumerate(order) if name in state.optimizer}
    content = {
        "model": {name: weights[source] for name, source in find_tied_names(shape).items()} | weights,
        "optimizer": {**adamw.state_dict(), "state": states},
        "model_args": remove_defaults(manifest["model_args"]),
        "iter_num": step,
        "best_val_loss": manifest["best_val_loss"],
        "config": config,
        "tokenizer": manifest["data"]["tokenizer"],
    }
    torch.save(content, folder / "ckpt.pt")


# ---- Hugging Face


def find_end_of_text(tokenizer: TokenizerIdentity) -> int | None:
    """Return the id of the end-of-text token; None if the tokenizer has none."""
    if tokenizer["name"] == "gpt2":
        return GPT2_VOCAB - 1
    return load_tokenizer(tokenizer).end_of_text


def write_hf_tokenizer(folder: Path, tokenizer: TokenizerIdentity) -> None:
    """Write the files from which the transformers library loads the same tokenizer."""
    if tokenizer["name"] == "gpt2":
        install_gpt2_vocabulary()
        for name, target in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
            shutil.copyfile(DOWNLOADS / "tiktoken" / TIKTOKEN_FILES[name][0], folder / target)
        return
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if tokenizer["name"] == "tokenizers":
        definition, loaded = tokenizer["definition"], HuggingFaceTokenizer(tokenizer["definition"])
        if loaded.end_of_text is not None:
            config["eos_token"] = loaded.tokenizer.id_to_token(loaded.end_of_text)
    else:
        vocab = {character: i for i, character in enumerate(tokenizer["characters"])}
        model = {"type": "BPE", "vocab": vocab, "merges": []}  # without merges, each token is one character
        content = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
        definition = json.dumps(content) + "\n"
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


def convert_to_hf(shape: ModelConfig, weights: Mapping[str, Tensor], rows: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter in the layout of `transformers`.

    The padding rows of the vocabulary are dropped. For GPT-2, Conv1D weights are transposed, and biases are added.

    Raises:
        ConfigError: the parameters are not those of the model in `transformers`.
    """
    names, is_gpt2 = find_format(shape.model).list_parameters(shape), isinstance(shape, GPTConfig)
    if different := sorted({*names} ^ {*weights}):
        raise ConfigError(
            f"this model is not the {shape.model} of transformers: {different[0]} is only in "
            f"{'it' if different[0] in weights else shape.model}; use --format=ckpt"
        )
    for name, value in weights.items():
        value = value[:rows] if name in shape.VOCABULARY else value
        yield name, (value.t() if is_gpt2 and name.endswith(CONV1D) else value).contiguous()
        if isinstance(shape, GPTConfig) and not shape.bias and (".ln_" in name or name.endswith(CONV1D)):
            yield name.removesuffix("weight") + "bias", torch.zeros(value.shape[0], dtype=value.dtype)


def write_hf(
    folder: Path,
    shape: ModelConfig,
    weights: Mapping[str, Tensor],
    rows: int,
    end_of_text: int | None = None,
) -> None:
    """Write a directory that `transformers` can read.

    Args:
        folder: an existing directory.
        shape: the shape of the model.
        weights: parameters by name.
        rows: vocabulary size of the tokenizer; further rows of the embedding are padding.
        end_of_text: the token id with which generation ends, if there is one.
    """
    file = folder / "model.safetensors"
    save_file(dict(convert_to_hf(shape, weights, rows)), file, metadata={"format": "pt"})
    write_hf_config(folder, shape, rows, end_of_text)
    shutil.copymode(folder / "config.json", file)  # safetensors makes its files readable by the owner only


def write_hf_config(folder: Path, shape: ModelConfig, rows: int, end_of_text: int | None) -> None:
    """Write config.json for a model of this shape, with a vocabulary of `rows` tokens."""
    config = {
        "model_type": shape.model,
        **find_format(shape.model).write_fields(shape),
        "vocab_size": rows,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
