"""Train on a number of nodes that may change: if a node dies or joins, the job continues with the nodes there are.

    make rendezvous PORT=29400                                                # once, on a machine that stays up
    make elastic PHASE=phase3 GPUS=8 NODES=1:4 STORE=10.0.0.1:29400 ARGS=--out_dir=/shared/run      # on each node

The nodes meet through a key-value store. It runs in its own process (`make rendezvous`), so that it does not die with a
node. torch's elastic agent starts the ranks on each node. If a node dies, the agents of the other nodes start the ranks
again, which resume from the newest checkpoint. If a node joins, or leaves after SIGTERM, the ranks first save, so that
no step is lost. The global batch is fixed, so the loss curve does not depend on the number of ranks. If it does not
divide the micro-batches, the ranks beyond the largest number that does are spare: they wait.

A rank that fails with an error that a restart would repeat (an invalid configuration, or a loss that is not finite)
stops the job on all nodes.
"""

import datetime
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.distributed.environment import ELASTIC_VARIABLE, port_number
from nanoGPT.distributed.process_group import is_served
from nanoGPT.errors import ConfigError
from nanoGPT.job.elastic import STOP_KEY, usable_ranks
from nanoGPT.job.log import append_to_log
from nanoGPT.job.parse import parse
from nanoGPT.job.preflight import preflight
from nanoGPT.launch import (
    config_to_env,
    find_root_cause,
    forward_signals,
    has_finished,
    list_rank_processes,
    load_trainer,
    split_arguments,
)
from nanoGPT.train_config import TrainConfig

ROUND_KEY = "round"  # number of the agents' rendezvous; a new one begins after a stop in which all ranks saved
LAST_CALL_SECONDS = 3  # how long a rendezvous waits for more nodes, once it has enough
KEEP_ALIVE_SECONDS, KEEP_ALIVE_ATTEMPTS = 1, 5  # a node that is silent for the product of both counts as lost
MAX_RESTARTS = 10**6  # of the ranks; a job without progress is stopped by STOP_KEY or by the user
TIMEOUT = datetime.timedelta(seconds=30)  # of a request to the store


@dataclass
class ElasticConfig:
    """Command-line options of `make elastic`. The trainer and its flags follow them."""

    gpus: int = 1
    """ranks on this node: one per GPU, or this number of processes on the CPU"""
    nodes: str = "1:1"
    """smallest and largest number of nodes, such as 1:4"""
    store: str = "127.0.0.1:29400"
    """host and port of the store that `make rendezvous` serves"""

    def node_range(self) -> tuple[int, int]:
        """Return the smallest and the largest number of nodes.

        Raises:
            ConfigError: they are not two numbers, from 1 upward.
        """
        low, _, high = self.nodes.partition(":")
        if not (low.isdigit() and (high or low).isdigit()) or not 1 <= int(low) <= int(high or low):
            raise ConfigError(f"NODES={self.nodes} is invalid: give the smallest and the largest number, such as 1:4")
        return int(low), int(high or low)

    def address(self) -> tuple[str, int]:
        """Return the host and the port of the store.

        Raises:
            ConfigError: the text has no port.
        """
        host, _, port = self.store.rpartition(":")
        if not host:
            raise ConfigError(f"STORE={self.store} has no port: write HOST:PORT, such as 10.0.0.1:29400")
        return host, port_number(port)


def serve(port: int = 29400) -> None:
    """Serve the store of elastic jobs until this process is stopped.

    Args:
        port: on which the nodes connect.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"PORT={port} is not a port: use a number from 1 to 65535")
    if is_served("127.0.0.1", port):
        raise ConfigError(f"port {port} is in use: give another PORT")
    store = dist.TCPStore("0.0.0.0", port, None, is_master=True, wait_for_workers=False)
    print(
        f"serving the rendezvous on port {store.port}; start nodes with STORE={socket.gethostname()}:{port}", flush=True
    )
    threading.Event().wait()


def connect(host: str, port: int) -> dist.TCPStore:
    """Connect to the store.

    Raises:
        ConfigError: no process serves it.
    """
    if not is_served(host, port):
        raise ConfigError(f"STORE={host}:{port} does not answer: start `make rendezvous PORT={port}` on {host} first")
    return dist.TCPStore(host, port, None, is_master=False, timeout=TIMEOUT)


def lost_store(host: str, port: int) -> str:
    """Return the message for a store that has died."""
    return f"the store at {host}:{port} is lost: start `make rendezvous` again, and the nodes with --init_from=resume"


def name_job(store: dist.TCPStore, out_dir: str) -> str:
    """Return the name of the job: its directory, and a random token that the first node of the job puts into the store.

    The checkpoints in the directory belong to this name. A node that joins later gets the same name. A job with a new
    store gets another one, so that it does not continue the checkpoints of an earlier job by mistake.
    """
    name = str(Path(out_dir).resolve()).replace("/", "-")
    return f"{name}-{store.compare_set(f'{name} token', '', os.urandom(4).hex()).decode()}"


class StoreWatch:
    """A thread that ends this node if the job has been stopped, or if the store is lost.

    Args:
        host, port: of the store.
        key: STOP_KEY of the job.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self.host, self.port, self.key = host, port, key
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            store = connect(self.host, self.port)
            while not store.check([self.key]):
                time.sleep(1)
            code, _, reason = store.get(self.key).decode().partition(" ")
            self._end(int(code), f"the job was stopped: {reason}")
        except (dist.DistError, ConfigError):
            self._end(1, lost_store(self.host, self.port))

    def _end(self, code: int, message: str) -> None:
        """Kill the ranks of this node, and exit."""
        print(f"error: {message}", file=sys.stderr, flush=True)
        for pid in list_rank_processes():
            os.kill(pid, signal.SIGKILL)
        os._exit(code)


def leave_after_signal(received_signals: list[int]) -> None:
    """Exit if the agent starts new ranks after this node was asked to leave, because another node joined meanwhile.

    The ranks that ran when the signal arrived have saved, so nothing is lost.
    """
    while not received_signals:
        time.sleep(0.2)
    ranks = set(list_rank_processes())
    while not (new_ranks := set(list_rank_processes()) - ranks):
        time.sleep(0.2)
    for pid in new_ranks:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def launch_config(config: ElasticConfig, job: str, round_number: int, logs: str) -> LaunchConfig:
    """Return the settings of torch's elastic agent for one round of the job."""
    low, high = config.node_range()
    return LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=config.gpus,
        logs_specs=DefaultLogsSpecs(logs),
        run_id=f"{job}-{round_number}",
        rdzv_backend="c10d",
        rdzv_endpoint=config.store,
        rdzv_configs={
            "is_host": "0",
            "last_call_timeout": LAST_CALL_SECONDS,
            "keep_alive_interval": KEEP_ALIVE_SECONDS,
            "keep_alive_max_attempt": KEEP_ALIVE_ATTEMPTS,
        },
        max_restarts=MAX_RESTARTS,
        monitor_interval=0.5,
        signals_to_handle="SIGQUIT",
    )


def run_rounds(elastic: ElasticConfig, command: list[str], config: TrainConfig) -> int:
    """Take part in the job until it has finished, or until this node is stopped. Return the exit code."""
    host, port = elastic.address()
    store = connect(host, port)
    job = name_job(store, config.out_dir)
    os.environ |= {"OMP_NUM_THREADS": "1", **os.environ, **config_to_env(config)}
    os.environ[ELASTIC_VARIABLE] = f"{elastic.store} {job}"
    # Without this setting, a node that joins waits for an address that the first node published in an earlier round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if store.check([f"{job} {STOP_KEY}"]):
        store.delete_key(f"{job} {STOP_KEY}")  # of an earlier start of this job
    StoreWatch(host, port, f"{job} {STOP_KEY}")
    received_signals: list[int] = []
    forward_signals(received_signals)
    threading.Thread(target=leave_after_signal, args=(received_signals,), daemon=True).start()
    while True:
        round_number = store.add(f"{job} {ROUND_KEY}", 0)
        with tempfile.TemporaryDirectory(prefix="nanogpt-", ignore_cleanup_errors=True) as logs:
            try:
                elastic_launch(launch_config(elastic, job, round_number, logs), sys.executable)(*command)
            except ChildFailedError as error:
                rank, failure = find_root_cause(error.failures)
                print(f"error: rank {rank}: {failure.message}", file=sys.stderr)
                return failure.exitcode if failure.exitcode > 0 else 1
            except (RendezvousError, dist.DistError):  # a node left while this one joined, or the store is lost
                if not is_served(host, port):
                    raise ConfigError(lost_store(host, port)) from None
        if has_finished(config):
            return 0
        store.compare_set(f"{job} {ROUND_KEY}", str(round_number), str(round_number + 1))  # the first node does it
        if received_signals:
            return 0
        append_to_log(config.out_dir, f"node {socket.gethostname()}", "a node has left: the job continues without it")


def main(arguments: list[str]) -> int:
    """Check the configuration, and take part in the job as one node. Return the exit code."""
    arguments, trainer, trainer_arguments = split_arguments(arguments)
    elastic = command_line(ElasticConfig, arguments)
    _, max_nodes = elastic.node_range()
    elastic.address()
    config_class: type[TrainConfig] = load_trainer(trainer).Config
    config = parse(config_class, trainer_arguments, trainer)
    if config.out_dir == TrainConfig.out_dir:
        raise ConfigError("an elastic job needs --out_dir: give a directory that all nodes share")
    for ranks in range(1, max_nodes + 1):
        preflight(config, usable_ranks(config, ranks * elastic.gpus), elastic.gpus)
    return run_rounds(elastic, [str(trainer), *trainer_arguments], config)


if __name__ == "__main__":
    with report_errors():
        if sys.argv[1:2] == ["serve"]:
            command_line(serve, sys.argv[2:])
        code = main(sys.argv[1:])
    os._exit(code)
