"""Read initial weights and checkpoints of other phases, and check custom models.

A trainer loads this module (`load_sources`) only if it needs one of these: a checkpoint of another phase, nanoGPT's
ckpt.pt, a Hugging Face directory, a GPT-2 of OpenAI by name, or a custom model. Weights are read as full tensors by
parameter name. Only tensors and plain values are read: a file that could run code is refused.
"""

import dataclasses
import re
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nanoGPT.checkpoint.ckpt import check_moments, read_ckpt
from nanoGPT.checkpoint.manifest import INDEX, find_checkpoint, read_manifests
from nanoGPT.checkpoint.shards import SafeReader, read_shards, select_param_sizes
from nanoGPT.checkpoint.starting_point import (
    check_same_tokenizer,
    check_sizes,
    read_shape,
    shape_fields,
    sizes_of,
)
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, did_you_mean, import_optional, quote_cause
from nanoGPT.files import is_present
from nanoGPT.model import GPT, MODULES, ModelConfig, check_buffers, make_shape
from nanoGPT.prepare.meta import GPT2_VOCAB, TokenizerIdentity, make_gpt2_identity
from nanoGPT.train_config import PRETRAINED, StepChoice, TrainConfig

WRAPPERS = r"^(module\.|_orig_mod\.)+"  # prefixes of parameter names in a model that DDP or torch.compile wraps
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass
class FullState:
    """A full training state by parameter name. Every payload can be read in this form. Tied names occur once.

    Attributes:
        model: the full tensor of each parameter, on the CPU.
        optimizer: the state tensors of each parameter, such as exp_avg; empty if there are only weights.
        sizes: the size of each parameter.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    sizes: Mapping[str, torch.Size]


class LazyTensors(UserDict[str, Any]):
    """A mapping whose tensors are read by functions at each access, so one tensor is in memory at a time."""

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]()


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


# ---- the full state of a checkpoint


def read_full_state(path: Path) -> FullState:
    """Return the full state of a checkpoint, from `ckpt.pt` or from shards. A tensor is read when it is accessed.

    Raises:
        ConfigError: the checkpoint is not valid.
    """
    if not is_present(path / INDEX):
        return read_ckpt(path / "ckpt.pt", interpret_ckpt)[0]
    reader = SafeReader(path)
    shapes = select_param_sizes(reader.sizes)
    model, optimizer = LazyTensors(), defaultdict[str, LazyTensors](LazyTensors)
    for key in reader.sizes:
        kind, name = key.split(".", 1)
        if kind == "model":
            model.data[name] = partial(read_tensor, reader, key, shapes[name])
        else:
            name, item = name.rsplit(".", 1)
            optimizer[name].data[item] = partial(read_tensor, reader, key, shapes[name])
    return FullState(model, optimizer, shapes)


def read_tensor(reader: SafeReader, key: str, shape: torch.Size) -> Tensor:
    """Read one full tensor from shards. If it is flat, as phase 1 stores it, return it in the parameter's shape."""
    stored = reader.index.state_dict_metadata[key]
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    read_shards(reader, {key: tensor}, no_dist=True)
    return tensor.view(shape) if tensor.dim() == 1 and tensor.numel() == shape.numel() else tensor


def order_for_optimizer(params: Mapping[str, Tensor]) -> list[str]:
    """Return parameter names in the order of `param_groups`: those with weight decay, then the others."""
    return sorted(params, key=lambda name: params[name].dim() < 2)


def remove_tied(weights: dict[str, Tensor], model_args: Mapping[str, Any]) -> None:
    """Remove the other names of tied parameters, if they have the values of the parameter.

    Args:
        weights: by name; it is changed.
        model_args: of the model.
    """
    for name, source in find_tied_names(make_shape(model_args)).items():
        if name in weights and are_tied(weights[name], weights[source]):
            del weights[name]


def find_tied_names(shape: ModelConfig) -> dict[str, str]:
    """Return the other name of each tied parameter outside the blocks, with the name under which it is saved."""
    model = dataclasses.replace(shape, n_layer=1).create_on_meta()  # a damaged file may describe millions of blocks
    saved_names = {param: name for name, param in model.named_parameters()}
    pairs = model.named_parameters(remove_duplicate=False)
    return {name: saved_names[param] for name, param in pairs if name != saved_names[param]}


def are_tied(head: Tensor, embedding: Tensor) -> bool:
    """Return whether both have the same values, of the same dtype."""
    return head.dtype == embedding.dtype and torch.equal(head, embedding)


def interpret_ckpt(content: dict[str, Any]) -> tuple[FullState, dict[str, Any]]:
    """Return the training state in a `ckpt.pt` of this project or of nanoGPT, and the other entries of the file."""
    model = {re.sub(WRAPPERS, "", k): v for k, v in content.pop("model").items()}
    model = {k: v for k, v in model.items() if not k.endswith(".attn.bias")}  # the causal mask
    remove_tied(model, content.get("model_args") or {})
    order = content.pop("optimizer_params", order_for_optimizer(model))  # nanoGPT does not name them
    states = content.pop("optimizer", {"state": {}})["state"]
    return FullState(model, {order[i]: state for i, state in states.items()}, sizes_of(model)), content


def copy_full_state(path: Path, state: Mapping[str, Tensor], copy: Callable[[Tensor, Tensor], object]) -> set[str]:
    """Copy the full tensors of a checkpoint to this rank's tensors and shards, as `shards.load_shards` describes."""
    full, found = read_full_state(path), set()
    check_sizes(path, full.sizes, select_param_sizes(sizes_of(state)))
    for key, target in state.items():
        kind, name = key.split(".", 1)
        if kind == "model":
            copy(target, full.model[name])
        else:
            name, item = name.rsplit(".", 1)
            if item not in full.optimizer.get(name, {}):
                continue
            value = full.optimizer[name][item]
            check_moments(path, name, {item: value}, full.sizes[name])
            copy(target, value)
        found.add(key)
    return found


# ---- weights of any source


def is_run(folder: Path) -> bool:
    """Return whether a directory is that of a run, or of one of its checkpoints."""
    return is_present(folder / "checkpoints") or is_present(folder / "manifest.json")


def read_initial_weights(config: TrainConfig, data: TokenData, run: Runtime) -> tuple[ModelConfig, LazyTensors]:
    """Return the shape and the weights of `config.init_from`, for sequences of `config.block_size` tokens. Collective.

    Raises:
        ConfigError: the context length or the tokenizer of the weights does not match the configuration.
    """
    source = config.init_from
    shape, weights, tokenizer = read_weights(source, run, config.resume_step)
    if tokenizer:
        check_same_tokenizer(config, data, source, tokenizer)
    else:
        run.print0(f"{source} does not name its tokenizer: assuming that of --dataset={config.dataset}")
    if config.block_size > shape.block_size:
        raise ConfigError(
            f"--block_size={config.block_size} is larger than the {shape.block_size} positions of {source}: "
            f"use --block_size={shape.block_size} or less"
        )
    shape.block_size = config.block_size
    if name := shape.POSITIONS:
        positions = weights[name][: config.block_size]
        weights.data[name] = lambda: positions
    return shape, weights


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
        model_args, tensors, shapes = checkpoint.manifest["model_args"], state.model, state.sizes
    else:
        if step is not None:
            raise ConfigError(f"--resume_step={step} needs the directory of a run, which {source} is not: remove it")
        if source in PRETRAINED and not folder.is_dir():
            folder, tokenizer = load_hugging_face(source).download_gpt2(source), make_gpt2_identity()
        if is_present(folder / "ckpt.pt"):
            state, rest = read_ckpt(folder / "ckpt.pt", interpret_ckpt)
            model_args, tensors, tokenizer = rest.get("model_args"), state.model, rest.get("tokenizer")
        elif is_present(folder / "config.json"):
            shape, tensors, stored_tokenizer = load_hugging_face(source).read_hf(folder)
            model_args, tokenizer = vars(shape), tokenizer or stored_tokenizer
        else:
            raise ConfigError(f"{source} has neither checkpoints/, ckpt.pt nor config.json: use a run or a model")
        shapes = sizes_of(tensors)
    shape = check_weights_fit(source, model_args, shapes)
    if tokenizer is None and shape.model == "gpt2" and shape.vocab_size >= GPT2_VOCAB:
        tokenizer = make_gpt2_identity()
        if run is None or run.is_main:
            print(f"{source} does not name its tokenizer: assuming GPT-2's", file=sys.stderr)
    readers = {name: partial(read_finite_tensor, source, tensors, name) for name in tensors}
    return Weights(shape, LazyTensors(readers), tokenizer)


def check_source(config: TrainConfig) -> None:
    """Check that `config.init_from` names a source of weights, which the run does not overwrite.

    Raises:
        ConfigError: it does not.
    """
    source = config.init_from
    if source in PRETRAINED:
        return
    if not source or not Path(source).is_dir():
        known = ["scratch", "resume", *PRETRAINED]
        raise ConfigError(
            f"--init_from={source} is neither {', '.join(known)} nor a directory"
            f"{did_you_mean(source, known) or ': use one of these names, or a directory with weights'}"
        )
    if not config.eval_only and Path(source).resolve() == Path(config.out_dir).resolve():
        raise ConfigError(
            f"--init_from={source} is the directory of --out_dir too: choose another --out_dir, so that the model "
            "stays as it is (or --init_from=resume to continue a run)"
        )


def load_hugging_face(source: str) -> Any:
    """Return the module that reads weights of Hugging Face. It is loaded only if a run starts from them."""
    return import_optional("nanoGPT.checkpoint.hugging_face", f"--init_from={source}")


def find_model_name(source: str) -> str:
    """Return the name of the model in a directory with weights; gpt2 if the directory does not name it."""
    folder, model_args = Path(source), None
    if is_run(folder):
        model_args = next((manifest.get("model_args") for _, manifest in read_manifests(folder)), None)
    elif is_present(folder / "ckpt.pt"):
        model_args = read_ckpt(folder / "ckpt.pt", interpret_ckpt)[1].get("model_args")
    elif is_present(folder / "config.json"):
        model = load_hugging_face(source).read_model_type(folder / "config.json")
        model_args = {"model": model if model in MODULES else "gpt2"}
    name = model_args.get("model") if isinstance(model_args, dict) else None
    return name if isinstance(name, str) else "gpt2"


def check_given_shape(config: TrainConfig, given: set[str]) -> None:
    """Check that no flag contradicts the shape of the weights that a new run starts from.

    Sequences may be shorter than the context of the model.

    Args:
        config: of the run.
        given: the names of the fields that a flag or a config file sets.

    Raises:
        ConfigError: a flag does; the message names it.
    """
    shape = make_shape({**dataclasses.asdict(config), "vocab_size": 1})
    names = [name for name in shape_fields(shape, config) if name in given and name != "block_size"]
    names = [name for name in names if getattr(config, name) is not None]
    if not names or not (config.init_from in PRETRAINED or Path(config.init_from or "scratch").is_dir()):
        return
    shape = read_weights(config.init_from, step=config.resume_step).shape
    for name in names:
        if (value := getattr(config, name)) != (actual := getattr(shape, name)):
            raise ConfigError(f"--{name}={value}, but {config.init_from} has {name}={actual}: remove this setting")


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
        expected = sizes_of(dict(shape.create_on_meta().named_parameters()))
    except Exception as error:  # of many kinds, if the values are arbitrary
        raise ConfigError(f"{source} describes no model ({quote_cause(error)}): use another directory") from None
    check_sizes(source, shapes, expected)
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


# ---- custom models


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
    check_buffers(model)
    if shared := sorted(names - saved_names - find_tied_names(shape).keys()):
        return f"{shared[0]} is another name of a parameter of a block: tie only parameters outside the blocks"
    if scalars := [name for name, param in model.named_parameters() if not param.dim()]:
        return f"{scalars[0]} has no dimension, and cannot be sharded: give it the shape (1,)"
    return ""


def find_blocks(model: GPT) -> torch.nn.Module | None:
    """Return the module at the path BLOCKS; None if there is none."""
    return dict(model.named_modules()).get(model.config.BLOCKS)
