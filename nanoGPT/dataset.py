"""Tokens on disk, and the batches that are read from them.

A dataset is a directory with `meta.json` (dtype, token counts, sha256, tokenizer) beside headerless `.bin` files of
little-endian token ids, the same files that nanoGPT reads. A batch is a pure function of (seed, step, micro-batch):
no loader has a state, so there is none to save, and a resumed run reads what the uninterrupted one would have read.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
import torch

from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA, is_present, open_regular, read_json, retry_reads, sha256_of, size_of
from nanoGPT.schema import Count, FileName, Malformed, Sha256, Within
from nanoGPT.tokenizer import TokenizerIdentity, check_tokenizer

HASH_UP_TO = 64 << 20  # bytes: files up to this size are hashed whenever they are opened
TRAIN, EVALUATE = 0, 1  # the first word of a batch's key


class TokenFile(TypedDict):
    """One file of token ids."""

    name: FileName
    tokens: Count
    sha256: Sha256


class Splits(TypedDict):
    """The files of each split."""

    train: Annotated[list[TokenFile], Within(1, 10**6)]
    val: Annotated[list[TokenFile], Within(1, 10**6)]


class DatasetMeta(TypedDict):
    """A prepared dataset's sidecar; `source` says what it was made from."""

    source: NotRequired[dict[str, Any]]
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"]
    splits: Splits


class DataIdentity(TypedDict):
    """What a run was trained on: its tokenizer, and the sha256 of each file by name."""

    tokenizer: TokenizerIdentity
    files: dict[str, Sha256]


def read_dataset_meta(folder: Path) -> DatasetMeta:
    """Read a dataset's meta.json.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        Malformed: it is not that of a dataset.
        ConfigError: it could not be read.
    """
    meta = read_json(folder / "meta.json", DatasetMeta)
    check_tokenizer(meta["tokenizer"])
    if meta["dtype"] == "uint16" and meta["tokenizer"]["vocab_size"] > 1 << 16:
        raise Malformed("ids of this vocab_size do not fit into uint16")
    return meta


def find_dataset(name: str) -> Path:
    """The directory of a prepared dataset: under nanoGPT/data, or a path to one.

    Raises:
        ConfigError: it does not exist, or is not prepared; names the command that prepares it.
    """
    folder = DATA / name[:200]
    if not folder.is_dir() and is_present(Path(name) / "meta.json"):
        folder = Path(name)
    if is_present(folder / "meta.json"):
        return folder
    if (folder / "prepare.py").is_file():
        raise ConfigError(f"dataset {name} is not prepared: run `make data DATASET={name}`")
    known = sorted({p.parent.name for pattern in ("*/prepare.py", "*/meta.json") for p in DATA.glob(pattern)})
    close = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"there is no dataset {name}" + (f"; did you mean {close[0]}?" if close else f" (known: {', '.join(known)})")
    )


@dataclass(frozen=True)
class Split:
    """The files of one split, open, and how many windows of block_size + 1 tokens start in each."""

    paths: list[Path]
    files: list[FileIO]
    begins: np.ndarray  # number of the first window of each file, counted through all files
    ends: np.ndarray

    @property
    def starts(self) -> int:
        return int(self.ends[-1])


def open_split(folder: Path, name: str, files: Sequence[TokenFile], dtype: np.dtype[Any], block_size: int) -> Split:
    """Open a split's files, checked against `meta.json` by size and, up to `HASH_UP_TO` bytes, by sha256.

    Raises:
        ConfigError: a file is missing, damaged or cannot be read, or all of them are shorter than a sequence.
    """
    again = f"prepare it again with `rm {folder}/meta.json && make data DATASET={folder.name}`"
    for file in files:
        path, expected = folder / file["name"], file["tokens"] * dtype.itemsize
        size = size_of(path)
        if size != expected:
            found = "is missing" if size is None else f"has {size:,} bytes where {expected:,} were written"
            raise ConfigError(f"{path} {found}: {again}")
        if size <= HASH_UP_TO and sha256_of(path) != file["sha256"]:
            raise ConfigError(f"{path} is not the file that was prepared (its sha256 differs): {again}")
    starts = [max(0, file["tokens"] - block_size) for file in files]
    if not sum(starts):
        tokens, longest = sum(file["tokens"] for file in files), max(file["tokens"] for file in files) - 1
        raise ConfigError(
            f"--block_size={block_size} is longer than the {name} split of {folder.name} ({tokens:,} tokens): "
            f"use --block_size={longest} or less"
        )
    paths, ends = [folder / file["name"] for file in files], np.cumsum(starts)
    return Split(paths, [open_regular(path) for path in paths], ends - starts, ends)


class TokenData:
    """Batches from a prepared dataset.

    Args:
        dataset: name under nanoGPT/data, or a path.
        block_size: T, tokens per sequence.
        batch_size: B, sequences per micro-batch.
        seed: with the key, decides what a batch holds.

    Raises:
        ConfigError: not prepared, damaged, or shorter than a sequence.
    """

    def __init__(self, dataset: str, block_size: int, batch_size: int, seed: int) -> None:
        folder = find_dataset(dataset)
        try:
            self.meta = read_dataset_meta(folder)
        except Malformed as error:
            raise ConfigError(
                f"{folder}/meta.json is not that of a dataset ({error}): delete it and prepare again"
            ) from None
        self.tokenizer, self.dtype = self.meta["tokenizer"], np.dtype(self.meta["dtype"]).newbyteorder("<")
        self.splits = {
            "train": open_split(folder, "train", self.meta["splits"]["train"], self.dtype, block_size),
            "val": open_split(folder, "val", self.meta["splits"]["val"], self.dtype, block_size),
        }
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint records of its data: every file's sha256, and the tokenizer."""
        splits = self.meta["splits"]
        files = {file["name"]: file["sha256"] for file in [*splits["train"], *splits["val"]]}
        return {"tokenizer": self.tokenizer, "files": files}

    def batch(self, split: str, purpose: int, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one micro-batch.

        Args:
            split: "train" or "val".
            purpose: `TRAIN` or `EVALUATE`; with step and micro_batch it is the key of a counter-based generator.
            step: optimizer step; 0 for evaluations, which read the same batches each time.
            micro_batch: index within the step, counted over all ranks.

        Returns:
            x, y: int64 token ids, both (B, T); y is x one token later.

        Raises:
            ConfigError: a token id beyond the tokenizer's vocabulary.
        """
        source = self.splits[split]
        generator = np.random.Generator(np.random.Philox(key=[self.seed, 0], counter=[0, purpose, step, micro_batch]))
        starts = generator.integers(source.starts, size=self.batch_size)
        which = np.searchsorted(source.ends, starts, side="right")
        offsets = (starts - source.begins[which]) * self.dtype.itemsize  # bytes into the file
        rows = np.empty((self.batch_size, self.block_size + 1), dtype=self.dtype)
        # Positioned reads, not a memory map: a map's pages stay in the process's memory once touched, and at random
        # places of a file larger than the page cache its read-ahead is 1,000 times slower (78 ms against 0.05).
        for row, file, offset in zip(rows, which.tolist(), offsets.tolist(), strict=True):
            read = partial(os.preadv, source.files[file].fileno(), [row], offset)
            if retry_reads(source.paths[file], read) != row.nbytes:
                raise ConfigError(f"{source.paths[file]} was cut short while it was in use", on_one_rank=True)
        if rows.max() >= self.tokenizer["vocab_size"]:
            raise ConfigError(
                f"{source.paths[0].parent} holds token id {rows.max()}, beyond its vocabulary of "
                f"{self.tokenizer['vocab_size']}: prepare the dataset again",
                on_one_rank=True,
            )
        x, y = rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C")
        return torch.from_numpy(x), torch.from_numpy(y)


def to_device(batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a batch; to a GPU through pinned memory, without waiting."""
    x, y = batch
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)
