"""Compare, before training, what must be the same on all ranks.

A node with another learning rate, another commit or another copy of the data would train without an error, and wrongly.
So every rank describes what it is about to run, and rank 0 compares; whatever differs ends the job on all ranks.
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.dataset import TokenData
from nanoGPT.train_config import PACKAGE, TrainConfig

if TYPE_CHECKING:
    from nanoGPT.distributed.runtime import Runtime

PACKAGES = ("torch", "numpy", "triton")
MAY_DIFFER = ("out_dir",)  # whether all ranks see the same directory is tried with a file in it


def describe_run(config: TrainConfig, data: TokenData, run: "Runtime") -> dict[str, Any]:
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


def find_disagreement(described: list[Mapping[str, Any]]) -> str | None:
    """Compare what the ranks are about to run.

    Args:
        described: of each rank, in rank order; or what keeps a rank from running, as `{"refusal": sentence}`.

    Returns:
        A sentence that names what differs and on which ranks; None where all agree.
    """
    for rank, each in enumerate(described):
        if "refusal" in each:
            return f"rank {rank} cannot start: {each['refusal']}"
    names = list(dict.fromkeys(name for each in described for name in each))
    differences = [name for name in names if any(each.get(name) != described[0].get(name) for each in described)]
    if not differences:
        return None
    parts = [f"{name} is {describe_values([each.get(name) for each in described])}" for name in differences[:3]]
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return f"the ranks do not agree: {'; '.join(parts)}{more}: start every node with the same command, code and data"


def describe_values(values: list[Any]) -> str:
    """Return "1337 on ranks 0, 1 and 7 on ranks 2, 3" for the value of each rank."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    return " and ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        + (", ..." if len(ranks) > 8 else "")
        for value, ranks in by_value.items()
    )
