"""The `meta.json` of a prepared dataset: its files of token ids, and the identity of their tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from nanoGPT.job.schema import Count, FileName, Meta, SchemaError, Sha256, Size, read_json

GPT2_VOCAB = 50257
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # of OpenAI's vocab.bpe


class TokenizerIdentity(TypedDict):
    """The tokenizer that created the token ids.

    A character tokenizer has `characters`, and one of Hugging Face the content of its tokenizer.json as `definition`.
    """

    name: Literal["char", "gpt2", "tokenizers"]
    vocab_size: Size
    sha256: Sha256
    characters: NotRequired[str]
    definition: NotRequired[str]


def make_gpt2_identity() -> TokenizerIdentity:
    """Return the identity of the GPT-2 tokenizer."""
    return {"name": "gpt2", "vocab_size": GPT2_VOCAB, "sha256": GPT2_SHA256}


def describe_tokenizer(identity: TokenizerIdentity) -> str:
    """Return a short description for messages."""
    kinds = {"char": "characters", "gpt2": "tokens of GPT-2", "tokenizers": "tokens of a tokenizer.json"}
    return f"{identity['vocab_size']:,} {kinds[identity['name']]}"


class TokenFile(TypedDict):
    """One file of token ids."""

    name: FileName
    tokens: Count
    sha256: Sha256


class Splits(TypedDict):
    """The files of each split."""

    train: Annotated[list[TokenFile], Meta(min_length=1, max_length=10**6)]
    val: Annotated[list[TokenFile], Meta(min_length=1, max_length=10**6)]


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
        SchemaError: the file does not describe a dataset.
        ConfigError: the file could not be read.
    """
    meta = read_json(folder / "meta.json", DatasetMeta)
    if meta["tokenizer"]["name"] == "char" and "characters" not in meta["tokenizer"]:
        raise SchemaError("the tokenizer's characters are missing")
    if meta["tokenizer"]["name"] == "tokenizers" and "definition" not in meta["tokenizer"]:
        raise SchemaError("the tokenizer's definition is missing")
    if meta["dtype"] == "uint16" and meta["tokenizer"]["vocab_size"] > 1 << 16:
        raise SchemaError("ids of this vocab_size do not fit into uint16")
    return meta


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
