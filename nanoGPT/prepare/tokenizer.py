"""Tokenizers: single characters, and GPT-2's byte-pair encoding.

A dataset and a checkpoint record the identity of their tokenizer, from which `load_tokenizer` creates it.
"""

import os
from typing import Protocol

from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.prepare.meta import TokenizerIdentity


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


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


def load_tokenizer(identity: TokenizerIdentity) -> Tokenizer:
    """Return the tokenizer that a `meta.json` or a checkpoint's manifest names.

    Raises:
        ConfigError: GPT-2's vocabulary is missing.
    """
    if identity["name"] == "char":
        return CharTokenizer(identity["characters"])
    return Gpt2Tokenizer()
