"""Train on a number of nodes that may change: if a node dies, joins or leaves, the job continues on the other nodes.

    python -m operate.elastic serve --port=29400                              # once, on a machine that stays up
    make elastic PHASE=phase3 GPUS=8 NODES=1:4 STORE=10.0.0.1:29400 ARGS=--out_dir=/shared/run      # on each node

The nodes meet through a key-value store. It runs in its own process, so that it does not die with a node. torch's
elastic agent starts the ranks on each node. If a node dies, the agents of the other nodes restart their
ranks, and the ranks resume from the newest checkpoint. If a node joins, or leaves after SIGTERM, the ranks save before
they restart, so no step is lost. The global batch stays the same, so the loss curve does not depend on the number of
ranks. The job trains on the largest number of ranks that divides `gradient_accumulation_steps`. The remaining ranks are
spare: they wait.

A node that is cut off the network ends its ranks, before the others restart without it (`operate.node_monitor`).

A rank that fails with an error that a restart would repeat (an invalid configuration, or a loss that is not finite)
stops the job on all nodes.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from measure.memory_limits import check_memory
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.log import append_to_log
from nanoGPT.job.parse import parse
from nanoGPT.job.start import check_run, handle_stop_signals
from nanoGPT.train_config import TrainConfig
from operate.connection import source_address
from operate.launch import config_to_env, copy_output, list_rank_processes, load_trainer, split_arguments
from operate.node_monitor import NodeMonitor, connect_to_job_store
from operate.restart import ELASTIC_VARIABLE, STOP_KEY, UNFINISHED, count_usable_ranks, has_finished
from operate.run_description import describe_inputs
from operate.run_files import read_heartbeats
from operate.store import is_served
from operate.watchdog import StallDetector, send_signal

LAST_CALL_SECONDS = 3  # how long a rendezvous waits for more nodes, once it has enough
KEEP_ALIVE_SECONDS, KEEP_ALIVE_ATTEMPTS = 1, 5  # a node that is silent for the product of both counts as lost
ADDRESS_SECONDS = 20  # how long a node of a new round waits for the address that the first node of the round publishes
MAX_RESTARTS = 100  # of the ranks, after failures; an error that a restart would repeat stops the job at once
RENDEZVOUS = "nanogpt"


@dataclass
class ElasticConfig:
    """Command-line options of `make elastic`. The trainer and its flags follow them."""

    gpus: int = 1
    """ranks on this node: one per GPU, or this number of processes on the CPU"""
    nodes: str = "1:1"
    """smallest and largest number of nodes, such as 1:4"""
    store: str = "127.0.0.1:29400"
    """host and port of the store that `operate.elastic serve` serves"""

    def parse_nodes(self) -> tuple[int, int]:
        """Return the smallest and the largest number of nodes.

        Raises:
            ConfigError: they are not two numbers, from 1 upward.
        """
        low, _, high = self.nodes.partition(":")
        if not (low.isdigit() and (high or low).isdigit()) or not 1 <= int(low) <= int(high or low):
            raise ConfigError(f"NODES={self.nodes} is invalid: use MIN:MAX with 1 <= MIN <= MAX, such as 1:4")
        return int(low), int(high or low)

    def parse_store(self) -> tuple[str, int]:
        """Return the host and the port of the store.

        Raises:
            ConfigError: the text is not HOST:PORT.
        """
        host, _, port = self.store.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise ConfigError(
                f"STORE={self.store} is not an address: use HOST:PORT, such as 10.0.0.1:29400, with a port up to 65535"
            )
        return host, int(port)


def serve_store(port: int = 29400) -> None:
    """Serve the store of elastic jobs until this process is stopped.

    Args:
        port: on which the nodes connect.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"PORT={port} is not a port: use a number from 1 to 65535")
    if is_served("127.0.0.1", port):
        raise ConfigError(f"PORT={port} is in use: use another port, such as PORT={port + 1}")
    store = dist.TCPStore("0.0.0.0", port, None, is_master=True, wait_for_workers=False)
    print(
        f"serving the rendezvous on port {store.port}; start nodes with STORE={socket.gethostname()}:{port}", flush=True
    )
    threading.Event().wait()


def token_key(out_dir: str) -> str:
    """Return the key of the token of the job in a directory."""
    return f"{Path(out_dir).resolve()} token".replace("/", "-")


def name_job(store: dist.TCPStore, out_dir: str) -> str:
    """Return the name of the job: its directory, and a random token that the first node of the job puts into the store.

    The checkpoints in the directory belong to this name. A node that joins later gets the same name. A new job gets
    another one, so that it does not continue the checkpoints of an earlier job by mistake. A job is new if it has
    another store, or if the job before it has finished or was stopped.
    """
    key, new_token = token_key(out_dir), os.urandom(4).hex()
    while True:
        token = store.compare_set(key, "", new_token).decode()
        if not store.check([f"{key}-{token} {STOP_KEY}"]):
            return f"{key}-{token}"
        store.compare_set(key, token, new_token)  # no effect if another node has replaced the token meanwhile


def check_joining_node(store: dist.TCPStore, job: str, inputs: dict[str, Any]) -> None:
    """Check that this node has the flags, data and code of the nodes that train, before it disturbs them.

    The first node of a job puts its description into the store.

    Args:
        store: of the job.
        job: its name.
        inputs: of this node, from `describe_inputs`.

    Raises:
        ConfigError: this node differs from the nodes that train, and the job continues without it.
    """
    text = json.dumps(inputs)
    others: dict[str, Any] = json.loads(store.compare_set(f"{job} inputs", "", text))
    parts = [
        f"{name} is {value} here and {others.get(name)} there"
        for name, value in json.loads(text).items()
        if value != others.get(name)
    ]
    if parts:
        raise ConfigError(
            f"this node differs from the nodes that train: {'; '.join(parts)}: start it with the same command, code "
            "and data; to continue the job with other ones, start the store again, and the nodes with "
            "--init_from=resume"
        )


def leave_after_signal(monitor: NodeMonitor, clean_up: Callable[[], None]) -> None:
    """After one of STOP_SIGNALS, let the ranks of this node save, clean up, and exit: with 0 if they have saved.

    The agent is not asked to stop, because it would close the rendezvous for all nodes.
    """
    received_signals: list[int] = []

    def forward(number: int, _frame: object) -> None:
        received_signals.append(number)
        monitor.nodes = 0  # the node ends its ranks itself
        if not (pids := list_rank_processes()):
            clean_up()
            os._exit(128 + number)
        send_signal(pids, signal.SIGTERM)

    def exit_without_ranks() -> None:
        while not received_signals:
            time.sleep(0.1)
        codes = {wait_for_rank(pid) for pid in list_rank_processes()} - {0, UNFINISHED}
        send_signal(list_rank_processes(), signal.SIGKILL)  # the agent may have started new ones
        clean_up()
        os._exit(max(codes, default=0))

    handle_stop_signals(forward)
    threading.Thread(target=exit_without_ranks, daemon=True).start()


def wait_for_rank(pid: int) -> int:
    """Wait until a rank has exited, and return its exit code, or 128 plus the number of the signal that ended it.

    The agent of torch waits for the same processes. If it has read the exit code first, return 0.
    """
    with contextlib.suppress(ChildProcessError):
        if result := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT):
            return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
    return 0


def report_killed_rank(monitor: NodeMonitor, out_dir: str) -> None:
    """Wait until the first rank of this round ends. If a signal killed it, report the signal, and end the other ranks.

    torch's agent restarts the ranks without printing the reason. A rank that exits by itself prints its own reason.
    Ranks that wait for a GPU cannot handle the agent's SIGTERM, on other nodes too, and it waits 30 s before it kills
    them. `monitor.nodes` is 0 if this node ends its ranks itself.
    """
    while True:
        try:
            result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            break
        except ChildProcessError:  # the agent has not started the ranks yet
            time.sleep(0.1)
    if result and result.si_code != os.CLD_EXITED and monitor.nodes:
        text = f"a rank of this node was killed by {signal.Signals(result.si_status).name}: the ranks restart"
        print(text, flush=True)
        append_to_log(out_dir, socket.gethostname(), text)
        for rank, heartbeat in read_heartbeats(Path(out_dir)).items():
            if (heartbeat["host"], heartbeat["pid"]) == (socket.gethostname(), result.si_pid):
                StallDetector(Path(out_dir), 0, math.inf, token=heartbeat["run"]).report_lost_rank(rank)


def register_rendezvous(monitor: NodeMonitor, out_dir: str, is_finished: Callable[[], bool]) -> None:
    """Register RENDEZVOUS: torch's c10d rendezvous with three changes.

    It reports every round to the monitor. It starts a thread that reports a killed rank. A node closes the rendezvous
    only if the run has completed its steps, not if the node fails, so the job continues on the other nodes.
    """

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        parameters.backend = "c10d"
        handler = rendezvous_handler_registry.create_handler(parameters)
        join, close = handler.next_rendezvous, handler.shutdown

        def next_rendezvous() -> RendezvousInfo:
            monitor.enter_round(0)
            info = join()
            monitor.enter_round(info.world_size)
            threading.Thread(target=report_killed_rank, args=(monitor, out_dir), daemon=True).start()
            return info

        handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
        handler.shutdown = lambda: not is_finished() or close()  # type: ignore[method-assign]
        return handler

    rendezvous_handler_registry.register(RENDEZVOUS, create)


def build_launch_config(config: ElasticConfig, job: str, logs: str) -> LaunchConfig:
    """Return the settings of torch's elastic agent."""
    low, high = config.parse_nodes()
    host, _ = config.parse_store()
    return LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=config.gpus,
        logs_specs=DefaultLogsSpecs(logs),
        run_id=job,
        rdzv_backend=RENDEZVOUS,
        rdzv_endpoint=config.store,
        rdzv_configs={
            "is_host": "0",
            "last_call_timeout": LAST_CALL_SECONDS,
            "keep_alive_interval": KEEP_ALIVE_SECONDS,
            "keep_alive_max_attempt": KEEP_ALIVE_ATTEMPTS,
            "read_timeout": ADDRESS_SECONDS,
        },
        max_restarts=MAX_RESTARTS,
        monitor_interval=0.5,
        signals_to_handle="",  # else the agent would replace the handlers of leave_after_signal
        local_addr=source_address(host),
    )


def take_part(elastic: ElasticConfig, command: list[str], config: TrainConfig, inputs: dict[str, Any]) -> int:
    """Take part in the job until it has finished, or until this node is stopped. Return the exit code."""
    host, port = elastic.parse_store()
    store = connect_to_job_store(host, port)
    job = name_job(store, config.out_dir)
    check_joining_node(store, job, inputs)
    os.environ |= {"OMP_NUM_THREADS": "1", **os.environ, **config_to_env(config)}
    os.environ[ELASTIC_VARIABLE] = f"{elastic.store} {job}"
    # Without this setting, a node that joins waits for an address that the first node published in an earlier round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # All nodes have the same number of ranks. Without this setting, the agents of a round wait for numbers from its
    # first node, and fail if it has died.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = tempfile.mkdtemp(prefix="nanogpt-")

    def clean_up() -> None:
        shutil.rmtree(logs, ignore_errors=True)

    monitor = NodeMonitor(host, port, job, clean_up)
    register_rendezvous(monitor, config.out_dir, lambda: has_finished(config))
    leave_after_signal(monitor, clean_up)
    try:
        train_in_rounds(build_launch_config(elastic, job, logs), command, config)
    finally:
        clean_up()
    with contextlib.suppress(dist.DistError):
        store.delete_key(token_key(config.out_dir))  # a new job in this directory gets another name
    print(f"the run in {config.out_dir} has completed its {config.max_iters} steps", flush=True)
    return 0


def train_in_rounds(settings: LaunchConfig, command: list[str], config: TrainConfig) -> None:
    """Start the ranks of this node again and again, until the run has completed its steps.

    Args:
        settings: of the elastic agent.
        command: the trainer and its arguments.
        config: of the run.

    Raises:
        ConfigError: the ranks of this node have failed MAX_RESTARTS times. The job continues on the other nodes.
    """
    while not has_finished(config):
        try:
            elastic_launch(copy_output(settings, f"{config.out_dir}/logs"), sys.executable)(*command)
        except ChildFailedError:
            raise ConfigError(
                f"the ranks of this node have failed {MAX_RESTARTS} times: run `make autopsy "
                f"RUN={quote(config.out_dir)}` to find the cause, and start this node again"
            ) from None
        except Exception as error:  # of a rendezvous: too few nodes, its first node has died, or the job has finished
            print(f"this node joins the rendezvous again ({type(error).__name__}: {error})", flush=True)
            time.sleep(1)


def main(arguments: list[str]) -> int:
    """Check the configuration, and take part in the job as one node. Return the exit code."""
    arguments, trainer, trainer_arguments = split_arguments(arguments)
    elastic = command_line(ElasticConfig, arguments)
    low, high = elastic.parse_nodes()
    elastic.parse_store()
    if elastic.gpus < 1:
        raise ConfigError(f"GPUS={elastic.gpus} is out of range: use 1 or more")
    config_class: type[TrainConfig] = load_trainer(trainer).Config
    config = parse(config_class, trainer_arguments, trainer)
    if config.out_dir == TrainConfig.out_dir:
        raise ConfigError("an elastic job needs --out_dir: use a directory that all nodes share, such as /shared/run")
    if "operate" not in config.observers.split(","):
        raise ConfigError("an elastic job needs the observer operate: add it to --observers")
    if config.eval_only:
        raise ConfigError("--eval_only does not work in an elastic job: use make baseline, phase1, phase2 or phase3")
    for nodes in range(low, high + 1):
        ranks = count_usable_ranks(config, nodes * elastic.gpus)
        if getattr(config, "fsdp_shard_size", "") == "node" and ranks > elastic.gpus and ranks % elastic.gpus:
            raise ConfigError(
                f"with {nodes} nodes, {ranks} ranks train, but --fsdp_shard_size=node needs equally many on each node: "
                f"use --fsdp_shard_size=all, or a multiple of {nodes * elastic.gpus} for --gradient_accumulation_steps"
            )
        check_run(config, ranks, elastic.gpus)
        check_memory(config, ranks, elastic.gpus)
    inputs = describe_inputs(config) | {"GPUS": elastic.gpus}
    return take_part(elastic, [str(trainer), *trainer_arguments], config, inputs)


if __name__ == "__main__":
    with report_errors():
        if sys.argv[1:2] == ["serve"]:
            command_line(serve_store, sys.argv[2:])
        code = main(sys.argv[1:])
    os._exit(code)
