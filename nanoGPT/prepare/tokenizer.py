"""Tokenizers: single characters, GPT-2's byte-pair encoding, and the tokenizer.json files of Hugging Face.

A dataset and a checkpoint record the identity of their tokenizer, from which `load_tokenizer` creates it.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, Protocol

from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.prepare.download import install_gpt2_vocabulary
from nanoGPT.prepare.meta import GPT2_VOCAB, NEEDED_FIELDS, TokenizerIdentity, make_gpt2_identity

GPT2_TOKENS_SHA256 = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"  # of its tokens, one per line


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
        ConfigError: GPT-2's vocabulary, the package `tokenizers`, or a field of the identity is missing.
    """
    field = NEEDED_FIELDS.get(identity["name"])
    if field and field not in identity:
        raise ConfigError(f"the identity of the tokenizer has no {field}: prepare the dataset again")
    if identity["name"] == "char":
        return CharTokenizer(identity["characters"])
    if identity["name"] == "tokenizers":
        return HuggingFaceTokenizer(identity["definition"])
    return Gpt2Tokenizer()


# ---- the identity of a tokenizer


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
