"""Datasets on disk, and the batches that are read from them.

A dataset is a directory with a `meta.json` (dtype, token counts, sha256, tokenizer) and `.bin` files. These contain
little-endian token ids without a header, as in nanoGPT. A batch is a pure function of (seed, step, micro-batch).
The data loader therefore has no state to save, and a resumed run reads the same batches as an uninterrupted run.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
import torch

from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import DATA, is_present, open_regular, read_json, retry_reads, sha256_of, size_of
from nanoGPT.schema import Count, FileName, Range, SchemaError, Sha256
from nanoGPT.tokenizer import TokenizerIdentity, check_tokenizer

MAX_HASHED_BYTES = 64 << 20  # files up to this size are hashed whenever they are opened
TRAIN, EVALUATE = 0, 1  # the purpose of a batch, which is part of its random key


class TokenFile(TypedDict):
    """One file of token ids."""

    name: FileName
    tokens: Count
    sha256: Sha256


class Splits(TypedDict):
    """The files of each split."""

    train: Annotated[list[TokenFile], Range(1, 10**6)]
    val: Annotated[list[TokenFile], Range(1, 10**6)]


class DatasetMeta(TypedDict):
    """The `meta.json` of a prepared dataset. `source` describes the text that it was prepared from."""

    source: NotRequired[dict[str, Any]]
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"]
    splits: Splits


class DataIdentity(TypedDict):
    """The identity of a dataset in a checkpoint: its tokenizer, and the sha256 of each file by name."""

    tokenizer: TokenizerIdentity
    files: dict[str, Sha256]


def read_dataset_meta(folder: Path) -> DatasetMeta:
    """Read a dataset's meta.json.

    Raises:
        FileNotFoundError, NotADirectoryError: the file does not exist.
        SchemaError: the file does not describe a dataset.
        ConfigError: the file could not be read.
    """
    meta = read_json(folder / "meta.json", DatasetMeta)
    check_tokenizer(meta["tokenizer"])
    if meta["dtype"] == "uint16" and meta["tokenizer"]["vocab_size"] > 1 << 16:
        raise SchemaError("ids of this vocab_size do not fit into uint16")
    return meta


def find_dataset(name: str) -> Path:
    """Return the directory of a prepared dataset.

    Args:
        name: a directory under nanoGPT/data, or a path.

    Raises:
        ConfigError: the dataset does not exist, or is not prepared yet. The message has the command that prepares it.
    """
    folder = DATA / name[:200]
    if not folder.is_dir() and is_present(Path(name) / "meta.json"):
        folder = Path(name)
    if is_present(folder / "meta.json"):
        return folder
    if (folder / "prepare.py").is_file():
        raise ConfigError(f"dataset {name} is not prepared: run `make data DATASET={name}`")
    known = sorted({p.parent.name for pattern in ("*/prepare.py", "*/meta.json") for p in DATA.glob(pattern)})
    hint = did_you_mean(name, known) or f" (known: {', '.join(known)})"
    raise ConfigError(f"there is no dataset {name}{hint}")


@dataclass(frozen=True)
class Split:
    """The open files of one split, and the windows of block_size + 1 tokens in them.

    The windows have consecutive numbers, from 0 for the first window of the first file to window_count - 1.

    Attributes:
        paths, files: the files.
        first_windows: for each file, the number of its first window.
        end_windows: for each file, the number of its last window, plus 1.
    """

    paths: list[Path]
    files: list[FileIO]
    first_windows: np.ndarray
    end_windows: np.ndarray

    @property
    def window_count(self) -> int:
        return int(self.end_windows[-1])


def open_split(folder: Path, name: str, files: Sequence[TokenFile], dtype: np.dtype[Any], block_size: int) -> Split:
    """Open a split's files, and check their size and, up to `MAX_HASHED_BYTES`, their sha256 against `meta.json`.

    Raises:
        ConfigError: a file is missing, damaged or cannot be read, or no file is long enough for a sequence.
    """
    remedy = f"prepare it again with `rm {folder}/meta.json && make data DATASET={folder.name}`"
    for file in files:
        path, expected = folder / file["name"], file["tokens"] * dtype.itemsize
        size = size_of(path)
        if size != expected:
            problem = "is missing" if size is None else f"has {size:,} bytes instead of {expected:,}"
            raise ConfigError(f"{path} {problem}: {remedy}")
        if size <= MAX_HASHED_BYTES and sha256_of(path) != file["sha256"]:
            raise ConfigError(f"{path} is not the file that was prepared (its sha256 differs): {remedy}")
    windows = [max(0, file["tokens"] - block_size) for file in files]
    if not sum(windows):
        tokens, max_block_size = sum(file["tokens"] for file in files), max(file["tokens"] for file in files) - 1
        raise ConfigError(
            f"--block_size={block_size} is longer than the {name} split of {folder.name} ({tokens:,} tokens): "
            f"use --block_size={max_block_size} or less"
        )
    paths, end_windows = [folder / file["name"] for file in files], np.cumsum(windows)
    open_files = [retry_reads(path, partial(open_regular, path)) for path in paths]
    return Split(paths, open_files, end_windows - windows, end_windows)


class TokenData:
    """A prepared dataset that returns random batches.

    Args:
        dataset: a directory under nanoGPT/data, or a path.
        block_size: T, tokens per sequence.
        batch_size: B, sequences per micro-batch.
        seed: part of the random key of every batch.

    Raises:
        ConfigError: the dataset is not prepared, is damaged, or is shorter than a sequence.
    """

    def __init__(self, dataset: str, block_size: int, batch_size: int, seed: int) -> None:
        folder = find_dataset(dataset)
        try:
            self.meta = read_dataset_meta(folder)
        except SchemaError as error:
            raise ConfigError(
                f"{folder}/meta.json does not describe a dataset ({error}): delete it and prepare the dataset again"
            ) from None
        self.tokenizer, self.dtype = self.meta["tokenizer"], np.dtype(self.meta["dtype"]).newbyteorder("<")
        self.splits = {
            "train": open_split(folder, "train", self.meta["splits"]["train"], self.dtype, block_size),
            "val": open_split(folder, "val", self.meta["splits"]["val"], self.dtype, block_size),
        }
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed

    @property
    def identity(self) -> dict[str, Any]:
        """The `DataIdentity` that a checkpoint records."""
        splits = self.meta["splits"]
        files = {file["name"]: file["sha256"] for file in [*splits["train"], *splits["val"]]}
        return {"tokenizer": self.tokenizer, "files": files}

    def batch(self, split: str, purpose: int, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one micro-batch.

        Args:
            split: "train" or "val".
            purpose: `TRAIN` or `EVALUATE`. Training and evaluation batches draw from separate random streams.
            step: optimizer step; 0 for evaluations, which read the same batches each time.
            micro_batch: index within the step, counted over all ranks.

        Returns:
            x, y: int64 token ids, both (B, T). y is x shifted by one token.

        Raises:
            ConfigError: a file cannot be read, or a token id is not in the tokenizer's vocabulary.
        """
        source = self.splits[split]
        # Philox is counter-based: it computes random numbers directly from its key (the seed) and a counter (purpose,
        # step and micro-batch), so no state is kept between calls.
        generator = np.random.Generator(np.random.Philox(key=[self.seed, 0], counter=[0, purpose, step, micro_batch]))
        windows = generator.integers(source.window_count, size=self.batch_size)
        file_indices = np.searchsorted(source.end_windows, windows, side="right")
        offsets = (windows - source.first_windows[file_indices]) * self.dtype.itemsize  # bytes into the file
        rows = np.empty((self.batch_size, self.block_size + 1), dtype=self.dtype)
        # preadv instead of a memory map: the pages of a map stay in the process's memory after the first access. In a
        # file larger than the page cache, the read-ahead of a map makes a random read 1,000 times slower (78 ms
        # instead of 0.05 ms).
        for row, file, offset in zip(rows, file_indices.tolist(), offsets.tolist(), strict=True):
            read = partial(os.preadv, source.files[file].fileno(), [row], offset)
            if retry_reads(source.paths[file], read) != row.nbytes:
                raise ConfigError(
                    f"{source.paths[file]} was truncated while it was in use: prepare the dataset again",
                    on_one_rank=True,
                )
        if rows.max() >= self.tokenizer["vocab_size"]:
            raise ConfigError(
                f"{source.paths[0].parent} contains token id {rows.max()}, beyond its vocabulary of "
                f"{self.tokenizer['vocab_size']}: prepare the dataset again",
                on_one_rank=True,
            )
        x, y = rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C")
        return torch.from_numpy(x), torch.from_numpy(y)


def to_device(batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a batch to a device. The copy to a GPU uses pinned memory and is asynchronous."""
    x, y = batch
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)
