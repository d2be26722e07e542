"""The manifest of a checkpoint: its metadata, the size and hash (SHA-256) of every file, and its own hash.

Nothing is repaired. If a checkpoint fails the verification, the reason is reported, and a resume skips the checkpoint.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from nanoGPT.dataset import DataIdentity
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, NotAFile, is_directory, is_present, list_directory, read_document, sha256_of, size_of
from nanoGPT.schema import Count, FileName, Meta, SchemaError, Sha256, Size, check_schema
from nanoGPT.tokenizer import check_tokenizer
from nanoGPT.train_config import StepChoice

Manifest = dict[str, Any]
DELETED = "was deleted while it was read, for example by a run that saves newer checkpoints: run the command again"
STEP = re.compile("step-[0-9]{8,}")  # the name of a checkpoint's directory


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete, or was changed after its save. The message is the reason: "payload is missing"."""


@dataclass(frozen=True)
class Checkpoint:
    """The path and the manifest of a complete, verified checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


class FileRecord(TypedDict):
    """The entry of one file in a manifest."""

    name: FileName
    size: Count
    sha256: Sha256


class ManifestFields(TypedDict):
    """The fields that every manifest has."""

    step: Count
    world_size: Annotated[int, Meta(ge=1, le=2**20)]
    run: NotRequired[str]
    versions: dict[str, str]
    files: Annotated[list[FileRecord], Meta(min_length=1, max_length=10**6)]
    sha256: Sha256


class ModelArgs(TypedDict):
    """The shape of a GPT."""

    n_layer: Annotated[int, Meta(ge=1, le=10_000)]
    n_head: Size
    n_embd: Annotated[int, Meta(ge=1, le=2**20)]
    block_size: Size
    bias: bool
    vocab_size: Size
    dropout: Annotated[float, Meta(ge=0, lt=1)]
    gelu: NotRequired[Literal["none", "tanh"]]


class TrainingManifestFields(ManifestFields):
    """The fields that the manifest of a training run has."""

    phase: str
    config: dict[str, Any]
    model_args: ModelArgs
    data: DataIdentity
    best_val_loss: float
    grad_scaler: dict[str, Any]


def step_directories(out_dir: Path) -> list[Path]:
    """Return all directories of a run that have the name of a checkpoint, newest first.

    Raises:
        ConfigError: `out_dir/checkpoints` exists, but could not be listed.
    """
    root = out_dir / "checkpoints"
    steps = sorted((name for name in list_directory(root) if STEP.fullmatch(name)), key=lambda name: -int(name[5:]))
    return [root / name for name in steps if is_directory(root / name)]


def choose_step(out_dir: Path, step: StepChoice) -> Path:
    """Return the path of the checkpoint after `step` updates, or of the one with the best validation loss.

    Raises:
        ConfigError: the run has no such checkpoint.
    """
    paths = step_directories(out_dir)
    if step == "best":
        newest = next((manifest for _, manifest in read_manifests(out_dir)), {})
        path, name = find_best(paths, newest.get("best_val_loss")), "with a validation loss"
    else:
        path, name = next((path for path in paths if int(path.name[5:]) == step), None), f"step-{step:08d}"
    if path is None:
        names = ", ".join(path.name for path in paths)
        remedy = f"choose one of {names}" if names else "give the directory of a run, which contains checkpoints/"
        raise ConfigError(f"there is no checkpoint {name} under {out_dir / 'checkpoints'}: {remedy}")
    return path


def find_best(paths: list[Path], best_val_loss: Any) -> Path | None:
    """Return the oldest checkpoint whose manifest has this best validation loss: the loss was measured at its step.

    Args:
        paths: newest first.
        best_val_loss: of the run, from the manifest of its newest checkpoint; None if it has recorded none.
    """
    for path in reversed(paths if best_val_loss is not None else []):
        with contextlib.suppress(DamagedCheckpoint, ConfigError):
            if read_manifest(path).get("best_val_loss") == best_val_loss:
                return path
    return None


def find_newest_run(directories: Iterable[Path]) -> Path | None:
    """Return the directory whose newest checkpoint was written last; None if no directory has a checkpoint."""
    save_times: dict[Path, float] = {}
    for directory in directories:
        with contextlib.suppress(FileNotFoundError, IndexError):  # a run in progress may delete an old checkpoint
            save_times[directory] = step_directories(directory)[0].stat().st_mtime
    return max(save_times, key=lambda directory: save_times[directory]) if save_times else None


def read_manifests(out_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the path and manifest of every checkpoint with a valid manifest, newest first. Files are not verified.

    The directory of a checkpoint contains only this one.

    Raises:
        ConfigError: a manifest exists, but could not be read.
    """
    for path in [out_dir] if is_present(out_dir / "manifest.json") else step_directories(out_dir):
        with contextlib.suppress(DamagedCheckpoint):
            yield path, read_manifest(path)


def serialize_manifest(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a field `sha256` that is computed from all other fields."""
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        DamagedCheckpoint: the manifest is missing, incomplete, or was changed after it was written.
        ConfigError: the manifest exists, but could not be read. The checkpoint may still be intact.
    """
    try:
        text = read_document(path / "manifest.json")
        manifest = json.loads(text)
    except ABSENT:
        raise DamagedCheckpoint("it has no manifest.json, so its save was not completed") from None
    except NotAFile as error:
        raise DamagedCheckpoint(f"its {error}") from None
    except (ValueError, RecursionError):
        raise DamagedCheckpoint("its manifest.json is not JSON") from None
    try:
        if not isinstance(manifest, dict) or serialize_manifest(manifest) != text:
            raise DamagedCheckpoint("its manifest.json was changed after it was written")
        step = check_schema(manifest, ManifestFields)["step"]
    except (SchemaError, RecursionError) as error:
        raise DamagedCheckpoint(f"its manifest.json does not describe a checkpoint ({error})") from None
    if STEP.fullmatch(path.name) and int(path.name[5:]) != step:
        raise DamagedCheckpoint("its manifest.json belongs to a checkpoint of another step")
    return manifest


def check_training(path: Path, manifest: Manifest) -> None:
    """Check that the manifest describes the model and data of a training run.

    Raises:
        ConfigError: it does not.
    """
    try:
        fields = check_schema(manifest, TrainingManifestFields)
        check_tokenizer(fields["data"]["tokenizer"])
        if fields["model_args"]["n_embd"] % fields["model_args"]["n_head"]:
            raise SchemaError("its n_embd is not divisible by its n_head")
    except SchemaError as error:
        raise ConfigError(
            f"{path / 'manifest.json'} does not describe a training run ({error}): use another run or checkpoint"
        ) from None


def list_files(path: Path) -> list[str]:
    """Return the names of the files in a checkpoint's manifest; all files of the directory if there is no manifest.

    Raises:
        ConfigError: the directory was deleted.
    """
    if not is_present(path / "manifest.json"):
        try:
            return list_directory(path)
        except ABSENT:
            raise ConfigError(f"{path} {DELETED}") from None
    return [file["name"] for file in read_manifest(path)["files"]]


def verify_files(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Verify the files of a checkpoint. Rank r of N verifies files r, r + N, r + 2N, ...; by default, verify all files.

    Raises:
        DamagedCheckpoint: a file is missing, or its size or hash differs.
        ConfigError: a file exists, but could not be read. The checkpoint may still be intact.
    """
    for file in manifest["files"][rank::world_size]:
        target = path / file["name"]
        if (size := size_of(target)) is None:
            raise DamagedCheckpoint(f"{file['name']} is missing")
        if size != file["size"]:
            raise DamagedCheckpoint(f"{file['name']} has {size:,} bytes instead of {file['size']:,}")
        try:
            digest = sha256_of(target)
        except ABSENT:
            raise DamagedCheckpoint(f"{file['name']} is missing") from None
        if digest != file["sha256"]:
            raise DamagedCheckpoint(f"the hash of {file['name']} differs from the one in the manifest")
