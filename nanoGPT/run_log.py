"""Append to log.txt in a run's directory: when the run started and ended, and which rank failed with which error."""

import contextlib
import time
from pathlib import Path

LOG = "log.txt"


def append_to_log(out_dir: str | Path, source: str, text: str) -> None:
    """Append one line with the time. Lines of several processes do not mix, because each is written at once.

    Args:
        out_dir: the run's directory.
        source: who writes, such as "rank 0" or "launcher".
        text: line breaks are replaced by spaces.
    """
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {source}: {' '.join(text.split())}\n"
    with contextlib.suppress(OSError):  # a full disk must not hide the original error
        with open(Path(out_dir) / LOG, "ab", buffering=0) as file:
            file.write(line.encode("utf-8", "replace"))
