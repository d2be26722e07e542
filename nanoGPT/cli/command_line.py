"""Command lines: tyro's parsing, with what is wrong in one sentence."""

import contextlib
import inspect
import io
import itertools
import re
from typing import Any

import tyro

from nanoGPT.errors import ConfigError

# What tyro says, and what is said instead.
SENTENCES = {
    r"Unrecognized options: (\S+).*Perhaps you meant: (--\S+).*": r"\1 is unknown; did you mean \2?",
    r"Unrecognized options: (\S+).*": r"\1 is unknown; --help lists all flags",
    r"Missing value for argument '(\S+)'.*": r"\1 needs a value: write \1=VALUE",
    r"Missing from \S+: (--\S+) \S+ (.*?)\.? \(required\).*": r"\1 is missing: give \1=VALUE, \2",
    r"invalid choice '(.*?)' for argument '(\S+)'. Expected one of \((.*?)\).*": r"\2=\1 cannot be: give one of \3",
    r"Error parsing (\S+): invalid literal for int.*: '(.*?)' .*": r"\1=\2 cannot be: give a whole number",
    r"Error parsing (\S+): could not convert string to float: '(.*?)' .*": r"\1=\2 cannot be: give a number",
    r"Error parsing (\S+): no type matching (\S+) could.* from \['(.*?)'\].*": r"\1=\3 cannot be: give \2",
}
KINDS = {"{None}|": "None or ", "INT": "a whole number", "FLOAT": "a number"}


def command_line(target: Any, words: list[str], source: str = "", **options: Any) -> Any:
    """Parse a command line with tyro, whose boxed message becomes one sentence.

    Args:
        target: a dataclass, or a function that is called with what was parsed.
        words: the command line without the program's name; the flag of a bool alone is short for `--flag=True`.

    Raises:
        ConfigError: an unknown flag or a wrong type. `--help` exits 0.
    """
    said, flags = io.StringIO(), (tyro.conf.FlagConversionOff,)
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                target, args=expand_bool_flags(target, words), config=flags, use_underscores=True, **options
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(source + describe_usage_error(said.getvalue())) from None


def expand_bool_flags(target: Any, words: list[str]) -> list[str]:
    """The words with `=True` after the flag of a bool that has no value."""
    taken = inspect.signature(target, eval_str=True).parameters.values()
    switches = {f"--{each.name}" for each in taken if each.annotation is bool}
    return [
        f"{word}=True" if word in switches and after not in ("True", "False") else word
        for word, after in itertools.pairwise([*words, ""])
    ]


def describe_usage_error(text: str) -> str:
    """What is wrong, from tyro's box: what SENTENCES make of all of it, else what stands first in it."""
    parts = strip_box(text)
    for pattern, told in SENTENCES.items():
        if found := re.fullmatch(pattern, " ".join(parts) + " "):
            said = found.expand(told)
            for kind, words in KINDS.items() if "no type matching" in pattern else ():
                said = said.replace(kind, words)
            return said
    return parts[0].rstrip(". ")


def strip_box(text: str) -> list[str]:
    """The parts of tyro's box below its title; in a terminal without Unicode the box has no sides."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        words = line.strip("│╭╮╰╯ ")
        if words.startswith(("─", "--- ", "----")):
            parts.append([])
        else:
            parts[-1].append(words)
    titled_inside = text.startswith("╭")
    said = [" ".join(part).strip() for part in parts if any(part)]
    return said[0 if titled_inside or len(said) == 1 else 1 :]


def join_flag_values(argv: list[str]) -> list[str]:
    """The command line with `--key value` written as `--key=value`."""
    words: list[str] = []
    for word in argv:
        open_flag = bool(words) and words[-1].startswith("--") and "=" not in words[-1] and words[-1] != "--help"
        if open_flag and not word.startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words
