"""The form of every file that this project reads, checked in one place before anything relies on it.

Each format is a typed dictionary whose constraints msgspec checks. A file of another form, from a broken disk, another
program or somebody hostile, is refused in one phrase that names the place, such as "Expected `int`, got `str` - at
`$.splits.train[0].tokens`".
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from nanoGPT.files import read_document

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**62)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
FileName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\0]{1,255}\Z")]  # in the same directory
Sha256 = Annotated[str, Meta(max_length=64)]  # hexadecimal; another text is no file's


class Malformed(ValueError):
    """A file does not have the form of its format; the message is a phrase that says where."""


# ---- a dataset: meta.json


class TokenFile(TypedDict):
    """One file of token ids."""

    name: FileName
    tokens: Count
    sha256: Sha256


class TokenizerIdentity(TypedDict):
    """Which tokenizer made the ids; `characters` are those of a character tokenizer."""

    name: Literal["char", "gpt2"]
    vocab_size: Size
    sha256: Sha256
    characters: NotRequired[str]


class Splits(TypedDict):
    """The files of each split."""

    train: Annotated[list[TokenFile], Meta(min_length=1, max_length=10**6)]
    val: Annotated[list[TokenFile], Meta(min_length=1, max_length=10**6)]


class DatasetMeta(TypedDict):
    """A prepared dataset's sidecar; `source` says what it was made from."""

    source: NotRequired[dict[str, Any]]
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"]
    splits: Splits


class PartialSplits(TypedDict):
    """The files of each split so far."""

    train: list[TokenFile]
    val: list[TokenFile]


class StreamProgress(TypedDict):
    """How far a streamed dataset is prepared (progress.json): its complete files, and the place in the stream."""

    source: dict[str, Any]
    splits: PartialSplits
    document: Count
    offset: Count


# ---- a checkpoint: manifest.json


class FileRecord(TypedDict):
    """One file of a checkpoint."""

    name: FileName
    size: Count
    sha256: Sha256


class Manifest(TypedDict):
    """What every checkpoint's manifest says; that of a training run says more."""

    step: Count
    world_size: Annotated[int, Meta(ge=1, le=2**20)]
    run: NotRequired[str]
    versions: dict[str, str]
    files: Annotated[list[FileRecord], Meta(min_length=1, max_length=10**6)]
    sha256: Sha256


class ModelArgs(TypedDict):
    """The shape of a GPT."""

    n_layer: Annotated[int, Meta(ge=1, le=10_000)]
    n_head: Size
    n_embd: Annotated[int, Meta(ge=1, le=2**20)]
    block_size: Size
    bias: bool
    vocab_size: Size
    dropout: Annotated[float, Meta(ge=0, lt=1)]
    gelu: NotRequired[Literal["none", "tanh"]]


class DataIdentity(TypedDict):
    """What a run was trained on: its tokenizer, and the sha256 of each file by name."""

    tokenizer: TokenizerIdentity
    files: dict[str, Sha256]


class TrainingManifest(Manifest):
    """What the manifest of a training run says."""

    phase: str
    config: dict[str, Any]
    model_args: ModelArgs
    data: DataIdentity
    best_val_loss: float
    grad_scaler: dict[str, Any]


# ---- checking


def check(value: Any, schema: type[T]) -> T:
    """Return a value, as JSON or TOML give it, if it has the form of `schema`.

    Raises:
        Malformed: it has not.
    """
    try:
        return msgspec.convert(value, schema)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise Malformed(str(error)) from None


def read_json(path: Path, schema: type[T]) -> T:
    """Read a JSON file of a known form.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        Malformed: it is no regular file, no JSON, or has another form.
        ConfigError: it could not be read.
    """
    try:
        return check(json.loads(read_document(path)), schema)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    except ValueError as error:  # no file, no UTF-8 or no JSON
        raise Malformed(str(error)) from None


def check_tokenizer(identity: TokenizerIdentity) -> None:
    """Check what the types cannot say of a tokenizer.

    Raises:
        Malformed: it is a character tokenizer without its characters.
    """
    if identity["name"] == "char" and "characters" not in identity:
        raise Malformed("the tokenizer's characters are missing")


def read_dataset_meta(folder: Path) -> DatasetMeta:
    """Read a dataset's meta.json.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        Malformed: it is not that of a dataset.
        ConfigError: it could not be read.
    """
    meta = read_json(folder / "meta.json", DatasetMeta)
    check_tokenizer(meta["tokenizer"])
    if meta["dtype"] == "uint16" and meta["tokenizer"]["vocab_size"] > 1 << 16:
        raise Malformed("ids of this vocab_size do not fit into uint16")
    return meta
