"""The directory of a prepared dataset. Only one process writes it at a time, and no other dataset is overwritten.

nanoGPT/data/my_char/
    train.bin, val.bin    token ids, little-endian
    meta.json             written last: source, tokenizer, dtype, and the number of tokens and sha256 of every file
    progress.json         while the dataset is being prepared: its source, and the progress
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np

from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, read_document, size_of, write_atomically
from nanoGPT.prepare.meta import GPT2_VOCAB, Count, DatasetMeta, TokenFile, TokenizerIdentity, read_dataset_meta

META, PROGRESS = "meta.json", "progress.json"
SHARD_TOKENS = 100_000_000  # per file
VAL_TOKENS = 4_000_000  # about as many as in nanoGPT's val split of OpenWebText


@contextlib.contextmanager
def dataset_lock(folder: Path) -> Iterator[None]:
    """Lock a dataset for writing. If another process has locked it, print a message and wait for that process."""
    locks = folder.parent / ".downloads"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"{folder.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder.name}: another process is preparing it; waiting until it finishes", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # the file system does not support locks
        yield


def read_meta(folder: Path) -> DatasetMeta | None:
    """Return the content of meta.json; None if there is no such file.

    Raises:
        ConfigError: the file cannot be read, or does not describe a dataset. It is not overwritten, because the dataset
            may have taken hours to prepare.
    """
    try:
        return read_dataset_meta(folder)
    except ABSENT:
        return None


def is_prepared(folder: Path, source: dict[str, Any], advice: str) -> bool:
    """Return whether a directory has the complete dataset of a source.

    Args:
        folder: the directory.
        source: as in meta.json.
        advice: what to do about the dataset of another source, for the message.

    Raises:
        ConfigError: the directory has a dataset of another source, which may have taken hours to prepare.
    """
    meta = read_meta(folder)
    if meta and meta.get("source") != source:
        raise ConfigError(
            f"{folder} has a dataset of another text, tokenizer or flags: {advice} to replace that dataset"
        )
    return meta is not None and is_complete(folder, meta)


def prepare_once(folder: Path, is_done: Callable[[], bool], write: Callable[[], object]) -> bool:
    """Write a dataset, unless it is done. Return whether it was written.

    Args:
        folder: of the dataset.
        is_done: returns whether the dataset is complete.
        write: writes it. Files of a damaged dataset or of a killed run are removed before.
    """
    if is_done():
        return False
    with dataset_lock(folder):
        if is_done():  # another process has prepared it meanwhile
            return False
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (folder / META, *folder.glob(".tmp-*")):
            stale.unlink(missing_ok=True)
        write()
    return True


def is_complete(folder: Path, meta: DatasetMeta) -> bool:
    """Return whether every file that meta.json lists exists with its full size.

    Raises:
        ConfigError: the size of a file cannot be read.
    """
    files, itemsize = [*meta["splits"]["train"], *meta["splits"]["val"]], np.dtype(meta["dtype"]).itemsize
    return all(size_of(folder / file["name"]) == file["tokens"] * itemsize for file in files)


def choose_token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype, uint16 or uint32, for the tokens of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_meta(
    folder: Path, source: dict[str, Any], tokenizer: TokenizerIdentity, splits: dict[str, list[dict[str, Any]]]
) -> None:
    """Write meta.json, after all other files: a directory without it counts as not prepared."""
    meta = {
        "source": source,
        "tokenizer": tokenizer,
        "dtype": choose_token_dtype(tokenizer["vocab_size"]),
        "splits": splits,
    }
    write_atomically(folder / META, (json.dumps(meta, indent=1) + "\n").encode())
    for name, files in splits.items():
        print(f"{folder.name}: {sum(file['tokens'] for file in files):,} {name} tokens")


def write_tokens(folder: Path, name: str, ids: np.ndarray) -> dict[str, Any]:
    """Write one `.bin` file, and return its entry in meta.json."""
    content = ids.astype(ids.dtype.newbyteorder("<"), copy=False).data.cast("B")
    write_atomically(folder / name, content)
    return {"name": name, "tokens": len(ids), "sha256": hashlib.sha256(content).hexdigest()}


# ---- the progress of a dataset with many files


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
class Progress:
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


def load_progress(folder: Path, source: dict[str, Any]) -> Progress:
    """Return the progress of an earlier run in `folder`; if there was none, the progress at the beginning.

    Raises:
        ConfigError: the earlier run had a different source or different flags, or a shard is incomplete.
    """
    path = folder / PROGRESS
    try:
        fields = msgspec.convert(json.loads(read_document(path)), ProgressFields)
        progress = Progress(**fields)  # type: ignore[arg-type]
        if progress.source != source:
            raise ValueError("it belongs to a different source or different flags")
        for file in progress.files:
            if size_of(folder / file["name"]) != file["tokens"] * progress.dtype.itemsize:
                raise ValueError(f"{file['name']} does not have {file['tokens']:,} tokens")
        return progress
    except ABSENT:
        return Progress(source)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} cannot be continued ({str(error)[:200]}): run `rm {path}` to start again") from None
