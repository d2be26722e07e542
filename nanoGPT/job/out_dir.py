"""The directory of a run: whether it can be used, and the lock that keeps a second run out of it."""

import fcntl
import os
from pathlib import Path

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, is_present, retry_reads, unique_name


def check_out_dir(out_dir: Path, resume: bool) -> None:
    """Refuse an out_dir that cannot be written, that has nothing to resume, or whose checkpoints are in the way.

    Raises:
        ConfigError: one sentence that says which, and what to do.
    """
    found = step_directories(out_dir)
    if resume and not found:
        raise ConfigError(f"there is no checkpoint under {out_dir} to resume: give the --out_dir of an earlier run")
    if found and not resume:
        raise ConfigError(
            f"{out_dir} holds checkpoints up to {found[0].name}: continue with --init_from=resume, "
            "or choose another --out_dir"
        )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        probe = out_dir / unique_name("probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--out_dir={out_dir} cannot be written ({error.strerror}): choose a directory of yours"
        ) from None


class DirectoryLock:
    """An exclusive lock on a run's directory, which ends with this process, however that ends.

    Args:
        out_dir: an existing directory.

    Attributes:
        warning: a sentence for the user where the file system has no locks; else empty.

    Raises:
        ConfigError: another run holds the lock, or its file cannot be opened.
    """

    def __init__(self, out_dir: Path) -> None:
        self.out_dir, self.path, self.warning = out_dir, out_dir / ".lock", ""
        self._acquire()

    def _acquire(self) -> None:
        try:
            self.file = open(self.path, "a+")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be opened ({error.strerror}): choose another --out_dir, or ask the owner of this "
                "one for write access"
            ) from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing into {self.out_dir}: wait for it, or choose another --out_dir"
            ) from None
        except OSError as error:  # such as ENOSYS or ENOLCK of some network and parallel file systems
            self.warning = (
                f"the file system of {self.out_dir} has no file locks ({error.strerror}): make sure that no other run "
                "writes there"
            )

    def is_ours(self) -> bool:
        """Return whether the lock file in the directory is still the one that this process opened."""
        try:
            found = retry_reads(self.path, lambda: os.stat(self.path))
            return os.path.samestat(found, os.fstat(self.file.fileno()))
        except ABSENT:
            return False

    def keep(self) -> str | None:
        """Check that the directory still belongs to this run; if it was deleted or moved away, create it again.

        Returns:
            A sentence for the user if it was created again; else None.

        Raises:
            ConfigError: another run has started in a new directory of this name.
        """
        if self.is_ours():
            return None
        if is_present(self.path):
            raise ConfigError(
                f"{self.out_dir} was moved or deleted, and another run has started there: nothing was written into it; "
                "give each run an --out_dir of its own"
            )
        text = self.read()
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self._acquire()
        self.write(text)
        return f"{self.out_dir} was moved or deleted during the run: it was created again for the next checkpoints"

    def write(self, text: str) -> None:
        """Replace what the lock file says."""
        self.file.truncate(0)
        self.file.write(text)
        self.file.flush()

    def read(self) -> str:
        """Return what the lock file says: that of the run before, until `write`."""
        self.file.seek(0)
        return self.file.read()

    def close(self) -> None:
        """Release the lock."""
        self.file.close()
