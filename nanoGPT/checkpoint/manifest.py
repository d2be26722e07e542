"""What a checkpoint says of itself, and the proof that it holds: sizes and sha256 of every file, sealed by its own.

Nothing is repaired: a checkpoint that does not verify is named, and a resume passes it over.
"""

import contextlib
import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import torch

from nanoGPT.dataset import DataIdentity
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, NotAFile, is_directory, is_present, list_directory, read_document, sha256_of, size_of
from nanoGPT.schema import Count, FileName, Malformed, Sha256, Size, Within, check_schema
from nanoGPT.tokenizer import check_tokenizer

Manifest = dict[str, Any]
STEP = re.compile("step-[0-9]{8,}")  # how a checkpoint's directory is named


class Damaged(Exception):
    """Why a checkpoint must not be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole, verified checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


class FileRecord(TypedDict):
    """One file of a checkpoint."""

    name: FileName
    size: Count
    sha256: Sha256


class ManifestFields(TypedDict):
    """What every checkpoint's manifest says; that of a training run says more."""

    step: Count
    world_size: Annotated[int, Within(1, 2**20)]
    run: NotRequired[str]
    versions: dict[str, str]
    files: Annotated[list[FileRecord], Within(1, 10**6)]
    sha256: Sha256


class ModelArgs(TypedDict):
    """The shape of a GPT."""

    n_layer: Annotated[int, Within(1, 10_000)]
    n_head: Size
    n_embd: Annotated[int, Within(1, 2**20)]
    block_size: Size
    bias: bool
    vocab_size: Size
    dropout: Annotated[float, Within(0, math.nextafter(1, 0))]
    gelu: NotRequired[Literal["none", "tanh"]]


class TrainingManifestFields(ManifestFields):
    """What the manifest of a training run says."""

    phase: str
    config: dict[str, Any]
    model_args: ModelArgs
    data: DataIdentity
    best_val_loss: float
    grad_scaler: dict[str, Any]


def step_directories(out_dir: Path) -> list[Path]:
    """Return all directories of a run that are named as a checkpoint is, newest first; other names are left alone.

    Raises:
        ConfigError: the directory is there, but could not be listed.
    """
    root = out_dir / "checkpoints"
    steps = sorted((name for name in list_directory(root) if STEP.fullmatch(name)), key=lambda name: -int(name[5:]))
    return [root / name for name in steps if is_directory(root / name)]


def manifests(out_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield every checkpoint whose manifest holds, newest first; its files are not verified.

    Raises:
        ConfigError: a manifest is there, but could not be read.
    """
    for path in step_directories(out_dir):
        with contextlib.suppress(Damaged):
            yield path, read_manifest(path)


def seal(manifest: Manifest) -> str:
    """The manifest as text that carries its own sha256."""
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        Damaged: it is absent, incomplete, or not exactly as it was written.
        ConfigError: it is there, but could not be read: that says nothing of the checkpoint.
    """
    try:
        text = read_document(path / "manifest.json")
        manifest = json.loads(text)
    except ABSENT:
        raise Damaged("it has no manifest.json, so its save never ended") from None
    except NotAFile as error:
        raise Damaged(f"its {error}") from None
    except (ValueError, RecursionError):
        raise Damaged("its manifest.json is not JSON") from None
    try:
        if not isinstance(manifest, dict) or seal(manifest) != text:
            raise Damaged("its manifest.json was changed after it was written")
        step = check_schema(manifest, ManifestFields)["step"]
    except (Malformed, RecursionError) as error:
        raise Damaged(f"its manifest.json is not that of a checkpoint ({error})") from None
    if STEP.fullmatch(path.name) and int(path.name[5:]) != step:
        raise Damaged("its manifest.json is not that of a checkpoint of this step")
    return manifest


def check_training(path: Path, manifest: Manifest) -> None:
    """Check that a checkpoint is that of a training run, whose model and data its manifest describes.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = check_schema(manifest, TrainingManifestFields)
        check_tokenizer(found["data"]["tokenizer"])
        if found["model_args"]["n_embd"] % found["model_args"]["n_head"]:
            raise Malformed("its n_embd is not divisible by its n_head")
    except Malformed as error:
        raise ConfigError(
            f"{path / 'manifest.json'} is not that of a training run ({error}): give another run or checkpoint"
        ) from None


def file_names(path: Path) -> list[str]:
    """The files of a checkpoint by its manifest, for what else lies there is none of it; without one, all."""
    if not is_present(path / "manifest.json"):
        return list_directory(path)
    return [file["name"] for file in read_manifest(path)["files"]]


def verify_files(path: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Hash every `shares`-th file of a checkpoint, so that ranks can divide the work.

    Raises:
        Damaged: a file is missing, or its size or sha256 differs.
        ConfigError: a file is there, but could not be read: that says nothing of the checkpoint.
    """
    for file in manifest["files"][share::shares]:
        target = path / file["name"]
        if (size := size_of(target)) is None:
            raise Damaged(f"{file['name']} is missing")
        if size != file["size"]:
            raise Damaged(f"{file['name']} has {size:,} bytes where {file['size']:,} were written")
        try:
            digest = sha256_of(target)
        except ABSENT:
            raise Damaged(f"{file['name']} is missing") from None
        if digest != file["sha256"]:
            raise Damaged(f"the sha256 of {file['name']} differs from the manifest's")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


# ---- the command
