"""Resume a job that torchrun has restarted, and keep other jobs out of its directory."""

import contextlib
import dataclasses
import datetime
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nanoGPT.checkpoint.manifest import read_manifests, step_directories
from nanoGPT.distributed.environment import environment_number, may_restart, read_elastic_job
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, LostConnection
from nanoGPT.out_dir import DirectoryLock, check_out_dir, check_writable
from nanoGPT.parse import load_saved_config, package_of
from nanoGPT.signals import handle_stop_signals
from nanoGPT.train_config import C, TrainConfig

STOP_KEY = "stop"  # in the store of an elastic job: the exit code and the reason
UNFINISHED = 75  # exit code of a rank of an elastic job that must be restarted (EX_TEMPFAIL of sysexits.h)
LOCK_SECONDS = 30.0  # how long an elastic job waits for ranks of its earlier start that still hold the lock
STORE_TIMEOUT = datetime.timedelta(seconds=10)


def choose_free_out_dir(run: Runtime, config: TrainConfig) -> str:
    """Return the run's directory. If the default directory has checkpoints already, return a new one under it.

    This is for plain torchrun: `operate.launch` chooses the directory itself. The ranks of a node compute the same name
    without communication, from the process id of their agent. Multiple nodes cannot, so they keep the default.
    """
    is_default = config.out_dir == TrainConfig.out_dir and config.init_from != "resume"
    if not is_default or may_restart() or run.local_world_size < run.world_size or not step_directories(Path("out")):
        return config.out_dir
    name = f"{config.out_dir}/{package_of(type(config))}-{os.getppid()}"
    out_dir = next(d for d in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not step_directories(Path(d)))
    run.print0(f"{config.out_dir} contains checkpoints of an earlier run: this run writes into {out_dir}")
    return out_dir


def enter_out_dir(run: Runtime, config: TrainConfig) -> DirectoryLock | None:
    """Check and lock the run's directory. If torchrun may restart ranks, `resume_after_restart` checks the checkpoints.

    Returns:
        The lock on rank 0, and None on the other ranks.
    """
    out_dir = Path(config.out_dir)
    if not may_restart():
        check_out_dir(out_dir, resume=config.init_from == "resume")
    elif run.is_main:
        check_writable(out_dir)
    if not run.is_main:
        return None
    run.lock = lock = lock_directory(out_dir)
    if lock.warning:
        run.print0(lock.warning)
    return lock


def lock_directory(out_dir: Path) -> DirectoryLock:
    """Lock a run's directory. An elastic job waits for ranks of its earlier start, on a node that it has lost.

    Raises:
        ConfigError: another run holds the lock.
        LostConnection: ranks of an earlier start of this job hold it after LOCK_SECONDS. The job tries it again.
    """
    job, deadline = read_elastic_job(), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return DirectoryLock(out_dir)
        except ConfigError:
            if not job or not is_lock_of(job[2], out_dir):
                raise
        if time.monotonic() > deadline:
            raise LostConnection(
                f"ranks of an earlier start of this job still write into {out_dir}: stop the processes of the node "
                "that was lost; the job continues then"
            )
        time.sleep(0.5)


def is_lock_of(job: str, out_dir: Path) -> bool:
    """Return whether the lock file of a directory names a job; False if it cannot be read."""
    with contextlib.suppress(OSError):
        return job in (out_dir / ".lock").read_text().splitlines()
    return False


def resume_after_restart(run: Runtime, config: C, lock: DirectoryLock | None) -> C:
    """Share rank 0's token for this start with all ranks; if torchrun has restarted the job, resume it. Collective.

    torchrun repeats the same command, without --init_from=resume. Each elastic agent counts its restarts separately, so
    the job was restarted if any count is not 0. The lock file names the agents of the job that may use the directory
    (or the elastic job itself): checkpoints of another job are refused at every restart, as they were at the start. It
    also has the tokens of the job's starts, each with the resume_step of its command. Only rank 0 reads the directory.

    Args:
        run: this rank's Runtime; its token becomes that of rank 0.
        config: the configuration from the command line.
        lock: the lock on the run's directory on rank 0, None on other ranks.

    Returns:
        The configuration. If the job resumes, it is that of the newest checkpoint, with init_from=resume.

    Raises:
        ConfigError: the directory contains checkpoints of another job, or there is no checkpoint to resume.
    """
    job = read_elastic_job()
    agent = job[2] if job else f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}"
    restarts, resume_step = environment_number("TORCHELASTIC_RESTART_COUNT"), config.resume_step
    tokens, agents, restart_counts = zip(*run.gather((run.token, agent, restarts)), strict=True)
    run.token = tokens[0]
    if may_restart():
        was_restarted = any(restart_counts) or job  # a node that joins restarts the ranks, and is not counted
        saved = run.call_on_rank0(lambda: find_saved_config(agents, lock, config)) if was_restarted else None
        if saved is not None and run.call_on_rank0(partial(has_saved, lock, config)):
            config = dataclasses.replace(config, resume_step=None)  # an earlier start has resumed from it
        if saved is not None and config.init_from != "resume":
            run.print0("torchrun has restarted the job: it resumes from its newest checkpoint")
            values: dict[str, Any] = {**saved, "out_dir": config.out_dir, "init_from": "resume"}
            config = dataclasses.replace(config, **values)
        run.call_on_rank0(partial(check_out_dir, Path(config.out_dir), resume=config.init_from == "resume"))
    if lock:
        with contextlib.nullcontext() if may_restart() else contextlib.suppress(OSError):  # the disk may be full
            lines = lock.read().splitlines()
            earlier_starts = lines if {*agents} & {*lines} else []
            lock.write("\n".join(dict.fromkeys([*agents, *earlier_starts, f"{run.token} {resume_step}"])))
    return config


def has_saved(lock: DirectoryLock | None, config: TrainConfig) -> bool:
    """Return whether a start of this job with this `resume_step` has saved a checkpoint, on rank 0.

    Such a start has set the checkpoints that are newer than `resume_step` aside.
    """
    lines = lock.read().splitlines() if lock else []
    tokens = {line.split()[0] for line in lines if line.endswith(f" {config.resume_step}")}
    return any(manifest.get("run") in tokens for _, manifest in read_manifests(Path(config.out_dir)))


def count_usable_ranks(config: TrainConfig, ranks: int) -> int:
    """Return the largest number of ranks, up to `ranks`, that divides `gradient_accumulation_steps`."""
    return max(n for n in range(1, ranks + 1) if config.gradient_accumulation_steps % n == 0)


def exclude_spare_ranks(config: TrainConfig) -> None:
    """Exclude the spare ranks of an elastic job: set WORLD_SIZE and LOCAL_WORLD_SIZE to the ranks that train.

    A spare rank does not return from this function. It waits until the job ends, or until the agent restarts all ranks
    because the number of nodes has changed.
    """
    if read_elastic_job() is None:
        return
    rank, ranks = environment_number("RANK"), environment_number("WORLD_SIZE")
    local_rank, local_ranks = environment_number("LOCAL_RANK"), environment_number("LOCAL_WORLD_SIZE")
    usable = count_usable_ranks(config, ranks)
    if rank < usable:
        first_rank = rank - local_rank
        os.environ |= {"WORLD_SIZE": str(usable), "LOCAL_WORLD_SIZE": str(min(local_ranks, usable - first_rank))}
        return
    print(f"rank {rank} is spare: {usable} of {ranks} ranks train", flush=True)
    handle_stop_signals(lambda *_: os._exit(UNFINISHED))
    agent = os.getppid()
    while not has_finished(config):
        time.sleep(1.0)
        if os.getppid() != agent:
            os._exit(UNFINISHED)
    os._exit(0)


def has_finished(config: TrainConfig) -> bool:
    """Return whether the run has completed all its steps."""
    return any(path.name == f"step-{config.max_iters:08d}" for path in step_directories(Path(config.out_dir)))


def exit_code_of_success(config: TrainConfig) -> int:
    """Return the exit code of a rank that ends without an error: 0, but in an elastic job only if it has finished.

    The elastic agents restart ranks with another exit code. If they got 0, they would end the job on their node.
    """
    return UNFINISHED if read_elastic_job() and not has_finished(config) else 0


def stop_elastic_job(code: int, reason: str) -> None:
    """Stop an elastic job on all nodes, because a restart would fail in the same way. Do nothing for other jobs."""
    with contextlib.suppress(ConfigError, dist.DistError):
        if job := read_elastic_job():
            connect_to_store(job).set(f"{job[2]} {STOP_KEY}", f"{code} {reason}")


def connect_to_store(job: tuple[str, int, str]) -> dist.TCPStore:
    """Return a connection to the store of an elastic job."""
    return dist.TCPStore(job[0], job[1], None, is_master=False, timeout=STORE_TIMEOUT)


def find_saved_config(
    agents: tuple[str, ...], lock: DirectoryLock | None, config: TrainConfig
) -> dict[str, object] | None:
    """Return the configuration in the newest checkpoint, on rank 0.

    Returns:
        None if there is no checkpoint, or if the lock file names none of these agents.
    """
    if not lock or not step_directories(Path(config.out_dir)):
        return None
    return load_saved_config(type(config), config.out_dir) if {*agents} & {*lock.read().splitlines()} else None
