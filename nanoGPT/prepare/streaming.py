"""Prepare web text as GPT-2 tokens: stream documents with Hugging Face `datasets` into shard files of a fixed size.

The first shard is the val split; the others are the train split. An end-of-text token precedes every document, so a
model learns that the text before it does not matter. A document may begin in one shard and end in the next. Memory is
needed for one shard, one batch of documents, and one row group of the parquet file. A run
that is resumed after a kill continues after its last complete shard. Its files are identical to those of an
uninterrupted run.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from tqdm import tqdm

from nanoGPT.dataset import TokenFile
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, read_json, size_of, write_atomically
from nanoGPT.prepare.corpus import Corpus, open_documents, read_batches
from nanoGPT.prepare.directory import (
    META,
    PROGRESS,
    dataset_lock,
    is_complete,
    read_meta,
    write_meta,
    write_tokens,
)
from nanoGPT.prepare.download import install_gpt2_vocabulary
from nanoGPT.schema import Count, SchemaError
from nanoGPT.tokenizer import Gpt2Tokenizer, make_gpt2_identity

SHARD_TOKENS = 100_000_000
VAL_TOKENS = 4_000_000  # about as many as in nanoGPT's val split of OpenWebText
THREADS = min(8, os.cpu_count() or 1)


def encode_documents(batches: Iterator[list[str]]) -> Iterator[np.ndarray]:
    """Yield the tokens of each document as uint16, with the end-of-text token before them.

    `encode_ordinary_batch` encodes the text "<|endoftext|>" inside a document as ordinary characters.
    """
    tokenizer = Gpt2Tokenizer()
    for texts in batches:
        for ids in tokenizer.bpe.encode_ordinary_batch(texts, num_threads=THREADS):
            yield np.array([tokenizer.end_of_text, *ids], dtype=np.uint16)


@dataclass
class StreamProgress:
    """The content of progress.json: the complete shards, and the position in the stream where the next one begins."""

    source: dict[str, Any]  # the corpus's identity, shard_tokens and max_tokens, as in meta.json
    splits: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    document: int = 0  # index of the document in which the next shard begins
    offset: int = 0  # number of tokens of this document in earlier shards, with its end-of-text token

    @property
    def files(self) -> list[dict[str, Any]]:
        return [*self.splits["val"], *self.splits["train"]]

    @property
    def tokens(self) -> int:
        return sum(file["tokens"] for file in self.files)

    def next_size(self) -> int:
        """Return the number of tokens in the next shard; 0 if max_tokens is reached."""
        size, limit = self.source["shard_tokens"], self.source["max_tokens"]
        if not self.splits["val"]:
            size = min(size, VAL_TOKENS)
        return size if limit is None else min(size, limit - self.tokens)

    def save(self, folder: Path) -> None:
        write_atomically(folder / PROGRESS, json.dumps(dataclasses.asdict(self)).encode())


def load_progress(folder: Path, source: dict[str, Any]) -> StreamProgress:
    """Return the progress of an earlier run in `folder`; if there was none, the progress at the beginning.

    Raises:
        ConfigError: the earlier run had a different source or different flags, or a shard is incomplete.
    """
    path = folder / PROGRESS
    restart = f"run `rm {path}` to start again"
    try:
        progress = StreamProgress(**read_json(path, ProgressFields))  # type: ignore[arg-type]
    except ABSENT:
        return StreamProgress(source)
    except SchemaError as error:
        raise ConfigError(f"{path} is damaged ({str(error)[:200]}): {restart}") from None
    if progress.source != source:
        raise ConfigError(
            f"{path} belongs to a different source or different flags: use those again to continue, or {restart}"
        )
    for file in progress.files:
        shard, size = folder / file["name"], file["tokens"] * np.dtype(np.uint16).itemsize
        if size_of(shard) != size:
            raise ConfigError(f"{shard} does not have the {size:,} bytes that were written: {restart}")
    return progress


class TokenShardWriter:
    """Packs tokens into shards. A full shard is written to the disk, and then the progress."""

    def __init__(self, folder: Path, progress: StreamProgress) -> None:
        self.folder, self.progress = folder, progress
        self.document, self.offset = progress.document, progress.offset  # position of the next token in the stream
        self.buffer = np.empty(progress.source["shard_tokens"], dtype=np.uint16)
        self.size, self.space = 0, progress.next_size()  # tokens in the current shard, and tokens that still fit

    def add(self, ids: np.ndarray) -> int:
        """Append the next document, without its tokens in earlier shards, and return the number of appended tokens."""
        start = self.offset
        while self.space and self.offset < len(ids):
            part = ids[self.offset : self.offset + self.space]
            self.buffer[self.size : self.size + len(part)] = part
            self.size, self.space, self.offset = self.size + len(part), self.space - len(part), self.offset + len(part)
            if not self.space:
                self.write_shard()
        added, self.document, self.offset = self.offset - start, self.document + 1, 0
        return added

    def write_shard(self) -> None:
        """Write the current shard and the progress. The first shard is the val split."""
        split = "train" if self.progress.splits["val"] else "val"
        name = f"{split}_{len(self.progress.files):06d}.bin"
        self.progress.splits[split].append(write_tokens(self.folder, name, self.buffer[: self.size]))
        self.progress.document, self.progress.offset = self.document, self.offset
        self.progress.save(self.folder)
        self.size, self.space = 0, self.progress.next_size()

    def finish(self, label: str) -> None:
        """Write the last shard, which may be shorter.

        Raises:
            ConfigError: the stream ended before the train split had a token.
        """
        if self.size and self.progress.splits["val"]:
            self.write_shard()
        if self.progress.splits["train"]:
            return
        (self.folder / PROGRESS).unlink(
            missing_ok=True
        )  # a second attempt with other flags must not fail because of it
        count = self.progress.tokens + self.size
        raise ConfigError(
            f"{label} has only {count:,} tokens, too few for a val and a train split: "
            f"use more text, or --shard_tokens={max(2, count // 10)}"
        )


def check_sizes(shard_tokens: int, max_tokens: int | None) -> None:
    """Check that both splits can have tokens.

    Raises:
        ConfigError: a number is too small.
    """
    if shard_tokens < 2:
        raise ConfigError(f"--shard_tokens={shard_tokens} is out of range: use 2 or more")
    if max_tokens is not None and max_tokens <= (val := min(shard_tokens, VAL_TOKENS)):
        raise ConfigError(
            f"--max_tokens={max_tokens} leaves nothing to train on: use more than the {val:,} tokens of val"
        )


def is_prepared(folder: Path, source: dict[str, Any]) -> bool:
    """Return whether `folder` contains the complete dataset.

    A command without flags, such as that of `make`, accepts a dataset that was prepared with other flags.

    Raises:
        ConfigError: `folder` contains a dataset of a different source, which may have taken hours to prepare, or its
            meta.json cannot be read.
    """
    meta = read_meta(folder)
    if meta is None:
        return False
    has_no_flags = "hub" in source and (source["shard_tokens"], source["max_tokens"]) == (SHARD_TOKENS, None)
    is_full = is_complete(folder, meta)
    if meta.get("source") != source and not (has_no_flags and is_full):
        path = folder / META
        raise ConfigError(
            f"{path} belongs to a different source or different flags: run `rm {path}` to replace that dataset"
        )
    return is_full


def write_token_shards(folder: Path, corpus: Corpus, progress: StreamProgress, documents: Any) -> None:
    """Stream, encode and write documents, from the position in `progress` to the end of the corpus or to max_tokens."""
    writer = TokenShardWriter(folder, progress)
    bar = tqdm(
        total=progress.source["max_tokens"], initial=progress.tokens, unit=" tokens", unit_scale=True, disable=None
    )
    with bar, contextlib.closing(read_batches(corpus, documents, progress.document)) as batches:
        for ids in encode_documents(batches) if writer.space else ():
            bar.update(writer.add(ids))
            if not writer.space:
                break
    writer.finish(corpus.label)


def prepare_stream(folder: Path, corpus: Corpus, shard_tokens: int, max_tokens: int | None = None) -> None:
    """Prepare a dataset from a corpus of documents, unless it is already prepared.

    Args:
        folder: directory of the dataset.
        corpus: the source of the documents.
        shard_tokens: tokens per shard; each takes two bytes, in memory and on disk.
        max_tokens: number of tokens to prepare, with those of val; None: the full corpus.

    Raises:
        ConfigError: the dataset cannot be prepared; the message says what to do.
    """
    check_sizes(shard_tokens, max_tokens)
    install_gpt2_vocabulary()
    source = {**corpus.identity, "shard_tokens": shard_tokens, "max_tokens": max_tokens}
    if not is_prepared(folder, source):
        with dataset_lock(folder):
            if not is_prepared(folder, source):  # another process may have prepared it meanwhile
                prepare_shards(folder, corpus, source)
                return
    (folder / PROGRESS).unlink(missing_ok=True)  # it exists if a run was killed after it wrote meta.json
    print(f"{folder.name}: already prepared")


def prepare_shards(folder: Path, corpus: Corpus, source: dict[str, Any]) -> None:
    """Write the missing shards, and then meta.json."""
    progress = load_progress(folder, source)
    documents = open_documents(corpus)
    action = f"continuing in document {progress.document:,}" if progress.files else "streaming"
    print(f"{folder.name}: GPT-2's vocabulary is installed; {action}")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (folder / META, *folder.glob(".tmp-*")):  # from a damaged dataset, or from a killed run
        stale.unlink(missing_ok=True)
    write_token_shards(folder, corpus, progress, documents)
    write_meta(folder, source, make_gpt2_identity(), progress.splits)
    (folder / PROGRESS).unlink(missing_ok=True)


class PartialSplits(TypedDict):
    """The complete files of each split."""

    train: list[TokenFile]
    val: list[TokenFile]


class ProgressFields(TypedDict):
    """The schema of progress.json: the complete files, and the position in the stream."""

    source: dict[str, Any]
    splits: PartialSplits
    document: Count
    offset: Count
