"""Checkpoint directories for tests without a trainer: one rank, and payloads of a few bytes."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import NewFiles
from nanoGPT.checkpoint.sources import read_weights
from nanoGPT.checkpoint.starting_point import load_weights
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.prepare.directory import write_meta, write_tokens
from nanoGPT.prepare.tokenizer import make_char_identity

CPU = torch.device("cpu")


MANIFEST_FIELDS = {  # as in the manifest of a training run
    "phase": "test",
    "config": {},
    "model_args": {**dataclasses.asdict(GPTConfig(1, 1, 8, 8)), "vocab_size": 5},
    "data": {"tokenizer": {"name": "char", "vocab_size": 5, "sha256": "", "characters": "abcde"}, "files": {}},
    "best_val_loss": 1.0,
    "grad_scaler": {},
}


def make_directory(out: Path) -> CheckpointDirectory:
    """Return a checkpoint directory of one rank in `out`, which is created if necessary."""
    out.mkdir(exist_ok=True)
    return CheckpointDirectory(str(out), Runtime(), keep_checkpoints=3)


def write_bytes(content: bytes):
    """Return a function that writes `content` into a checkpoint, for `CheckpointDirectory.save`."""

    def write(to: NewFiles) -> None:
        with to.open("payload") as file:
            file.write(content)

    return write


def list_names(out: Path) -> list[str]:
    """Return the sorted names of all files and directories in the checkpoint directory of a run."""
    return sorted(p.name for p in (out / "checkpoints").iterdir())


@torch.no_grad()
def compute_logits(folder: Path, idx: torch.Tensor) -> torch.Tensor:
    """Return the logits of this project's GPT, with the weights of a directory."""
    shape, weights, _ = read_weights(str(folder))
    model = GPT(shape)
    load_weights(model, weights)
    return model.compute_logits(model.eval().compute_features(idx))


def write_small_dataset(folder: Path) -> None:
    """Write a dataset of the characters x, y and z, without a line end."""
    tokens = np.arange(400, dtype=np.uint16) % 3
    splits = {split: [write_tokens(folder, f"{split}.bin", tokens)] for split in ("train", "val")}
    write_meta(folder, {}, make_char_identity("xyz"), splits)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a directory by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def list_steps(out: Path) -> list[str]:
    """Return the sorted names of the checkpoints of a run."""
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))
