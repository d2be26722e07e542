"""The payload of the baseline and of phase 2: nanoGPT's ckpt.pt, with the training state in full."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanoGPT.checkpoint.manifest import NewFiles
from nanoGPT.checkpoint.training_state import check_shapes, load_weights, read_full_state, shapes_of
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT


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


def load_training_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer state of any checkpoint into an unsharded model and its optimizer.

    Raises:
        ConfigError: the checkpoint does not match the model or the optimizer.
    """
    state, params = read_full_state(path), dict(model.named_parameters())
    check_shapes(path, state.shapes, shapes_of(params))
    load_weights(model, state.model)
    moments = {name: dict(items) for name, items in state.optimizer.items()}
    for name, items in moments.items():
        stored = {key: value.shape for key, value in items.items() if value.dim()}  # without step counts
        check_shapes(f"the optimizer state of {name} in {path}", stored, dict.fromkeys(stored, state.shapes[name]))
    order = optimizer_params(model, optimizer)
    values = {i: moments[name] for i, name in enumerate(order) if name in moments}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": values})


def optimizer_params(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters in the order of the optimizer's groups."""
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for group in optimizer.param_groups for param in group["params"]]
