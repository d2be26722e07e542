"""Solve problems on the ranks of a test."""

from nanoGPT.errors import ConfigError
from phase3_fsdp.solve.command import parse, solve


def solve_quietly(arguments: list[str]) -> "int | str":
    """Solve on this rank; return the exit code, or the sentence of a ConfigError."""
    try:
        return solve(parse([*arguments, "--device=cpu"]))
    except ConfigError as error:
        return str(error)


def solve_each(commands: list[list[str]]) -> list["int | str"]:
    """Solve one command after the other on this rank."""
    return [solve_quietly(arguments) for arguments in commands]
