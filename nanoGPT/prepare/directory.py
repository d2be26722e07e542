"""The directory of a prepared dataset: one process writes it at a time, and what another source gave is never lost.

nanoGPT/data/my_char/
    train.bin, val.bin    token ids, little-endian
    meta.json             written last: source, tokenizer, dtype, every file with its tokens and sha256
    progress.json         while the dataset is being prepared: its source, and how far it is
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanoGPT.dataset import DatasetMeta, read_dataset_meta
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, size_of, write_atomically
from nanoGPT.schema import Malformed

META, PROGRESS = "meta.json", "progress.json"


@contextlib.contextmanager
def dataset_lock(folder: Path) -> Iterator[None]:
    """Hold a dataset for writing; while another process holds it, say so and wait. The lock ends with its process."""
    locks = folder.parent / ".downloads"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"{folder.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder.name}: another process is preparing it; waiting for that one to end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


def read_meta(folder: Path) -> DatasetMeta | None:
    """Return what meta.json holds; None if there is no such file.

    Raises:
        ConfigError: it cannot be read, or describes no dataset. What it stands for may have taken hours.
    """
    try:
        return read_dataset_meta(folder)
    except ABSENT:
        return None
    except Malformed as error:
        raise ConfigError(
            f"{folder / META} is not that of a dataset ({str(error)[:200]}): remove that file to prepare the dataset "
            "again"
        ) from None


def is_complete(folder: Path, meta: DatasetMeta) -> bool:
    """Return whether every file that meta.json lists is there in full.

    Raises:
        ConfigError: the file system does not say whether it is.
    """
    files, itemsize = [*meta["splits"]["train"], *meta["splits"]["val"]], np.dtype(meta["dtype"]).itemsize
    return all(size_of(folder / file["name"]) == file["tokens"] * itemsize for file in files)


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_meta(
    folder: Path, source: dict[str, Any], tokenizer: dict[str, Any], splits: dict[str, list[dict[str, Any]]]
) -> None:
    """Write the sidecar, last of all: a directory without it is not prepared."""
    meta = {
        "source": source,
        "tokenizer": tokenizer,
        "dtype": token_dtype(tokenizer["vocab_size"]),
        "splits": splits,
    }
    write_atomically(folder / META, (json.dumps(meta, indent=1) + "\n").encode())
    for name, files in splits.items():
        print(f"{folder.name}: {sum(file['tokens'] for file in files):,} {name} tokens")


def write_tokens(folder: Path, name: str, ids: np.ndarray) -> dict[str, Any]:
    """Write one `.bin` file and return its entry in the sidecar."""
    content = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
    write_atomically(folder / name, content)
    return {"name": name, "tokens": len(ids), "sha256": hashlib.sha256(content).hexdigest()}
