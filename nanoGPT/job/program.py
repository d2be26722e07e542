"""What every program needs: flags of the form `--name=value`, and unbreakable output.

Printing can fail: a terminal is closed, `| head` exits, or the disk of a log file is full. A training run continues in
each of these cases, and output that cannot be printed is dropped.
"""

import contextlib
import inspect
import io
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, get_args, get_origin, get_type_hints

from nanoGPT.errors import ConfigError, did_you_mean

HELP = {"--help", "-h"}
Texts = dict[str, list[str | None]]  # the values of each flag, by its name; None: a flag without a value


def print_help(target: Any, default: Any = None) -> None:
    """Print the flags of a dataclass or a function, with their docstrings, and exit with code 0.

    Args:
        target: the dataclass or the function.
        default: an object of the dataclass with the defaults to print; None: those of the dataclass.
    """
    import tyro  # here, because it is slow, and because a GPU machine without it can still run the programs

    options = {} if default is None else {"default": default}
    tyro.cli(target, args=["--help"], config=(tyro.conf.FlagConversionOff,), use_underscores=True, **options)


def collect_flags(words: list[str]) -> Texts:
    """Return the values of each flag of a command line, as text and by name.

    Raises:
        ConfigError: a word is not a flag.
    """
    texts: Texts = {}
    for word in words:
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{word} is neither --name=value nor a config file (.py): --help lists all flags")
        texts.setdefault(flag.removeprefix("--").replace("-", "_"), []).append(text if equals else None)
    return texts


def convert_texts(target: Any, texts: Texts) -> dict[str, Any]:
    """Return the values of flags in their types. A flag of a tuple has all its values; of others, the last counts.

    Args:
        target: the dataclass or the function whose parameters are the flags.
        texts: the values as text.

    Raises:
        ConfigError: a flag is unknown or has no value, or a value has the wrong type.
    """
    hints, names, values = get_type_hints(target), [*inspect.signature(target).parameters], dict[str, Any]()
    for name, parts in texts.items():
        if name not in names:
            advice = did_you_mean(name, names, "--") or "; --help lists all flags"
            raise ConfigError(f"unknown flag --{name}{advice}")
        converted = [read_value(name, text, hints[name]) for text in parts]
        values[name] = sum(converted, ()) if get_origin(hints[name]) is tuple else converted[-1]
    return values


def read_value(name: str, text: str | None, kind: Any) -> Any:
    """Return the value of a flag as its type: msgspec reads integers such as 1e6, bools, Literals and unions.

    Args:
        name: of the flag.
        text: its value as text; None: it has none, which means True for a bool.
        kind: the type. A tuple gets this one value.

    Raises:
        ConfigError: there is no text, or it has another type.
    """
    if text is None and kind is not bool:
        raise ConfigError(f"--{name} needs a value: write --{name}=VALUE")
    text = "True" if text is None else expand_home(name, text)
    if text == "None" and types.NoneType in get_args(kind):
        return None
    if not text and (kind is Path or types.NoneType in get_args(kind)):  # a shell variable is not set
        raise ConfigError(f"--{name}= is empty: give a value, or leave out the flag")
    import msgspec  # here, because a GPU machine without it can still run the kernels

    if kind is float:
        with contextlib.suppress(ValueError):
            text = str(float(text))  # .1 and 1., as Python writes them too
    values = (text,) if get_origin(kind) is tuple else text
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=lambda path, value: path(value))
    except msgspec.ValidationError:
        valid = inspect.formatannotation(kind).replace("typing.", "").replace("pathlib.", "")
        if get_origin(kind) is Literal:
            valid = ", ".join(map(str, get_args(kind)))
        raise ConfigError(f"--{name}={text} is invalid: use {valid}") from None


def expand_home(name: str, text: str) -> str:
    """Return the value of a flag with the home directory in place of `~`, which no shell expands after `=`.

    The value may be a list of paths, such as a mixture of datasets, or `FILE:` with a path. A prompt does not change.
    """
    prefix = "FILE:" if text.startswith("FILE:") else ""
    if name == "start" and not prefix:
        return text
    return prefix + ",".join(map(os.path.expanduser, text.removeprefix(prefix).split(",")))


def join_flag_values(arguments: list[str]) -> list[str]:
    """Return the command line with every `--key value` written as `--key=value`."""
    joined: list[str] = []
    for word in arguments:
        last = joined[-1] if joined else ""
        if last.startswith("--") and "=" not in last and last != "--help" and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# ---- output


class DroppingFile(io.FileIO):
    """A file whose writes always succeed. Data that cannot be written is dropped."""

    def write(self, data: "memoryview | bytes") -> int:  # type: ignore[override]
        """Write data, or drop it if its reader has exited or its disk is full."""
        with contextlib.suppress(OSError):
            if written := super().write(data):
                return written
        return len(memoryview(data).cast("B"))


def open_dropping_stream(stream: IO[str] | None, descriptor: int) -> IO[str] | None:
    """Return a stream that never raises: not for a closed reader, a full disk or an encoding.

    Streams of pytest and Jupyter, which do not write to a file descriptor of the process, are returned as they are.
    """
    try:
        if stream is None or stream.fileno() != descriptor:
            return stream
    except (OSError, ValueError):  # it has no descriptor
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(DroppingFile(descriptor, "w", closefd=False))  # type: ignore[type-var]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` with streams that drop what they cannot write."""
    original_streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = open_dropping_stream(sys.stdout, 1), open_dropping_stream(sys.stderr, 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original_streams
