"""Write and read the result files of benchmarks: `bench/results/<name>-<hardware>.json`."""

import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from nanoGPT.distributed.environment import collect_versions, describe_hardware, read_git_commit
from nanoGPT.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[1] / "results"


def describe_origin(device: torch.device) -> dict[str, Any]:
    """Return the hardware, the versions, the commit and the time of a measurement that is made now."""
    return {
        "hardware": describe_hardware(device),
        "versions": collect_versions(),
        "git_commit": read_git_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_result(name: str, device: torch.device, settings: dict[str, Any], samples: dict[str, Any]) -> Path:
    """Write the raw samples of a benchmark, with everything that is needed to repeat it.

    Args:
        name: name of the benchmark, such as "step-overhead".
        device: the device that was measured; the file name contains its hardware.
        settings: sizes, options and the command of the measurement.
        samples: raw numbers; the keys contain their units.

    Returns:
        The path of the file. It replaces an earlier result of the same benchmark on the same hardware.
    """
    return write_result_of(describe_origin(device), RESULTS, name, settings, samples)


def write_result_of(
    origin: dict[str, Any], folder: Path, name: str, settings: dict[str, Any], samples: dict[str, Any]
) -> Path:
    """Write a result that was measured elsewhere: see `write_result`.

    Args:
        origin: returned by `describe_origin` on the machine that was measured.
        folder: directory of the file.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", origin["hardware"].lower()).strip("-")
    result = {"name": name, **origin, "settings": settings, "samples": samples}
    path = folder / f"{name}-{slug}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def read_results(name: str) -> list[dict[str, Any]]:
    """Return all committed results of a benchmark, one per hardware.

    Raises:
        ConfigError: a file is damaged.
    """
    return [read_result(path) for path in sorted(RESULTS.glob(f"{name}-*.json"))]


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of a result file.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        result = json.loads(path.read_text())
    except ValueError:
        result = None
    if not (isinstance(result, dict) and {"hardware", "versions", "settings", "samples"} <= result.keys()):
        raise ConfigError(f"{path} is not a result file: restore it from git, or measure again")
    return result


def hardware_of(result: dict[str, Any]) -> str:
    return f"{result['hardware']}, torch {result['versions']['torch']}"


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
