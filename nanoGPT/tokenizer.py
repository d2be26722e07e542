"""Tokenizers: single characters, and GPT-2's byte-pair encoding.

A dataset and a checkpoint record the identity of their tokenizer, from which `load_tokenizer` creates it.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Literal, NotRequired, Protocol, TypedDict

from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.schema import SchemaError, Sha256, Size


class TokenizerIdentity(TypedDict):
    """The tokenizer that created the token ids. Only a character tokenizer has `characters`."""

    name: Literal["char", "gpt2"]
    vocab_size: Size
    sha256: Sha256
    characters: NotRequired[str]


def check_tokenizer(identity: TokenizerIdentity) -> None:
    """Check the condition that `TokenizerIdentity` cannot express: a character tokenizer has characters.

    Raises:
        SchemaError: the characters are missing.
    """
    if identity["name"] == "char" and "characters" not in identity:
        raise SchemaError("the tokenizer's characters are missing")


GPT2_VOCAB = 50257
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # of OpenAI's vocab.bpe


def make_gpt2_identity() -> TokenizerIdentity:
    """Return the identity of the GPT-2 tokenizer."""
    return {"name": "gpt2", "vocab_size": GPT2_VOCAB, "sha256": GPT2_SHA256}


def make_char_identity(characters: str) -> TokenizerIdentity:
    """Return the identity of a character tokenizer, whose ids follow the order of the characters."""
    sha256 = hashlib.sha256(characters.encode()).hexdigest()
    return {"name": "char", "vocab_size": len(characters), "sha256": sha256, "characters": characters}


def describe_tokenizer(identity: TokenizerIdentity) -> str:
    """Return a short description for messages."""
    return f"{identity['vocab_size']:,} " + ("characters" if identity["name"] == "char" else "tokens of GPT-2")


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def write_hf(self, folder: Path) -> None:
        """Write the files from which the transformers library loads the same tokenizer."""


class CharTokenizer:
    """A tokenizer with one id per character. `encode` raises a ConfigError for an unknown character."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.ids = {c: i for i, c in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            raise ConfigError(
                f"the character {unknown[0]!r} is not in this model's vocabulary: use only {self.characters!r}"
            )
        return [self.ids[c] for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i] for i in ids if i < len(self.characters))

    def write_hf(self, folder: Path) -> None:
        model = {"type": "BPE", "vocab": self.ids, "merges": []}  # without merges, each token is one character
        tokenizer = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding from tiktoken, with the vocabulary that `make data` downloads."""

    def __init__(self) -> None:
        import tiktoken

        os.environ["TIKTOKEN_CACHE_DIR"] = str(DOWNLOADS / "tiktoken")
        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise ConfigError(f"GPT-2's vocabulary is missing ({type(error).__name__}): run `make data`") from None
        self.end_of_text = self.bpe.eot_token

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text, allowed_special={"<|endoftext|>"})

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.bpe.n_vocab])

    def write_hf(self, folder: Path) -> None:
        files = {"6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": "vocab.json"}  # the names in tiktoken's cache
        files["6d1cbeee0f20b3d9449abfede4726ed8212e3aee"] = "merges.txt"
        for name, target in files.items():
            shutil.copyfile(DOWNLOADS / "tiktoken" / name, folder / target)


def load_tokenizer(identity: TokenizerIdentity) -> Tokenizer:
    """Return the tokenizer that a `meta.json` or a checkpoint's manifest names.

    Raises:
        ConfigError: GPT-2's vocabulary is missing.
    """
    if identity["name"] == "char":
        return CharTokenizer(identity["characters"])
    return Gpt2Tokenizer()
