"""Find the directory of a run, and read its files. Skip parts that are missing or cut off."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from nanoGPT.errors import ConfigError


def find_newest_run() -> Path:
    """Return the directory under out/ of the run that wrote its log or metrics last.

    Raises:
        ConfigError: there is none.
    """
    files = [path for name in ("log.txt", "metrics.jsonl") for path in Path("out").glob(f"**/{name}")]
    if not files:
        raise ConfigError("there is no run under out/: give RUN=DIRECTORY")
    return max(files, key=lambda path: path.stat().st_mtime).parent


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file is missing or damaged, as while another process replaces it."""
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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line. Lines that were cut off are left out."""
    values = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


def read_by_rank(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the files whose names match a pattern with a rank, such as "rank*.json", by rank."""
    found = {}
    for path in folder.glob(pattern):
        if match := re.fullmatch(pattern.replace(".", r"\.").replace("*", r"(\d+)"), path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last heartbeat of each rank of the newest start of a run. An earlier start may have had more ranks.

    Each start replaces the heartbeat of rank 0. The newest start is that of this heartbeat, even if other files have
    later times, because a clock was wrong.
    """
    files = read_by_rank(folder / "heartbeat", "rank*.json")
    beats = {rank: beat for rank, path in files.items() if "time" in (beat := read_json_object(path))}
    newest = max(beats.values(), key=lambda beat: beat["time"], default={})
    return {rank: beat for rank, beat in beats.items() if beat.get("run") == beats.get(0, newest).get("run")}
