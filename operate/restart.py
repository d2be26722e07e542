"""Resume a job that torchrun has restarted, exclude the spare ranks of an elastic job, and stop with the launcher."""

import contextlib
import datetime
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nanoGPT.checkpoint.manifest import read_manifests, step_directories
from nanoGPT.distributed.environment import environment_number, name_launcher
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, LostConnection, NonFiniteLoss
from nanoGPT.files import lock_directory
from nanoGPT.job.parse import load_saved_config
from nanoGPT.job.start import handle_stop_signals
from nanoGPT.train_config import TrainConfig
from operate.store import port_number
from operate.watchdog import is_alive

ELASTIC_VARIABLE = "NANOGPT_ELASTIC"  # set by `make elastic`: the address of its store, and the name of the job
STOP_KEY = "stop"  # in the store of an elastic job: the exit code and the reason
UNFINISHED = 75  # exit code of a rank of an elastic job that must be restarted (EX_TEMPFAIL of sysexits.h)
LOCK_SECONDS = 30.0  # how long an elastic job waits for ranks of its earlier start that still hold the lock
STORE_TIMEOUT = datetime.timedelta(seconds=10)


def read_elastic_job() -> tuple[str, int, str] | None:
    """Return the host and the port of an elastic job's store, and the name of the job; None for other jobs.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    address, _, job = os.environ.get(ELASTIC_VARIABLE, "").partition(" ")
    host, _, port = address.rpartition(":")
    return (host, port_number(port, ELASTIC_VARIABLE), job) if job else None


def name_job() -> str:
    """Return the name of the elastic job, or of the agent of torchrun that has started this rank."""
    job = read_elastic_job()
    return job[2] if job else f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {name_launcher()}"


def read_job_lines(out_dir: Path, names: list[str]) -> list[str]:
    """Return the lines of a directory's lock file if they name one of these jobs or agents, else an empty list.

    The lines are the agents of the job that uses the directory, or the elastic job, and the tokens of its starts.
    """
    with contextlib.suppress(OSError):
        lines = (out_dir / ".lock").read_text().splitlines()
        return lines if {*lines} & {*names} else []
    return []


def resume_after_restart(run: Runtime, config: TrainConfig) -> None:
    """Change the configuration, so that the job continues if torchrun has restarted it. Collective.

    torchrun repeats the same command, without --init_from=resume. Checkpoints of another job in the same directory are
    refused at every restart, as they were at the start: the lock file names the job that may use the directory. Only
    rank 0 reads the directory.

    Args:
        run: this rank's Runtime.
        config: changed in place, on every rank in the same way.

    Raises:
        LostConnection: ranks of an earlier start of this job still write into the directory.
    """
    if environment_number("TORCHELASTIC_MAX_RESTARTS") == 0:
        return
    out_dir, names = Path(config.out_dir), run.gather(name_job())
    if run.is_main and read_job_lines(out_dir, names):
        wait_for_lock(out_dir)  # not in call_on_rank0, which would turn LostConnection into another ConfigError

    def find_changes() -> dict[str, Any]:
        lines = read_job_lines(out_dir, names)
        if not lines or not step_directories(out_dir):
            return {}
        has_saved = any(manifest.get("run") in lines for _, manifest in read_manifests(out_dir))
        changes: dict[str, Any] = {"resume_step": None} if has_saved else {}  # an earlier start has resumed from it
        if config.init_from != "resume":
            print("torchrun has restarted the job: it resumes from its newest checkpoint", flush=True)
            changes |= load_saved_config(type(config), config.out_dir) | {"init_from": "resume"}
        return changes

    vars(config).update(run.call_on_rank0(find_changes))


def wait_for_lock(out_dir: Path) -> None:
    """Wait until ranks of an earlier start of this job, on a node that was lost, have released the directory.

    Raises:
        LostConnection: they have not after LOCK_SECONDS. An elastic job tries it again.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with contextlib.suppress(ConfigError):
            lock_directory(out_dir).close()
            return
        if time.monotonic() > deadline:
            raise LostConnection(
                f"ranks of an earlier start of this job still write into {out_dir}: stop the processes of the node "
                "that was lost; the job continues then"
            )
        time.sleep(0.5)


def record_job(run: Runtime, out_dir: Path) -> None:
    """Write into the lock file which job uses the directory, for `resume_after_restart`. Collective."""
    names = run.gather(name_job())
    if run.lock:
        with contextlib.suppress(OSError):  # the disk may be full
            lines = dict.fromkeys([*names, *read_job_lines(out_dir, names), run.token])  # before the file is emptied
            run.lock.truncate(0)
            run.lock.write("\n".join(lines))
            run.lock.flush()


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


def end_elastic_job(config: TrainConfig, error: BaseException | None) -> None:
    """End this rank's part in an elastic job, when its training has ended. Do nothing for other jobs.

    The elastic agents restart ranks that exit with another code than 0. After 0, they would end the job on their node.
    An error that a restart would repeat stops the job on all nodes.
    """
    if (job := read_elastic_job()) is None:
        return
    if error is None and not has_finished(config):
        raise SystemExit(UNFINISHED)
    if isinstance(error, ConfigError | NonFiniteLoss) and not isinstance(error, LostConnection):
        with contextlib.suppress(dist.DistError):
            store = dist.TCPStore(job[0], job[1], None, is_master=False, timeout=STORE_TIMEOUT)
            store.set(f"{job[2]} {STOP_KEY}", f"{error.exit_code} {error}")


def stop_with_launcher(launcher: int) -> None:
    """Stop this process when its launcher has exited: a launcher that is killed must not leave ranks behind.

    A run that has begun saves first, as after SIGTERM. A rank of an elastic job exits at once, because the other nodes
    start new ranks.
    """
    while os.getppid() == launcher:
        time.sleep(0.5)
    if read_elastic_job():
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)


def watch_launcher() -> None:
    """Start a thread that stops this process when its launcher has exited, if a launcher has started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "NANOGPT_PARENT" in os.environ:
        launcher = int(os.environ.get("NANOGPT_LAUNCHER") or os.environ.get("NANOGPT_PARENT") or os.getppid())
        # A launcher that was killed while this process imported torch is no longer the parent.
        parent = os.getppid() if is_alive(launcher) else launcher
        threading.Thread(target=stop_with_launcher, args=(parent,), daemon=True).start()
