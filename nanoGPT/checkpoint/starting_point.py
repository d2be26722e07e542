"""Decide where a run starts: with random weights, with given weights, or by resuming a checkpoint.

Weights come from a checkpoint of any phase and number of ranks, nanoGPT's ckpt.pt, a Hugging Face directory, or the
name of one of OpenAI's GPT-2 models. A run that resumes a checkpoint needs the same model, optimizer, tokenizer, data
and position; an evaluation needs only the model and the tokenizer.
"""

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nanoGPT.checkpoint.manifest import Checkpoint, find_checkpoint, read_manifests
from nanoGPT.checkpoint.training_state import LazyTensors, check_shapes, read_ckpt, read_full_state, shapes_of
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, import_optional, quote_cause
from nanoGPT.files import is_present
from nanoGPT.model import GPT, MODULES, ModelConfig, find_architecture, make_shape
from nanoGPT.prepare.meta import GPT2_VOCAB, TokenizerIdentity, describe_tokenizer, make_gpt2_identity
from nanoGPT.train_config import PRETRAINED, StepChoice, TrainConfig

PADDED_VOCAB = 50304
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Weights(NamedTuple):
    """The weights of a model.

    Attributes:
        shape: of the model.
        tensors: its parameters by name, each of which is read when it is accessed.
        tokenizer: of the text that it was trained on; None if its source does not name it.
    """

    shape: ModelConfig
    tensors: LazyTensors
    tokenizer: TokenizerIdentity | None


def tokenizer_rows(tokenizer: TokenizerIdentity) -> int:
    """Return the number of rows of the embedding. GPT-2's 50257 tokens are padded to 50304, a multiple of 64."""
    return PADDED_VOCAB if tokenizer["vocab_size"] == GPT2_VOCAB else tokenizer["vocab_size"]


def read_starting_point(
    config: TrainConfig, data: TokenData, checkpoint: Checkpoint | None, run: Runtime, trains: bool = True
) -> tuple[ModelConfig, Mapping[str, Tensor] | None]:
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
        check_resume(config, data, checkpoint, trains)
        shape = read_shape(checkpoint.path, checkpoint.manifest["model_args"])
    elif config.init_from == "scratch":
        rows = config.vocab_size or tokenizer_rows(data.tokenizer)
        shape = make_shape({**dataclasses.asdict(config), "vocab_size": rows})
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
        if name := shape.POSITIONS:
            positions = weights[name][: config.block_size]
            weights.data[name] = lambda: positions
    if shape.vocab_size < data.tokenizer["vocab_size"]:
        raise ConfigError(
            f"the model has {shape.vocab_size} rows of vocabulary, but {config.dataset} needs "
            f"{data.tokenizer['vocab_size']}: use a larger --vocab_size, or a dataset with the tokenizer of the weights"
        )
    shape.dropout = config.dropout
    check_model(shape)
    return shape, weights


def check_model(shape: ModelConfig) -> None:
    """Check that checkpoints can store a model: one with two blocks is built without memory.

    Raises:
        ConfigError: it has something that they would not store, or its shape does not describe it.
    """
    problem = find_problem_of_shape(shape) or find_problem_of_model(dataclasses.replace(shape, n_layer=2))
    if problem:
        raise ConfigError(f"--model={shape.model} cannot be trained: {problem}")


def find_problem_of_shape(shape: ModelConfig) -> str:
    """Return why a checkpoint could not store a shape; "" if it can."""
    fields = getattr(type(shape), "__dataclass_fields__", {})
    if "__dataclass_fields__" not in vars(type(shape)):
        return "its class Shape is no dataclass: decorate it with @dataclass"
    if "create_model" not in vars(type(shape)):
        return "its class Shape has no method create_model: define it"
    if others := sorted(vars(shape).keys() - fields.keys()):
        return f"its class Shape sets {others[0]}, which is not a field: compute it in the model"
    try:
        msgspec.convert(vars(shape), type(shape))
    except msgspec.ValidationError as error:
        return f"a field of its class Shape has a value of another type ({error}): correct the annotation"
    return ""


def find_problem_of_model(shape: ModelConfig) -> str:
    """Return why a model of this shape cannot be trained; "" if it can."""
    model = shape.create_on_meta()
    saved_names, names = ({name for name, _ in model.named_parameters(remove_duplicate=r)} for r in (True, False))
    if not isinstance(model, GPT) or not isinstance(find_blocks(model), torch.nn.ModuleList):
        return f"{shape.BLOCKS}, its BLOCKS, is no nn.ModuleList of a model that extends GPT: correct it"
    if extra := sorted(model.state_dict().keys() - names):
        return f"a checkpoint would not have {extra[0]}: register buffers with persistent=False"
    if shared := sorted(names - saved_names - shape.tied_names().keys()):
        return f"{shared[0]} is another name of a parameter of a block: tie only parameters outside the blocks"
    if scalars := [name for name, param in model.named_parameters() if not param.dim()]:
        return f"{scalars[0]} has no dimension, and cannot be sharded: give it the shape (1,)"
    return ""


def find_blocks(model: GPT) -> torch.nn.Module | None:
    """Return the module at the path BLOCKS; None if there is none."""
    return dict(model.named_modules()).get(model.config.BLOCKS)


def find_best_val_loss(config: TrainConfig, checkpoint: Checkpoint, run: Runtime) -> float:
    """Return the best validation loss of a run that is resumed; infinity if it evaluates on other batches now.

    Losses on other batches cannot be compared: a loss on a few lucky ones could remain the best one forever.
    """
    old = checkpoint.manifest["config"]
    if all(old[name] == getattr(config, name) for name in ("eval_iters", "batch_size", "seed")):
        return float(checkpoint.manifest["best_val_loss"])
    if not config.eval_only:
        run.print0("evaluations now read other batches: the best validation loss so far no longer counts")
    return float("inf")


# ---- checks of a checkpoint that is resumed or evaluated


def check_resume(config: TrainConfig, data: TokenData, checkpoint: Checkpoint, trains: bool = True) -> None:
    """Check that a run uses a checkpoint with the same model, optimizer and data.

    With `sampling=epoch`, a step reads batch_size * gradient_accumulation_steps sequences, and its number determines
    which ones. Both values may change if their product does not. Random sampling has no position.

    Args:
        trains: whether the run continues the training. An evaluation may use other data with the same tokenizer, and
            sequences that are shorter than the context of the model.

    Raises:
        ConfigError: one of them differs; the message names it.
    """
    name, manifest = checkpoint.path.name, checkpoint.manifest
    saved = {
        "model": "gpt2",
        "optimizer": "adamw",
        "sampling": "random",
        **manifest["config"],
        **manifest["model_args"],
    }
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


# ---- weights of any source


def is_run(folder: Path) -> bool:
    """Return whether a directory is that of a run, or of one of its checkpoints."""
    return is_present(folder / "checkpoints") or is_present(folder / "manifest.json")


def read_weights(source: str, run: Runtime | None = None, step: StepChoice = None) -> Weights:
    """Read weights from a run, a nanoGPT directory, a Hugging Face directory, or a GPT-2 that is given by name.

    Args:
        source: the directory or the name.
        run: this rank's Runtime. With multiple ranks, rank 0 chooses the checkpoint, because the source may be a run
            that is training. None: a single process.
        step: of the checkpoint, if the source is a run; see `find_checkpoint`.

    Returns:
        The weights. An access to one raises ConfigError if a value is not finite.

    Raises:
        ConfigError: the source is none of these, or is not valid.
    """
    folder, tokenizer = Path(source), None
    if is_run(folder):
        checkpoint = find_checkpoint(folder, run, step)
        state, tokenizer = read_full_state(checkpoint.path), checkpoint.manifest["data"]["tokenizer"]
        model_args, tensors, shapes = checkpoint.manifest["model_args"], state.model, state.shapes
    else:
        if step is not None:
            raise ConfigError(f"--resume_step={step} needs the directory of a run, which {source} is not: remove it")
        if source in PRETRAINED and not folder.is_dir():
            folder, tokenizer = load_hugging_face(source).download_gpt2(source), make_gpt2_identity()
        if is_present(folder / "ckpt.pt"):
            state, rest = read_ckpt(folder / "ckpt.pt")
            model_args, tensors, tokenizer = rest.get("model_args"), state.model, rest.get("tokenizer")
        elif is_present(folder / "config.json"):
            shape, tensors, stored_tokenizer = load_hugging_face(source).read_hf(folder)
            model_args, tokenizer = vars(shape), tokenizer or stored_tokenizer
        else:
            raise ConfigError(f"{source} has neither checkpoints/, ckpt.pt nor config.json: use a run or a model")
        shapes = shapes_of(tensors)
    shape = check_weights_fit(source, model_args, shapes)
    if tokenizer is None and shape.model == "gpt2" and shape.vocab_size >= GPT2_VOCAB:
        tokenizer = make_gpt2_identity()
        if run is None or run.is_main:
            print(f"{source} does not name its tokenizer: assuming GPT-2's", file=sys.stderr)
    readers = {name: partial(read_finite_tensor, source, tensors, name) for name in tensors}
    return Weights(shape, LazyTensors(readers), tokenizer)


def load_hugging_face(source: str) -> Any:
    """Return the module that reads weights of Hugging Face. It is loaded only if a run starts from them."""
    return import_optional("nanoGPT.checkpoint.hugging_face", f"--init_from={source}")


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


def find_model_name(source: str) -> str:
    """Return the name of the model in a directory with weights; gpt2 if the directory does not name it."""
    folder, model_args = Path(source), None
    if is_run(folder):
        model_args = next((manifest.get("model_args") for _, manifest in read_manifests(folder)), None)
    elif is_present(folder / "ckpt.pt"):
        model_args = read_ckpt(folder / "ckpt.pt")[1].get("model_args")
    elif is_present(folder / "config.json"):
        model = load_hugging_face(source).read_model_type(folder / "config.json")
        model_args = {"model": model if model in MODULES else "gpt2"}
    name = model_args.get("model") if isinstance(model_args, dict) else None
    return name if isinstance(name, str) else "gpt2"


def check_weights_fit(source: str, model_args: Any, shapes: Mapping[str, torch.Size]) -> ModelConfig:
    """Check that weights match the model that `model_args` describes, and return its shape.

    Args:
        source: of the weights, for the message.
        model_args: as read from a file.
        shapes: of the weights, by name.

    Raises:
        ConfigError: `model_args` describe no model, or a parameter is missing, unknown or of another shape.
    """
    shape = read_shape(source, model_args)
    try:
        prefix = shape.BLOCKS + "."
        layers = {name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)}
        if shape.n_layer != len(layers):  # to build a model of 10**8 layers would take forever
            raise ValueError(f"its n_layer is {shape.n_layer}, but it has the weights of {len(layers)} layers")
        if shape.n_head < 1 or shape.n_embd % shape.n_head:
            raise ValueError(f"its n_embd {shape.n_embd} is not divisible by its n_head {shape.n_head}")
        expected = shapes_of(dict(shape.create_on_meta().named_parameters()))
    except Exception as error:  # of many kinds, if the values are arbitrary
        raise ConfigError(f"{source} describes no model ({quote_cause(error)}): use another directory") from None
    check_shapes(source, shapes, expected)
    return shape


def read_finite_tensor(source: str, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Read a parameter.

    Raises:
        ConfigError: it is not floating point, or a value is NaN or infinite.
    """
    tensor = tensors[name]
    if tensor.dtype not in FLOATS:
        raise ConfigError(f"{source} has {name} of {tensor.dtype}: use weights of torch.float32, for example")
    if not tensor.isfinite().all():
        raise ConfigError(f"{source} has values in {name} that are not finite: use an earlier checkpoint")
    return tensor
