"""Read the weights that a run starts from.

Their source is a checkpoint of any phase and number of ranks, nanoGPT's ckpt.pt, a Hugging Face directory, or the name
of one of OpenAI's GPT-2 models.
"""

import dataclasses
import re
import sys
from collections import ChainMap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoGPT.checkpoint.checks import SHAPE, check_resume, check_same_tokenizer, check_shape
from nanoGPT.checkpoint.hugging_face import PRETRAINED, download_gpt2, read_hf, read_hf_tokenizer
from nanoGPT.checkpoint.manifest import (
    Checkpoint,
    DamagedCheckpoint,
    check_training,
    choose_step,
    read_manifest,
    read_manifests,
    verify_files,
)
from nanoGPT.checkpoint.training_state import LazyTensors, read_ckpt, read_full_state
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import is_present, size_of
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.schema import SchemaError, check_schema
from nanoGPT.tokenizer import GPT2_VOCAB, TokenizerIdentity, check_tokenizer, make_gpt2_identity
from nanoGPT.train_config import StepChoice, TrainConfig

PADDED_VOCAB = 50304
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Weights(NamedTuple):
    """The weights of a model.

    Attributes:
        shape: of the model.
        tensors: its parameters by name, each of which is read when it is accessed.
        tokenizer: of the text that it was trained on; None if its source does not name it.
    """

    shape: GPTConfig
    tensors: Mapping[str, Tensor]
    tokenizer: TokenizerIdentity | None


def tokenizer_rows(tokenizer: TokenizerIdentity) -> int:
    """Return the number of rows of the embedding. GPT-2's 50257 tokens are padded to 50304, a multiple of 64."""
    return PADDED_VOCAB if tokenizer["vocab_size"] == GPT2_VOCAB else int(tokenizer["vocab_size"])


def read_starting_point(
    config: TrainConfig, data: TokenData, checkpoint: Checkpoint | None, run: Runtime, trains: bool = True
) -> tuple[GPTConfig, Mapping[str, Tensor] | None]:
    """Return the shape of the model and the weights that a run starts from. Collective.

    Args:
        config: the configuration of the run.
        data: the run's data.
        checkpoint: the checkpoint to resume; None for a new run.
        run: this rank's Runtime.
        trains: whether the run continues the training of the checkpoint. If False, it only evaluates the weights.

    Returns:
        The configuration of the model, and the weights. The weights are None if they are initialized randomly
        (scratch), or loaded with the optimizer (resume).

    Raises:
        ConfigError: the shape, context length or tokenizer of the weights does not match the configuration.
    """
    weights = None
    if checkpoint:
        check_training(checkpoint.path, checkpoint.manifest)
        if trains:
            check_resume(config, data, checkpoint)
        else:
            check_shape(config, checkpoint, allows_shorter=True)
            tokenizer, dataset = checkpoint.manifest["data"]["tokenizer"], checkpoint.manifest["config"].get("dataset")
            check_same_tokenizer(config, data, checkpoint.path.name, tokenizer, dataset)
        shape = GPTConfig.from_dict(checkpoint.manifest["model_args"])
    elif config.init_from == "scratch":
        rows = config.vocab_size or tokenizer_rows(data.tokenizer)
        shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": rows})
    else:
        shape, weights, tokenizer = read_weights(config.init_from, run, config.resume_step)
        if tokenizer:
            check_same_tokenizer(config, data, config.init_from, tokenizer)
        else:
            run.print0(f"{config.init_from} does not name its tokenizer: assuming that of --dataset={config.dataset}")
        if config.block_size > shape.block_size:
            raise ConfigError(
                f"--block_size={config.block_size} is larger than the {shape.block_size} positions of "
                f"{config.init_from}: use --block_size={shape.block_size} or less"
            )
        shape.block_size = config.block_size
        positions = weights["transformer.wpe.weight"][: config.block_size]
        weights = ChainMap({"transformer.wpe.weight": positions}, weights)  # type: ignore[arg-type]
    if shape.vocab_size < data.tokenizer["vocab_size"]:
        remedy = "a larger --vocab_size" if weights is None and not checkpoint else "a dataset with the same tokenizer"
        raise ConfigError(
            f"the model has {shape.vocab_size} rows of vocabulary, but {config.dataset} needs "
            f"{data.tokenizer['vocab_size']}: use {remedy}"
        )
    shape.dropout = config.dropout
    return shape, weights


def is_run(folder: Path) -> bool:
    """Return whether a directory is that of a run, or of one of its checkpoints."""
    return is_present(folder / "checkpoints") or is_present(folder / "manifest.json")


def find_checkpoint(source: Path, run: Runtime | None = None, step: StepChoice = None) -> Checkpoint:
    """Return a complete checkpoint of a run: the newest one, or the one of `step`. Nothing is renamed.

    The function is collective if there is a Runtime.

    Args:
        source: directory of the run; or of one checkpoint, which is then the only choice.
        run: this rank's Runtime. Rank 0 lists the checkpoints, and the ranks divide the files to hash, so that a large
            checkpoint takes 1/N of the time. None: a single process.
        step: number of updates of the checkpoint, or "best"; None: the newest one that is complete.

    Raises:
        ConfigError: there is no complete checkpoint, one could not be read, or other ranks do not see one of rank 0.
    """

    def list_paths() -> list[Path]:
        if step is not None:
            return [choose_step(source, step)]
        return [source] if is_present(source / "manifest.json") else [path for path, _ in read_manifests(source)]

    is_changing = True
    while is_changing:  # if a training run deletes a checkpoint meanwhile, it has saved a newer one: search again
        is_changing = False
        paths = run.call_on_rank0(list_paths) if run else list_paths()
        for path in paths:
            checkpoint, reason = verify_checkpoint(path, run)
            if checkpoint:
                return checkpoint
            is_visible = run.gather(is_present(path)) if run else []
            missing_ranks = [rank for rank in range(len(is_visible)) if not is_visible[rank]]
            is_deleted = not (run.call_on_rank0(partial(is_present, path)) if run else is_present(path))
            if missing_ranks and not is_deleted:
                raise ConfigError(f"ranks {missing_ranks} do not see {path}: use a directory that all nodes share")
            is_changing = is_changing or is_deleted
            if not is_deleted and (step is not None or path == source):
                raise ConfigError(f"{path} is damaged ({reason}): choose another checkpoint")
            if not is_deleted and (run is None or run.is_main):
                print(f"skipping {path.name}: {reason}", file=sys.stderr)
    raise ConfigError(
        f"there is no complete checkpoint under {source}: train first, or use the --out_dir of another run"
    )


def verify_checkpoint(path: Path, run: Runtime | None) -> tuple[Checkpoint | None, str]:
    """Verify a checkpoint, and return it, or None and what is damaged. Collective if there is a Runtime.

    Raises:
        ConfigError: a file could not be read, or the checkpoint does not belong to a training run. All ranks raise it.
    """
    rank, world_size = (run.rank, run.world_size) if run else (0, 1)
    checkpoint, damage, failure = None, "", ""
    try:
        checkpoint = Checkpoint(path, read_manifest(path))
        verify_files(path, checkpoint.manifest, rank, world_size)
        check_training(path, checkpoint.manifest)
    except DamagedCheckpoint as error:
        damage = str(error)
    except ConfigError as error:
        failure = str(error)
    outcomes = run.gather((damage, failure)) if run else [(damage, failure)]
    if message := next((failure for _, failure in outcomes if failure), ""):
        raise ConfigError(message)
    damage = next((damage for damage, _ in outcomes if damage), "")
    return None if damage else checkpoint, damage


def read_weights(source: str, run: Runtime | None = None, step: StepChoice = None) -> Weights:
    """Read weights from a run, a nanoGPT directory, a Hugging Face directory, or a GPT-2 that is given by name.

    Args:
        source: the directory or the name.
        run: this rank's Runtime. With multiple ranks, rank 0 chooses the checkpoint, because the source may be a run
            that is training. None: a single process.
        step: of the checkpoint, if the source is a run; see `find_checkpoint`.

    Raises:
        ConfigError: the source is none of these, or is not valid.
    """
    folder, tokenizer = Path(source), None
    if is_run(folder):
        checkpoint = find_checkpoint(folder, run, step)
        manifest = checkpoint.manifest
        content = check_weights_fit(source, manifest["model_args"], read_full_state(checkpoint.path).model)
        return Weights(*content, manifest["data"]["tokenizer"])
    if step is not None:
        raise ConfigError(f"--resume_step={step} needs the directory of a run, which {source} is not: remove it")
    if source in PRETRAINED and not folder.is_dir():
        folder, tokenizer = download_gpt2(source), make_gpt2_identity()
    if size_of(folder / "ckpt.pt") is not None:
        state, rest = read_ckpt(folder / "ckpt.pt")
        tokenizer = read_ckpt_tokenizer(source, rest)
        content = check_weights_fit(source, rest.get("model_args"), state.model)
    elif is_present(folder / "config.json"):
        shape, weights = read_hf(folder)
        tokenizer = tokenizer or read_hf_tokenizer(folder)
        content = check_weights_fit(source, dataclasses.asdict(shape), weights)
    else:
        raise ConfigError(
            f"{source} contains neither checkpoints/, ckpt.pt nor config.json: use the directory of a run or a model"
        )
    if tokenizer is None and content[0].vocab_size >= GPT2_VOCAB:
        tokenizer = make_gpt2_identity()
        if run is None or run.is_main:
            print(f"{source} does not name its tokenizer: assuming GPT-2's", file=sys.stderr)
    return Weights(*content, tokenizer)


def read_ckpt_tokenizer(source: str, content: dict[str, Any]) -> TokenizerIdentity | None:
    """Return the tokenizer that a ckpt.pt of this project names; None if it names none, as nanoGPT's.

    Raises:
        ConfigError: it is not valid.
    """
    if "tokenizer" not in content:
        return None
    try:
        identity = check_schema(content["tokenizer"], TokenizerIdentity)
        check_tokenizer(identity)
        return identity
    except SchemaError as error:
        raise ConfigError(f"{source} has no valid tokenizer ({error}): use another checkpoint") from None


def check_weights_fit(
    source: str, model_args: Any, weights: Mapping[str, Tensor]
) -> tuple[GPTConfig, Mapping[str, Tensor]]:
    """Check that weights match the model that `model_args` describes.

    Returns:
        The shape of the model, and its weights, each of which is read when it is accessed. A read raises ConfigError if
        a value is not finite.

    Raises:
        ConfigError: `model_args` does not describe a GPT-2, or a parameter is missing, unknown, of another shape or not
            floating point.
    """
    try:
        shape = parse_shape(model_args, list(weights))
        with torch.device("meta"):
            expected = {name: tuple(p.shape) for name, p in GPT(shape).named_parameters()}
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{source} does not describe a GPT-2 ({error}): use another directory") from None
    for name in sorted(expected.keys() | weights.keys()):
        tensor = weights.get(name)
        expected_shape, actual_shape = expected.get(name), None if tensor is None else tuple(tensor.shape)
        if expected_shape is None or actual_shape is None:
            owner, other = ("its model", source) if actual_shape is None else (source, "its model")
            raise ConfigError(f"{owner} has {name}, which {other} lacks: use other weights")
        if actual_shape != expected_shape:
            raise ConfigError(
                f"{source} has {name} of shape {actual_shape}, but its model has {expected_shape}: use other weights"
            )
        if tensor is not None and tensor.dtype not in FLOATS:
            raise ConfigError(f"{source} has {name} of {tensor.dtype}: use weights of {', '.join(map(str, FLOATS))}")
    return shape, LazyTensors({name: partial(read_finite_tensor, source, weights, name) for name in weights})


def parse_shape(model_args: Any, names: list[str]) -> GPTConfig:
    """Return the shape that `model_args` describes.

    Check that there are weights for every layer first: to build a model of 10**8 layers would take forever.

    Args:
        model_args: as read from a file.
        names: the names of the weights.

    Raises:
        ValueError, TypeError: `model_args` does not describe a GPT-2; the message names the field.
    """
    if not isinstance(model_args, dict):
        raise TypeError("it has no model_args")
    known = {field.name for field in dataclasses.fields(GPTConfig)}
    if invalid := sorted({*SHAPE} - model_args.keys()) or sorted(map(str, model_args.keys() - known)):
        raise ValueError(f"its {invalid[0]} is {'unknown' if invalid[0] in model_args else 'missing'}")
    shape = GPTConfig.from_dict(model_args)
    for name in SHAPE:
        value = getattr(shape, name)
        if type(value) is not (bool if name == "bias" else int) or not (name == "bias" or 1 <= value < 2**31):
            raise ValueError(f"its {name} is {str(value)[:50]!r}")
    layers = {match[1] for name in names if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    if shape.n_layer != len(layers):
        raise ValueError(f"its n_layer is {shape.n_layer}, but it has the weights of {len(layers)} layers")
    if shape.n_embd % shape.n_head:
        raise ValueError(f"n_embd {shape.n_embd} is not divisible by n_head {shape.n_head}")
    if shape.gelu not in ("none", "tanh"):
        raise ValueError(f"its gelu is {str(shape.gelu)[:50]!r}")
    return shape


def read_finite_tensor(source: str, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Read a parameter.

    Raises:
        ConfigError: a value is NaN or infinite.
    """
    tensor = weights[name]
    if not tensor.isfinite().all():
        raise ConfigError(f"{source} has values in {name} that are not finite: use an earlier checkpoint")
    return tensor
