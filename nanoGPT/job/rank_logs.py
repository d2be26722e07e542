"""Copy what each rank prints into logs/rank{r}.txt of the run's directory, while the console shows it as before.

torch's elastic agent copies the lines: it redirects the output of a rank into a temporary file, and reads new lines
from there ten times per second (`tee`, as in `torchrun --tee=3`). It also receives what libraries such as NCCL print.
The progress bar of rank 0 needs a terminal. If there is one, the first rank of the node writes directly to it, and its
output is not copied.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig

FOLDER = "logs"
MARK = "\0"  # around the number of the rank, at the start of each line that torch copies


def copy_output(config: LaunchConfig, logs: str) -> LaunchConfig:
    """Return the settings of an elastic agent that copies the output of its ranks. Use it inside `split_by_rank`.

    Args:
        config: the settings without a copy.
        logs: a temporary directory.
    """
    first = 1 if sys.stderr.isatty() else 0
    specs = DefaultLogsSpecs(logs, tee=dict.fromkeys(range(first, config.nproc_per_node), Std.ALL))
    return dataclasses.replace(config, logs_specs=specs, log_line_prefix_template=f"{MARK}${{rank}}{MARK}")


class RankStream:
    """A text stream that passes on what it gets, and also appends the lines of each rank to the file of that rank.

    Args:
        console: the stream that gets everything, without the marks.
        folder: of the files; None to write none.
    """

    def __init__(self, console: IO[str], folder: Path | None) -> None:
        self.console, self.folder = console, folder
        self.unfinished: set[str] = set()  # ranks whose last line has no end yet

    def write(self, text: str) -> int:
        """Write one line, or a part of a line."""
        if not text.startswith(MARK):
            return self.console.write(text)
        _, rank, line = text.split(MARK, 2)
        self.console.write(line)
        self.console.flush()
        if self.folder:
            self._append(self.folder / f"rank{rank}.txt", rank, line)
        return len(text)

    def _append(self, path: Path, rank: str, line: str) -> None:
        """Append to the file of a rank, with the time at the start of a line."""
        prefix = "" if rank in self.unfinished else time.strftime("%Y-%m-%d %H:%M:%S ")
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(f"{prefix}{line}".encode("utf-8", "replace"))
        (self.unfinished.discard if line.endswith("\n") else self.unfinished.add)(rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)


@contextlib.contextmanager
def split_by_rank(out_dir: str | Path, reads_only: bool = False) -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` of a launcher, to which torch's agent copies the lines of the ranks.

    Args:
        out_dir: the run's directory.
        reads_only: write no files, because the directory belongs to another run.
    """
    folder = None if reads_only else Path(out_dir) / FOLDER
    if folder:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = copies = RankStream(sys.stdout, folder), RankStream(sys.stderr, folder)
    copies[1].unfinished = copies[0].unfinished  # both append to the same files
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
