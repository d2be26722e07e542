"""Read, check and write files, and lock directories, on file systems that may fail.

A file counts as absent only if its path does not exist. Any other read error, such as EIO or ESTALE from a network
file system, is retried for a few seconds. If it persists, the program stops with one sentence. Files are opened in
non-blocking mode, so that a FIFO with the name of a file cannot hang a run.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TextIO, TypeVar

from nanoGPT.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent
DATA = PACKAGE / "data"
DOWNLOADS = DATA / ".downloads"
ABSENT = (FileNotFoundError, NotADirectoryError)
PERMANENT_ERRORS = (*ABSENT, PermissionError, IsADirectoryError)  # a retry does not help
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before the second, third and fourth attempt
MAX_DOCUMENT_BYTES = 256 << 20  # of a JSON or TOML document

T = TypeVar("T")


class NotAFile(ValueError):
    """The path exists, but it is not a regular file, or the file is too large."""


def retry_reads(path: Path, read: Callable[[], T]) -> T:
    """Call `read` and return its result; retry after a transient error.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        ConfigError: the path could not be read. Nothing was changed.
    """
    for delay in (*RETRY_DELAYS, None):
        try:
            return read()
        except ABSENT:
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # a file with this name cannot exist
                raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConfigError(
                    f"{path} cannot be opened ({error.strerror}): raise the limit with `ulimit -n 65536`, or use a "
                    "dataset with fewer files",
                    on_one_rank=True,
                ) from None
            if delay is None or isinstance(error, PERMANENT_ERRORS) or error.errno == errno.ELOOP:
                raise ConfigError(
                    f"{path} cannot be read ({error.strerror}): nothing was changed; check the file system and its "
                    "permissions, then run the same command again",
                    on_one_rank=True,
                ) from None
            time.sleep(delay)
    raise AssertionError("the last attempt either returns or raises")


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered. The call never blocks, not even on a FIFO or a device.

    Raises:
        NotAFile: the path is a FIFO, a device or a directory.
        OSError: the file cannot be opened.
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
        NotAFile: the path is not a regular file, or the file is larger than `MAX_DOCUMENT_BYTES`.
        UnicodeDecodeError: the file is not UTF-8.
        ConfigError: the file could not be read.
    """

    def read() -> bytes:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_DOCUMENT_BYTES:
                raise NotAFile(f"{path.name} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
            return file.readall()

    return retry_reads(path, read).decode("utf-8-sig")  # without a byte order mark


def size_of(path: Path) -> int | None:
    """Return the size of a regular file in bytes; None if the path is absent or not a regular file.

    Raises:
        ConfigError: the file system returned another error.
    """
    try:
        status = retry_reads(path, lambda: os.stat(path))
    except ABSENT:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def is_present(path: Path) -> bool:
    """Return whether the path exists. It may be a file of any type, or a directory.

    Raises:
        ConfigError: the file system returned an error other than absence.
    """
    try:
        retry_reads(path, lambda: os.stat(path))
        return True
    except ABSENT:
        return False


def list_directory(path: Path) -> list[str]:
    """Return the names in a directory, unsorted; an empty list if the directory is absent.

    Raises:
        ConfigError: the file system returned another error.
    """
    try:
        return retry_reads(path, lambda: os.listdir(path))
    except ABSENT:
        return []


def sha256_of(path: Path) -> str:
    """Return the hash (SHA-256) of a file in hexadecimal.

    Raises:
        FileNotFoundError, NotADirectoryError: the path is absent.
        NotAFile: the path is not a regular file.
        ConfigError: the file could not be read.
    """

    def read() -> str:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retry_reads(path, read)


def unique_name(name: str) -> str:
    """Return a hidden temporary name that no other process uses."""
    # Random bytes and not the process id: two containers or nodes can have processes with the same id.
    return f".tmp-{os.urandom(8).hex()}-{name}"


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically: a reader sees either the old file or the complete new one.

    The content goes into a temporary file in the same directory, is flushed to the disk, and is then renamed.
    """
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
    """Delete a file, a symbolic link (not its target) or a directory tree.

    Raises:
        OSError: the path could not be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- the lock of a directory


def open_lock_file(folder: Path, flag: str = "--out_dir") -> TextIO:
    """Create a directory if it does not exist, and open its lock file. This shows that the directory is writable.

    Args:
        folder: the directory.
        flag: the flag that names it, for error messages.

    Raises:
        ConfigError: the directory cannot be created, or is not writable.
    """
    path, problem = folder / ".lock", f"{flag}={folder} is not writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # an existing lock file may be writable
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        problem = f"{path} cannot be opened"
        return open(path, "a+")
    except OSError as error:
        raise ConfigError(
            f"{problem} ({error.strerror}): choose another {flag}, or ask its owner for write access"
        ) from None


def lock_directory(folder: Path, flag: str = "--out_dir") -> TextIO:
    """Lock a directory against other runs, or print a warning if its file system does not support locks.

    Args:
        folder, flag: as in `open_lock_file`.

    Returns:
        The lock file. The operating system releases the lock when the file is closed, or when this process ends.

    Raises:
        ConfigError: another run holds the lock, or the lock file cannot be opened.
    """
    file = open_lock_file(folder, flag)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run is writing into {folder}: wait for it, or choose another {flag}") from None
    except OSError as error:  # such as ENOSYS or ENOLCK on some network and parallel file systems
        print(
            f"the file system of {folder} does not support file locks ({error.strerror}): make sure that no other run "
            "writes there",
            flush=True,
        )
    return file


def is_in_place(lock: TextIO) -> bool:
    """Return whether a lock file still has its name, because its directory was neither moved nor deleted."""
    try:
        return os.path.samestat(retry_reads(Path(lock.name), lambda: os.stat(lock.name)), os.fstat(lock.fileno()))
    except ABSENT:
        return False


def ensure_locked_directory(lock: TextIO) -> TextIO:
    """Check that a directory still belongs to this run. If it was moved or deleted, create it again, and lock it.

    Args:
        lock: from `lock_directory`.

    Returns:
        The lock file that is now in the directory.

    Raises:
        ConfigError: another run has created a new directory with this name.
    """
    path = Path(lock.name)
    if is_in_place(lock):
        return lock
    if is_present(path):
        raise ConfigError(
            f"{path.parent} was moved or deleted, and another run has started there: this run wrote nothing into it; "
            "use a separate --out_dir for each run"
        )
    new_lock = lock_directory(path.parent)
    lock.seek(0)
    new_lock.write(lock.read())
    new_lock.flush()
    lock.close()
    print(
        f"{path.parent} was moved or deleted during the run; it was created again for the next checkpoints", flush=True
    )
    return new_lock
