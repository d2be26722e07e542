"""The one way in which a benchmark writes its result: `bench/results/<name>-<hardware>.json`."""

import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from nanoGPT.checkpoint.manifest import versions
from nanoGPT.errors import ConfigError
from nanoGPT.metrics.hardware import git_commit, hardware

RESULTS = Path(__file__).resolve().parents[1] / "results"
FORMAT = 1  # of result files; those that say nothing are of the first


def write_result(name: str, device: torch.device, settings: dict[str, Any], samples: dict[str, Any]) -> Path:
    """Write one benchmark's raw samples with everything needed to run it again.

    Args:
        name: of the benchmark, such as "step-overhead".
        device: what it ran on; its hardware's name becomes part of the file's.
        settings: what was measured: sizes, options, commands.
        samples: raw numbers, with their unit in each key.

    Returns:
        The file; an earlier result of the same benchmark on the same hardware is replaced.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", hardware(device).lower()).strip("-")
    result = {
        "format": FORMAT,
        "name": name,
        "hardware": hardware(device),
        "versions": versions(),
        "git_commit": git_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": settings,
        "samples": samples,
    }
    path = RESULTS / f"{name}-{slug}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def read_results(name: str) -> list[dict[str, Any]]:
    """All committed results of a benchmark, one a hardware.

    Raises:
        ConfigError: one of them was written by another version, or is damaged.
    """
    return [read_result(path) for path in sorted(RESULTS.glob(f"{name}-*.json"))]


def read_result(path: Path) -> dict[str, Any]:
    """One result file."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        found, again = result.get("format", 1), result["settings"].get("command", "the benchmark that wrote it")
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no result file ({type(error).__name__}): restore it from git, or measure again"
        ) from None
    if found != FORMAT:
        raise ConfigError(f"{path} has format {found}, and this version reads {FORMAT}: measure again with `{again}`")
    return result


def hardware_of(result: dict[str, Any]) -> str:
    return f"{result['hardware']}, torch {result['versions']['torch']}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
