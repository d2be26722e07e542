"""The tokenizer of a Hugging Face model, as `TextCodec`."""

import contextlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from evaluation.prompts import TextCodec
from nanoGPT.errors import ConfigError


class HfCodec(TextCodec):
    """The tokenizer of a Hugging Face model."""

    def __init__(self, folder: Path, config: Any) -> None:
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            raise ConfigError(
                f"{folder} has no tokenizer that transformers can read ({str(error)[:200]}): copy the tokenizer's files"
            ) from None
        self.ids = max(self.tokenizer.get_vocab().values()) + 1  # ids may have holes
        ends = {self.tokenizer.eos_token_id}
        sources = [config]
        with contextlib.suppress(OSError):  # chat models have this file
            sources.append(GenerationConfig.from_pretrained(folder))
        for source in sources:
            ids = getattr(source, "eos_token_id", None)  # some models have several
            ends |= set(ids if isinstance(ids, list) else [ids])
        self.ends = frozenset(ends - {None})
        begin = self.tokenizer.bos_token_id
        self.prefix = [begin] if begin is not None and self.tokenizer.encode("a")[:1] == [begin] else []

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_chat(self, message: str) -> list[int]:
        if not self.tokenizer.chat_template:
            return super().encode_chat(message)
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    def find_special(self, names: tuple[str, ...]) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {name: vocabulary[name] for name in names if name in vocabulary}
