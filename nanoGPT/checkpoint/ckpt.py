"""The payload of the baseline and of phase 2: nanoGPT's ckpt.pt, with the training state in full."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanoGPT.checkpoint.manifest import INDEX, NewFiles
from nanoGPT.checkpoint.starting_point import check_sizes, load_sources, load_weights, sizes_of
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, quote_cause, ran_out_of_memory, unreadable_checkpoint
from nanoGPT.files import is_present, retry_reads
from nanoGPT.model import GPT

T = TypeVar("T")


def write_ckpt(
    files: NewFiles,
    run: Runtime,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    step: int,
    fields: dict[str, Any],
) -> None:
    """Write `ckpt.pt` on rank 0, from a model and an optimizer that are replicated on every rank.

    The file has nanoGPT's entries. It also names the tokenizer, and the parameters in the order of the optimizer.
    """
    if run.is_main:
        content = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "optimizer_params": optimizer_params(model, optimizer),
            "model_args": remove_defaults(fields["model_args"]),
            "iter_num": step,
            "best_val_loss": fields["best_val_loss"],
            "config": fields["config"],
            "tokenizer": fields["data"]["tokenizer"],
        }
        with files.open("ckpt.pt") as file:
            torch.save(content, file)


def remove_defaults(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return model_args without the fields that nanoGPT does not know, if they have the values of nanoGPT's model."""
    return {k: v for k, v in model_args.items() if (k, v) not in (("gelu", "none"), ("model", "gpt2"))}


def read_ckpt(path: Path, interpret: Callable[[dict[str, Any]], T]) -> T:
    """Read a `ckpt.pt`. Its tensors are mapped to memory.

    Args:
        path: of the file.
        interpret: converts the entries of the file to the result.

    Returns:
        The result of `interpret`.

    Raises:
        ConfigError: the file is not a `ckpt.pt`, or contains anything but tensors and plain values.
    """
    try:
        return interpret(retry_reads(path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True)))
    except ConfigError:
        raise
    except Exception as error:  # of many kinds, if the content is arbitrary
        if ran_out_of_memory(error):
            raise
        is_unsafe = isinstance(error, pickle.UnpicklingError)
        reason = "reading it could run code" if is_unsafe else quote_cause(error)
        message = f"{path} is not a checkpoint of nanoGPT ({reason}): use another checkpoint"
        raise unreadable_checkpoint(path, message) from None


def split_entries(content: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the weights, their shapes and the optimizer state in a `ckpt.pt` of this project, by parameter name."""
    names, states = content["optimizer_params"], content["optimizer"]["state"]
    return content["model"], sizes_of(content["model"]), {names[i]: items for i, items in states.items()}


def load_training_state(path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer state of any checkpoint into an unsharded model and its optimizer.

    Raises:
        ConfigError: the checkpoint does not match the model or the optimizer.
    """
    if is_present(path / INDEX):
        state = load_sources("--init_from=resume with a checkpoint of another phase").read_full_state(path)
        weights, shapes, moments = state.model, state.sizes, state.optimizer
        expected = dict(model.named_parameters())
    else:
        weights, shapes, moments = read_ckpt(path / "ckpt.pt", split_entries)
        expected = model.state_dict()  # with all names of tied parameters
    check_sizes(path, shapes, sizes_of(expected))
    load_weights(model, weights)
    moments = {name: dict(items) for name, items in moments.items()}
    for name, items in moments.items():
        check_moments(path, name, items, shapes[name])
    values = {i: moments[name] for i, name in enumerate(optimizer_params(model, optimizer)) if name in moments}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": values})


def check_moments(path: Path, name: str, items: Mapping[str, torch.Tensor], shape: torch.Size) -> None:
    """Check that the optimizer state of a parameter has the parameter's shape, except scalars such as step counts.

    Raises:
        ConfigError: an item has another shape.
    """
    stored = {item: value.shape for item, value in items.items() if value.dim()}
    check_sizes(f"the optimizer state of {name} in {path}", stored, dict.fromkeys(stored, shape))


def optimizer_params(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters in the order of the optimizer's groups."""
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for group in optimizer.param_groups for param in group["params"]]
