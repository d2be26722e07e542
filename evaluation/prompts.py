"""The text that a model gets for a problem, and the answer in the text that it generates.

    plain       the problem itself; the model continues it, as a model without instruction tuning does
    chat        the chat template of the model's tokenizer
    harmony     the format of gpt-oss: the model first writes to the channel `analysis`, then to `final`

A Harmony message is `<|channel|>NAME<|message|>TEXT`, and ends with `<|end|>`, `<|call|>` or `<|return|>`
(https://github.com/openai/harmony).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from evaluation.arc import COLORS
from evaluation.problems import ArcProblem, Problem
from nanoGPT.errors import ConfigError
from nanoGPT.prepare.tokenizer import CharTokenizer, Tokenizer

PromptForm = Literal["plain", "chat", "harmony"]

INSTRUCTIONS = (
    "Each example below shows an input grid, a line with a colon, and its output grid. Each symbol is a color. "
    "Find the rule. Then write the output grid of the last input, one row per line, and nothing after it.\n\n"
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")


class TextCodec(ABC):
    """A model's tokenizer, as problems need it. Here it has no chat template and no special tokens.

    Attributes:
        ids: number of token ids; larger ids of the model are padding, which is never sampled.
        ends: ids that end a text.
        prefix: ids that the model expects before every prompt, such as a BOS token; may be empty.
    """

    ids: int
    ends: frozenset[int]
    prefix: list[int]

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: list[int]) -> str: ...

    def encode_chat(self, message: str) -> list[int]:
        """Return the ids of a user's message in the chat template, up to where the model answers.

        Raises:
            ConfigError: there is no chat template.
        """
        raise ConfigError(
            "--prompt=chat needs a tokenizer with a chat template, which this model lacks: use --prompt=plain"
        )

    def find_special(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the ids of special tokens; the dictionary lacks those that the tokenizer lacks."""
        return {}


class OwnCodec(TextCodec):
    """The tokenizer of one of this project's datasets."""

    def __init__(self, tokenizer: Tokenizer, ids: int) -> None:
        self.tokenizer, self.ids, self.prefix = tokenizer, ids, []
        self.ends = frozenset([] if tokenizer.end_of_text is None else [tokenizer.end_of_text])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


def choose_symbols(codec: TextCodec) -> str:
    """Return the characters that stand for the colors of ARC: the digits, or letters if the vocabulary has no digits.

    Raises:
        ConfigError: the vocabulary has neither.
    """
    characters = codec.tokenizer.characters if isinstance(getattr(codec, "tokenizer", None), CharTokenizer) else None  # type: ignore[attr-defined]
    for symbols in ("0123456789", "abcdefghij"):
        if characters is None or set(symbols) <= set(characters):
            return symbols
    raise ConfigError(
        f"the vocabulary has neither the digits nor the letters a to j, which stand for the {COLORS} colors of ARC: "
        "use a model with another tokenizer"
    )


class Prompter:
    """Writes prompts in one form, and finds the answer in the generated tokens.

    Args:
        form: plain, chat or harmony.
        codec: the model's tokenizer.
        stops: texts that end every answer; empty: a blank line for ARC tasks in plain form, and nothing otherwise.

    Raises:
        ConfigError: the tokenizer does not support the form.
    """

    def __init__(self, form: PromptForm, codec: TextCodec, stops: Sequence[str] = ()) -> None:
        self.form, self.codec, self.stops = form, codec, tuple(stops)
        self.special = codec.find_special((*HARMONY, "<|call|>"))
        if form == "harmony" and (missing := [name for name in HARMONY if name not in self.special]):
            raise ConfigError(
                f"--prompt=harmony needs the token {missing[0]}, which this model's tokenizer lacks: use --prompt=plain"
            )
        if form == "chat":
            codec.encode_chat("test")
        self.ends = codec.ends
        if form == "harmony":
            self.ends = frozenset({self.special[name] for name in ("<|return|>", "<|call|>") if name in self.special})

    def write(self, problem: Problem, symbols: str) -> list[int]:
        """Return the token ids of the prompt of a problem."""
        text = problem.format_prompt(symbols)
        if self.form == "plain":
            return self.codec.prefix + self.codec.encode(text)
        message = (INSTRUCTIONS if isinstance(problem, ArcProblem) else "") + text
        if self.form == "chat":
            return self.codec.encode_chat(message)
        parts: list[str | int] = []
        for role, content in (("system", "Reasoning: medium\n\n# Valid channels: analysis, final."), ("user", message)):
            parts += ["<|start|>", role, "<|message|>", content, "<|end|>"]
        ids: list[int] = []
        for part in [*parts, "<|start|>", "assistant"]:
            ids += [self.special[part]] if part in self.special else self.codec.encode(str(part))
        return ids

    def find_stops(self, problem: Problem) -> tuple[str, ...]:
        """Return the texts that end the answer to a problem; empty if only a special token does."""
        if not self.stops and self.form == "plain" and isinstance(problem, ArcProblem):
            return ("\n\n",)
        return self.stops

    def describe(self, ids: list[int], problem: Problem) -> dict[str, str]:
        """Return the answer and, with Harmony, also the full `text` with its channels and special tokens."""
        text = {"text": self.codec.decode(ids)} if self.form == "harmony" else {}
        return {"answer": self.read(ids, problem), **text}

    def read(self, ids: list[int], problem: Problem) -> str:
        """Return the answer in the generated token ids, without stop texts and special tokens."""
        answer = [i for i in self.select_answer(ids) if i not in self.ends]
        return cut_text(self.codec.decode(answer), self.find_stops(problem))

    def select_answer(self, ids: list[int]) -> list[int]:
        """Return the ids of the answer: with Harmony, those of the text in the channel `final`."""
        if self.form != "harmony":
            return ids
        names = {number: name for name, number in self.special.items()}
        header: list[int] | None = None  # the tokens after <|channel|>
        channel, final = "", list[int]()
        for token in ids:
            name = names.get(token)
            if name == "<|channel|>":
                header, channel = [], ""
            elif name == "<|message|>" and header is not None:
                channel, header = (self.codec.decode(header).split() or [""])[0], None
            elif name in HARMONY_ENDS:
                channel = ""
            elif header is not None:
                header.append(token)
            elif channel == "final":
                final.append(token)
        return final


def cut_text(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the texts that end it."""
    return text[: min((position for stop in stops if (position := text.find(stop)) >= 0), default=len(text))]
