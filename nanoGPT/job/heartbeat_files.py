"""Read and write the JSON files of a run, such as the heartbeats, which other processes read while they are written."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file, without waiting for the disk. Create its directory at the first write, or if it was deleted.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    text = json.dumps(content) + "\n"
    try:
        temporary.write_text(text)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        temporary.write_text(text)
    os.replace(temporary, path)
