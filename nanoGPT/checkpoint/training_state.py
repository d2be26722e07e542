"""Describe a training state in a manifest, and read it in full from a checkpoint of any phase.

The payload of the baseline is nanoGPT's ckpt.pt; the payload of phases 1 and 3 are shards. Both can be read as a full
state by parameter name, so a checkpoint of one phase opens in another. Only tensors and plain values are read: a file
that could run code is refused.
"""

import dataclasses
import pickle
import re
from collections import UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoGPT.checkpoint.dcp_reader import INDEX, SafeReader, read_shards
from nanoGPT.checkpoint.manifest import NO_LOSS
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError, quote_cause, ran_out_of_memory, unreadable_checkpoint
from nanoGPT.files import is_present, retry_reads
from nanoGPT.model import ModelConfig, make_shape
from nanoGPT.optim import LossScaler
from nanoGPT.train_config import TrainConfig

WRAPPERS = r"^(module\.|_orig_mod\.)+"  # prefixes of parameter names in a model that DDP or torch.compile wraps


@dataclass
class FullState:
    """A full training state by parameter name. Every payload can be converted to this form. Tied names occur once.

    Attributes:
        model: the full tensor of each parameter, on the CPU.
        optimizer: the state tensors of each parameter, such as exp_avg; empty if there are only weights.
        shapes: the shape of each parameter.
        reader: of the shards; None if the payload is a ckpt.pt.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    shapes: Mapping[str, torch.Size]
    reader: SafeReader | None = None


class LazyTensors(UserDict[str, Any]):
    """A mapping whose tensors are read by functions at each access, so one tensor is in memory at a time."""

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]()


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each tensor; of a sharded tensor, that of the full one."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_shapes(source: object, stored: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
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


def manifest_fields(
    config: TrainConfig,
    model_args: ModelConfig,
    data: TokenData,
    phase: str,
    best_val_loss: float,
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
        "best_val_loss": min(best_val_loss, NO_LOSS),
        "grad_scaler": scaler.state_dict(),
    }


# ---- nanoGPT's ckpt.pt


def order_for_optimizer(params: Mapping[str, Tensor]) -> list[str]:
    """Return parameter names in the order of `param_groups`: those with weight decay, then the others."""
    return sorted(params, key=lambda name: params[name].dim() < 2)


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
        model = {k: v for k, v in model.items() if not k.endswith(".attn.bias")}  # the causal mask
        remove_tied(model, content.get("model_args") or {})
        order = content.pop("optimizer_params", order_for_optimizer(model))  # nanoGPT does not name them
        states = content.pop("optimizer", {"state": {}})["state"]
        return FullState(model, {order[i]: state for i, state in states.items()}, shapes_of(model)), content
    except ConfigError:
        raise
    except Exception as error:  # of many kinds, if the content is arbitrary
        if ran_out_of_memory(error):
            raise
        is_unsafe = isinstance(error, pickle.UnpicklingError)
        reason = "reading it could run code" if is_unsafe else quote_cause(error)
        message = f"{path} is not a checkpoint of nanoGPT ({reason}): use another checkpoint"
        raise unreadable_checkpoint(path, message) from None


def remove_tied(weights: dict[str, Tensor], model_args: Mapping[str, Any]) -> None:
    """Remove the other names of tied parameters, if they have the values of the parameter.

    Args:
        weights: by name; it is changed.
        model_args: of the model.
    """
    for name, source in make_shape(model_args).tied_names().items():
        if name in weights and are_tied(weights[name], weights[source]):
            del weights[name]


def are_tied(head: Tensor, embedding: Tensor) -> bool:
    """Return whether both have the same values, of the same dtype."""
    return head.dtype == embedding.dtype and torch.equal(head, embedding)


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same shape. The tied head shares the embedding's tensor."""
    for name, param in model.named_parameters():
        param.copy_(weights[name])


# ---- the full state of any checkpoint


def read_full_state(path: Path) -> FullState:
    """Return the full state of a checkpoint, from `ckpt.pt` or from shards. A tensor is read when it is accessed."""
    if not is_present(path / INDEX):
        return read_ckpt(path / "ckpt.pt")[0]
    reader = SafeReader(path)
    shapes = {key.removeprefix("model."): size for key, size in reader.sizes.items() if key.startswith("model.")}
    model, optimizer = LazyTensors(), defaultdict[str, LazyTensors](LazyTensors)
    for key in reader.sizes:
        kind, name = key.split(".", 1)
        if kind == "model":
            model.data[name] = partial(read_tensor, reader, key, shapes[name])
        else:
            name, item = name.rsplit(".", 1)
            optimizer[name].data[item] = partial(read_tensor, reader, key, shapes[name])
    return FullState(model, optimizer, shapes, reader)


def read_tensor(reader: SafeReader, key: str, shape: torch.Size) -> Tensor:
    """Read one full tensor from shards. If it is flat, as phase 1 stores it, return it in the parameter's shape."""
    stored = reader.index.state_dict_metadata[key]
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    read_shards(reader, {key: tensor}, no_dist=True)
    return tensor.view(shape) if tensor.dim() == 1 and tensor.numel() == shape.numel() else tensor
