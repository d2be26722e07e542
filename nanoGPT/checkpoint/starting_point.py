"""Decide where a run starts: with random weights, with given weights, or by resuming a checkpoint.

A run that resumes a checkpoint needs the same model, optimizer, tokenizer, data and position; an evaluation needs only
the model and the tokenizer. `nanoGPT.checkpoint.sources` reads given weights. This file also has what every payload
needs: the fields of the manifest, and the comparison of shapes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanoGPT.checkpoint.manifest import NO_LOSS, Checkpoint
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, import_optional, quote_cause
from nanoGPT.model import MODULES, ModelConfig, find_architecture, make_shape
from nanoGPT.optim import LossScaler
from nanoGPT.prepare.meta import GPT2_VOCAB, TokenizerIdentity, describe_tokenizer
from nanoGPT.train_config import TrainConfig

PADDED_VOCAB = 50304


def tokenizer_rows(tokenizer: TokenizerIdentity) -> int:
    """Return the number of rows of the embedding. GPT-2's 50257 tokens are padded to 50304, a multiple of 64."""
    return PADDED_VOCAB if tokenizer["vocab_size"] == GPT2_VOCAB else tokenizer["vocab_size"]


def read_starting_point(
    config: TrainConfig, data: TokenData, checkpoint: Checkpoint | None, run: Runtime
) -> tuple[ModelConfig, Mapping[str, Tensor] | None]:
    """Return the shape of the model and the weights that a run starts from. Collective.

    Args:
        config: the configuration of the run.
        data: the run's data.
        checkpoint: the checkpoint to resume; None for a new run.
        run: this rank's Runtime.

    Returns:
        The configuration of the model, and the weights. The weights are None if they are initialized randomly
        (scratch), or loaded with the optimizer (resume).

    Raises:
        ConfigError: the shape, context length or tokenizer of the weights does not match the configuration.
    """
    weights = None
    if checkpoint:
        check_resume(config, data, checkpoint)
        shape = read_shape(checkpoint.path, checkpoint.manifest["model_args"])
    elif config.init_from == "scratch":
        rows = config.vocab_size or tokenizer_rows(data.tokenizer)
        shape = make_shape({**dataclasses.asdict(config), "vocab_size": rows})
    else:
        shape, weights = load_sources(f"--init_from={config.init_from}").read_initial_weights(config, data, run)
    if shape.vocab_size < data.tokenizer["vocab_size"]:
        raise ConfigError(
            f"the model has {shape.vocab_size} rows of vocabulary, but {config.dataset} needs "
            f"{data.tokenizer['vocab_size']}: use a larger --vocab_size, or a dataset with the tokenizer of the weights"
        )
    shape.dropout = config.dropout
    if shape.model not in MODULES:
        load_sources(f"--model={shape.model}").check_model(shape)
    return shape, weights


def load_sources(flag: str) -> Any:
    """Return the module that reads given weights and checkpoints of other phases, and checks custom models.

    Args:
        flag: the flag that needs it, for the error message.
    """
    return import_optional("nanoGPT.checkpoint.sources", flag)


def find_best(config: TrainConfig, checkpoint: Checkpoint, run: Runtime) -> tuple[float, int]:
    """Return the lowest validation loss of a run that is resumed, and its step.

    The loss is infinity if the run evaluates on other batches now.

    Losses on other batches cannot be compared: a loss on a few lucky ones could remain the best one forever.
    """
    old, step = checkpoint.manifest["config"], checkpoint.manifest["best_step"]
    if all(old[name] == getattr(config, name) for name in ("eval_iters", "batch_size", "seed")):
        return float(checkpoint.manifest["best_val_loss"]), step
    if not config.eval_only:
        run.print0("evaluations now read other batches: the best validation loss so far no longer counts")
    return float("inf"), step


# ---- checks of a checkpoint that is resumed or evaluated


def check_resume(config: TrainConfig, data: TokenData, checkpoint: Checkpoint) -> None:
    """Check that a run uses a checkpoint with the same model, optimizer and data.

    With `sampling=epoch`, a step reads batch_size * gradient_accumulation_steps sequences, and its number determines
    which ones. Both values may change if their product does not. Random sampling has no position.

    A program that only evaluates may use other data with the same tokenizer, and sequences that are shorter than the
    context of the model.

    Raises:
        ConfigError: one of them differs; the message names it.
    """
    name, manifest, trains = checkpoint.path.name, checkpoint.manifest, config.trains
    saved = {**manifest["config"], **manifest["model_args"]}
    new_run = f"start a new run from its weights with --init_from={config.out_dir} and another --out_dir"
    if trains and checkpoint.step > config.max_iters:
        raise ConfigError(
            f"--max_iters={config.max_iters}, but {name} is past it: raise --max_iters, or use another --out_dir"
        )
    has_position = trains and not config.eval_only and "epoch" in (config.sampling, saved["sampling"])
    shape = shape_fields(read_shape(name, manifest["model_args"]), config)
    fields = [*shape, *(["optimizer"] if trains else []), *(["sampling", "seed"] if has_position else [])]
    for field in fields:
        value = getattr(config, field)
        is_shorter = not trains and field == "block_size" and value < saved[field]
        if value not in (None, saved[field]) and not is_shorter:
            raise ConfigError(
                f"--{field}={value}, but {name} was trained with {field}={saved[field]}: remove the flag, or {new_run}"
            )
    check_same_tokenizer(config, data, name, manifest["data"]["tokenizer"], saved.get("dataset"))
    if not trains:
        return
    old, new = ({**each["files"], **each.get("weights", {})} for each in (manifest["data"], data.identity))
    if changed := sorted(key for key in {*old, *new} if old.get(key) != new.get(key)):
        raise ConfigError(
            f"--dataset={config.dataset} is not the data that {name} was trained on ({changed[0]} differs): use "
            f"--dataset={saved['dataset']}, as it was, to resume, or {new_run}"
        )
    if has_position:
        old, new = (each["batch_size"] * each["gradient_accumulation_steps"] for each in (saved, vars(config)))
        if old != new:
            raise ConfigError(
                f"--batch_size={config.batch_size} --gradient_accumulation_steps={config.gradient_accumulation_steps} "
                f"read {new} sequences per step, but {name} was trained with {old} and --sampling=epoch, so sequences "
                f"would be skipped or repeated: use values with the product {old} to resume, or {new_run}"
            )


def check_same_tokenizer(
    config: TrainConfig, data: TokenData, name: str, tokenizer: TokenizerIdentity, dataset: str | None = None
) -> None:
    """Check that weights were trained with the tokenizer of the data.

    Args:
        config: of the run.
        data: of the run.
        name: of the checkpoint, or of the source of the weights.
        tokenizer: with which they were trained.
        dataset: on which they were trained, if it is known.

    Raises:
        ConfigError: they were not, so every token id would mean another text.
    """
    if data.tokenizer["sha256"] != tokenizer["sha256"]:
        remedy = f"use --dataset={dataset}" if dataset else "use a dataset that was prepared with that tokenizer"
        raise ConfigError(
            f"--dataset={config.dataset} has a different tokenizer ({describe_tokenizer(data.tokenizer)}) than {name} "
            f"({describe_tokenizer(tokenizer)}): {remedy}"
        )


def shape_fields(shape: ModelConfig, config: TrainConfig) -> list[str]:
    """Return the fields that the shape of a model shares with a configuration, the model's name first.

    The dropout is not one of them: a run may change it.
    """
    shared = [name for name in vars(shape) if hasattr(config, name) and name not in ("model", "dropout")]
    return ["model", *shared]


def read_shape(source: object, model_args: Any) -> ModelConfig:
    """Return the shape of the model that the model_args of a checkpoint describe.

    Raises:
        ConfigError: they describe no model of this project.
    """
    try:
        shape_class = find_architecture(model_args.get("model", "gpt2")).Shape
        msgspec.convert(model_args, shape_class)
        return shape_class(**model_args)
    except ConfigError:
        raise
    except Exception as error:  # of many kinds, if the content is arbitrary
        raise ConfigError(f"{source} describes no model ({quote_cause(error)}): use another directory") from None


# ---- manifests and weights


def manifest_fields(
    config: TrainConfig,
    model_args: ModelConfig,
    data: TokenData,
    phase: str,
    best: tuple[float, int],
    scaler: LossScaler,
) -> dict[str, Any]:
    """Return the fields of a training run's manifest, in addition to the fields of every manifest.

    The configuration in the manifest has the shape of the model, which may be that of given weights (`init_from`).
    """
    fields, shape = dataclasses.asdict(config), dict(vars(model_args))
    return {
        "phase": phase,
        "config": fields | {name: shape[name] for name in fields.keys() & shape},
        "model_args": shape,
        "data": data.identity,
        "best_val_loss": min(best[0], NO_LOSS),
        "best_step": best[1],
        "grad_scaler": scaler.state_dict(),
    }


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each tensor; of a sharded tensor, that of the full one."""
    return {name: tensor.size() for name, tensor in tensors.items()}


def check_sizes(source: object, stored: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Check that a checkpoint has exactly the tensors of a model, or of an optimizer, with their shapes.

    Args:
        source: the checkpoint, for the message.
        stored: the shapes of its full tensors, by name.
        expected: the shapes of the model's full tensors, by name.

    Raises:
        ConfigError: a name or a shape differs.
    """
    if differ := sorted(name for name in {*stored, *expected} if stored.get(name) != expected.get(name)):
        in_file, in_model = (
            tuple(shapes[differ[0]]) if differ[0] in shapes else "missing" for shapes in (stored, expected)
        )
        raise ConfigError(
            f"{source} and the model differ in {len(differ)} parameters, such as {differ[0]}: its shape is {in_file} "
            f"in the checkpoint, and {in_model} in the model: use a checkpoint of this model"
        )


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same shape. The tied head shares the embedding's tensor."""
    for name, param in model.named_parameters():
        param.copy_(weights[name])
