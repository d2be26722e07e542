"""Check the directory of a run, and lock it against a second run."""

import fcntl
import os
from pathlib import Path

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.distributed.environment import environment_number, name_launcher
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import ABSENT, is_present, retry_reads, unique_name
from nanoGPT.train_config import TrainConfig


def choose_out_dir(config: TrainConfig, package: str) -> str:
    """Return the output directory of a run that no launcher has chosen one for: that of the flags, else a new one.

    The ranks of a node compute the same name without communication, from the process of their agent. If torchrun
    restarts them, they get the same name again. With several nodes, the name contains the number of nodes.
    """
    if config.out_dir != TrainConfig.out_dir or config.init_from == "resume":
        return config.out_dir
    ranks, local_ranks = environment_number("WORLD_SIZE") or 1, environment_number("LOCAL_WORLD_SIZE") or 1
    if local_ranks < ranks:
        return f"{config.out_dir}/{package}-{ranks // local_ranks}nodes"
    return f"{config.out_dir}/{package}-{name_launcher()}"


def enter_out_dir(run: Runtime, config: TrainConfig) -> None:
    """Check the directory of the run, and lock it on rank 0 until this process ends. Collective.

    Raises:
        ConfigError: the run cannot use it, or another run does. Every rank raises it.
    """

    def lock() -> str:
        check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
        run.lock = DirectoryLock(Path(config.out_dir))
        return run.lock.warning

    if warning := run.call_on_rank0(lock):
        run.print0(warning)


def check_out_dir(out_dir: Path, resume: bool) -> None:
    """Check that a run can use out_dir.

    Args:
        out_dir: the run's directory; it is created if it does not exist.
        resume: whether the run resumes from a checkpoint in out_dir.

    Raises:
        ConfigError: out_dir is not writable, there is no checkpoint to resume, a new run would mix its checkpoints
            with existing ones, or another run is writing there.
    """
    checkpoints = step_directories(out_dir)
    if resume and not checkpoints:
        raise ConfigError(f"there is no checkpoint under {out_dir} to resume: give the --out_dir of an earlier run")
    if checkpoints and not resume:
        if is_present(out_dir / ".lock"):
            DirectoryLock(out_dir).close()  # if another run is writing there, this is the better reason
        raise ConfigError(
            f"{out_dir} contains checkpoints up to {checkpoints[0].name}: continue with --init_from=resume, "
            "or choose another --out_dir"
        )
    check_writable(out_dir)


def check_writable(out_dir: Path) -> None:
    """Create a run's directory, and check that it is writable.

    Raises:
        ConfigError: it is not.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        probe = out_dir / unique_name("probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--out_dir={out_dir} is not writable ({error.strerror}): choose a directory that you can write to"
        ) from None


class DirectoryLock:
    """An exclusive lock on a run's directory. The operating system releases it when this process exits or is killed.

    Args:
        out_dir: an existing directory.
        flag: the flag that names the directory, for error messages.

    Attributes:
        warning: a message for the user if the file system does not support locks; else empty.

    Raises:
        ConfigError: another run holds the lock, or the lock file cannot be opened.
    """

    def __init__(self, out_dir: Path, flag: str = "--out_dir") -> None:
        self.out_dir, self.path, self.flag, self.warning = out_dir, out_dir / ".lock", flag, ""
        self._acquire()

    def _acquire(self) -> None:
        try:
            self.file = open(self.path, "a+")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be opened ({error.strerror}): choose another {self.flag}, or ask its owner "
                "for write access"
            ) from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing into {self.out_dir}: wait for it, or choose another {self.flag}"
            ) from None
        except OSError as error:  # such as ENOSYS or ENOLCK on some network and parallel file systems
            self.warning = (
                f"the file system of {self.out_dir} does not support file locks ({error.strerror}): make sure that no "
                "other run writes there"
            )

    def is_ours(self) -> bool:
        """Return whether the lock file in the directory is still the one that this process opened."""
        try:
            current = retry_reads(self.path, lambda: os.stat(self.path))
            return os.path.samestat(current, os.fstat(self.file.fileno()))
        except ABSENT:
            return False

    def ensure_directory(self) -> str | None:
        """Check that the directory still belongs to this run; if it was deleted or moved away, create it again.

        Returns:
            A warning for the user if the directory was created again; else None.

        Raises:
            ConfigError: another run has created a new directory with this name.
        """
        if self.is_ours():
            return None
        if is_present(self.path):
            raise ConfigError(
                f"{self.out_dir} was moved or deleted, and another run has started there: this run wrote nothing into "
                "it; use a separate --out_dir for each run"
            )
        content = self.read()
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self._acquire()
        self.write(content)
        return f"{self.out_dir} was moved or deleted during the run; it was created again for the next checkpoints"

    def write(self, text: str) -> None:
        """Replace the content of the lock file."""
        self.file.truncate(0)
        self.file.write(text)
        self.file.flush()

    def read(self) -> str:
        """Return the content of the lock file. Before the first `write` it is that of the previous run."""
        self.file.seek(0)
        return self.file.read()

    def close(self) -> None:
        """Release the lock."""
        self.file.close()
