"""Documents to make a dataset of: a dataset on the Hugging Face hub, or local parquet files.

corpus = parquet_corpus("folder/*.parquet")
for texts in read_batches(corpus, open_documents(corpus), first=0):
    ...
"""

import atexit
import functools
import glob
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoGPT.errors import ConfigError
from nanoGPT.files import size_of

BATCH = 512  # documents that are read together
COLUMN = "text"


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
        ConfigError: no file matches, or one cannot be read.
    """
    sizes = {path: size_of(Path(path)) for path in sorted(os.path.abspath(path) for path in glob.glob(pattern))}
    paths = [path for path, size in sizes.items() if size is not None]
    if not paths:
        raise ConfigError(f"--input={pattern} matches no file: give a pattern such as 'folder/*.parquet'")
    identity = {"files": [{"name": os.path.basename(path), "bytes": sizes[path]} for path in paths]}
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
