"""Solve problems on the ranks of a test."""

from evaluation.command import parse, solve
from nanoGPT.errors import ConfigError


def solve_quietly(arguments: list[str]) -> "int | str":
    """Solve on this rank; return the exit code, or the sentence of a ConfigError."""
    try:
        return solve(parse([*arguments, "--device=cpu"]))
    except ConfigError as error:
        return str(error)


def solve_each(commands: list[list[str]]) -> list["int | str"]:
    """Solve one command after the other on this rank."""
    return [solve_quietly(arguments) for arguments in commands]
