"""Datasets on disk, and the batches that are read from them.

A dataset is a directory with a `meta.json` (dtype, token counts, sha256, tokenizer) and `.bin` files. These contain
little-endian token ids without a header, as in nanoGPT. A batch is a pure function of (seed, step, micro-batch).
The data loader therefore has no state to save, and a resumed run reads the same batches as an uninterrupted run.
"""

import contextlib
import os
import resource
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from nanoGPT.errors import ConfigError, did_you_mean, import_optional
from nanoGPT.files import DATA, is_present, open_regular, retry_reads, sha256_of, size_of
from nanoGPT.prepare.meta import DatasetMeta, TokenFile, identify, read_dataset_meta
from nanoGPT.train_config import TrainConfig

MAX_HASHED_BYTES = 64 << 20  # files up to this size are hashed whenever they are opened
MAX_OPEN_FILES = 32768  # more than any dataset has shards, and fewer than macOS allows
SAMPLING = "nanoGPT.options.sampling"  # loaded only for mixtures and epochs


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
        raise ConfigError(f"dataset {name} is not prepared: run `make data DATASET={quote(name)}`")
    if folder.is_dir():
        command = "`make data INPUT=FILE`"
        raise ConfigError(
            f"{folder} has no meta.json, which names the tokenizer and the files: prepare a text: {command}"
        )
    known = sorted({p.parent.name for pattern in ("*/prepare.py", "*/meta.json") for p in DATA.glob(pattern)})
    hint = did_you_mean(name, known) or f" (known: {', '.join(known)})"
    raise ConfigError(f"there is no dataset {name}{hint}")


@dataclass(frozen=True)
class Split:
    """The open files of one split, and the windows of block_size + 1 tokens in them.

    The windows have consecutive numbers, from 0 for the first window of the first file.

    Attributes:
        paths, files: the files.
        dtype: of the token ids in the files.
        stride: tokens from the start of a window to the start of the next one.
        end_windows: for each file, the number of its last window, plus 1.
    """

    paths: list[Path]
    files: list[FileIO]
    dtype: np.dtype[Any]
    stride: int
    end_windows: list[int]

    def locate(self, window: int) -> tuple[int, int]:
        """Return the index of the file that contains a window, and the position of the window in it, in bytes."""
        index = bisect_right(self.end_windows, window)
        first = self.end_windows[index - 1] if index else 0
        return index, (window - first) * self.stride * self.dtype.itemsize

    def read(self, window: int, length: int) -> np.ndarray:
        """Return the token ids of a window, (length,).

        Raises:
            ConfigError: the file cannot be read.
        """
        index, offset = self.locate(window)
        tokens = np.empty(length, self.dtype)
        # preadv instead of a memory map: the pages of a map stay in the process's memory after the first access. In a
        # file larger than the page cache, the read-ahead of a map makes a random read 1,000 times slower (78 ms
        # instead of 0.05 ms).
        read = partial(os.preadv, self.files[index].fileno(), [tokens.data], offset)
        if retry_reads(self.paths[index], read) != tokens.nbytes:
            raise ConfigError(
                f"{self.paths[index]} was truncated while it was in use: prepare the dataset again", on_one_rank=True
            )
        return tokens

    def read_ahead(self, window: int, length: int) -> None:
        """Ask the operating system to read a window into its page cache, without waiting for it."""
        if hasattr(os, "posix_fadvise"):
            index, offset = self.locate(window)
            size = length * self.dtype.itemsize
            with contextlib.suppress(OSError):  # it is only a hint; `read` reports errors
                os.posix_fadvise(self.files[index].fileno(), offset, size, os.POSIX_FADV_WILLNEED)


def open_split(folder: Path, files: Sequence[TokenFile], dtype: np.dtype[Any], block_size: int, stride: int) -> Split:
    """Open a split's files, and check their size and, up to `MAX_HASHED_BYTES`, their hash against `meta.json`.

    Raises:
        ConfigError: a file is missing, damaged or cannot be read.
    """
    remedy = "prepare the dataset again from its text"
    if (folder / "prepare.py").is_file():
        remedy = f"prepare it again with `rm {quote(f'{folder}/meta.json')} && make data DATASET={quote(folder.name)}`"
    for file in files:
        path, expected = folder / file["name"], file["tokens"] * dtype.itemsize
        size = size_of(path)
        if size != expected:
            problem = "is missing" if size is None else f"has {size:,} bytes instead of {expected:,}"
            raise ConfigError(f"{path} {problem}: {remedy}")
        if size <= MAX_HASHED_BYTES and sha256_of(path) != file["sha256"]:
            raise ConfigError(f"{path} is not the file that was prepared (its hash differs): {remedy}")
    windows = [max(0, (file["tokens"] - 1 - block_size) // stride + 1) for file in files]
    paths = [folder / file["name"] for file in files]
    open_files = [retry_reads(path, partial(open_regular, path)) for path in paths]
    return Split(paths, open_files, dtype, stride, list(accumulate(windows)))


def raise_open_file_limit() -> None:
    """Raise the limit of open files of this process, as far as it may: a dataset can have hundreds of shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@dataclass(frozen=True)
class Dataset:
    """One prepared dataset, with open files.

    Attributes:
        name: the name of its directory.
        weight: its weight in the mixture.
        meta: its `meta.json`.
        splits: "train" and "val".
    """

    name: str
    weight: int
    meta: DatasetMeta
    splits: dict[str, Split]


def open_dataset(folder: Path, weight: int, block_size: int, stride: int) -> Dataset:
    """Open a prepared dataset.

    Args:
        folder: its directory.
        weight: its weight in the mixture.
        block_size: T, tokens per sequence.
        stride: of the windows of the train split; the validation split has all windows.

    Raises:
        ConfigError: it is damaged, or shorter than a sequence.
    """
    meta = read_dataset_meta(folder)
    dtype, files = np.dtype(meta["dtype"]).newbyteorder("<"), meta["splits"]
    tokens = {"train": [file["tokens"] for file in files["train"]], "val": [file["tokens"] for file in files["val"]]}
    split = min(tokens, key=lambda name: max(tokens[name]))  # the one with the shorter longest file
    if block_size >= max(tokens[split]):
        max_block_size = max(tokens[split]) - 1
        remedy = f"use --block_size={max_block_size} or less" if max_block_size > 0 else "prepare a longer text"
        raise ConfigError(
            f"--block_size={block_size} is longer than the {split} split of {folder.name} "
            f"({sum(tokens[split]):,} tokens): {remedy}"
        )
    splits = {
        "train": open_split(folder, files["train"], dtype, block_size, stride),
        "val": open_split(folder, files["val"], dtype, block_size, 1),
    }
    return Dataset(folder.resolve().name, weight, meta, splits)


def find_mixture(dataset: str) -> list[tuple[Path, int]]:
    """Return the directory and the weight of each dataset of a mixture, sorted by the name of the directory.

    Args:
        dataset: the value of `--dataset`: names with weights, as in `shakespeare:3,fineweb_edu:1`, or one name or path.

    Raises:
        ConfigError: a dataset does not exist or occurs twice, or a weight is not valid.
    """
    may_be_mixture = ":" in dataset or "," in dataset
    if not may_be_mixture or is_present(DATA / dataset[:200] / "meta.json") or is_present(Path(dataset) / "meta.json"):
        return [(find_dataset(dataset), 1)]
    parts = import_optional(SAMPLING, f"--dataset={dataset}").parse_mixture(dataset)
    mixture = sorted([(find_dataset(name), weight) for name, weight in parts], key=lambda part: part[0].resolve().name)
    names = [folder.resolve().name for folder, _ in mixture]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"--dataset={dataset} contains the dataset {repeated[0]} twice: give each name once, and rename the "
            "directory if these are two datasets"
        )
    return mixture


def read_identity(dataset: str) -> dict[str, Any]:
    """Return the identity of the data that `--dataset` names, from the files meta.json alone."""
    return identify([(path.resolve().name, weight, read_dataset_meta(path)) for path, weight in find_mixture(dataset)])


def draw_random(
    generator: np.random.Generator, batch_size: int, window_counts: Sequence[int], weights: Sequence[int]
) -> list[tuple[int, int]]:
    """Draw sequences with replacement: a dataset in proportion to the weights, and then one of its windows.

    Args:
        generator: in a state that depends only on the key of the batch.
        batch_size: B, the number of sequences.
        window_counts: number of windows of each dataset.
        weights: weight of each dataset.

    Returns:
        B pairs: the index of a dataset, and the number of a window.
    """
    windows = [generator.integers(count, size=batch_size).tolist() for count in window_counts]
    if len(windows) == 1:
        return [(0, window) for window in windows[0]]
    ends = list(accumulate(weights))
    datasets = [bisect_right(ends, draw) for draw in generator.integers(ends[-1], size=batch_size).tolist()]
    return [(dataset, windows[dataset][row]) for row, dataset in enumerate(datasets)]


class TokenData:
    """The prepared dataset of a run, or its mixture of datasets, which returns batches.

    Args:
        config: its `dataset`, `sampling`, `seed` and the sizes of a batch are used.

    Raises:
        ConfigError: a dataset is not prepared, is damaged, or is shorter than a sequence; or the datasets of a mixture
            have different tokenizers.
    """

    def __init__(self, config: TrainConfig) -> None:
        raise_open_file_limit()
        self.config, stride = config, config.block_size if config.sampling == "epoch" else 1
        self.datasets = [open_dataset(*part, config.block_size, stride) for part in find_mixture(config.dataset)]
        self.tokenizer = self.datasets[0].meta["tokenizer"]
        for other in self.datasets:
            if other.meta["tokenizer"]["sha256"] != self.tokenizer["sha256"]:
                raise ConfigError(
                    f"--dataset={config.dataset} mixes tokenizers: {self.datasets[0].name} and {other.name} have "
                    "different ones; mix datasets that were prepared with the same tokenizer and vocabulary"
                )

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the data in a checkpoint."""
        return identify([(each.name, each.weight, each.meta) for each in self.datasets])

    def batch(self, split: str, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one micro-batch.

        Args:
            split: "train" or "val". It is part of the random key, so evaluations draw other windows.
            step: optimizer step; 0 for evaluations, which read the same batches each time.
            micro_batch: index within the step, counted over all ranks.

        Returns:
            x, y: int64 token ids, both (B, T). y is x shifted by one token.

        Raises:
            ConfigError: a file cannot be read, or a token id is not in the tokenizer's vocabulary.
        """
        choices = self.choose_windows(split, step, micro_batch)
        length = self.config.block_size + 1
        rows = np.empty((self.config.batch_size, length), np.int64)
        for row, (dataset, window) in zip(rows, choices, strict=True):
            row[:] = self.datasets[dataset].splits[split].read(window, length)
        if rows.max() >= self.tokenizer["vocab_size"]:
            dataset = choices[rows.max(axis=1).argmax()][0]
            raise ConfigError(
                f"{self.datasets[dataset].splits[split].paths[0].parent} contains token id {rows.max()}, beyond its "
                f"vocabulary of {self.tokenizer['vocab_size']}: prepare the dataset again",
                on_one_rank=True,
            )
        if split == "train":
            self.read_ahead(step + 1, micro_batch)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def read_ahead(self, step: int, micro_batch: int) -> None:
        """Let the operating system read the training sequences of a micro-batch while the model computes.

        A rank reads the same micro-batches in every step, so it knows those of the next step.
        """
        for dataset, window in self.choose_windows("train", step, micro_batch):
            self.datasets[dataset].splits["train"].read_ahead(window, self.config.block_size + 1)

    def choose_windows(self, split: str, step: int, micro_batch: int) -> list[tuple[int, int]]:
        """Return the index of the dataset and the number of the window for each sequence of a micro-batch."""
        counts = tuple(each.splits[split].end_windows[-1] for each in self.datasets)
        weights = tuple(each.weight for each in self.datasets)
        if self.config.sampling == "epoch" and split == "train":
            first = (step * self.config.gradient_accumulation_steps + micro_batch) * self.config.batch_size
            return import_optional(SAMPLING, "--sampling=epoch").draw_in_epochs(
                self.config.seed, first, self.config.batch_size, counts, weights
            )
        # Philox is counter-based: it computes random numbers directly from its key (the seed) and a counter (split,
        # step and micro-batch), so no state is kept between calls.
        philox = np.random.Philox(key=[self.config.seed, 0], counter=[0, split == "val", step, micro_batch])
        return draw_random(np.random.Generator(philox), self.config.batch_size, counts, weights)


def to_device(batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a batch to a device. The copy to a GPU uses pinned memory and is asynchronous."""
    x, y = (tokens.pin_memory() if device.type == "cuda" else tokens for tokens in batch)
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)
