"""Read the documents of a corpus: a dataset on the Hugging Face hub, or local parquet files.

corpus = parquet_corpus("folder/*.parquet")
for texts in read_batches(corpus, open_documents(corpus), first=0):
    ...
"""

import atexit
import glob
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoGPT.errors import ConfigError
from nanoGPT.files import size_of

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
