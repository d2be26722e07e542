"""The directory of the repository, and the package of each phase on the command line."""

import importlib
from dataclasses import dataclass
from pathlib import Path

from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import PACKAGE
from nanoGPT.observers import add_flags, find_default_observers
from nanoGPT.train_config import TrainConfig
from operate.launch import load_trainer

ROOT = PACKAGE.parent
PHASES = {"baseline": "nanoGPT", "phase1": "phase1_zero1", "phase2": "phase2_triton", "phase3": "phase3_fsdp"}


@dataclass
class Ranks:
    """Command-line options of a program that starts ranks on this machine. The trainer and its flags follow them."""

    gpus: int = 1
    """ranks, one per GPU"""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"GPUS={self.gpus} is out of range: use 1 or more")


def find_phase(trainer: Path) -> str:
    """Return the name of the phase that a train.py belongs to.

    Raises:
        ConfigError: it is not a train.py of this repository.
    """
    package = load_trainer(trainer).__name__.partition(".")[0]
    return next(phase for phase, name in PHASES.items() if name == package)


def find_package(phase: str) -> str:
    """Return the name of a phase's package.

    Args:
        phase: a key of `PHASES`, or the package itself.

    Raises:
        ConfigError: the phase is unknown.
    """
    if phase in PHASES.values():
        return phase
    if phase not in PHASES:
        advice = did_you_mean(phase, list(PHASES)) or f": use {', '.join(PHASES)}"
        raise ConfigError(f"PHASE={phase} is unknown{advice}")
    return PHASES[phase]


def load_config_class(phase: str, model: str = "gpt2") -> type[TrainConfig]:
    """Return the class of a phase's configuration, with the flags of the shell and of a model.

    Raises:
        ConfigError: the phase or the model is unknown.
    """
    return add_flags(importlib.import_module(f"{find_package(phase)}.train").Config, find_default_observers(), model)
