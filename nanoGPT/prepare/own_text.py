"""Prepare your own text: a .txt, .jsonl or .parquet file, or a directory of them.

    python -m nanoGPT.prepare.own_text --input=my.txt                   # the dataset my
    python -m nanoGPT.prepare.own_text --input=folder --name=web --tokenizer=gpt2 --field=body
    python -m nanoGPT.prepare.own_text --input=folder --tokenizer=path/to/tokenizer.json    # of Hugging Face

A .txt file is one document. A line of a .jsonl file and a row of a .parquet file are documents too: their text is in
the field `text`. Lines without a text are skipped, counted and named. The first tenth of the tokens, at most 4 million,
is the val split.

The text is read twice, in pieces. First its characters are counted, then its tokens are written. After an interruption,
the same command continues after the last complete file, and the files become those of an uninterrupted run.
"""

import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote

import numpy as np
from tqdm import tqdm

from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA, is_present, size_of
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.prepare.directory import (
    PROGRESS,
    SHARD_TOKENS,
    VAL_TOKENS,
    Progress,
    is_prepared,
    load_progress,
    prepare_once,
    write_meta,
)
from nanoGPT.prepare.meta import TokenizerIdentity, make_gpt2_identity
from nanoGPT.prepare.tokenizer import Gpt2Tokenizer, Tokenizer, load_tokenizer, make_char_identity, make_json_identity

SUFFIXES = (".txt", ".jsonl", ".parquet")
PIECE = 1 << 20  # characters of a text that are read at a time
LONGEST_LINE = 16 * PIECE  # a text without line starts is divided there too, where tokens may then be others
LINE_START = re.compile(r"(?<=\S\n)(?=\S)")  # no token of GPT-2 crosses the start of such a line
MAX_CHAR_TEXT = 20_000_000  # characters; a longer text is not tokenized by characters, unless --tokenizer says so
NAMED_LINES = 5  # that are skipped; the others are only counted

Piece = tuple[str, bool]  # a part of a document, and whether it is the first one


@dataclass
class OwnText:
    """The documents of one or more files.

    Args:
        path: a file or a directory.
        column: the field of .jsonl and .parquet files that contains the text.

    Attributes:
        skipped: the number of lines without a text, as of the last pass over the text.
        ignored: the number of other files.
    """

    path: Path
    column: str = "text"
    skipped: int = 0
    files: list[Path] = field(init=False)
    ignored: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise ConfigError(
                f"--input={self.path} does not exist: give a .txt, .jsonl or .parquet file, or a directory"
            )
        files = sorted(list_files(self.path)) if self.path.is_dir() else [self.path]
        self.files = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
        self.ignored = len(files) - len(self.files)
        if not self.files:
            raise ConfigError(
                f"--input={self.path} is no .txt, .jsonl or .parquet file, and has none: give one of these"
            )

    def pieces(self, shows_skipped: bool = False) -> Iterator[Piece]:
        """Yield all documents in pieces, in the order of the names of their files.

        Args:
            shows_skipped: print the lines that are skipped.

        Raises:
            ConfigError: a file cannot be read.
        """
        self.skipped = 0
        readers = {".txt": self._read_text, ".jsonl": self._read_lines, ".parquet": self._read_rows}
        for file in self.files:
            try:
                for piece in readers[file.suffix.lower()](file):
                    if isinstance(piece, str):
                        self.skipped += 1
                        if shows_skipped and self.skipped <= NAMED_LINES:
                            print(f"skipped {file}, {piece}")
                    elif piece[0]:
                        yield piece
            except OSError as error:
                raise ConfigError(f"{file} cannot be read ({error}): correct it, or remove it") from None
            except UnicodeDecodeError as error:
                advice = f"`LC_ALL=C.UTF-8 grep -naxv '.*' {quote(str(file))}` shows the invalid lines"
                raise ConfigError(f"{file} is not UTF-8 ({error.reason}): correct or convert it; {advice}") from None

    def _read_text(self, file: Path) -> Iterator[Piece]:
        rest, is_first = "", True
        with open(file, encoding="utf-8-sig") as stream:  # without a byte order mark, and with \n for every line end
            while block := stream.read(PIECE):
                if "\0" in block:
                    raise ConfigError(f"{file} has NUL characters, as UTF-16 has: convert it to UTF-8, or remove them")
                rest += block
                ends = [match.start() for match in LINE_START.finditer(rest)]
                if len(rest) > LONGEST_LINE and not ends:
                    ends = [len(rest)]
                if ends:
                    yield rest[: ends[-1]], is_first
                    rest, is_first = rest[ends[-1] :], False
        yield rest, is_first

    def _read_lines(self, file: Path) -> Iterator[Piece | str]:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
                if not line:
                    continue
                try:
                    text = json.loads(line)[self.column]
                except (ValueError, RecursionError) as error:
                    yield f"line {number}: it is not JSON ({str(error)[:80]})"
                    continue
                except (KeyError, TypeError, IndexError):
                    text = None
                yield (normalize(text), True) if isinstance(text, str) else f"line {number}: no text in `{self.column}`"

    def _read_rows(self, file: Path) -> Iterator[Piece | str]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ConfigError("parquet files need the extra `web`: run `.venv/bin/pip install -e '.[web]'`") from None
        try:
            number = itertools.count(1)
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(64, columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    row = next(number)
                    is_text = isinstance(text, str)
                    yield (normalize(text), True) if is_text else f"row {row}: no text in `{self.column}`"
        except (pyarrow.ArrowException, IndexError) as error:
            raise ConfigError(
                f"{file} has no readable column `{self.column}` ({str(error)[:200]}): correct it or --field"
            ) from None


def list_files(folder: Path) -> Iterator[Path]:
    """Yield all files of a directory and its subdirectories. A directory is entered once, also through links.

    Hidden files and directories are left out: they are copies and settings of other programs.

    Raises:
        ConfigError: a directory cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): correct its permissions, or move it")

    entered = set[str]()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        entered.add(os.path.realpath(parent))
        visible = [each for each in folders if not each.startswith(".")]
        folders[:] = sorted(each for each in visible if os.path.realpath(f"{parent}/{each}") not in entered)
        yield from (path for name in names if name[0] != "." and (path := Path(parent) / name).is_file())


def normalize(text: str) -> str:
    r"""Return a text with \n for every line end, and U+FFFD for half of a surrogate pair, which has no encoding."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def show_progress(pieces: Iterator[Piece], label: str) -> Iterator[Piece]:
    """Yield the pieces, and show how many characters have been read if standard error is a terminal."""
    with tqdm(desc=label, unit=" characters", unit_scale=True, disable=None) as bar:
        for piece in pieces:
            yield piece
            bar.update(len(piece[0]))


def choose_tokenizer(tokenizer: str | None, characters: set[str], length: int) -> TokenizerIdentity:
    """Return the identity of a tokenizer.

    Args:
        tokenizer: char, gpt2, or the path of a tokenizer.json; None: char for a short text, else gpt2.
        characters: that occur in the text.
        length: of the text, in characters.

    Raises:
        ConfigError: it is no tokenizer.
    """
    if tokenizer is None:
        tokenizer = "char" if length <= MAX_CHAR_TEXT else "gpt2"
        print(f"--tokenizer={tokenizer} is the default for {length:,} characters: char, gpt2 or a tokenizer.json")
    if tokenizer == "char":
        return make_char_identity("".join(sorted({*characters, "\n"})))
    if tokenizer == "gpt2":
        return make_gpt2_identity()
    try:
        return make_json_identity(Path(tokenizer).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--tokenizer={tokenizer} is neither char, nor gpt2, nor a tokenizer.json of Hugging Face ({error}): use "
            "one of these"
        ) from None


@dataclass
class Sample:
    """Parts of a text, at equal distances in characters: at most 200, of 500 characters each."""

    parts: list[str] = field(default_factory=list)
    distance: int = 500
    length: int = 0

    def add(self, piece: str) -> None:
        """Add the parts that begin in the next piece. If there are too many, drop every second one."""
        end = self.length + len(piece)
        while (begin := len(self.parts) * self.distance) < end:
            self.parts.append(piece[begin - self.length :][:500])
            if len(self.parts) > 200:
                self.parts, self.distance = self.parts[::2], 2 * self.distance
        self.length = end

    def estimate_tokens(self, tokenizer: Tokenizer) -> int:
        """Return about how many tokens the text has."""
        tokens = sum(len(tokenizer.encode(part)) for part in self.parts)
        return self.length * tokens // sum(map(len, self.parts))


def describe_losses(tokenizer: Tokenizer, sample: Sample, characters: set[str]) -> None:
    """Print which characters of a text a tokenizer cannot encode, and if nothing separates documents.

    A character counts as encoded if it is in the decoded sample, or if it survives as a separate word.
    """
    text = "".join(sample.parts)
    kept = {*tokenizer.decode(tokenizer.encode(text))}
    try:
        kept |= {*tokenizer.decode(tokenizer.encode(" ".join(sorted(characters))))}
    except ConfigError:  # a word-level tokenizer that has no token for unknown words
        characters = {*text}
    if missing := sorted(characters - kept):
        first = "".join(missing)[:50]
        print(f"the tokenizer changes or drops {len(missing):,} of {len(characters):,} different characters: {first!r}")
    if not find_separator(tokenizer):
        print("the tokenizer has no token for the end of a text or a line: nothing separates documents")
    elif tokenizer.end_of_text is None:
        print("the tokenizer has no token that is known as the end of a text: a line end separates documents")


def find_separator(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids between two documents: end-of-text, or a line end if the tokenizer has no such token."""
    return [tokenizer.end_of_text] if tokenizer.end_of_text is not None else tokenizer.encode("\n")


def encode_pieces(pieces: Iterator[Piece], tokenizer: Tokenizer, first: int) -> Iterator[list[int]]:
    """Yield the token ids of all pieces from number `first` on, with a separator before each document but the first."""
    separator = find_separator(tokenizer)
    for number, (text, starts_document) in enumerate(pieces):
        if number >= first:
            yield (separator if starts_document and number else []) + tokenizer.encode(text)


def write_files(folder: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, progress: Progress) -> None:
    """Write the token ids of all pieces from `progress` on. Each file has exactly as many as it should have."""
    content, skip, piece = bytearray(), progress.written_of_document, progress.document
    for ids in encode_pieces(pieces, tokenizer, progress.document):
        content += np.array(ids[skip:], progress.dtype).tobytes()
        written = len(ids)  # of this piece, when all of it is in the content
        while len(content) >= (size := int(progress.next_size) * progress.dtype.itemsize):
            left = (len(content) - size) // progress.dtype.itemsize
            progress.write_shard(folder, content[:size], piece, written - left)
            content = content[size:]
        skip, piece = 0, piece + 1
    if content:
        progress.write_shard(folder, content, piece)


def scan(text: OwnText, special_tokens: Sequence[str]) -> tuple[str, set[str], Sample, Counter[str]]:
    """Read a text once. Return its hash, its characters, a sample, and how often it contains each special token."""
    digest, characters, sample, special = hashlib.sha256(), set[str](), Sample(), Counter[str]()
    print(f"files to read: {len(text.files):,}; files of other kinds, which are ignored: {text.ignored:,}")
    broken = 0
    for piece, starts_document in show_progress(text.pieces(shows_skipped=True), "counting characters"):
        broken += piece.count("\ufffd")
        sample.add(piece)
        digest.update(b"\0" * starts_document + piece.encode())
        characters |= set(piece)
        special.update({name: piece.count(name) for name in special_tokens})
    if text.skipped:
        print(f"skipped {text.skipped:,} lines or rows without a text in `{text.column}`")
    if broken:
        print(f"occurrences of U+FFFD in the text: {broken:,}. They replace characters that could not be read")
    return digest.hexdigest(), characters, sample, special


def prepare_own_text(text: OwnText, name: str | None, tokenizer: str | None, shard_tokens: int = SHARD_TOKENS) -> str:
    """Prepare a dataset, unless it is already prepared, and return its name.

    Args:
        text: the documents.
        name: of the dataset; None: that of the file or directory.
        tokenizer: see `choose_tokenizer`.
        shard_tokens: tokens per file.

    Raises:
        ConfigError: the text or the tokenizer cannot be used, or a dataset of this name has another source.
    """
    name = name or re.sub(r"[^\w.-]+", "_", text.path.resolve().stem).strip("._") or "text"
    folder = DATA / name
    if not re.fullmatch(r"\w[\w.-]*", name) or is_present(folder / "prepare.py"):
        raise ConfigError(
            f"--name={name} is taken, or has characters other than letters, digits, _, . and -: choose another"
        )
    # A tokenizer that needs no text is loaded first, so that a wrong name is refused before a long text is read.
    identity = None if tokenizer in (None, "char") else choose_tokenizer(tokenizer, set(), 0)
    special_tokens = load_tokenizer(identity).special_tokens if identity else Gpt2Tokenizer.special_tokens
    digest, characters, sample, special = scan(text, special_tokens)
    if sample.length < 100:
        raise ConfigError(
            f"--input={text.path} has {sample.length} characters of text: use at least 100, or correct --field (a "
            "column of parquet must have strings, not bytes)"
        )
    identity = identity or choose_tokenizer(tokenizer, characters, sample.length)
    loaded = load_tokenizer(identity)
    for word, count in (+special).items() if loaded.special_tokens else ():
        print(
            f"occurrences of {word} in the text: {count:,}. Each becomes a special token of the tokenizer, such as the "
            "end of a document: replace the word in the text if it means something else"
        )
    tokens = sample.estimate_tokens(loaded)
    if identity["name"] == "tokenizers":
        describe_losses(loaded, sample, characters)
    source = {
        "text_sha256": digest,
        "files": [{"name": file.name, "bytes": size_of(file)} for file in text.files[:1000]],
        "tokenizer": identity["sha256"],
        "shard_tokens": shard_tokens,
        "max_tokens": None,
        "val_tokens": max(1, min(VAL_TOKENS, tokens // 10)),
        "vocab_size": identity["vocab_size"],
    }

    def write() -> None:
        progress = load_progress(folder, source)
        write_files(folder, show_progress(text.pieces(), "writing tokens"), loaded, progress)
        if not progress.splits["train"]:
            (folder / PROGRESS).unlink(missing_ok=True)
            raise ConfigError(f"--input={text.path} has too few tokens for two splits: use more text")
        write_meta(folder, source, identity, progress.splits)

    advice = f"choose another --name, or run `rm -r {quote(str(folder))}`"
    prepare_once(folder, partial(is_prepared, folder, source, advice), write)
    (folder / PROGRESS).unlink(missing_ok=True)
    return name


def main(input: Path, name: str | None = None, tokenizer: str | None = None, field: str = "text") -> None:
    """Prepare your own text.

    Args:
        input: a .txt, .jsonl or .parquet file, or a directory of them.
        name: of the dataset; None: that of the file or directory.
        tokenizer: char, gpt2 or the path of a tokenizer.json; None: char for a short text, else gpt2.
        field: of .jsonl and .parquet files, with the text.
    """
    text = OwnText(input, field)
    name = prepare_own_text(text, name, tokenizer)
    print(f"the val split is the beginning of the text, in {text.files[0]}")
    print(f"{name} is prepared: train on it with --dataset={name}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
