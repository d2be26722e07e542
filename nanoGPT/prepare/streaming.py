"""Prepare web text as GPT-2 tokens: stream documents with Hugging Face `datasets` into shard files.

The first shard is the val split; the others are the train split. An end-of-text token precedes every document, so a
model learns that the text before it does not matter. A shard ends with the document that fills it. Memory is needed for
one shard, one batch of documents, and one row group of the parquet file. A run that is resumed after a kill continues
after its last complete shard. Its files are identical to those of an uninterrupted run.
"""

import atexit
import contextlib
import dataclasses
import glob
import json
import math
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from tqdm import tqdm

from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, size_of, write_atomically
from nanoGPT.job.schema import Count, SchemaError, read_json
from nanoGPT.prepare.directory import (
    META,
    PROGRESS,
    choose_token_dtype,
    dataset_lock,
    is_complete,
    read_meta,
    write_meta,
    write_tokens,
)
from nanoGPT.prepare.download import install_gpt2_vocabulary
from nanoGPT.prepare.meta import GPT2_VOCAB, TokenFile, make_gpt2_identity
from nanoGPT.prepare.tokenizer import Gpt2Tokenizer

# ---- a corpus: a dataset on the Hugging Face hub, or local parquet files

BATCH = 512  # documents per batch
COLUMN = "text"


@dataclass(frozen=True)
class Corpus:
    """A source of documents."""

    label: str  # its name in error messages
    advice: str  # what to do if it cannot be read
    identity: dict[str, Any]  # its description in meta.json, as JSON types
    arguments: dict[str, Any]  # the arguments of `load_dataset`, without the split


def hub_corpus(path: str, name: str | None = None) -> Corpus:
    """Return the train split of a dataset on the Hugging Face hub.

    Args:
        path: name of the dataset, such as "HuggingFaceFW/fineweb-edu".
        name: name of its subset.
    """
    advice = "check the network, or use local parquet files with --input='folder/*.parquet'"
    return Corpus(path, advice, {"hub": path, "name": name}, {"path": path, "name": name})


def parquet_corpus(pattern: str) -> Corpus:
    """Return the local parquet files that match a pattern, in alphabetical order.

    Their names and sizes identify the corpus.

    Raises:
        ConfigError: no file matches, or one cannot be read.
    """
    paths = [Path(path).absolute() for path in sorted(glob.glob(pattern))]
    if not paths:
        raise ConfigError(f"--input={pattern} matches no file: give a pattern such as 'folder/*.parquet'")
    identity = {"files": [{"name": path.name, "bytes": size_of(path)} for path in paths]}
    escaped_paths = [glob.escape(str(path)) for path in paths]  # load_dataset reads paths as patterns
    arguments = {"path": "parquet", "data_files": escaped_paths}
    return Corpus(f"--input={pattern}", "check that every file is a complete parquet file", identity, arguments)


def open_documents(corpus: Corpus) -> Any:
    """Return the corpus as an IterableDataset with the single column `text`.

    Raises:
        ConfigError: `datasets` is not installed, the corpus cannot be read, or it has no column `text` of strings.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(
            "streaming documents needs the extra `web`: run `.venv/bin/pip install -e '.[web]'`"
        ) from None
    # Arrow's threads may hang or abort Python when it exits (apache/arrow#45214): wait for them.
    atexit.register(time.sleep, 1)
    try:
        documents: Any = load_dataset(
            **corpus.arguments, columns=[COLUMN], batch_size=BATCH, split="train", streaming=True
        )
        # Read one row group at a time: Arrow reads ahead without a limit, so a file of 2 GB would be fully in memory.
        documents = documents.reshard()
    except Exception as error:  # any error of the network, the hub's client or the parquet reader
        raise ConfigError(
            f"{corpus.label} cannot be opened ({type(error).__name__}: {str(error)[:200]}): {corpus.advice}"
        ) from None
    if "string" not in str(getattr((documents.features or {}).get(COLUMN), "dtype", "")):
        raise ConfigError(f"{corpus.label} has no column `{COLUMN}` of strings: use parquet files that have one")
    return documents


def read_batches(corpus: Corpus, documents: Any, first: int) -> Generator[list[str]]:
    """Yield batches of texts, starting at document `first`. A missing text counts as an empty document.

    Raises:
        ConfigError: the corpus can no longer be read.
    """
    try:
        for batch in documents.skip(first).iter(BATCH):
            yield [text or "" for text in batch[COLUMN]]
    except Exception as error:
        raise ConfigError(
            f"{corpus.label} cannot be read to its end ({type(error).__name__}: {str(error)[:200]}): {corpus.advice}, "
            "then run the same command again; it keeps the complete shards"
        ) from None


# ---- its shards

SHARD_TOKENS = 100_000_000
VAL_TOKENS = 4_000_000  # about as many as in nanoGPT's val split of OpenWebText
THREADS = min(8, os.cpu_count() or 1)
DTYPE = np.dtype("<u2")


class PartialSplits(TypedDict):
    """The complete files of each split."""

    train: list[TokenFile]
    val: list[TokenFile]


class ProgressFields(TypedDict):
    """The schema of progress.json."""

    source: dict[str, Any]
    splits: PartialSplits
    document: Count
    written_of_document: NotRequired[Count]


@dataclass
class StreamProgress:
    """The content of progress.json: the complete shards, and the document with which the next one begins.

    Attributes:
        source: the corpus's identity, shard_tokens and max_tokens, as in meta.json.
        written_of_document: the tokens of the document that are in the shards before it.
    """

    source: dict[str, Any]
    splits: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"train": [], "val": []})
    document: int = 0
    written_of_document: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the token ids in the files."""
        return np.dtype(choose_token_dtype(self.source.get("vocab_size", GPT2_VOCAB))).newbyteorder("<")

    @property
    def files(self) -> list[dict[str, Any]]:
        return [*self.splits["val"], *self.splits["train"]]

    @property
    def tokens_left(self) -> float:
        """The number of tokens until max_tokens."""
        return (self.source["max_tokens"] or math.inf) - sum(file["tokens"] for file in self.files)

    @property
    def next_size(self) -> float:
        """The number of tokens after which the next shard ends."""
        val_tokens = self.source.get("val_tokens", min(self.source["shard_tokens"], VAL_TOKENS))
        return min(self.source["shard_tokens"] if self.splits["val"] else val_tokens, self.tokens_left)

    def save(self, folder: Path) -> None:
        write_atomically(folder / PROGRESS, json.dumps(dataclasses.asdict(self)).encode())

    def write_shard(self, folder: Path, content: bytearray, document: int, written: int = 0) -> None:
        """Write the next shard, and then the progress.

        Args:
            folder: directory of the dataset.
            content: the tokens, as bytes.
            document: the document with which the shard after this one begins.
            written: the tokens of that document that are in this shard.
        """
        ids = np.frombuffer(content, self.dtype)[: int(min(self.tokens_left, len(content)))]
        split = "train" if self.splits["val"] else "val"
        self.splits[split].append(write_tokens(folder, f"{split}_{len(self.files):06d}.bin", ids))
        self.document, self.written_of_document = document, written
        self.save(folder)


def load_progress(folder: Path, source: dict[str, Any]) -> StreamProgress:
    """Return the progress of an earlier run in `folder`; if there was none, the progress at the beginning.

    Raises:
        ConfigError: the earlier run had a different source or different flags, or a shard is incomplete.
    """
    path = folder / PROGRESS
    try:
        progress = StreamProgress(**read_json(path, ProgressFields))  # type: ignore[arg-type]
        if progress.source != source:
            raise SchemaError("it belongs to a different source or different flags")
        for file in progress.files:
            if size_of(folder / file["name"]) != file["tokens"] * progress.dtype.itemsize:
                raise SchemaError(f"{file['name']} does not have {file['tokens']:,} tokens")
        return progress
    except ABSENT:
        return StreamProgress(source)
    except (SchemaError, TypeError) as error:
        raise ConfigError(f"{path} cannot be continued ({str(error)[:200]}): run `rm {path}` to start again") from None


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


def encode_documents(batches: Iterator[list[str]]) -> Iterator[bytes]:
    """Yield the tokens of each document, as the bytes of uint16, with the end-of-text token before them.

    `encode_ordinary_batch` encodes the text "<|endoftext|>" inside a document as ordinary characters.
    """
    tokenizer = Gpt2Tokenizer()
    for texts in batches:
        for ids in tokenizer.bpe.encode_ordinary_batch(texts, num_threads=THREADS):
            yield np.array([tokenizer.end_of_text, *ids], DTYPE).tobytes()


def write_token_shards(folder: Path, corpus: Corpus, progress: StreamProgress) -> None:
    """Stream, encode and write documents, from `progress` to the end of the corpus or to max_tokens.

    Raises:
        ConfigError: the corpus cannot be read, or it ended before the train split had a token.
    """
    documents, document, content = open_documents(corpus), progress.document, bytearray()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (folder / META, *folder.glob(".tmp-*")):  # from a damaged dataset, or from a killed run
        stale.unlink(missing_ok=True)
    with (
        contextlib.closing(read_batches(corpus, documents, document)) as batches,
        tqdm(unit=" tokens", unit_scale=True, disable=None) as bar,
    ):
        for ids in encode_documents(batches) if progress.tokens_left else ():
            content += ids
            document += 1
            bar.update(len(ids) // DTYPE.itemsize)
            if len(content) >= progress.next_size * DTYPE.itemsize:
                progress.write_shard(folder, content, document)
                content = bytearray()
                if not progress.tokens_left:
                    break
    if content and progress.splits["val"]:
        progress.write_shard(folder, content, document)
    if not progress.splits["train"]:
        (folder / PROGRESS).unlink(missing_ok=True)  # a second attempt with other flags must not fail because of it
        raise ConfigError(
            f"{corpus.label} has too few tokens for a val and a train split: use more text, or a smaller --shard_tokens"
        )


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
    if shard_tokens < 2 or (max_tokens is not None and max_tokens <= min(shard_tokens, VAL_TOKENS)):
        raise ConfigError(
            f"--shard_tokens={shard_tokens} and --max_tokens={max_tokens} leave nothing to train on: use shards of 2 "
            f"tokens or more, and more tokens than the first shard, which is val"
        )
    install_gpt2_vocabulary()
    source = {**corpus.identity, "shard_tokens": shard_tokens, "max_tokens": max_tokens}
    if not is_prepared(folder, source):
        with dataset_lock(folder):
            if not is_prepared(folder, source):  # another process may have prepared it meanwhile
                progress = load_progress(folder, source)
                print(f"{folder.name}: reading documents from number {progress.document:,}")
                write_token_shards(folder, corpus, progress)
                write_meta(folder, source, make_gpt2_identity(), progress.splits)
    (folder / PROGRESS).unlink(missing_ok=True)
    print(f"{folder.name}: prepared")
