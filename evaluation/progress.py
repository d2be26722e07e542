"""The files of an evaluation: one line per finished problem, and the result at the end.

    settings.json                         what the answers depend on; another model or prompt is refused
    progress_phase3_<time>.jsonl          one line per finished problem, synchronized to the disk before the next one
    result_phase3_<time>.json             everything, when all problems are finished

A run that was killed continues with the same command: it skips the problems that have a line.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from nanoGPT.errors import ConfigError
from nanoGPT.files import lock_directory, write_atomically

PREFIX = "phase3"
LOCK_SECONDS = 5.0  # how long to wait for the ranks of a run that was killed


class Progress:
    """The progress files in a directory. Use it on rank 0 only.

    Args:
        folder: created if it does not exist.
        settings: what the answers depend on, as JSON types.

    Raises:
        ConfigError: the directory cannot be used, has unreadable files, or holds answers with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = wait_for_lock(folder)
            self.lines = read_lines(folder)
            self._check_settings(settings)
            files = sorted(folder.glob("progress_*.jsonl"))
            self.path = files[-1] if files else folder / f"progress_{self.new_suffix()}.jsonl"
            drop_torn_line(self.path)
            self.file = open(self.path, "ab")
        except OSError as error:
            raise ConfigError(f"--to={folder} cannot be used ({error.strerror}): use another directory") from None

    @staticmethod
    def new_suffix() -> str:
        """Return the phase and the time, which end the names of the files."""
        return f"{PREFIX}_{time.strftime('%Y%m%d-%H%M%S')}"

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / "settings.json"
        if not self.lines or not path.exists():  # there is no answer that the settings could contradict
            write_atomically(path, (json.dumps(settings, indent=1) + "\n").encode())
            return
        try:
            saved = json.loads(path.read_text())
            # A model is compared by its weights, not by its path.
            different = [name for name in settings if name != "model" and saved.get(name) != settings[name]]
        except (ValueError, AttributeError, TypeError):
            raise ConfigError(f"{path} is damaged: use another directory as --to") from None
        if different:
            name = different[0]
            reason = f"with {name} {saved.get(name)!r} instead of {settings[name]!r}"
            if name == "weights":
                reason = f"of {saved.get('model')}, whose weights differ from those of {settings.get('model')}"
            raise ConfigError(f"{self.folder} has answers {reason}: use another directory as --to")

    def add(self, line: dict[str, Any]) -> None:
        """Append the line of a finished problem. When this returns, it is on the disk."""
        try:
            self.file.write(json.dumps(line).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}): free some disk space and repeat the command",
                on_one_rank=True,
            ) from None
        self.lines[line["id"]] = line

    def close(self) -> None:
        """Close the files, and let another run use the directory."""
        self.file.close()
        self.lock.close()


def wait_for_lock(folder: Path) -> TextIO:
    """Lock a directory. Wait a little first: the ranks of a run that was killed exit within a second.

    Raises:
        ConfigError: another run is writing into the directory.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return lock_directory(folder, flag="--to")
        except ConfigError as error:
            if "another run" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def read_lines(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of all progress files in a directory, by the id of the problem. A torn last line is ignored.

    Raises:
        ConfigError: another line is damaged.
    """
    lines: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("progress_*.jsonl")):
        complete, _, _ = path.read_bytes().rpartition(b"\n")
        for number, text in enumerate(complete.splitlines(), start=1):
            try:
                line = json.loads(text)
                lines[line["id"]] = line
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"line {number} of {path} is damaged: remove this line to solve its problem again, or use another "
                    "directory as --to"
                ) from None
    return lines


def drop_torn_line(path: Path) -> None:
    """Truncate a file after its last line break: a kill may have left an incomplete line."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
