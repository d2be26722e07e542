"""Output streams that never stop a run, and error reports of programs.

Printing can fail: a terminal is closed, `| head` exits, or the disk of a log file is full. A training run continues in
each of these cases, and output that cannot be printed is dropped.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import IO

from nanoGPT.errors import ConfigError


class DroppingFile(io.FileIO):
    """A file whose writes always succeed. Data that cannot be written is dropped."""

    def write(self, data: "memoryview | bytes") -> int:  # type: ignore[override]
        """Write data, or drop it if its reader has exited or its disk is full."""
        with contextlib.suppress(OSError):
            if written := super().write(data):
                return written
        return len(memoryview(data).cast("B"))


def open_dropping_stream(stream: IO[str] | None, descriptor: int) -> IO[str] | None:
    """Return a stream that never raises: not for a closed reader, a full disk or an encoding.

    Streams of pytest and Jupyter, which do not write to a file descriptor of the process, are returned as they are.
    """
    try:
        if stream is None or stream.fileno() != descriptor:
            return stream
    except (OSError, ValueError):  # it has no descriptor
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(DroppingFile(descriptor, "w", closefd=False))  # type: ignore[type-var]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` with streams that drop what they cannot write."""
    original_streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = open_dropping_stream(sys.stdout, 1), open_dropping_stream(sys.stderr, 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original_streams


@contextlib.contextmanager
def report_errors(output_is_optional: bool = True) -> Iterator[None]:
    """Wrap a program: print a ConfigError, an OSError or a MemoryError as one sentence, and exit with code 2.

    KeyboardInterrupt is raised again. If it is not caught, the program prints "stopped" and exits with code 130.

    Args:
        output_is_optional: whether the program continues if its output cannot be printed. Characters that the terminal
            cannot show are printed with a backslash in any case.
    """
    if not output_is_optional and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with unbreakable_output() if output_is_optional else contextlib.nullcontext():
        try:
            yield
        except (ConfigError, OSError, MemoryError) as error:
            print(f"error: {str(error) or 'out of memory: use a machine with more memory'}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.excepthook = lambda *_: print("\nstopped", file=sys.stderr)
            raise
