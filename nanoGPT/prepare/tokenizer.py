"""Tokenizers: single characters, GPT-2's byte-pair encoding, and the tokenizer.json files of Hugging Face.

A dataset and a checkpoint record the identity of their tokenizer, from which `load_tokenizer` creates it.
"""

import codecs
import os
from collections.abc import Callable
from typing import Protocol

from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.prepare.download import install_gpt2_vocabulary
from nanoGPT.prepare.meta import TokenizerIdentity


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        end_of_text: the id of the token between two documents; None if there is none.
        special_tokens: words that become one token with a meaning of its own where a text contains them.
    """

    end_of_text: int | None
    special_tokens: tuple[str, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def start_decoding(self) -> Callable[[list[int]], str]:
        """Return a function that decodes a text part by part.

        A character whose bytes span multiple tokens is returned with its last token.
        """
        ...


class CharTokenizer:
    """A tokenizer with one id per character. `encode` raises a ConfigError for an unknown character."""

    end_of_text: int | None = None
    special_tokens: tuple[str, ...] = ()

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

    def start_decoding(self) -> Callable[[list[int]], str]:
        return self.decode


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding from tiktoken. Its vocabulary is downloaded if it is missing."""

    special_tokens: tuple[str, ...] = ("<|endoftext|>",)

    def __init__(self) -> None:
        import tiktoken

        install_gpt2_vocabulary()
        os.environ["TIKTOKEN_CACHE_DIR"] = str(DOWNLOADS / "tiktoken")
        self.bpe = tiktoken.get_encoding("gpt2")
        self.end_of_text: int | None = self.bpe.eot_token

    def encode(self, text: str) -> list[int]:
        try:
            return self.bpe.encode(text, allowed_special=set(self.special_tokens))
        except ValueError as error:
            raise ConfigError(
                f"GPT-2's tokenizer cannot encode the text ({error}): shorten runs of a million spaces or line ends"
            ) from None

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.bpe.n_vocab])

    def start_decoding(self) -> Callable[[list[int]], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda ids: decoder.decode(b"".join(self.bpe.decode_single_token_bytes(i) for i in ids))


class HuggingFaceTokenizer:
    """A tokenizer that a tokenizer.json of Hugging Face defines.

    Args:
        definition: the content of the file.

    Raises:
        ConfigError: the package `tokenizers` is not installed, or the definition is not valid.
    """

    # names of end-of-text
    ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")

    def __init__(self, definition: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                "a tokenizer.json needs the package tokenizers: run `.venv/bin/pip install tokenizers`"
            ) from None
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the package raises Exception itself
            raise ConfigError(f"the tokenizer.json is not valid ({error}): use that of another model") from None
        self.tokenizer.no_truncation()  # settings of a model's inputs, and not of its training data
        self.tokenizer.no_padding()
        if getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)
        ids = (self.tokenizer.token_to_id(name) for name in self.ENDS)
        self.end_of_text: int | None = next((i for i in ids if i is not None), None)

    def encode(self, text: str, is_input: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any text.
            is_input: whether to add the special tokens with which an input of the model begins. Texts are prepared for
                training without them.
        """
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
            if is_input:
                full: list[int] = self.tokenizer.encode(text, add_special_tokens=True).ids
                begins = (i for i in range(len(full)) if full[i : i + len(ids)] == ids)
                ids = full[: next(begins, 0)] + ids
            return ids
        except Exception as error:  # the package raises Exception itself
            raise ConfigError(f"the tokenizer.json cannot encode the text ({error}): use another one") from None

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def start_decoding(self) -> Callable[[list[int]], str]:
        # The package's DecodeStream raises an error if a model generates bytes that are not valid UTF-8.
        recent: list[int] = []  # the last ids that gave text, and those after them
        shown = 0  # of `recent`

        def decode(ids: list[int]) -> str:
            nonlocal recent, shown
            recent += ids
            before, text = self.decode(recent[:shown]), self.decode(recent)
            if len(text) <= len(before) or text.endswith("\ufffd"):
                return ""
            recent, shown = recent[shown:], len(recent) - shown
            return text[len(before) :]

        return decode


def load_tokenizer(identity: TokenizerIdentity) -> Tokenizer:
    """Return the tokenizer that a `meta.json` or a checkpoint's manifest names.

    Raises:
        ConfigError: GPT-2's vocabulary, or the package `tokenizers`, is missing.
    """
    if identity["name"] == "char":
        return CharTokenizer(identity["characters"])
    if identity["name"] == "tokenizers":
        return HuggingFaceTokenizer(identity["definition"])
    return Gpt2Tokenizer()
