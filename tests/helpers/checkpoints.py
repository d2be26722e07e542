"""Checkpoint directories for tests without a trainer: one rank, and payloads of a few bytes."""

import dataclasses
from pathlib import Path

import torch

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import NewFiles
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPTConfig

CPU = torch.device("cpu")


MANIFEST_FIELDS = {  # as in the manifest of a training run
    "phase": "test",
    "config": {},
    "model_args": {**dataclasses.asdict(GPTConfig(1, 1, 8, 8)), "vocab_size": 5},
    "data": {"tokenizer": {"name": "char", "vocab_size": 5, "sha256": "", "characters": "abcde"}, "files": {}},
    "best_val_loss": 1.0,
    "grad_scaler": {},
}


class OneRank(Runtime):
    """A Runtime with one rank and no process group."""

    def gather(self, value):
        return [value]


def make_directory(out: Path, keep: int = 3) -> CheckpointDirectory:
    """Return a checkpoint directory of one rank in `out`, which is created if necessary."""
    out.mkdir(exist_ok=True)
    return CheckpointDirectory(str(out), OneRank(0, 0, 1, 1, CPU, torch.float32), keep)


def write_bytes(content: bytes):
    """Return a function that writes `content` into a checkpoint, for `CheckpointDirectory.save`."""

    def write(to: NewFiles) -> None:
        with to.open("payload") as file:
            file.write(content)

    return write


def list_names(out: Path) -> list[str]:
    """Return the sorted names of all files and directories in the checkpoint directory of a run."""
    return sorted(p.name for p in (out / "checkpoints").iterdir())
