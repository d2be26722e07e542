"""Prepare web text as GPT-2 tokens: stream documents with Hugging Face `datasets` into shard files.

The first shard is the val split; the others are the train split. An end-of-text token precedes every document, so a
model learns that the text before it does not matter. A shard ends with the document that fills it. Memory is needed for
one shard, one batch of documents, and one row group of the parquet file. A run that is resumed after a kill continues
after its last complete shard. Its files are identical to those of an uninterrupted run.
"""

import atexit
import contextlib
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoGPT.errors import ConfigError
from nanoGPT.prepare.directory import (
    META,
    PROGRESS,
    SHARD_TOKENS,
    VAL_TOKENS,
    Progress,
    is_complete,
    is_prepared,
    load_progress,
    prepare_once,
    read_meta,
    write_meta,
)
from nanoGPT.prepare.download import install_gpt2_vocabulary
from nanoGPT.prepare.meta import make_gpt2_identity
from nanoGPT.prepare.tokenizer import Gpt2Tokenizer

# ---- a corpus: a dataset on the Hugging Face hub

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
    advice = "check the network, or prepare files of your own: `make data INPUT=FILE`"
    return Corpus(path, advice, {"hub": path, "name": name}, {"path": path, "name": name})


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
    atexit.unregister(time.sleep)  # a process may open several
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

THREADS = min(8, os.cpu_count() or 1)
DTYPE = np.dtype("<u2")


def is_corpus_prepared(folder: Path, source: dict[str, Any]) -> bool:
    """Return whether a directory has the complete dataset of a source.

    A command without flags, such as that of `make`, accepts a dataset that was prepared with other flags.

    Raises:
        ConfigError: it has a dataset of another source or of other flags.
    """
    has_no_flags = "hub" in source and (source["shard_tokens"], source["max_tokens"]) == (SHARD_TOKENS, None)
    meta = read_meta(folder) if has_no_flags else None
    return bool(meta and is_complete(folder, meta)) or is_prepared(folder, source, f"run `rm {folder / META}`")


def encode_documents(batches: Iterator[list[str]]) -> Iterator[bytes]:
    """Yield the tokens of each document, as the bytes of uint16, with the end-of-text token before them.

    `encode_ordinary_batch` encodes the text "<|endoftext|>" inside a document as ordinary characters.
    """
    tokenizer = Gpt2Tokenizer()
    for texts in batches:
        for ids in tokenizer.bpe.encode_ordinary_batch(texts, num_threads=THREADS):
            yield np.array([tokenizer.end_of_text, *ids], DTYPE).tobytes()


def write_token_shards(folder: Path, corpus: Corpus, progress: Progress) -> None:
    """Stream, encode and write documents, from `progress` to the end of the corpus or to max_tokens.

    Raises:
        ConfigError: the corpus cannot be read, or it ended before the train split had a token.
    """
    documents, document, content = open_documents(corpus), progress.document, bytearray()
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
        raise ConfigError(f"{corpus.label} has too few tokens for a val and a train split: use more text")


def prepare_stream(
    folder: Path, corpus: Corpus, shard_tokens: int = SHARD_TOKENS, max_tokens: int | None = None
) -> None:
    """Prepare a dataset from a corpus of documents, unless it is already prepared.

    Args:
        folder: directory of the dataset.
        corpus: the source of the documents.
        shard_tokens: tokens per shard; each takes two bytes, in memory and on disk.
        max_tokens: number of tokens to prepare, with those of val; None: the full corpus.

    Raises:
        ConfigError: the dataset cannot be prepared; the message says what to do.
    """
    if max_tokens is not None and max_tokens <= min(shard_tokens, VAL_TOKENS):
        raise ConfigError(f"--max_tokens={max_tokens} leaves nothing to train on: the val split alone has {VAL_TOKENS}")
    install_gpt2_vocabulary()
    source = {**corpus.identity, "shard_tokens": shard_tokens, "max_tokens": max_tokens}

    def write() -> None:
        progress = load_progress(folder, source)
        print(f"{folder.name}: reading documents from number {progress.document:,}")
        write_token_shards(folder, corpus, progress)
        write_meta(folder, source, make_gpt2_identity(), progress.splits)

    prepare_once(folder, lambda: is_corpus_prepared(folder, source), write)
    (folder / PROGRESS).unlink(missing_ok=True)
    print(f"{folder.name}: prepared")
