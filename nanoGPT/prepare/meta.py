"""The `meta.json` of a prepared dataset: its files of token ids, and the identity of their tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from nanoGPT.errors import ConfigError
from nanoGPT.files import read_document

GPT2_VOCAB = 50257
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # of OpenAI's vocab.bpe

Count = Annotated[int, Meta(ge=0)]
FileName = Annotated[str, Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\0]{1,255}\Z")]  # without a directory


class TokenizerIdentity(TypedDict):
    """The tokenizer that created the token ids.

    A character tokenizer has `characters`, and one of Hugging Face the content of its tokenizer.json as `definition`.
    """

    name: Literal["char", "gpt2", "tokenizers"]
    vocab_size: Annotated[int, Meta(ge=1)]
    sha256: str
    characters: NotRequired[str]
    definition: NotRequired[str]


def make_gpt2_identity() -> TokenizerIdentity:
    """Return the identity of the GPT-2 tokenizer."""
    return {"name": "gpt2", "vocab_size": GPT2_VOCAB, "sha256": GPT2_SHA256}


def describe_tokenizer(identity: TokenizerIdentity) -> str:
    """Return a short description for messages."""
    kinds = {"char": "characters", "gpt2": "tokens of GPT-2", "tokenizers": "tokens of a tokenizer.json"}
    return f"{identity['vocab_size']:,} {kinds[identity['name']]}"


NEEDED_FIELDS = {"char": "characters", "tokenizers": "definition"}  # of the identity, by its name


class TokenFile(TypedDict):
    """One file of token ids."""

    name: FileName
    tokens: Count
    sha256: str


class Splits(TypedDict):
    """The files of each split."""

    train: Annotated[list[TokenFile], Meta(min_length=1)]
    val: Annotated[list[TokenFile], Meta(min_length=1)]


class DatasetMeta(TypedDict):
    """The `meta.json` of a prepared dataset. `source` describes the text that it was prepared from."""

    source: NotRequired[dict[str, Any]]
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"]
    splits: Splits


def read_dataset_meta(folder: Path) -> DatasetMeta:
    """Read a dataset's meta.json.

    Raises:
        FileNotFoundError, NotADirectoryError: the file does not exist.
        ConfigError: the file could not be read, or does not describe a dataset.
    """
    path = folder / "meta.json"
    try:
        meta = msgspec.convert(json.loads(read_document(path)), DatasetMeta)
        tokenizer = meta["tokenizer"]
        if (field := NEEDED_FIELDS.get(tokenizer["name"])) and field not in tokenizer:
            raise ValueError(f"the identity of the tokenizer has no {field}")
        if meta["dtype"] == "uint16" and tokenizer["vocab_size"] > 1 << 16:
            raise ValueError("ids of this vocab_size do not fit into uint16")
        return meta
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{path} does not describe a dataset ({str(error)[:200]}): remove this file to prepare the dataset again"
        ) from None


def identify(datasets: Sequence[tuple[str, int, DatasetMeta]]) -> dict[str, Any]:
    """Return the identity of the data of a run: the tokenizer, and the hash (SHA-256) of each file by name.

    For a mixture, it also has the weight of each dataset, and the names of the files begin with `<dataset>/`.

    Args:
        datasets: the name, the weight and the `meta.json` of each.
    """
    files, is_mixture = {}, len(datasets) > 1
    for name, _, meta in datasets:
        for file in [*meta["splits"]["train"], *meta["splits"]["val"]]:
            files[f"{name}/{file['name']}" if is_mixture else file["name"]] = file["sha256"]
    identity = {"tokenizer": datasets[0][2]["tokenizer"], "files": files}
    return identity | ({"weights": {name: weight for name, weight, _ in datasets}} if is_mixture else {})
