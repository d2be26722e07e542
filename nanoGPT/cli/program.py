"""Output streams that never stop a run, and error reports of programs.

Printing can fail: a terminal is closed, `| head` exits, `| less` stops reading, or the disk of a log file is full. A
training run continues in each of these cases, and output that cannot be printed is dropped.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import IO

from nanoGPT.errors import ConfigError

READER_TIMEOUT = 10.0  # seconds to wait for a reader that has stopped reading


class DroppingFile(io.FileIO):
    """A file whose writes always succeed. Data that cannot be written is dropped.

    If the reader of a pipe has stopped reading, only the first write waits.
    """

    timeout = READER_TIMEOUT

    def write(self, data: "memoryview | bytes") -> int:  # type: ignore[override]
        """Write data in pieces of `select.PIPE_BUF` bytes, which do not block if the descriptor is writable."""
        view = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            for start in range(0, len(view), select.PIPE_BUF):
                if not self._wait_until_writable():
                    break
                super().write(view[start : start + select.PIPE_BUF])
        return len(view)

    def _wait_until_writable(self) -> bool:
        """Wait up to `timeout` seconds, and return whether the descriptor is writable."""
        is_writable = bool(select.select([], [self], [], self.timeout)[1])
        self.timeout = READER_TIMEOUT if is_writable else 0.0
        return is_writable


def open_dropping_stream(stream: IO[str] | None, descriptor: int) -> IO[str]:
    """Return a text stream on a descriptor that never raises: not for a closed reader, a full disk or an encoding.

    Args:
        stream: the stream to replace; None if the descriptor was closed when Python started.
        descriptor: the file descriptor.
    """
    if stream is None:  # another file may use the descriptor now, so do not write to it
        reserve_descriptor(descriptor)
        return open(os.devnull, "w")
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    raw = io.BufferedWriter(DroppingFile(descriptor, "w", closefd=False))  # type: ignore[type-var]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def reserve_descriptor(descriptor: int) -> None:
    """Open /dev/null on a descriptor that is closed.

    Otherwise the next file that is opened would get the number of standard output or standard error.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        null_descriptor = os.open(os.devnull, os.O_RDWR)
        if null_descriptor != descriptor:
            os.dup2(null_descriptor, descriptor)
            os.close(null_descriptor)
        os.set_inheritable(descriptor, True)


def has_descriptor(stream: IO[str] | None, descriptor: int) -> bool:
    """Return whether a stream writes to this descriptor. The streams of pytest and Jupyter do not."""
    try:
        return stream is None or stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` with streams that drop what they cannot write."""
    original_streams = sys.stdout, sys.stderr
    if has_descriptor(sys.stdout, 1):
        sys.stdout = open_dropping_stream(sys.stdout, 1)
    if has_descriptor(sys.stderr, 2):
        sys.stderr = open_dropping_stream(sys.stderr, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
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
