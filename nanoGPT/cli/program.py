"""Standard output and standard error that cannot end a run.

A terminal may be closed, `| head` may exit, a log's disk may fill up, `| less` may stop reading. A training run goes on
through all of these, or saves and ends if it was asked to: what cannot be printed is dropped.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import IO

from nanoGPT.errors import ConfigError

PATIENCE = 10.0  # seconds to wait for a reader that has stopped reading


class DroppingFile(io.FileIO):
    """A file descriptor whose writes always succeed; what it does not take is dropped.

    A write of `select.PIPE_BUF` bytes does not block where `select` reports the descriptor as writable. While nobody
    reads, only the first write waits.
    """

    patience = PATIENCE

    def write(self, data: "memoryview | bytes") -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            for start in range(0, len(view), select.PIPE_BUF):
                if not self._wait():
                    break
                super().write(view[start : start + select.PIPE_BUF])
        return len(view)

    def _wait(self) -> bool:
        """Return whether somebody reads within `patience`."""
        is_ready = bool(select.select([], [self], [], self.patience)[1])
        self.patience = PATIENCE if is_ready else 0.0
        return is_ready


def dropping_stream(stream: IO[str] | None, descriptor: int) -> IO[str]:
    """Return a text stream on a descriptor that never raises: not for a closed reader, a full disk or an encoding."""
    if stream is None:  # the descriptor was closed when Python started, and may belong to another file by now
        keep_open(descriptor)
        return open(os.devnull, "w")
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    raw = io.BufferedWriter(DroppingFile(descriptor, "w", closefd=False))  # type: ignore[type-var]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def keep_open(descriptor: int) -> None:
    """Let a closed descriptor lead to /dev/null, so that no file that is opened later becomes the standard output."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)


def is_descriptor(stream: IO[str] | None, descriptor: int) -> bool:
    """Return whether a stream writes to this descriptor; a test's or a notebook's own stream does not."""
    try:
        return stream is None or stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` with streams that drop what they cannot write."""
    before = sys.stdout, sys.stderr
    if is_descriptor(sys.stdout, 1):
        sys.stdout = dropping_stream(sys.stdout, 1)
    if is_descriptor(sys.stderr, 2):
        sys.stderr = dropping_stream(sys.stderr, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def report_errors(output_is_optional: bool = True) -> Iterator[None]:
    """Wrap a program: a ConfigError, or a full or read-only disk, becomes one sentence and exit code 2.

    KeyboardInterrupt is passed on; where nothing catches it, Python ends with its own exit code, 130, and one word.

    Args:
        output_is_optional: the program goes on when its output cannot be printed any more.
    """
    with unbreakable_output() if output_is_optional else contextlib.nullcontext():
        try:
            yield
        except (ConfigError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.excepthook = lambda *_: print("\nstopped", file=sys.stderr)
            raise
