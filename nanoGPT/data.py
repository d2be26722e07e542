"""Tokens on disk, and the batches that are read from them.

A dataset is a directory with `meta.json` (dtype, token counts, sha256, tokenizer) beside headerless `.bin` files of
little-endian token ids, the same files that nanoGPT reads. A batch is a pure function of (seed, step, micro-batch):
no loader has a state, so there is none to save, and a resumed run reads what the uninterrupted one would have read.
"""

import difflib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

from nanoGPT.config import PACKAGE
from nanoGPT.exits import ConfigError
from nanoGPT.files import sha256_of

DATA = PACKAGE / "data"
DOWNLOADS = DATA / ".downloads"
HASH_UP_TO = 64 << 20  # bytes: files up to this size are hashed whenever they are opened
TRAIN, EVALUATE = 0, 1  # the first word of a batch's key


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def write_hf(self, folder: Path) -> None:
        """Write the files with which transformers makes the same tokenizer."""


class CharTokenizer:
    """One id a character. Encoding a character that the training text did not have is a ConfigError."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.ids = {c: i for i, c in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            raise ConfigError(f"the character {unknown[0]!r} is not in this model's vocabulary: {self.characters!r}")
        return [self.ids[c] for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i] for i in ids if i < len(self.characters))

    def write_hf(self, folder: Path) -> None:
        model = {"type": "BPE", "vocab": self.ids, "merges": []}  # of characters, none of which is merged
        whole = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer.json").write_text(json.dumps(whole) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(about) + "\n")


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding through tiktoken, from the vocabulary that `make data` fetched."""

    def __init__(self) -> None:
        import tiktoken

        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(DOWNLOADS / "tiktoken"))
        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise ConfigError(f"GPT-2's vocabulary is not here ({type(error).__name__}): run `make data`") from None
        self.end_of_text = self.bpe.eot_token

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text, allowed_special={"<|endoftext|>"})

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.bpe.n_vocab])

    def write_hf(self, folder: Path) -> None:
        files = {"6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": "vocab.json"}  # as they are called in tiktoken's cache
        files["6d1cbeee0f20b3d9449abfede4726ed8212e3aee"] = "merges.txt"
        for name, target in files.items():
            shutil.copyfile(Path(os.environ["TIKTOKEN_CACHE_DIR"]) / name, folder / target)


def load_tokenizer(identity: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a `meta.json` or a checkpoint's manifest names."""
    if identity["name"] == "char":
        return CharTokenizer(identity["characters"])
    if identity["name"] == "gpt2":
        return Gpt2Tokenizer()
    raise ConfigError(f"the tokenizer {identity['name']!r} is not known here: char and gpt2 are")


def find_dataset(name: str) -> Path:
    """The directory of a prepared dataset: under nanoGPT/data, or a path to one.

    Raises:
        ConfigError: it does not exist, or is not prepared; names the command that prepares it.
    """
    folder = DATA / name[:200]
    if not folder.is_dir() and (Path(name) / "meta.json").is_file():
        folder = Path(name)
    if (folder / "meta.json").is_file():
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
    files: list[BinaryIO]
    begins: np.ndarray  # number of the first window of each file, counted through all files
    ends: np.ndarray

    @property
    def starts(self) -> int:
        return int(self.ends[-1])


def open_split(folder: Path, name: str, meta: dict[str, Any], block_size: int) -> Split:
    """Check a split's files against `meta.json`, by size and, up to `HASH_UP_TO` bytes, by sha256."""
    itemsize = np.dtype(meta["dtype"]).itemsize
    again = f"prepare it again with `rm {folder}/meta.json && make data DATASET={folder.name}`"
    files = meta["splits"][name]
    for file in files:
        path = folder / file["name"]
        size = path.stat().st_size if path.is_file() else -1
        if size != file["tokens"] * itemsize:
            found = "is missing" if size < 0 else f"has {size:,} bytes where {file['tokens'] * itemsize:,} were written"
            raise ConfigError(f"{path} {found}: {again}")
        if size <= HASH_UP_TO and sha256_of(path) != file["sha256"]:
            raise ConfigError(f"{path} is not the file that was prepared (its sha256 differs): {again}")
    starts = [max(0, file["tokens"] - block_size) for file in files]
    tokens = sum(file["tokens"] for file in files)
    if not sum(starts):
        longest = max(file["tokens"] for file in files) - 1
        raise ConfigError(
            f"--block_size={block_size} is longer than the {name} split of {folder.name} ({tokens:,} tokens): "
            f"use --block_size={longest} or less"
        )
    paths, ends = [folder / file["name"] for file in files], np.cumsum(starts)
    return Split(paths, [open(path, "rb", buffering=0) for path in paths], ends - starts, ends)


def checked_tokenizer(identity: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's identity, if it is one that can be used.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or not what it should be.
    """
    if identity["name"] not in ("char", "gpt2"):
        raise ValueError(f"its tokenizer {identity['name']!r} is neither char nor gpt2")
    if not isinstance(identity["vocab_size"], int) or identity["vocab_size"] < 1:
        raise ValueError(f"its vocab_size is {identity['vocab_size']!r}")
    if not isinstance(identity["sha256"], str) or (identity["name"] == "char" and "characters" not in identity):
        raise ValueError("its tokenizer is not described")
    return identity


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
            self.meta = json.loads((folder / "meta.json").read_text())
            self.tokenizer = checked_tokenizer(self.meta["tokenizer"])
            self.dtype = np.dtype(self.meta["dtype"])
            self.splits = {name: open_split(folder, name, self.meta, block_size) for name in ("train", "val")}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder}/meta.json cannot be read ({type(error).__name__}: {error}): delete it and prepare again"
            ) from None
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint records of its data: every file's sha256, and the tokenizer."""
        files = {f["name"]: f["sha256"] for split in self.meta["splits"].values() for f in split}
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
            if os.preadv(source.files[file].fileno(), [row], offset) != row.nbytes:
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
