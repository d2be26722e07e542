"""Choose the directory of a run, check it, and lock it against a second run."""

from pathlib import Path

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.distributed.environment import environment_number, name_launcher
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import is_present, lock_directory, open_lock_file
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

    def lock() -> None:
        check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
        run.lock = lock_directory(Path(config.out_dir))

    run.call_on_rank0(lock)


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
            lock_directory(out_dir).close()  # if another run is writing there, this is the better reason
        raise ConfigError(
            f"{out_dir} contains checkpoints up to {checkpoints[0].name}: continue with --init_from=resume, "
            "or choose another --out_dir"
        )
    open_lock_file(out_dir).close()
