"""Web text as GPT-2 tokens: documents streamed with Hugging Face `datasets` into shard files of a fixed size.

The first shard is the val split, the others are train. Every document follows an end-of-text token, so a model learns
that what came before does not matter; a document may begin in one shard and end in the next. Memory holds one shard,
twice while it is written, one batch of documents and the row group of the parquet file that they come from. A run
that was killed goes on after its last whole shard, and ends with the files that it would have written at once.
"""

import atexit
import contextlib
import dataclasses
import functools
import glob
import json
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoGPT.data import Gpt2Tokenizer
from nanoGPT.exits import ConfigError
from nanoGPT.files import write_atomically
from nanoGPT.prepare import (
    gpt2_identity,
    install_gpt2_vocabulary,
    is_prepared,
    write_meta,
    write_tokens,
)

SHARD_TOKENS = 100_000_000
VAL_TOKENS = 4_000_000  # about as many as nanoGPT's own val split of OpenWebText has
BATCH = 512  # documents that are encoded together
THREADS = min(8, os.cpu_count() or 1)
COLUMN = "text"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Corpus:
    """Where documents come from."""

    label: str  # what error messages call it
    advice: str  # what to try when it cannot be read
    identity: dict[str, Any]  # what the sidecar says of it, in JSON's types
    arguments: dict[str, Any]  # what `load_dataset` is called with, beside the split


def hub_corpus(path: str, name: str | None = None) -> Corpus:
    """The train split of a dataset on the Hugging Face hub; `name` is its subset."""
    advice = "check the network, or give parquet files of your own with --input='folder/*.parquet'"
    return Corpus(path, advice, {"hub": path, "name": name}, {"path": path, "name": name})


def parquet_corpus(pattern: str) -> Corpus:
    """Local parquet files, in alphabetical order. They are told from others by their names and sizes.

    Raises:
        ConfigError: no file matches.
    """
    paths = sorted(os.path.abspath(path) for path in glob.glob(pattern) if os.path.isfile(path))
    if not paths:
        raise ConfigError(f"--input={pattern} matches no file: give a pattern such as 'folder/*.parquet'")
    identity = {"files": [{"name": os.path.basename(path), "bytes": os.path.getsize(path)} for path in paths]}
    arguments = {"path": "parquet", "data_files": [glob.escape(path) for path in paths]}  # it takes them for patterns
    return Corpus(f"--input={pattern}", "check that every file is whole and is parquet", identity, arguments)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@functools.cache
def wait_at_exit() -> None:
    """Give Arrow's threads a second to end, or they hang or abort the interpreter (apache/arrow issue 45214)."""
    atexit.register(time.sleep, 1)


def open_documents(corpus: Corpus) -> Any:
    """The corpus as an IterableDataset of the one column `text`.

    Raises:
        ConfigError: `datasets` is not installed, the corpus cannot be reached or read, or it has no such column.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError("streaming documents needs `.venv/bin/pip install -e '.[web]'`") from None
    wait_at_exit()
    try:
        documents: Any = load_dataset(
            **corpus.arguments, columns=[COLUMN], batch_size=BATCH, split="train", streaming=True
        )
        # Row group by row group, as Arrow reads ahead without regard for who waits: a file of 2 GB would be in memory.
        documents = documents.reshard()
    except Exception as error:  # whatever the network, the hub's client or a parquet reader raise
        raise ConfigError(f"{corpus.label} cannot be opened ({first_line(error)}): {corpus.advice}") from None
    if "string" not in str(getattr((documents.features or {}).get(COLUMN), "dtype", "")):
        raise ConfigError(f"{corpus.label} has no column `{COLUMN}` of strings: give parquet files that have one")
    return documents


def read_batches(corpus: Corpus, documents: Any, first: int) -> Generator[list[str]]:
    """Batches of texts, from document `first` on; a missing text counts as an empty document.

    Raises:
        ConfigError: the corpus stopped being readable.
    """
    read = first
    try:
        for batch in documents.skip(first).iter(BATCH):
            yield [text or "" for text in batch[COLUMN]]
            read += len(batch[COLUMN])
    except Exception as error:
        raise ConfigError(
            f"{corpus.label} cannot be read beyond document {read:,} ({first_line(error)}): {corpus.advice}, "
            "then run the same command again, which keeps the shards that are whole"
        ) from None


def encode(batches: Iterator[list[str]]) -> Iterator[np.ndarray]:
    """Each document's tokens, uint16, with the end-of-text token before them.

    `encode_ordinary` reads "<|endoftext|>" inside a document as the characters that it is made of.
    """
    tokenizer = Gpt2Tokenizer()
    for texts in batches:
        for ids in tokenizer.bpe.encode_ordinary_batch(texts, num_threads=THREADS):
            yield np.array([tokenizer.end_of_text, *ids], dtype=np.uint16)


@dataclass
class Progress:
    """What progress.json holds: the shards that are whole, and where in the stream the next one begins."""

    source: dict[str, Any]  # the corpus's identity, shard_tokens and max_tokens, as the sidecar will have them
    splits: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    document: int = 0  # index of the document in which the next shard begins
    offset: int = 0  # tokens of that document, its separator included, that are in earlier shards

    @property
    def files(self) -> list[dict[str, Any]]:
        return [*self.splits["val"], *self.splits["train"]]

    @property
    def tokens(self) -> int:
        return sum(file["tokens"] for file in self.files)

    def next_size(self) -> int:
        """Tokens that the next shard takes; 0 when there are max_tokens already."""
        size, limit = self.source["shard_tokens"], self.source["max_tokens"]
        if not self.splits["val"]:
            size = min(size, VAL_TOKENS)
        return size if limit is None else min(size, limit - self.tokens)

    def save(self, folder: Path) -> None:
        write_atomically(folder / PROGRESS, json.dumps(dataclasses.asdict(self)).encode())


def load_progress(folder: Path, source: dict[str, Any]) -> Progress:
    """How far an earlier run in `folder` came; nowhere, where there was none.

    Raises:
        ConfigError: it had another source or other flags, or its shards are not all there.
    """
    path = folder / PROGRESS
    if not path.is_file():
        return Progress(source)
    anew = f"`rm {path}` to begin anew"
    try:
        progress = Progress(**json.loads(path.read_text()))
        sizes = [(folder / file["name"], file["tokens"] * np.dtype(np.uint16).itemsize) for file in progress.files]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} cannot be read: {anew}") from None
    if progress.source != source:
        raise ConfigError(f"{path} is of another source or of other flags: use those again to go on, or {anew}")
    for shard, size in sizes:
        if not shard.is_file() or shard.stat().st_size != size:
            raise ConfigError(f"{shard} is not the {size:,} bytes that were written: {anew}")
    return progress


class ShardWriter:
    """Packs tokens into shards. A whole shard goes to disk, and then the progress."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder, self.progress = folder, progress
        self.document, self.taken = progress.document, progress.offset  # where in the stream the next token is
        self.buffer = np.empty(progress.source["shard_tokens"], dtype=np.uint16)
        self.filled, self.room = 0, progress.next_size()  # tokens in the open shard, and tokens it still takes

    def add(self, ids: np.ndarray) -> int:
        """Append the next document, less what earlier shards hold of it, and return how many tokens were taken."""
        start = self.taken
        while self.room and self.taken < len(ids):
            part = ids[self.taken : self.taken + self.room]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled, self.room, self.taken = self.filled + len(part), self.room - len(part), self.taken + len(part)
            if not self.room:
                self.write_shard()
        added, self.document, self.taken = self.taken - start, self.document + 1, 0
        return added

    def write_shard(self) -> None:
        split = "train" if self.progress.splits["val"] else "val"
        name = f"{split}_{len(self.progress.files):06d}.bin"
        self.progress.splits[split].append(write_tokens(self.folder, name, self.buffer[: self.filled]))
        self.progress.document, self.progress.offset = self.document, self.taken
        self.progress.save(self.folder)
        self.filled, self.room = 0, self.progress.next_size()

    def finish(self, label: str) -> None:
        """Write the last shard, which may be shorter.

        Raises:
            ConfigError: the stream ended before there was a token for the train split.
        """
        if self.filled and self.progress.splits["val"]:
            self.write_shard()
        if self.progress.splits["train"]:
            return
        (self.folder / PROGRESS).unlink(missing_ok=True)  # it would stand in the way of other flags
        found = self.progress.tokens + self.filled
        raise ConfigError(
            f"{label} holds {found:,} tokens, too few for a val and a train split: "
            f"give more text, or --shard_tokens={max(2, found // 10)}"
        )


def check_sizes(shard_tokens: int, max_tokens: int | None) -> None:
    if shard_tokens < 2:
        raise ConfigError(f"--shard_tokens={shard_tokens} cannot be: give 2 or more")
    if max_tokens is not None and max_tokens <= (val := min(shard_tokens, VAL_TOKENS)):
        raise ConfigError(f"--max_tokens={max_tokens} leaves nothing to train on: give more than val's {val:,} tokens")


def is_there(folder: Path, source: dict[str, Any]) -> bool:
    """Whether the dataset is there. A command without flags, which is what `make` gives, takes it as it was made.

    Raises:
        ConfigError: what is there is of another source, and may have taken hours.
    """
    path = folder / "meta.json"
    try:
        found = json.loads(path.read_text())["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    no_flags = "hub" in source and (source["shard_tokens"], source["max_tokens"]) == (SHARD_TOKENS, None)
    if found != source and not (no_flags and is_prepared(folder, found)):
        raise ConfigError(f"{path} is of another source or of other flags: `rm {path}` to replace that dataset")
    return is_prepared(folder, found)


def write_shards(folder: Path, corpus: Corpus, progress: Progress, documents: Any) -> None:
    """Stream, encode and write, from where `progress` stands to the end of the corpus or to max_tokens."""
    writer = ShardWriter(folder, progress)
    limit, done = progress.source["max_tokens"], progress.tokens
    bar = tqdm(total=limit, initial=done, unit=" tokens", unit_scale=True, disable=None)
    with bar, contextlib.closing(read_batches(corpus, documents, progress.document)) as batches:
        for ids in encode(batches) if writer.room else ():
            bar.update(writer.add(ids))
            if not writer.room:
                break
    writer.finish(corpus.label)


def prepare_stream(folder: Path, corpus: Corpus, shard_tokens: int, max_tokens: int | None = None) -> None:
    """Make a dataset of a corpus of documents; nothing is done where it is there already.

    Args:
        folder: directory of the dataset.
        corpus: where the documents come from.
        shard_tokens: tokens of a shard; two bytes each, in memory and on disk.
        max_tokens: tokens to stop after, those of val included; None: the whole corpus.

    Raises:
        ConfigError: something must be done first; its sentence says what.
    """
    check_sizes(shard_tokens, max_tokens)
    install_gpt2_vocabulary()
    source = {**corpus.identity, "shard_tokens": shard_tokens, "max_tokens": max_tokens}
    if is_there(folder, source):
        (folder / PROGRESS).unlink(missing_ok=True)  # there if a run was killed after its last but one line
        print(f"{folder.name}: already prepared")
        return
    progress = load_progress(folder, source)
    documents = open_documents(corpus)
    begin = f"going on in document {progress.document:,}" if progress.files else "streaming"
    print(f"{folder.name}: GPT-2's vocabulary is installed; {begin}")
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / "meta.json", *folder.glob(".tmp-*")):  # of a damaged dataset, and of a kill while writing
        left.unlink(missing_ok=True)
    write_shards(folder, corpus, progress, documents)
    write_meta(folder, source, gpt2_identity(), progress.splits)
    (folder / PROGRESS).unlink(missing_ok=True)
