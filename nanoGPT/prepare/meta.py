"""The `meta.json` of a prepared dataset: its files of token ids, and the identity of their tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from nanoGPT.job.schema import Count, FileName, Meta, SchemaError, Sha256, Size, read_json

GPT2_VOCAB = 50257
GPT2_TOKENS_SHA256 = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"  # of its tokens, one per line
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


def make_char_identity(characters: str) -> TokenizerIdentity:
    """Return the identity of a character tokenizer, whose ids follow the order of the characters."""
    sha256 = hashlib.sha256(characters.encode()).hexdigest()
    return {"name": "char", "vocab_size": len(characters), "sha256": sha256, "characters": characters}


def find_known_tokenizer(vocab: Any, has_merges: bool) -> TokenizerIdentity | None:
    """Return the identity of GPT-2's tokenizer or of one of single characters; None if a vocabulary is neither.

    A vocabulary with further tokens after GPT-2's 50257 counts as GPT-2's. For a tokenizer.json, which says what they
    are, see `make_json_identity`.

    Args:
        vocab: the ids by token.
        has_merges: whether the tokenizer merges characters to tokens.
    """
    token_of = {i: token for token, i in vocab.items()} if isinstance(vocab, dict) else {}
    tokens = [token_of.get(i, "") for i in range(len(token_of))]
    content = "\n".join(tokens[:GPT2_VOCAB]).encode("utf-8", "replace")
    if has_merges and hashlib.sha256(content).hexdigest() == GPT2_TOKENS_SHA256:
        return make_gpt2_identity()
    if tokens and not has_merges and all(len(token) == 1 for token in tokens):
        return make_char_identity("".join(tokens))
    return None


def make_json_identity(definition: str) -> TokenizerIdentity:
    """Return the identity of a tokenizer of Hugging Face, from the content of its tokenizer.json.

    The hash is that of the parts that determine the token ids. Programs write the same tokenizer in different ways.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is no tokenizer.
    """
    content = json.loads(definition)
    model = content["model"]
    vocab = model["vocab"]  # a list in Unigram models
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    added = sorted(content.get("added_tokens") or [], key=lambda token: token["id"])
    if known := find_known_tokenizer(vocab, bool(merges)):
        has_more_tokens = any(token["id"] >= known["vocab_size"] for token in added)
        encodes_bytes = not merges and (content.get("pre_tokenizer") or content.get("normalizer"))
        if not (has_more_tokens or encodes_bytes):
            return known
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab))), *(token["id"] for token in added)]
    settings = {name: value for name, value in model.items() if value and name not in ("vocab", "merges")}
    parts = [settings, vocab, merges, content.get("normalizer"), content.get("pre_tokenizer"), added]
    sha256 = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return {"name": "tokenizers", "vocab_size": max(ids) + 1, "sha256": sha256, "definition": definition}


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
