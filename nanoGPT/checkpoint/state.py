"""A training state: what of it a checkpoint holds, and how it goes into a model and an optimizer again.

The baseline's payload is nanoGPT's ckpt.pt; a phase that shards writes shards. Either can be read whole, by parameter
name, so that a checkpoint of one phase opens in another. Whatever is read is read as tensors and plain values: a file
that would run code is refused.
"""

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoGPT.checkpoint.manifest import Checkpoint, file_names
from nanoGPT.checkpoint.shards import SafeReader, read_index, read_shards
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, is_out_of_memory
from nanoGPT.files import ABSENT, retry_reads
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler
from nanoGPT.train_config import TrainConfig

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")


@dataclass
class FullState:
    """A whole training state by parameter name, tied names once: the form that every payload can be turned into.

    Attributes:
        model: each parameter, whole, on the CPU.
        optimizer: for each parameter its state tensors, such as exp_avg; empty where only weights are known.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for, and not kept: of a whole state, one is in memory at a time."""

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
    """What a checkpoint's manifest says of its run, beside what every checkpoint says."""
    return {
        "phase": phase,
        "config": dataclasses.asdict(config),
        "model_args": dataclasses.asdict(model_args),
        "data": data.identity,
        "best_val_loss": best_val_loss,
        "grad_scaler": scaler.state_dict(),
    }


def check_resumed(config: TrainConfig, data: TokenData, checkpoint: Checkpoint) -> None:
    """Refuse to continue a checkpoint with another model, another optimizer or other data.

    Raises:
        ConfigError: names what differs.
    """
    saved, name = checkpoint.manifest["model_args"], checkpoint.path.name
    if checkpoint.step > config.max_iters:
        raise ConfigError(
            f"--max_iters={config.max_iters}, but {name} is beyond it: raise --max_iters, or use another --out_dir"
        )
    for key in SHAPE:
        wanted = getattr(config, key)
        if wanted is not None and wanted != saved[key]:
            raise ConfigError(
                f"--{key}={wanted}, but {name} was trained with {key}={saved[key]}: leave the flag out to resume, "
                "or train anew in another --out_dir"
            )
    if config.optimizer != (before := checkpoint.manifest["config"].get("optimizer", "adamw")):
        raise ConfigError(
            f"--optimizer={config.optimizer}, but {name} was trained with --optimizer={before}: leave the flag out to "
            f"resume, or begin anew from its weights with --init_from={config.out_dir} and another --out_dir"
        )
    if data.tokenizer["sha256"] != checkpoint.manifest["data"]["tokenizer"]["sha256"]:
        raise ConfigError(
            f"--dataset={config.dataset} has another tokenizer than the one {name} was trained with: "
            f"use --dataset={checkpoint.manifest['config']['dataset']}"
        )
    before, now = checkpoint.manifest["data"]["files"], data.identity["files"]
    if changed := sorted(file for file in {*before, *now} if before.get(file) != now.get(file)):
        raise ConfigError(
            f"--dataset={config.dataset} is not the data that {name} was trained on ({changed[0]} differs): prepare "
            "that data again to resume, or start a new run from these weights with "
            f"--init_from={config.out_dir} and another --out_dir"
        )


# ---- the baseline's payload: nanoGPT's ckpt.pt


def write_ckpt(
    to: NewFiles, run: Runtime, model: GPT, optimizer: torch.optim.Optimizer, step: int, facts: dict[str, Any]
) -> None:
    """Write `ckpt.pt` from a model and optimizer that every rank holds whole; rank 0 writes."""
    if run.is_main:
        save_ckpt(to, FullState(dict(model.named_parameters()), optimizer_by_name(model, optimizer)), step, facts)


def save_ckpt(to: NewFiles, state: FullState, step: int, facts: dict[str, Any]) -> None:
    """Write nanoGPT's format: its keys, its order of the optimizer's parameters. (Muon's state it cannot use.)"""
    args = {k: v for k, v in facts["model_args"].items() if k != "gelu" or v != "none"}
    config = facts["config"]
    with torch.device("meta"):
        params = dict(GPT(GPTConfig.of(args)).named_parameters())  # in the module's order; shards come in another
    order = optimizer_order(params)
    decay = [i for i, name in enumerate(order) if params[name].dim() >= 2]
    groups = [
        {"params": decay, "weight_decay": config["weight_decay"]},
        {"params": list(range(len(decay), len(order))), "weight_decay": 0.0},
    ]
    defaults = {"lr": config["learning_rate"], "betas": (config["beta1"], config["beta2"]), "eps": 1e-8}
    defaults |= {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    defaults |= {"fused": None, "decoupled_weight_decay": True}
    model = {name: state.model[name].detach() for name in params}
    content = {
        "model": {**model, HEAD: model[EMBEDDING]},
        "optimizer": {
            "state": {i: dict(state.optimizer[name]) for i, name in enumerate(order) if name in state.optimizer},
            "param_groups": [{**defaults, **group} for group in groups],
        },
        "model_args": args,
        "iter_num": step,
        "best_val_loss": facts["best_val_loss"],
        "config": config,
    }
    with to.open("ckpt.pt") as file:
        torch.save(content, file)  # type: ignore[arg-type]


def optimizer_order(params: Mapping[str, Tensor]) -> list[str]:
    """Parameter names in the order of `param_groups`: those that decay, then the others."""
    return [n for n, p in params.items() if p.dim() >= 2] + [n for n, p in params.items() if p.dim() < 2]


def optimizer_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state tensors by parameter name; the tensors themselves, not copies."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def read_ckpt(path: Path) -> tuple[FullState, dict[str, Any]]:
    """Read a `ckpt.pt` of this project or of nanoGPT: its state, and the rest of what it holds.

    Raises:
        ConfigError: it is no such file, or holds anything but tensors and plain values.
    """
    try:
        content = retry_reads(path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        model = {k.removeprefix("_orig_mod."): v for k, v in content.pop("model").items()}
        model = {k: v for k, v in model.items() if not k.endswith(".attn.bias")}
        if not are_tied(model.pop(HEAD, model[EMBEDDING]), model[EMBEDDING]):
            raise ConfigError(
                f"{path} has an {HEAD} that differs from {EMBEDDING}, and this model has one tensor for both: give a "
                "checkpoint with a tied head"
            )
        states = content.pop("optimizer", {"state": {}})["state"]
        order = optimizer_order(model)
        return FullState(model, {order[i]: state for i, state in states.items()}), content
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path} holds more than tensors and plain values, so that opening it could run code: it is not opened"
        ) from None
    except (*ABSENT, RuntimeError, KeyError, ValueError, AttributeError, TypeError, EOFError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{path} is no checkpoint of nanoGPT ({type(error).__name__}): give another file") from None


def are_tied(head: Tensor, embedding: Tensor) -> bool:
    """Whether the two are one tensor, or hold the same values."""
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    if head.data_ptr() == embedding.data_ptr() and head.stride() == embedding.stride():
        return True
    return torch.equal(head.contiguous().view(torch.uint8), embedding.contiguous().view(torch.uint8))  # NaN too


def load_training_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and optimizer state, whatever its payload, into a model that is held whole."""
    state = read_full_state(path)
    load_weights(model, state.model)
    allocate_state(optimizer)
    for name, param in model.named_parameters():
        for key, value in state.optimizer.get(name, {}).items():
            if key not in optimizer.state[param]:
                raise ConfigError(f"{path} has an optimizer state {key} of {name}, which this optimizer does not have")
            copy_tensor(f"{key} of {name}", value, optimizer.state[param][key])


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model; the tied head comes with the embedding."""
    params = dict(model.named_parameters())
    if params.keys() != weights.keys():
        differ = sorted(params.keys() ^ weights.keys())
        raise ConfigError(f"the weights and the model differ in {len(differ)} parameters, such as {differ[0]}")
    with torch.no_grad():
        for name, param in params.items():
            copy_tensor(name, weights[name], param)


def copy_tensor(name: str, value: Tensor, target: Tensor) -> None:
    """Copy a tensor that was read from a file; never one of another shape, which `copy_` would broadcast.

    Raises:
        ConfigError: its shape or its kind of numbers is another.
    """
    if value.shape != target.shape or not value.dtype.is_floating_point:
        raise ConfigError(
            f"{name} is {value.dtype} of shape {tuple(value.shape)} in the file, where the model has shape "
            f"{tuple(target.shape)}: give another file"
        )
    target.copy_(value)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, by a step with zero gradients at learning rate zero."""
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


# ---- any checkpoint, whole


def read_full_state(path: Path, scratch: Path | None = None) -> FullState:
    """The whole state in a checkpoint directory: from `ckpt.pt`, or put together from shards, each when asked for.

    Args:
        path: the checkpoint.
        scratch: a directory in whose files all tensors shall lie at once; it must outlive them.
    """
    if "ckpt.pt" in file_names(path):
        return read_ckpt(path / "ckpt.pt")[0]
    described = read_index(path)
    if scratch:
        tensors = {
            k: file_backed(scratch / str(i), *shape_and_dtype)
            for i, (k, shape_and_dtype) in enumerate(described.items())
        }
        read_shards(path, tensors, alone=True)
        read: Callable[[str], Tensor] = tensors.__getitem__
    else:
        read = partial(read_tensor, SafeReader(path), described)
    readers: dict[str, dict[str, Callable[[], Tensor]]] = {}
    for key in described:
        if key.startswith("optimizer."):
            name, item = key.removeprefix("optimizer.").rsplit(".", 1)
            readers.setdefault(name, {})[item] = partial(unflatten, read, key, described[f"model.{name}"][0])
    names = [key.removeprefix("model.") for key in described if key.startswith("model.")]
    return FullState(
        LazyTensors({name: partial(read, f"model.{name}") for name in names}),
        {name: LazyTensors(items) for name, items in readers.items()},
    )


def read_tensor(reader: SafeReader, described: dict[str, tuple[torch.Size, torch.dtype]], key: str) -> Tensor:
    """One tensor out of shards, whole."""
    size, dtype = described[key]
    tensor = torch.empty(size, dtype=dtype)
    read_shards(reader, {key: tensor}, alone=True)
    return tensor


def unflatten(read: Callable[[str], Tensor], key: str, shape: torch.Size) -> Tensor:
    """A tensor as large as its parameter in that one's shape: phase 1's shards are those of a flattened one."""
    tensor = read(key)
    return tensor.view(shape) if tensor.dim() == 1 and tensor.numel() == shape.numel() else tensor


def file_backed(file: Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is a new file's.

    Raises:
        OSError: the disk is full; found out now, since a mapped page that finds no room kills the process.
    """
    with open(file, "wb") as reserved:
        length = size.numel() * dtype.itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(reserved.fileno(), 0, max(length, 1))
        else:
            reserved.truncate(length)
    return torch.from_file(str(file), shared=True, size=size.numel(), dtype=dtype).view(size)
