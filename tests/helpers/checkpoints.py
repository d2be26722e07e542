"""Checkpoint directories without a trainer: one rank, and payloads of some bytes."""

import dataclasses
from pathlib import Path

import torch

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPTConfig

CPU = torch.device("cpu")


FACTS = {  # what the manifest of a training run says
    "phase": "test",
    "config": {},
    "model_args": {**dataclasses.asdict(GPTConfig(1, 1, 8, 8)), "vocab_size": 5},
    "data": {"tokenizer": {"name": "char", "vocab_size": 5, "sha256": "", "characters": "abcde"}, "files": {}},
    "best_val_loss": 1.0,
    "grad_scaler": {},
}


class OneRank(Runtime):
    """A Runtime of one rank without a process group."""

    def gather(self, value):
        return [value]


def directory(out: Path, keep: int = 3) -> CheckpointDirectory:
    out.mkdir(exist_ok=True)
    return CheckpointDirectory(str(out), OneRank(0, 0, 1, 1, CPU, torch.float32), keep)


def write_bytes(content: bytes):
    def write(to: NewFiles) -> None:
        with to.open("payload") as file:
            file.write(content)

    return write


def names(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())
