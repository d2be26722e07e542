"""The options of a planned run: those that its phase adds, and what `--kernels=auto` selects."""

import dataclasses
from typing import Any

from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from phase2_triton.apply import resolve_kernels

Row = tuple[str, dict[str, Any]]  # a phase, and its options that differ from the defaults


def phase_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a configuration that only its phase has, and that differ from the phase's defaults."""
    common = {field.name for field in dataclasses.fields(TrainConfig)}
    default = type(config)()
    names = [field.name for field in dataclasses.fields(config) if field.name not in common]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def select_auto_kernels(row: Row, shape: GPTConfig, device_type: str = "cuda", is_compiled: bool = False) -> Row:
    """Return the row with the kernels that `--kernels=auto` selects; a trace runs on fake devices, and needs a list.

    The list is without adamw, which changes neither memory nor communication.

    Args:
        row: a phase and its options.
        shape: of the model.
        device_type: the device that the plan is for.
        is_compiled: whether torch.compile compiles the model.
    """
    phase, options = row
    if options.get("kernels", "none").lower() != "auto":
        return row
    config = TrainConfig(n_embd=shape.n_embd, n_head=shape.n_head, compile=is_compiled)
    kernels = resolve_kernels(config, "auto", device_type)
    return phase, {**options, "kernels": kernels}
