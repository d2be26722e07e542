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

from nanoGPT.exits import ConfigError
from nanoGPT.files import ABSENT, read_document, size_of, write_atomically

META, PROGRESS = "meta.json", "progress.json"
ITEM_BYTES = {"uint16": 2, "uint32": 4}


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


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return what meta.json holds; None if there is no such file.

    Raises:
        ConfigError: it cannot be read, or describes no dataset. What it stands for may have taken hours.
    """
    path = folder / META
    try:
        meta = json.loads(read_document(path))
        known = isinstance(meta["source"], dict) and isinstance(meta["tokenizer"]["name"], str)
        if not known or meta["dtype"] not in ITEM_BYTES or not meta["splits"].keys() == {"train", "val"}:
            raise ValueError("it describes no dataset")
        for file in files_of(meta):
            check_file_entry(file)
    except ABSENT:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]}): remove that file to prepare the "
            "dataset again"
        ) from None
    return dict(meta)


def check_file_entry(file: dict[str, Any]) -> None:
    """Check what a sidecar says of one `.bin` file.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or of another type.
    """
    if not isinstance(file["name"], str) or "/" in file["name"] or not file["name"].endswith(".bin"):
        raise ValueError(f"{file['name']!r} is no name of a .bin file")
    if type(file["tokens"]) is not int or file["tokens"] < 0:
        raise ValueError(f"{file['name']} has {file['tokens']!r} tokens")


def files_of(meta: dict[str, Any]) -> list[dict[str, Any]]:
    return [file for split in meta["splits"].values() for file in split]


def is_complete(folder: Path, meta: dict[str, Any]) -> bool:
    """Return whether every file that meta.json lists is there in full.

    Raises:
        ConfigError: the file system does not say whether it is.
    """
    itemsize = ITEM_BYTES[meta["dtype"]]
    return all(size_of(folder / file["name"]) == file["tokens"] * itemsize for file in files_of(meta))


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
