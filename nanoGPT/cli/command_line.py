"""Parse command lines with tyro, and report errors in one sentence."""

import contextlib
import functools
import inspect
import io
import itertools
import os
import re
from typing import Any

from nanoGPT.errors import ConfigError

# Error messages of tyro (regular expressions), and the messages of this project for them.
MESSAGES = {
    r"Unrecognized options: (\S+).*Perhaps you meant: (--\S+).*": r"\1 is unknown; did you mean \2?",
    r"Unrecognized options: (\S+).*": r"\1 is unknown; --help lists all flags",
    r"Missing value for argument '(\S+)'.*": r"\1 needs a value: write \1=VALUE",
    r"Missing from \S+: (--\S+) \S+ (.*?)\.? \(required\).*": r"\1 is missing: add \1=VALUE (\2)",
    r"invalid choice '(.*?)' for argument '(\S+)'. Expected one of \((.*?)\).*": r"\2=\1 is invalid: use one of \3",
    r"Error parsing (\S+): invalid literal for int.*: '(.*?)' .*": r"\1=\2 is invalid: use an integer",
    r"Error parsing (\S+): could not convert string to float: '(.*?)' .*": r"\1=\2 is invalid: use a number",
    r"Error parsing (\S+): no type matching (\S+) could.* from \['(.*?)'\].*": r"\1=\3 is invalid: use \2",
}
TYPE_NAMES = {"{None}|": "None or ", "INT": "an integer", "FLOAT": "a number"}  # tyro's names of types, and ours


def command_line(target: Any, arguments: list[str], source: str = "", **options: Any) -> Any:
    """Parse a command line with tyro. An error becomes a ConfigError with one sentence.

    Args:
        target: a dataclass, which is created, or a function, which is called with the parsed values.
        arguments: the command line without the program's name. `--flag` without a value sets a bool to True.
        source: text to put before an error message, such as the name of a config file.
        options: further arguments of `tyro.cli`.

    Raises:
        ConfigError: a flag is unknown or missing, or a value has the wrong type.
        SystemExit: with code 0 for `--help`.
    """
    import tyro  # not above: benchmarks import this module on machines that have only torch, triton and numpy

    @functools.wraps(target)
    def bind(*args: Any, **values: Any) -> Any:
        return functools.partial(target, *args, **values)

    errors, flags = io.StringIO(), (tyro.conf.FlagConversionOff,)
    is_function = inspect.isfunction(target)  # call it later, with the real standard error
    try:
        with contextlib.redirect_stderr(errors):
            parsed = tyro.cli(
                bind if is_function else target,
                args=convert_values(target, arguments),
                config=flags,
                use_underscores=True,
                **options,
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(source + describe_usage_error(errors.getvalue())) from None
    return parsed() if is_function else parsed


def convert_values(target: Any, arguments: list[str]) -> list[str]:
    """Return the arguments with the values that the parser expects.

    A bool without a value gets `=True`, an integer `1e6` becomes `1000000`, and `~` becomes the home directory.
    """
    parameters = inspect.signature(target, eval_str=True).parameters.values()
    integers = {f"--{each.name}" for each in parameters if each.annotation in (int, int | None)}
    converted = []
    for argument in expand_bool_flags(target, arguments):
        name, _, value = argument.partition("=")
        if name in integers and re.fullmatch(r"\d+(\.\d+)?e\+?\d{1,2}", value, re.I) and float(value).is_integer():
            argument = f"{name}={int(float(value))}"
        converted.append(expand_home(argument))
    return converted


def expand_home(argument: str) -> str:
    """Return `--key=value` with the home directory in place of `~`, which no shell expands there.

    The value may be a list of paths, such as a mixture of datasets, or `FILE:` with a path. A prompt does not change.
    """
    name, equals, value = argument.partition("=")
    prefix = "FILE:" if value.startswith("FILE:") else ""
    if name == "--start" and not prefix:
        return argument
    paths = value.removeprefix(prefix).split(",")
    return f"{name}{equals}{prefix}{','.join(map(os.path.expanduser, paths))}"


def expand_bool_flags(target: Any, arguments: list[str]) -> list[str]:
    """Append `=True` to each flag of a bool that has no value."""
    parameters = inspect.signature(target, eval_str=True).parameters.values()
    bool_flags = {f"--{each.name}" for each in parameters if each.annotation is bool}
    return [
        f"{argument}=True" if argument in bool_flags and following not in ("True", "False") else argument
        for argument, following in itertools.pairwise([*arguments, ""])
    ]


def describe_usage_error(text: str) -> str:
    """Return the message of MESSAGES for an error of tyro; if there is none, the first part of tyro's own message."""
    parts = strip_box(text)
    for pattern, template in MESSAGES.items():
        if match := re.fullmatch(pattern, " ".join(parts) + " "):
            message = match.expand(template)
            for tyro_name, name in TYPE_NAMES.items() if "no type matching" in pattern else ():
                message = message.replace(tyro_name, name)
            return message
    return parts[0].rstrip(". ")


def strip_box(text: str) -> list[str]:
    """Return the parts of tyro's error box below its title. Without Unicode in the terminal, the box has no sides."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        content = line.strip("│╭╮╰╯ ")
        if content.startswith(("─", "--- ", "----")):
            parts.append([])
        else:
            parts[-1].append(content)
    has_title_in_frame = text.startswith("╭")
    texts = [" ".join(part).strip() for part in parts if any(part)]
    return texts[0 if has_title_in_frame or len(texts) == 1 else 1 :]


def join_flag_values(argv: list[str]) -> list[str]:
    """Return the command line with every `--key value` written as `--key=value`."""
    arguments: list[str] = []
    for word in argv:
        last = arguments[-1] if arguments else ""
        needs_value = last.startswith("--") and "=" not in last and last != "--help"
        if needs_value and not word.startswith("--"):
            arguments[-1] += f"={word}"
        else:
            arguments.append(word)
    return arguments
