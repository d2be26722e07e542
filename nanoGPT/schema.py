"""Check a JSON or TOML document against a schema before the program uses it.

A schema is a `TypedDict`. Its fields may have limits:

    class TokenFile(TypedDict):
        name: Annotated[str, Pattern(r"[a-z]+")]
        tokens: Annotated[int, Range(0, 2**62)]

    check_schema({"name": "train", "tokens": -1}, TokenFile)    # SchemaError: $.tokens is -1: must be from 0 to ...

A document that does not match, for example because the disk is damaged or the file is malicious, raises an error with
the place of the problem. Keys that are not in the schema are ignored.
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

TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
TYPE_NAMES |= {types.NoneType: "null"}
MAX_VALUE_LENGTH = 60  # characters of a value in a message


class SchemaError(ValueError):
    """A document does not match its schema. The message names the place, the value and the requirement."""


@dataclass(frozen=True)
class Range:
    """A limit: the minimum and maximum of a number, or of the length of a string or a list."""

    minimum: float = -math.inf
    maximum: float = math.inf

    def find_problem(self, value: Any) -> str | None:
        """Return the requirement that a value does not meet, or None."""
        size = len(value) if isinstance(value, str | list) else value
        if self.minimum <= size <= self.maximum:
            return None
        unit = " items" if isinstance(value, list) else " characters" if isinstance(value, str) else ""
        return f"must have {self}{unit}" if unit else f"must be {self}"

    def __str__(self) -> str:
        if self.maximum == math.inf:
            return f"at least {self.minimum:g}"
        return f"from {self.minimum:g} to {self.maximum:g}"


@dataclass(frozen=True)
class Pattern:
    """A limit: a regular expression that the full string must match."""

    pattern: str

    def find_problem(self, value: str) -> str | None:
        """Return the requirement that a value does not meet, or None."""
        return None if re.fullmatch(self.pattern, value) else f"must match {self.pattern}"


Count = Annotated[int, Range(0, 2**62)]
Size = Annotated[int, Range(1, 2**31 - 1)]
FileName = Annotated[str, Pattern(r"(?!\.{1,2}\Z)[^/\0]{1,255}")]  # without a directory
Sha256 = Annotated[str, Range(0, 64)]  # hexadecimal; any other text equals no hash


def check_schema(value: Any, schema: type[T]) -> T:
    """Return a value that was read from JSON or TOML, after checking it against a schema.

    Args:
        value: objects, lists, strings, numbers, booleans and null.
        schema: a TypedDict, a dataclass (any of whose fields may be missing), or any type that their fields can have.

    Raises:
        SchemaError: the value does not match the schema.
    """
    check_value(value, schema, "$")
    return value


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Return the type of each field of a TypedDict or a dataclass, including its limits."""
    return get_type_hints(schema, include_extras=True)


def check_value(value: Any, schema: Any, place: str) -> None:
    """Check a value against a schema.

    Args:
        value: the value.
        schema: as in `check_schema`.
        place: where the value is in the document, such as `$.splits.train[0]`.

    Raises:
        SchemaError: the value does not match the schema.
    """
    origin, arguments = get_origin(schema), get_args(schema)
    if schema is Any:
        return
    if origin in (Required, NotRequired):
        check_value(value, arguments[0], place)
    elif origin is Annotated:
        check_value(value, arguments[0], place)
        for limit in arguments[1:]:
            if problem := limit.find_problem(value):
                raise SchemaError(f"{place} is {shorten(value)}: {problem}")
    elif origin is Literal:
        if not any(type(value) is type(known) and value == known for known in arguments):
            raise SchemaError(f"{place} is {shorten(value)}: must be {' or '.join(map(repr, arguments))}")
    elif origin in (Union, types.UnionType):
        if not any(matches_schema(value, each) for each in arguments):
            names = " or ".join(TYPE_NAMES[each] for each in arguments)
            raise SchemaError(f"{place} is {shorten(value)}: must be {names}")
    elif is_typeddict(schema) or dataclasses.is_dataclass(schema):
        check_fields(value, schema, place)
    else:
        check_plain(value, origin or schema, arguments, place)


def matches_schema(value: Any, schema: Any) -> bool:
    """Return whether a value matches a schema."""
    try:
        check_value(value, schema, "$")
        return True
    except SchemaError:
        return False


def check_fields(value: Any, schema: Any, place: str) -> None:
    """Check an object and its fields against a TypedDict or a dataclass."""
    check_plain(value, dict, (), place)
    for name, each in field_types(schema).items():
        if name in value:
            check_value(value[name], each, f"{place}.{name}")
        elif name in getattr(schema, "__required_keys__", ()):
            raise SchemaError(f"{place}.{name} is missing")


def check_plain(value: Any, kind: type, arguments: tuple[Any, ...], place: str) -> None:
    """Check a string, a number, a boolean, null, a list of one type, or an object whose values have one type."""
    actual = types.NoneType if value is None else type(value)
    if actual is not kind and not (kind is float and actual is int and abs(value) < 2**1023):
        raise SchemaError(f"{place} is {TYPE_NAMES.get(actual, actual.__name__)}: must be {TYPE_NAMES[kind]}")
    if kind is list and arguments:
        for i, item in enumerate(value):
            check_value(item, arguments[0], f"{place}[{i}]")
    elif kind is dict and arguments:
        for key, item in value.items():
            check_value(item, arguments[1], f"{place}[{shorten(key)}]")


def shorten(value: Any) -> str:
    """Return the text of a value for a message, at most `MAX_VALUE_LENGTH` characters long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or deeply nested lists
        text = "too large to be shown"
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
