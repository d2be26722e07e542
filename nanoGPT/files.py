"""Read, check and write files on file systems that may fail.

A read error is retried, and never taken for a missing file.
Only a path that leads nowhere means that a file is absent. Any other error, such as EIO or ESTALE
from a network file system, is retried for a few seconds and then ends the program with one sentence. Files are opened
without blocking, so that a FIFO in the place of a file cannot hang a run.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeVar

from nanoGPT.errors import ConfigError
from nanoGPT.schema import Malformed, check_schema

PACKAGE = Path(__file__).resolve().parent
DATA = PACKAGE / "data"
DOWNLOADS = DATA / ".downloads"
ABSENT = (FileNotFoundError, NotADirectoryError)
FINAL = (*ABSENT, PermissionError, IsADirectoryError)  # waiting does not help
WAITS = (0.1, 0.5, 2.0)  # seconds before the second, third and fourth try
LARGEST_DOCUMENT = 256 << 20  # bytes of a JSON or TOML document

T = TypeVar("T")


class NotAFile(ValueError):
    """There is something at the path, but it is no regular file, or it is too large to be a document."""


def retry_reads(path: Path, read: Callable[[], T]) -> T:
    """Call `read`, and call it again after a transient error.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        ConfigError: the path could not be read; nothing was changed.
    """
    for wait in (*WAITS, None):
        try:
            return read()
        except ABSENT:
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # there cannot be such a file
                raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
            if wait is None or isinstance(error, FINAL) or error.errno == errno.ELOOP:
                raise ConfigError(
                    f"{path} cannot be read ({error.strerror}): nothing was changed; check the file system and its "
                    "permissions, then run the same command again",
                    on_one_rank=True,
                ) from None
            time.sleep(wait)
    raise AssertionError("the last try either returns or raises")


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered. A FIFO, a device or a directory is refused without blocking.

    Raises:
        NotAFile: the path is something else.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile(f"{path.name} is not a regular file")
    return open(descriptor, "rb", buffering=0)


def read_document(path: Path) -> str:
    """Return the text of a JSON or TOML file.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        NotAFile: it is not a regular file, or larger than any document of this project.
        UnicodeDecodeError: it is not UTF-8.
        ConfigError: it could not be read.
    """

    def read() -> bytes:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_DOCUMENT:
                raise NotAFile(f"{path.name} is larger than {LARGEST_DOCUMENT >> 20} MiB")
            return file.readall()

    return retry_reads(path, read).decode()


def read_json(path: Path, schema: type[T]) -> T:
    """Read a JSON file of a known form.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        Malformed: it is no regular file, no JSON, or has another form.
        ConfigError: it could not be read.
    """
    try:
        return check_schema(json.loads(read_document(path)), schema)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    except ValueError as error:  # no file, no UTF-8 or no JSON
        raise Malformed(str(error)) from None


def size_of(path: Path) -> int | None:
    """Return a regular file's size in bytes; None if it is absent or not a regular file.

    Raises:
        ConfigError: the file system gave another error.
    """
    try:
        found = retry_reads(path, lambda: os.stat(path))
    except ABSENT:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_present(path: Path) -> bool:
    """Return whether the path exists, as a file of any kind.

    Raises:
        ConfigError: the file system gave an error other than absence.
    """
    try:
        retry_reads(path, lambda: os.stat(path))
        return True
    except ABSENT:
        return False


def is_directory(path: Path) -> bool:
    """Return whether the path is a directory, or a symbolic link to one.

    Raises:
        ConfigError: the file system gave an error other than absence.
    """
    try:
        return stat.S_ISDIR(retry_reads(path, lambda: os.stat(path)).st_mode)
    except ABSENT:
        return False


def list_directory(path: Path) -> list[str]:
    """Return the names in a directory, unsorted; none if it is absent.

    Raises:
        ConfigError: the file system gave another error.
    """
    try:
        return retry_reads(path, lambda: os.listdir(path))
    except ABSENT:
        return []


def sha256_of(path: Path) -> str:
    """Return a file's sha256 in hexadecimal.

    Raises:
        FileNotFoundError, NotADirectoryError: it is absent.
        NotAFile: it is not a regular file.
        ConfigError: it could not be read.
    """

    def read() -> str:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retry_reads(path, read)


def unique_name(name: str) -> str:
    """Return a hidden temporary name that no other process uses. Process ids repeat across containers and machines."""
    return f".tmp-{os.urandom(8).hex()}-{name}"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside `path`, flush it to the disk and rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(unique_name(path.name))
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a file or a directory tree. Of a symbolic link only the link is deleted.

    Raises:
        OSError: it could not be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
