"""Check the form of a JSON or TOML document before anything relies on it.

Each format is a `TypedDict`, whose fields may carry limits:

    class TokenFile(TypedDict):
        name: Annotated[str, Matches(r"[a-z]+")]
        tokens: Annotated[int, Within(0, 2**62)]

    check_schema({"name": "train", "tokens": -1}, TokenFile)    # Malformed: $.tokens is -1: must be from 0 to ...

A file of another form, from a broken disk, another program or somebody hostile, is refused in one phrase that names the
place. Keys that the format does not have are ignored.
"""

import dataclasses
import functools
import math
import re
import types
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")

NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
NAMES |= {types.NoneType: "null"}
LONGEST_VALUE = 60  # characters of a value in a message


class Malformed(ValueError):
    """A file does not have the form of its format; the message is a phrase that says where."""


@dataclass(frozen=True)
class Within:
    """The smallest and the largest number; of a string or a list, the smallest and the largest length."""

    least: float = -math.inf
    most: float = math.inf

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value, or None."""
        size = len(value) if isinstance(value, str | list) else value
        what = " items" if isinstance(value, list) else " characters" if isinstance(value, str) else ""
        return None if self.least <= size <= self.most else f"must have {self}{what}" if what else f"must be {self}"

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"at least {self.least:g}"
        return f"from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Matches:
    """A regular expression that a whole string must match."""

    pattern: str

    def problem(self, value: str) -> str | None:
        """Return what is wrong with a value, or None."""
        return None if re.fullmatch(self.pattern, value) else f"must match {self.pattern}"


Count = Annotated[int, Within(0, 2**62)]
Size = Annotated[int, Within(1, 2**31 - 1)]
FileName = Annotated[str, Matches(r"(?!\.{1,2}\Z)[^/\0]{1,255}")]  # in the same directory
Sha256 = Annotated[str, Within(0, 64)]  # hexadecimal; another text is no file's


def check_schema(value: Any, schema: type[T]) -> T:
    """Return a value, as JSON or TOML give it, if it has the form of a schema.

    Args:
        value: objects, lists, strings, numbers, booleans and null.
        schema: a TypedDict; a dataclass, of whose fields some may be missing; or any type of their fields.

    Raises:
        Malformed: it has not.
    """
    check_value(value, schema, "$")
    return value


@functools.cache
def fields_of(schema: type) -> dict[str, Any]:
    """Return the type of each field of a TypedDict or a dataclass, with its limits."""
    return get_type_hints(schema, include_extras=True)


def check_value(value: Any, schema: Any, place: str) -> None:
    """Check a value at a place such as `$.splits.train[0]`.

    Raises:
        Malformed: it does not have the form of the schema.
    """
    origin, arguments = get_origin(schema), get_args(schema)
    if schema is Any:
        return
    if origin in (Required, NotRequired):
        check_value(value, arguments[0], place)
    elif origin is Annotated:
        check_value(value, arguments[0], place)
        for limit in arguments[1:]:
            if problem := limit.problem(value):
                raise Malformed(f"{place} is {shorten(value)}: {problem}")
    elif origin is Literal:
        if not any(type(value) is type(known) and value == known for known in arguments):
            raise Malformed(f"{place} is {shorten(value)}: must be {' or '.join(map(repr, arguments))}")
    elif origin in (Union, types.UnionType):
        if not any(fits(value, each) for each in arguments):
            raise Malformed(f"{place} is {shorten(value)}: must be {' or '.join(NAMES[each] for each in arguments)}")
    elif is_typeddict(schema) or dataclasses.is_dataclass(schema):
        check_fields(value, schema, place)
    else:
        check_plain(value, origin or schema, arguments, place)


def fits(value: Any, schema: Any) -> bool:
    """Return whether a value has the form of a schema."""
    try:
        check_value(value, schema, "$")
        return True
    except Malformed:
        return False


def check_fields(value: Any, schema: Any, place: str) -> None:
    """Check an object whose keys are known."""
    check_plain(value, dict, (), place)
    for name, each in fields_of(schema).items():
        if name in value:
            check_value(value[name], each, f"{place}.{name}")
        elif name in getattr(schema, "__required_keys__", ()):
            raise Malformed(f"{place}.{name} is missing")


def check_plain(value: Any, kind: type, arguments: tuple[Any, ...], place: str) -> None:
    """Check a string, a number, a boolean, null, a list of one type, or an object whose values have one type."""
    found = types.NoneType if value is None else type(value)
    if found is not kind and not (kind is float and found is int and abs(value) < 2**1023):
        raise Malformed(f"{place} is {NAMES.get(found, found.__name__)}: must be {NAMES[kind]}")
    if kind is list and arguments:
        for i, item in enumerate(value):
            check_value(item, arguments[0], f"{place}[{i}]")
    elif kind is dict and arguments:
        for key, item in value.items():
            check_value(item, arguments[1], f"{place}[{shorten(key)}]")


def shorten(value: Any) -> str:
    """Return a value as text for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or lists in lists
        text = "too large to be shown"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
