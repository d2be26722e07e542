"""The directory of a prepared dataset. Only one process writes it at a time, and no other dataset is overwritten.

nanoGPT/data/my_char/
    train.bin, val.bin    token ids, little-endian
    meta.json             written last: source, tokenizer, dtype, and the number of tokens and sha256 of every file
    progress.json         while the dataset is being prepared: its source, and the progress
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, size_of, write_atomically
from nanoGPT.job.schema import SchemaError
from nanoGPT.prepare.meta import DatasetMeta, TokenizerIdentity, read_dataset_meta

META, PROGRESS = "meta.json", "progress.json"


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
    except SchemaError as error:
        raise ConfigError(
            f"{folder / META} does not describe a dataset ({str(error)[:200]}): remove this file to prepare the "
            "dataset again"
        ) from None


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
