"""Runs that torchrun restarts: who may use the run's directory, and where a restarted job goes on."""

import contextlib
import dataclasses
import os
import socket
from pathlib import Path

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.distributed.environment import environment_number, may_restart
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.job.out_dir import DirectoryLock, check_out_dir
from nanoGPT.job.parse import saved_config
from nanoGPT.train_config import C, TrainConfig


def enter_out_dir(run: Runtime, config: TrainConfig) -> DirectoryLock | None:
    """Check and lock the run's directory. Where torchrun restarts ranks, `resume_after_restart` judges its checkpoints.

    Returns:
        The lock, on rank 0.
    """
    out_dir = Path(config.out_dir)
    if not may_restart():
        check_out_dir(out_dir, resume=config.init_from == "resume")
    elif run.is_main:
        check_out_dir(out_dir, resume=bool(step_directories(out_dir)))  # whether it can be written
    if not run.is_main:
        return None
    run.lock = lock = DirectoryLock(out_dir)
    if lock.warning:
        run.print0(lock.warning)
    return lock


def resume_after_restart(run: Runtime, config: C, lock: DirectoryLock | None) -> C:
    """Give this start a token that all ranks know; if torchrun has restarted the job, let it resume. Collective.

    torchrun repeats the same command, without --init_from=resume. The count of restarts is each agent's own, so any
    that is not 0 tells. The lock file names the agents of the job that may use the directory: checkpoints of another
    job are refused at every restart, as they were at the start. What rank 0 sees on the disk counts for all.

    Args:
        run: this rank's Runtime, whose token becomes that of rank 0.
        config: of this start's command line.
        lock: on the run's directory; rank 0's.

    Returns:
        The configuration: where the job resumes, that of the newest checkpoint, with init_from=resume.

    Raises:
        ConfigError: checkpoints are in the way, or missing.
    """
    agent = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}"
    count = environment_number("TORCHELASTIC_RESTART_COUNT")
    tokens, agents, counts = zip(*run.gather((run.token, agent, count)), strict=True)
    run.token = tokens[0]
    if may_restart():
        saved = run.gather(saved_by(agents, lock, config) if any(counts) else None)[0]
        if saved is not None and config.init_from != "resume":
            run.print0("torchrun has restarted the job: it goes on from its newest checkpoint")
            config = dataclasses.replace(config, **{**saved, "out_dir": config.out_dir, "init_from": "resume"})
        if refused := run.gather(out_dir_problem(run, config))[0]:
            raise ConfigError(refused)
    if lock:
        with contextlib.nullcontext() if may_restart() else contextlib.suppress(OSError):  # on a full disk
            lock.write("\n".join(agents))
    return config


def saved_by(agents: tuple[str, ...], lock: DirectoryLock | None, config: TrainConfig) -> dict[str, object] | None:
    """The configuration in the newest checkpoint, if there is one and it is of a job of these agents; rank 0 reads."""
    if not lock or not step_directories(Path(config.out_dir)):
        return None
    return saved_config(type(config), config.out_dir) if {*agents} & {*lock.read().splitlines()} else None


def out_dir_problem(run: Runtime, config: TrainConfig) -> str | None:
    """What is wrong with the directory; rank 0 looks."""
    try:
        if run.is_main:
            check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
    except ConfigError as error:
        return str(error)
    return None
