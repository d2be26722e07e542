"""All exercises, by name."""

from nanoGPT.errors import ConfigError, did_you_mean
from workshop.exercises.chapters import (
    baseline,
    bugs,
    capstone,
    checkpoints,
    collectives,
    ddp,
    fsdp,
    memory,
    parallel,
    precision,
    tiles,
    triton,
    zero1,
)
from workshop.exercises.exercise import Exercise

MODULES = (
    baseline,
    collectives,
    ddp,
    zero1,
    triton,
    bugs,
    fsdp,
    memory,
    checkpoints,
    precision,
    parallel,
    tiles,
    capstone,
)
CHAPTERS = {module.__name__.rpartition(".")[2]: module.EXERCISES for module in MODULES}
EXERCISES: dict[str, Exercise] = {each.name: each for chapter in CHAPTERS.values() for each in chapter}

# In this order: ring collectives, DDP, ZeRO-1, a kernel and FSDP, each written by hand.
CORE_TRACK = (
    "collectives.1",
    "collectives.2",
    "ddp.1",
    "ddp.2",
    "zero1.2",
    "zero1.3",
    "zero1.4",
    "zero1.5",
    "triton.1",
    "fsdp.1",
    "fsdp.4",
    "fsdp.5",
)


def find_exercise(name: str) -> Exercise:
    """Return an exercise.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in EXERCISES:
        advice = did_you_mean(name, list(EXERCISES)) or ": `make exercise` lists all exercises"
        raise ConfigError(f"N={name} is not an exercise{advice}" if name else f"N= is missing{advice}")
    return EXERCISES[name]
