"""Command lines: tyro's parsing, with what is wrong in one sentence."""

import contextlib
import io
from typing import Any

import tyro

from nanoGPT.exits import ConfigError


def command_line(target: Any, words: list[str], source: str = "", **options: Any) -> Any:
    """Parse a command line with tyro, whose boxed message becomes one sentence.

    Args:
        target: a dataclass, or a function that is called with what was parsed.
        words: the command line without the program's name.

    Raises:
        ConfigError: an unknown flag or a wrong type. `--help` exits 0.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(target, args=words, config=(tyro.conf.FlagConversionOff,), use_underscores=True, **options)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(source + unboxed(said.getvalue())) from None


def unboxed(text: str) -> str:
    """What stands first in tyro's box, below its title; in a terminal without Unicode the box has no sides."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        words = line.strip("│╭╮╰╯ ")
        if words.startswith(("─", "--- ", "----")):
            parts.append([])
        else:
            parts[-1].append(words)
    titled_inside = text.startswith("╭")
    said = [" ".join(part).strip() for part in parts if any(part)]
    return said[0 if titled_inside or len(said) == 1 else 1].rstrip(".")


def joined(argv: list[str]) -> list[str]:
    """The command line with `--key value` written as `--key=value`."""
    words: list[str] = []
    for word in argv:
        open_flag = bool(words) and words[-1].startswith("--") and "=" not in words[-1] and words[-1] != "--help"
        if open_flag and not word.startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words
