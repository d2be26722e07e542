"""Where a run's weights come from: a checkpoint of any phase and number of ranks, nanoGPT's ckpt.pt, a Hugging Face
directory, or OpenAI's GPT-2 by name.
"""

import dataclasses
import re
import sys
from collections import ChainMap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoGPT.checkpoint.hugging_face import GPT2_VOCAB, download, read_hf
from nanoGPT.checkpoint.manifest import Checkpoint, Damaged, check_training, manifests, verify_files
from nanoGPT.checkpoint.state import SHAPE, LazyTensors, check_resumed, read_ckpt, read_full_state
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import is_present, size_of
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.tokenizer import TokenizerIdentity
from nanoGPT.train_config import C

PADDED_VOCAB = 50304


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tokenizer_rows(tokenizer: TokenizerIdentity) -> int:
    """Rows of the embedding for a tokenizer: GPT-2's 50257 are padded to 50304, a multiple of 64."""
    return PADDED_VOCAB if tokenizer["vocab_size"] == GPT2_VOCAB else int(tokenizer["vocab_size"])


def read_starting_point(
    config: C, data: TokenData, checkpoint: Checkpoint | None, run: Runtime, trains: bool = True
) -> tuple[C, GPTConfig, Mapping[str, Tensor] | None]:
    """Return where a run begins. Collective.

    Args:
        config: as asked for.
        data: what it reads.
        checkpoint: what it resumes, if it does.
        run: this rank's Runtime.
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
        shape, weights = read_weights(config.init_from, run)
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


def find_newest(out_dir: Path) -> Checkpoint:
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


def find_newest_on_all(out_dir: Path, run: Runtime) -> Checkpoint:
    """Return the newest checkpoint that verifies, on every rank; rank 0 reads it. Nothing is renamed. Collective.

    Raises:
        ConfigError: there is none, or it could not be read.
    """
    found: tuple[Checkpoint | None, str] = (None, "")
    if run.is_main:
        try:
            found = find_newest(out_dir), ""
        except ConfigError as error:
            found = None, str(error)
    checkpoint, refusal = run.gather(found)[0]
    if checkpoint is None:
        raise ConfigError(refusal)
    return checkpoint


def read_weights(source: str, run: Runtime | None = None) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """Read weights by parameter name: from a run, a nanoGPT directory, a Hugging Face directory, or a GPT-2 by name.

    Args:
        source: the directory or the name.
        run: on several ranks, rank 0 chooses the newest checkpoint of a run, which may be training; None: one process.

    Raises:
        ConfigError: none of these is there.
    """
    folder = Path(source)
    if source.startswith("gpt2") and not folder.is_dir():
        folder = download(source)
    if is_present(folder / "checkpoints"):
        checkpoint = find_newest_on_all(folder, run) if run else find_newest(folder)
        return check_weights_fit(source, checkpoint.manifest["model_args"], read_full_state(checkpoint.path).model)
    if size_of(folder / "ckpt.pt") is not None:
        state, rest = read_ckpt(folder / "ckpt.pt")
        return check_weights_fit(source, rest.get("model_args"), state.model)
    if is_present(folder / "config.json"):
        shape, weights = read_hf(folder)
        return check_weights_fit(source, dataclasses.asdict(shape), weights)
    raise ConfigError(
        f"{source} holds neither checkpoints/, ckpt.pt nor config.json: give a run's or a model's directory"
    )


def check_weights_fit(
    source: str, model_args: Any, weights: Mapping[str, Tensor]
) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """The shape that `model_args` describes, with weights that fit it and are read when they are asked for.

    Raises:
        ConfigError: it describes no GPT-2, or a parameter is missing, unknown, of another shape or no float; or, when
            one is read, its values are not finite.
    """
    try:
        shape = checked_shape(model_args, list(weights))
        with torch.device("meta"):
            expected = {name: tuple(p.shape) for name, p in GPT(shape).named_parameters()}
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{source} does not describe a GPT-2 ({error}): give another directory") from None
    for name in sorted(expected.keys() | weights.keys()):
        tensor = weights.get(name)
        wanted, found = expected.get(name), None if tensor is None else tuple(tensor.shape)
        if found != wanted:
            raise ConfigError(f"{source} has {name} of shape {found} where its model has {wanted}: give another one")
        if tensor is not None and tensor.dtype not in FLOATS:
            raise ConfigError(f"{source} has {name} of {tensor.dtype}: give weights of {', '.join(map(str, FLOATS))}")
    return shape, LazyTensors({name: partial(read_finite, source, weights, name) for name in weights})


def checked_shape(model_args: Any, names: list[str]) -> GPTConfig:
    """The shape that `model_args` describes, if there are weights of as many layers: a model of 10**8 takes for ever.

    Raises:
        ValueError, TypeError: it describes no GPT-2; the message says which field.
    """
    if not isinstance(model_args, dict):
        raise TypeError("it has no model_args")
    known = {field.name for field in dataclasses.fields(GPTConfig)}
    if wrong := sorted({*SHAPE} - model_args.keys()) or sorted(map(str, model_args.keys() - known)):
        raise ValueError(f"its {wrong[0]} is {'unknown here' if wrong[0] in model_args else 'missing'}")
    shape = GPTConfig.of(model_args)
    for name in SHAPE:
        value = getattr(shape, name)
        if type(value) is not (bool if name == "bias" else int) or not (name == "bias" or 1 <= value < 2**31):
            raise ValueError(f"its {name} is {str(value)[:50]!r}")
    layers = {found[1] for name in names if (found := re.match(r"transformer\.h\.(\d+)\.", name))}
    if shape.n_layer != len(layers):
        raise ValueError(f"its n_layer is {shape.n_layer}, and it has the weights of {len(layers)} layers")
    if shape.n_embd % shape.n_head:
        raise ValueError(f"n_embd {shape.n_embd} is not divisible by n_head {shape.n_head}")
    if shape.gelu not in ("none", "tanh"):
        raise ValueError(f"its gelu is {str(shape.gelu)[:50]!r}")
    return shape


def read_finite(source: str, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Read a parameter.

    Raises:
        ConfigError: it holds NaN or infinity, with which nothing can be computed.
    """
    tensor = weights[name]
    if not tensor.isfinite().all():
        raise ConfigError(f"{source} has values in {name} that are not finite: give weights from before that")
    return tensor
