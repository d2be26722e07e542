"""Save a training state into a checkpoint, and load it into a model and an optimizer.

The payload of the baseline is nanoGPT's ckpt.pt; the payload of phases 1 and 3 are shards. Both can be read as a full
state by parameter name, so a checkpoint of one phase opens in another. Only tensors and plain values are read: a file
that could run code is refused.
"""

import dataclasses
import os
import pickle
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoGPT.checkpoint.checks import SHAPE
from nanoGPT.checkpoint.hashed_files import NewFiles
from nanoGPT.checkpoint.manifest import list_files
from nanoGPT.checkpoint.shards import SafeReader, read_index, read_shards
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, is_out_of_memory
from nanoGPT.files import ABSENT, retry_reads
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler
from nanoGPT.train_config import TrainConfig

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
WRAPPERS = r"^(module\.|_orig_mod\.)+"  # prefixes of parameter names in a model that DDP or torch.compile wraps


@dataclass
class FullState:
    """A full training state by parameter name. Every payload can be converted to this form. Tied names occur once.

    Attributes:
        model: the full tensor of each parameter, on the CPU.
        optimizer: the state tensors of each parameter, such as exp_avg; empty if there are only weights.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]


class LazyTensors(Mapping[str, Tensor]):
    """A mapping whose tensors are read at each access and not stored, so one tensor is in memory at a time."""

    def __init__(self, readers: dict[str, Callable[[], Tensor]]) -> None:
        self.readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self.readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def manifest_fields(
    config: TrainConfig,
    model_args: GPTConfig,
    data: TokenData,
    phase: str,
    best_val_loss: float,
    scaler: LossScaler,
) -> dict[str, Any]:
    """Return the fields of a training run's manifest, in addition to the fields of every manifest.

    The configuration in the manifest has the shape of the model, which may be that of given weights (`init_from`).
    """
    shape = {name: getattr(model_args, name) for name in SHAPE}
    return {
        "phase": phase,
        "config": {**dataclasses.asdict(config), **shape},
        "model_args": dataclasses.asdict(model_args),
        "data": data.identity,
        "best_val_loss": best_val_loss,
        "grad_scaler": scaler.state_dict(),
    }


# ---- the baseline's payload: nanoGPT's ckpt.pt


def write_ckpt(
    files: NewFiles,
    run: Runtime,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    step: int,
    fields: dict[str, Any],
) -> None:
    """Write `ckpt.pt` on rank 0, from a model and an optimizer that are replicated on every rank."""
    if run.is_main:
        state = FullState(dict(model.named_parameters()), optimizer_state_by_name(model, optimizer))
        save_ckpt(files, state, step, fields)


def save_ckpt(files: NewFiles, state: FullState, step: int, fields: dict[str, Any]) -> None:
    """Write `ckpt.pt` in nanoGPT's format, with its keys and its order of parameters in the optimizer.

    nanoGPT cannot use the optimizer state of Muon.

    Args:
        files: the new checkpoint.
        state: the model and the optimizer.
        step: number of completed updates.
        fields: the fields of the manifest.
    """
    args = {k: v for k, v in fields["model_args"].items() if k != "gelu" or v != "none"}
    config = fields["config"]
    with torch.device("meta"):
        names = [name for name, _ in GPT(GPTConfig.from_dict(args)).named_parameters()]  # in nanoGPT's order
    model = {name: state.model[name].detach() for name in dict.fromkeys([*names, *state.model])}
    order = order_for_optimizer(model)
    decay = [i for i, name in enumerate(order) if model[name].dim() >= 2]
    groups = [
        {"params": decay, "weight_decay": config["weight_decay"]},
        {"params": list(range(len(decay), len(order))), "weight_decay": 0.0},
    ]
    defaults = {"lr": config["learning_rate"], "betas": (config["beta1"], config["beta2"]), "eps": 1e-8}
    defaults |= {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    defaults |= {"fused": None, "decoupled_weight_decay": True}
    content = {
        "model": {HEAD: model[EMBEDDING], **model},  # a head that is not tied is in `model`
        "optimizer": {
            "state": {i: dict(state.optimizer[name]) for i, name in enumerate(order) if name in state.optimizer},
            "param_groups": [{**defaults, **group} for group in groups],
        },
        "model_args": args,
        "iter_num": step,
        "best_val_loss": fields["best_val_loss"],
        "config": config,
        "tokenizer": fields["data"]["tokenizer"],
    }
    with files.open("ckpt.pt") as file:
        torch.save(content, file)  # type: ignore[arg-type]


def order_for_optimizer(params: Mapping[str, Tensor]) -> list[str]:
    """Return parameter names in the order of `param_groups`: those with weight decay, then the others."""
    return [n for n, p in params.items() if p.dim() >= 2] + [n for n, p in params.items() if p.dim() < 2]


def optimizer_state_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's state tensors by parameter name, without copying them."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def read_ckpt(path: Path) -> tuple[FullState, dict[str, Any]]:
    """Read a `ckpt.pt` of this project or of nanoGPT.

    Returns:
        The training state, and the other entries of the file.

    Raises:
        ConfigError: the file is not a `ckpt.pt`, or contains anything but tensors and plain values.
    """
    try:
        content = retry_reads(path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        model = {re.sub(WRAPPERS, "", k): v for k, v in content.pop("model").items()}
        model = {k: v for k, v in model.items() if not k.endswith(".attn.bias")}
        if HEAD in model and are_tied(model[HEAD], model[EMBEDDING]):
            del model[HEAD]
        states = content.pop("optimizer", {"state": {}})["state"]
        order = order_for_optimizer(model)
        return FullState(model, {order[i]: state for i, state in states.items()}), content
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path} contains more than tensors and plain values, so reading it could run code: use another checkpoint"
        ) from None
    except (*ABSENT, RuntimeError, KeyError, ValueError, AttributeError, TypeError, EOFError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{path} is not a checkpoint of nanoGPT ({type(error).__name__}): use another") from None


def are_tied(head: Tensor, embedding: Tensor) -> bool:
    """Return whether both are the same tensor, or have identical values."""
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    if head.data_ptr() == embedding.data_ptr() and head.stride() == embedding.stride():
        return True
    # Compare bytes, so that NaN equals NaN.
    return torch.equal(head.contiguous().view(torch.uint8), embedding.contiguous().view(torch.uint8))


def load_training_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer state of any checkpoint into an unsharded model and its optimizer.

    Raises:
        ConfigError: the checkpoint does not match the model or the optimizer.
    """
    state = read_full_state(path)
    load_weights(model, state.model)
    allocate_state(optimizer)
    for name, param in model.named_parameters():
        for key, value in state.optimizer.get(name, {}).items():
            if key not in optimizer.state[param]:
                raise ConfigError(
                    f"{path} has an optimizer state {key} for {name}, which this optimizer lacks: use --optimizer and "
                    "--kernels as in that run"
                )
            copy_tensor(f"{key} of {name}", value, optimizer.state[param][key])
    clear_missing_state(model, optimizer, state.optimizer)


def clear_missing_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, stored: Container[str]) -> None:
    """Clear the optimizer state of each parameter whose name is not in `stored`.

    A float16 run that has skipped all its steps saves no optimizer state.
    """
    for name, param in model.named_parameters():
        if name not in stored:
            optimizer.state[param].clear()


def check_parameters(path: Path, stored: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Check that a checkpoint has exactly the parameters of a model, with their shapes.

    Args:
        path: of the checkpoint.
        stored: the sizes of its full tensors; those of parameters are named `model.<param>`.
        expected: the sizes of the model's full tensors, with the same names.

    Raises:
        ConfigError: a name or a shape differs.
    """
    names = [key for key in {*stored, *expected} if key.startswith("model.")]
    if differ := sorted(key for key in names if stored.get(key) != expected.get(key)):
        in_file, in_model = (sizes.get(differ[0]) for sizes in (stored, expected))
        raise ConfigError(
            f"{path} and the model differ in {len(differ)} parameters, such as {differ[0].removeprefix('model.')}: its "
            f"shape is {in_file and tuple(in_file)} in the checkpoint, and {in_model and tuple(in_model)} in the model"
        )


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model. The tied head shares the embedding's tensor.

    Raises:
        ConfigError: the parameters have different names, shapes or kinds of dtype.
    """
    params = dict(model.named_parameters())
    if params.keys() != weights.keys():
        different = sorted(params.keys() ^ weights.keys())
        raise ConfigError(f"the weights and the model differ in {len(different)} parameters, such as {different[0]}")
    with torch.no_grad():
        for name, param in params.items():
            copy_tensor(name, weights[name], param)


def copy_tensor(name: str, value: Tensor, target: Tensor) -> None:
    """Copy a tensor that was read from a file. Check the shape first, because `copy_` would broadcast.

    Raises:
        ConfigError: the shape differs, or the tensor is not floating point.
    """
    if value.shape != target.shape or not value.dtype.is_floating_point:
        raise ConfigError(
            f"{name} is {value.dtype} of shape {tuple(value.shape)} in the file, but the model has shape "
            f"{tuple(target.shape)}: use another file"
        )
    target.copy_(value)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of an optimizer, by a step with zero gradients and learning rate zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# ---- the full state of any checkpoint


def read_full_state(path: Path, scratch: Path | None = None) -> FullState:
    """Return the full state of a checkpoint, from `ckpt.pt` or from shards.

    Args:
        path: the checkpoint.
        scratch: None: each access of a tensor reads it from the shards. A directory: all shards are read now, into
            tensors that are backed by files in it; it must outlive these tensors.
    """
    if "ckpt.pt" in list_files(path):
        return read_ckpt(path / "ckpt.pt")[0]
    reader = SafeReader(path)
    index = read_index(reader)
    if scratch:
        tensors = {
            k: file_backed(scratch / str(i), *shape_and_dtype) for i, (k, shape_and_dtype) in enumerate(index.items())
        }
        read_shards(reader, tensors, no_dist=True)
        read: Callable[[str], Tensor] = tensors.__getitem__
    else:
        read = partial(read_tensor, reader, index)
    readers: dict[str, dict[str, Callable[[], Tensor]]] = {}
    for key in index:
        if key.startswith("optimizer."):
            name, item = key.removeprefix("optimizer.").rsplit(".", 1)
            readers.setdefault(name, {})[item] = partial(unflatten, read, key, index[f"model.{name}"][0])
    names = [key.removeprefix("model.") for key in index if key.startswith("model.")]
    return FullState(
        LazyTensors({name: partial(read, f"model.{name}") for name in names}),
        {name: LazyTensors(items) for name, items in readers.items()},
    )


def read_tensor(reader: SafeReader, index: dict[str, tuple[torch.Size, torch.dtype]], key: str) -> Tensor:
    """Read one full tensor from shards."""
    size, dtype = index[key]
    tensor = torch.empty(size, dtype=dtype)
    read_shards(reader, {key: tensor}, no_dist=True)
    return tensor


def unflatten(read: Callable[[str], Tensor], key: str, shape: torch.Size) -> Tensor:
    """Read a tensor of the optimizer state. If it is flat, as phase 1 stores it, return it in the parameter's shape."""
    tensor = read(key)
    return tensor.view(shape) if tensor.dim() == 1 and tensor.numel() == shape.numel() else tensor


def file_backed(file: Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory is mapped to a new file.

    Raises:
        OSError: the disk is full. The space is reserved now, because a later write to a mapped page without disk space
            would kill the process.
    """
    with open(file, "wb") as reserved_file:
        length = size.numel() * dtype.itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(reserved_file.fileno(), 0, max(length, 1))
        else:
            reserved_file.truncate(length)
    return torch.from_file(str(file), shared=True, size=size.numel(), dtype=dtype).view(size)
