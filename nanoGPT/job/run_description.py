"""Describe what a rank is about to run, so that ranks can be compared before training.

A node with another learning rate, another commit or another copy of the data would train without an error, and wrongly.
So every rank describes what it is about to run, and rank 0 compares (`nanoGPT/distributed/agreement.py`); whatever
differs ends the job on all ranks.
"""

import dataclasses
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import PACKAGE
from nanoGPT.train_config import TrainConfig

PACKAGES = ("torch", "numpy", "triton")


MAY_DIFFER = ("out_dir",)  # whether all ranks see the same directory is tried with a file in it


def describe_run(config: TrainConfig, data: TokenData, run: Runtime) -> dict[str, Any]:
    """Return what this rank is about to run, as JSON's types: each item must be the same on all ranks."""
    described = {f"--{name}": value for name, value in dataclasses.asdict(config).items() if name not in MAY_DIFFER}
    described |= {
        "the trainer": f"{type(config).__module__}.{type(config).__qualname__}",
        "the device": run.device.type,
        "the dtype": str(run.dtype).removeprefix("torch."),
        "the prepared data": digest(json.dumps(data.identity, sort_keys=True).encode()),
        "the code": code_digest(),
        "the weights to start from": weights_digest(config.init_from),
        "the version of python": ".".join(platform.python_version_tuple()[:2]),
    }
    return described | {f"the version of {name}": version_of(name) for name in PACKAGES}


def digest(content: bytes) -> str:
    """Return the first 12 digits of a sha256: enough to tell two contents apart, and to print."""
    return hashlib.sha256(content).hexdigest()[:12]


def code_digest() -> str:
    """Return a digest of the source files of the baseline and of all phases, committed or not."""
    folders = [PACKAGE, *sorted(PACKAGE.parent.glob("phase*"))]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path.is_file()]
    code = [path for path in files if not {"data", "config"} & {*path.relative_to(PACKAGE.parent).parts}]
    return digest(b"".join(path.name.encode() + path.read_bytes() for path in code))


def weights_digest(init_from: str) -> str:
    """Return a digest of the names and sizes of the files in a directory of weights, or the newest step of a run that
    may be training; the name of anything else."""
    folder = Path(init_from)
    if steps := step_directories(folder):
        return steps[0].name
    if not folder.is_dir():
        return init_from
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return digest(json.dumps(files).encode())


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
