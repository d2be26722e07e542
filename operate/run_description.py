"""Describe the run of a rank, so that all ranks can be compared before training.

A node with a different learning rate, commit or copy of the data would train without an error, but with wrong results.
Therefore every rank describes its run, and rank 0 compares the descriptions (`operate/agreement.py`). If
they differ, all ranks stop.
"""

import dataclasses
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.dataset import read_identity
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import PACKAGE
from nanoGPT.train_config import TrainConfig

PACKAGES = ("torch", "numpy", "triton")


NOT_COMPARED = ("out_dir",)  # CheckpointDirectory checks with a file that all ranks share this directory


def describe_run(config: TrainConfig, run: Runtime) -> dict[str, Any]:
    """Return a description of this rank's run as JSON types. Each item must be equal on all ranks."""
    return describe_inputs(config) | {
        "the device": run.device.type,
        "the dtype": str(run.dtype).removeprefix("torch."),
        "the weights to start from": describe_starting_point(config.init_from),
    }


def describe_inputs(config: TrainConfig) -> dict[str, Any]:
    """Return a description of a run's flags, data and code as JSON types. It does not change while a run trains."""
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_COMPARED}
    description = {f"--{name}": value for name, value in flags.items()}
    description |= {
        "the trainer": f"{type(config).__module__}.{type(config).__qualname__}",
        "the prepared data": compute_digest(json.dumps(read_identity(config.dataset), sort_keys=True).encode()),
        "the code": digest_code(),
        "the version of python": ".".join(platform.python_version_tuple()[:2]),
    }
    return description | {f"the version of {name}": find_version(name) for name in PACKAGES}


def compute_digest(content: bytes) -> str:
    """Return the first 12 digits of the SHA-256 hash: enough to distinguish two contents, and short enough to print."""
    return hashlib.sha256(content).hexdigest()[:12]


def digest_code(*more: Path) -> str:
    """Return a hash of the source files of the baseline, of all phases and of `more`, including uncommitted changes."""
    folders = [PACKAGE, *sorted(PACKAGE.parent.glob("phase*")), *more]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path.is_file()]
    files += [path for path in [PACKAGE.parent / "train.py"] if path.is_file()]  # of a copy
    sources = [path for path in files if not {"data", "config"} & {*path.relative_to(PACKAGE.parent).parts}]
    return compute_digest(b"".join(path.name.encode() + path.read_bytes() for path in sources))


def describe_starting_point(init_from: str) -> str:
    """Return what must be equal on all ranks: `digest_weights`, or for a run's directory only its path.

    The newest checkpoint of a run that is training may change while the ranks start. Rank 0 chooses it for all ranks.
    """
    return init_from if step_directories(Path(init_from)) else digest_weights(init_from)


def digest_weights(init_from: str) -> str:
    """Return what identifies the weights that a run starts from.

    Returns:
        For a run's directory, the name of its newest checkpoint. For another directory, a hash of the names and
        sizes of its files. Otherwise `init_from` itself.
    """
    folder = Path(init_from)
    if steps := step_directories(folder):
        return steps[0].name
    if not folder.is_dir():
        return init_from
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return compute_digest(json.dumps(files).encode())


def find_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
