"""Tokenizers: characters, and GPT-2's byte-pair encoding. A dataset and a checkpoint name theirs by its identity."""

import json
import os
import shutil
from pathlib import Path
from typing import Literal, NotRequired, Protocol, TypedDict

from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.schema import Malformed, Sha256, Size


class TokenizerIdentity(TypedDict):
    """Which tokenizer made the ids; `characters` are those of a character tokenizer."""

    name: Literal["char", "gpt2"]
    vocab_size: Size
    sha256: Sha256
    characters: NotRequired[str]


def check_tokenizer(identity: TokenizerIdentity) -> None:
    """Check what the types cannot say of a tokenizer.

    Raises:
        Malformed: it is a character tokenizer without its characters.
    """
    if identity["name"] == "char" and "characters" not in identity:
        raise Malformed("the tokenizer's characters are missing")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def write_hf(self, folder: Path) -> None:
        """Write the files with which transformers makes the same tokenizer."""


class CharTokenizer:
    """One id a character. Encoding a character that the training text did not have is a ConfigError."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.ids = {c: i for i, c in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            raise ConfigError(f"the character {unknown[0]!r} is not in this model's vocabulary: {self.characters!r}")
        return [self.ids[c] for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i] for i in ids if i < len(self.characters))

    def write_hf(self, folder: Path) -> None:
        model = {"type": "BPE", "vocab": self.ids, "merges": []}  # of characters, none of which is merged
        whole = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer.json").write_text(json.dumps(whole) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(about) + "\n")


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding through tiktoken, from the vocabulary that `make data` fetched."""

    def __init__(self) -> None:
        import tiktoken

        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(DOWNLOADS / "tiktoken"))
        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise ConfigError(f"GPT-2's vocabulary is not here ({type(error).__name__}): run `make data`") from None
        self.end_of_text = self.bpe.eot_token

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text, allowed_special={"<|endoftext|>"})

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.bpe.n_vocab])

    def write_hf(self, folder: Path) -> None:
        files = {"6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": "vocab.json"}  # as they are called in tiktoken's cache
        files["6d1cbeee0f20b3d9449abfede4726ed8212e3aee"] = "merges.txt"
        for name, target in files.items():
            shutil.copyfile(Path(os.environ["TIKTOKEN_CACHE_DIR"]) / name, folder / target)


def load_tokenizer(identity: TokenizerIdentity) -> Tokenizer:
    """The tokenizer that a `meta.json` or a checkpoint's manifest names."""
    if identity["name"] == "char":
        return CharTokenizer(identity["characters"])
    if identity["name"] == "gpt2":
        return Gpt2Tokenizer()
    raise ConfigError(f"the tokenizer {identity['name']!r} is not known here: char and gpt2 are")
