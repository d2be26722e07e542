r"""Check a JSON or TOML document against a schema before the program uses it. msgspec does the work.

A schema is a `TypedDict`. Its fields may have limits:

    class TokenFile(TypedDict):
        name: Annotated[str, Meta(pattern=r"\A[a-z]+\Z")]
        tokens: Annotated[int, Meta(ge=0)]

    check_schema({"name": "train", "tokens": -1}, TokenFile)    # SchemaError: Expected `int` >= 0 - at `$.tokens`

A document that does not match, for example because the disk is damaged or the file is malicious, raises an error with
the place of the problem. Keys that are not in the schema are ignored.
"""

import json
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from nanoGPT.files import read_document

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**62)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
FileName = Annotated[str, Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\0]{1,255}\Z")]  # without a directory
Sha256 = Annotated[str, Meta(max_length=64)]  # hexadecimal; any other text equals no hash


class SchemaError(ValueError):
    """A document does not match its schema. The message names the place and the requirement."""


def check_schema(value: T, schema: type) -> T:
    """Return a value that was read from JSON or TOML, after checking it against a schema.

    Args:
        value: objects, lists, strings, numbers, booleans and null.
        schema: a TypedDict, or any type that its fields can have.

    Raises:
        SchemaError: the value does not match the schema.
    """
    try:
        msgspec.convert(value, schema)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SchemaError(str(error)) from None
    return value


def read_json(path: Path, schema: type[T]) -> T:
    """Read a JSON file and check it against a schema.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        SchemaError: the path is not a regular file, or the file is not JSON or does not match the schema.
        ConfigError: the file could not be read.
    """
    try:
        return check_schema(json.loads(read_document(path)), schema)
    except SchemaError:
        raise
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except ValueError as error:  # NotAFile, not UTF-8 or not JSON
        raise SchemaError(str(error)) from None
