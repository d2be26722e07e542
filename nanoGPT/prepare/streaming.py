"""Web text as GPT-2 tokens: documents streamed with Hugging Face `datasets` into shard files of a fixed size.

The first shard is the val split, the others are train. Every document follows an end-of-text token, so a model learns
that what came before does not matter; a document may begin in one shard and end in the next. Memory holds one shard,
twice while it is written, one batch of documents and the row group of the parquet file that they come from. A run
that was killed goes on after its last whole shard, and ends with the files that it would have written at once.
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
from nanoGPT.prepare.download import gpt2_identity, install_gpt2_vocabulary
from nanoGPT.schema import Count, Malformed
from nanoGPT.tokenizer import Gpt2Tokenizer

SHARD_TOKENS = 100_000_000
VAL_TOKENS = 4_000_000  # about as many as nanoGPT's own val split of OpenWebText has
THREADS = min(8, os.cpu_count() or 1)


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
    anew = f"`rm {path}` to begin anew"
    try:
        progress = Progress(**read_json(path, StreamProgress))  # type: ignore[arg-type]
    except ABSENT:
        return Progress(source)
    except Malformed as error:
        raise ConfigError(f"{path} is damaged ({str(error)[:200]}): {anew}") from None
    if progress.source != source:
        raise ConfigError(f"{path} is of another source or of other flags: use those again to go on, or {anew}")
    for file in progress.files:
        shard, size = folder / file["name"], file["tokens"] * np.dtype(np.uint16).itemsize
        if size_of(shard) != size:
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
        ConfigError: what is there is of another source, or cannot be read, and may have taken hours.
    """
    meta = read_meta(folder)
    if meta is None:
        return False
    no_flags = "hub" in source and (source["shard_tokens"], source["max_tokens"]) == (SHARD_TOKENS, None)
    complete = is_complete(folder, meta)
    if meta.get("source") != source and not (no_flags and complete):
        path = folder / META
        raise ConfigError(f"{path} is of another source or of other flags: `rm {path}` to replace that dataset")
    return complete


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
    if not is_there(folder, source):
        with dataset_lock(folder):
            if not is_there(folder, source):  # another process may have done it meanwhile
                prepare_shards(folder, corpus, source)
                return
    (folder / PROGRESS).unlink(missing_ok=True)  # there if a run was killed after its last but one line
    print(f"{folder.name}: already prepared")


def prepare_shards(folder: Path, corpus: Corpus, source: dict[str, Any]) -> None:
    """Write the shards that are not there yet, and then the sidecar."""
    progress = load_progress(folder, source)
    documents = open_documents(corpus)
    begin = f"going on in document {progress.document:,}" if progress.files else "streaming"
    print(f"{folder.name}: GPT-2's vocabulary is installed; {begin}")
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / META, *folder.glob(".tmp-*")):  # of a damaged dataset, and of a kill while writing
        left.unlink(missing_ok=True)
    write_shards(folder, corpus, progress, documents)
    write_meta(folder, source, gpt2_identity(), progress.splits)
    (folder / PROGRESS).unlink(missing_ok=True)


class PartialSplits(TypedDict):
    """The files of each split so far."""

    train: list[TokenFile]
    val: list[TokenFile]


class StreamProgress(TypedDict):
    """How far a streamed dataset is prepared (progress.json): its complete files, and the place in the stream."""

    source: dict[str, Any]
    splits: PartialSplits
    document: Count
    offset: Count
