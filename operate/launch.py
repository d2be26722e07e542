"""Start a trainer on one or more ranks. If a rank fails, print one sentence and return the exit code of that rank.

    python -m operate.launch --gpus=4 nanoGPT/train.py --dropout=0.2
    python -m operate.launch --gpus=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 phase3_fsdp/train.py    # node 0

`make baseline`, `make phase1`, `make phase2` and `make phase3` call this program. It checks the configuration before
any rank starts. It starts and monitors the ranks with torch's elastic agent, as torchrun does. It forwards signals
to the ranks. After training it prints a sample of text from the newest checkpoint. Plain `torchrun`
with the same train.py works too, but without these services.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from shlex import quote
from types import ModuleType

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # let Ctrl-C stop the slow import of torch without a traceback

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher_api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from measure.memory_limits import check_memory
from nanoGPT.checkpoint.manifest import read_manifests
from nanoGPT.errors import STALLED, ConfigError, blames_peer
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.log import append_to_log
from nanoGPT.job.parse import CONFIG_VARIABLE, package_of, parse, read_config_files
from nanoGPT.job.start import check_out_dir, check_run, handle_stop_signals
from nanoGPT.model import make_shape
from nanoGPT.train_config import TrainConfig
from operate.credentials import check_credentials
from operate.nodes import NodeConfig, Rendezvous, check_node_config, master_port
from operate.observer import read_flags
from operate.restart import has_finished
from operate.root_cause import explain_exit, find_root_cause
from operate.watchdog import StallDetector, list_children, send_signal, watch_children

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
BARRIER_SECONDS = 30.0  # a launcher that has finished waits this long for those of the other nodes
MAX_SAMPLED_PARAMS = 2 * 10**9  # of the model of which a sample is printed after a run

# glibc returns freed memory to the kernel after each backward pass, and the next forward pass gets it back in 4 KiB
# pages that are zeroed one by one. Ranks keep up to 1 GiB of freed memory instead, in huge pages where the kernel has
# them. Allocations of more than 32 MiB are still returned. Other C libraries ignore this variable.
MALLOC_TUNABLES = "glibc.malloc.trim_threshold=1073741824:glibc.malloc.mmap_threshold=33554432:glibc.malloc.hugetlb=1"


def split_arguments(arguments: list[str]) -> tuple[list[str], Path, list[str]]:
    """Split a command line into the launcher's arguments, the trainer, and the trainer's arguments.

    Raises:
        ConfigError: there is no trainer, and no `--help`, which needs none.
    """
    for i, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return arguments[:i], Path(argument), arguments[i + 1 :]
    if {"-h", "--help"} & set(arguments):
        return arguments, Path(), []
    raise ConfigError("no trainer is given: name the trainer to start, such as nanoGPT/train.py")


def load_trainer(path: Path) -> ModuleType:
    """Import a train.py by its package name, and return the module.

    Raises:
        ConfigError: it is not a trainer of this repository.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give nanoGPT/train.py or the train.py of a phase")
    spec = None
    for name in (f"{path.resolve().parent.name}.train", path.stem):  # in a package, or at the top of a copy
        with contextlib.suppress(ModuleNotFoundError, ValueError):
            spec = importlib.util.find_spec(name)
        if spec and spec.origin and os.path.samefile(spec.origin, path):
            break
    if spec is None or spec.origin is None or not os.path.samefile(spec.origin, path):
        raise ConfigError(
            f"{path} is not a trainer of this repository: give nanoGPT/train.py or the train.py of a phase"
        )
    return importlib.import_module(spec.name)


def create_out_dir(config: TrainConfig, place: NodeConfig) -> str:
    """Return the output directory of the run. If the configuration names none, create a new one under out/.

    With multiple nodes the name does not contain the time, so that every node computes the same name.

    Raises:
        ConfigError: the directory cannot be created.
    """
    if config.out_dir != "out" or config.init_from == "resume":
        return config.out_dir
    name = package_of(type(config))
    if place.nnodes > 1:
        return f"out/{name}-{place.nnodes}nodes"
    for count in range(1000):
        out_dir = Path("out") / (time.strftime(f"{name}-%Y%m%d-%H%M%S") + (f"-{count}" if count else ""))
        try:
            out_dir.mkdir(parents=True)
            return str(out_dir)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"{out_dir} cannot be created ({error.strerror}): use --out_dir with a directory that you can write"
            ) from None
    raise ConfigError("no free name under out/: choose a directory with --out_dir")


def list_rank_processes() -> list[int]:
    """Return the process ids of the ranks on this node."""
    return list_children(os.getpid())


def forward_signals(received_signals: list[int]) -> None:
    """Forward signals to the ranks: STOP_SIGNALS, so that they save and exit, and SIGQUIT, so that they write stacks.

    If there are no ranks yet, exit at once.

    The first SIGINT is forwarded as SIGTERM, so that a rank that is still importing torch exits without a traceback. A
    line says so, because the ranks report SIGTERM.

    Args:
        received_signals: the number of every signal that arrives is appended to this list.
    """

    has_forwarded: list[bool] = []

    def forward(number: int, _frame: object) -> None:
        received_signals.append(number)
        pids = list_rank_processes()
        if not pids:
            if has_forwarded:  # the ranks have saved and ended; schedulers repeat their signals
                return
            raise SystemExit(128 + number)
        has_forwarded.append(True)
        is_first_interrupt = received_signals == [signal.SIGINT]
        send_signal(pids, signal.SIGTERM if is_first_interrupt else number)
        if is_first_interrupt:
            os.write(2, b"\nCtrl-C: the ranks receive SIGTERM and stop\n")  # a handler must not use buffered output

    handle_stop_signals(forward)
    signal.signal(signal.SIGQUIT, forward)


def start_watchdog(config: TrainConfig, place: NodeConfig) -> StallDetector:
    """Start a thread that stops ranks that hang. It waits 10 seconds longer than the watchdogs of the ranks."""
    watch = StallDetector(Path(config.out_dir), place.world_size, read_flags(config).stall_seconds + 10)
    threading.Thread(target=watch_children, args=(watch, list_rank_processes), daemon=True).start()
    return watch


def configure_agent(place: NodeConfig, logs: str) -> LaunchConfig:
    """Return the configuration of torch's elastic agent for the ranks of this node, and silence the agent's log.

    Args:
        place: the ranks of this node.
        logs: a temporary directory for the agent's logs.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # torch waits for 300 s, and no signal can end this wait.
    launcher_api.LocalElasticAgent = partial(LocalElasticAgent, exit_barrier_timeout=BARRIER_SECONDS)  # type: ignore
    is_single_node = place.nnodes == 1
    return LaunchConfig(
        min_nodes=place.nnodes,
        max_nodes=place.nnodes,
        nproc_per_node=place.gpus,
        logs_specs=DefaultLogsSpecs(logs),
        run_id=f"nanogpt-{os.getpid()}" if is_single_node else "nanogpt",
        rdzv_backend="c10d" if is_single_node else "static",
        rdzv_endpoint="127.0.0.1:0" if is_single_node else f"{place.master_addr}:{master_port()}",
        rdzv_configs={} if is_single_node else {"rank": place.node_rank},
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="",  # else the agent would replace the handlers of forward_signals
        local_addr="127.0.0.1" if is_single_node else None,
    )


def copy_output(config: LaunchConfig, logs: str) -> LaunchConfig:
    """Return the settings of an elastic agent that copies the output of its ranks, as `torchrun --tee=3` does.

    The first rank of the node prints to the console only: its progress bar needs a terminal. torch writes the output of
    the others, of libraries such as NCCL too, into {logs}/{run id}/attempt_{n}/{local rank}/stdout.log and stderr.log,
    and shows it on the console after the number of the rank. The reason why a rank failed is in error.json.

    Args:
        config: the settings without a copy.
        logs: a directory.
    """
    specs = DefaultLogsSpecs(logs, tee=dict.fromkeys(range(1, config.nproc_per_node), Std.ALL))
    return dataclasses.replace(config, logs_specs=specs, log_line_prefix_template="[rank${rank}] ")


def run_job(rendezvous: Rendezvous, command: list[str], config: TrainConfig) -> int:
    """Start the ranks of this node and the watchdog, wait for the ranks, and return the exit code of the job."""
    watch = start_watchdog(config, rendezvous.node)
    if rendezvous.node.world_size == 1:
        return run_one_rank(command, config, watch)
    with tempfile.TemporaryDirectory(prefix="nanogpt-", ignore_cleanup_errors=True) as logs:
        return run_ranks(rendezvous, command, config, watch, logs)


def end_with_other_nodes(rendezvous: Rendezvous, watch: StallDetector, failures: list[str]) -> None:
    """Wait for the first heartbeat of this node. If another node fails before it, kill the ranks of this node.

    Until the first heartbeat, the ranks wait for each other in the rendezvous of gloo or NCCL, where no watchdog can
    help, and NCCL has no limit.

    Args:
        failures: why the other node has failed is appended to this list.
    """
    with contextlib.suppress(DistError):  # node 0 has exited: the job has ended
        while not (watch.token or failures):
            has_all_ranks = len(list_rank_processes()) >= rendezvous.node.gpus  # else this node has its own reason
            if has_all_ranks and (reason := rendezvous.read_failure()):
                failures.append(reason)
                send_signal(list_rank_processes(), signal.SIGKILL)
            time.sleep(1)


def run_ranks(rendezvous: Rendezvous, command: list[str], config: TrainConfig, watch: StallDetector, logs: str) -> int:
    """Start the ranks of this node, wait for them, and return the exit code of the job.

    Args:
        rendezvous: of the launchers of all nodes.
        command: the trainer and its arguments.
        config: the configuration, which the ranks get through their environment.
        watch: the watchdog.
        logs: a temporary directory for the logs of the elastic agent.
    """
    place = rendezvous.node
    defaults = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": MALLOC_TUNABLES}
    os.environ |= {**defaults, **os.environ, "NANOGPT_LAUNCHER": str(os.getpid()), **config_to_env(config)}
    received_signals: list[int] = []
    forward_signals(received_signals)
    failures: list[str] = []  # of other nodes
    if place.nnodes > 1:
        threading.Thread(target=end_with_other_nodes, args=(rendezvous, watch, failures), daemon=True).start()
    try:
        folder = logs if config.eval_only else f"{config.out_dir}/logs"  # the logs of the training stay
        elastic_launch(copy_output(configure_agent(place, logs), folder), sys.executable)(*command)
        return 0
    except ChildFailedError as error:
        watch.read_heartbeats()
        if (verdict := watch.verdict()) and verdict[0] == STALLED:
            return report_exit(config, *verdict)
        rank, failure = find_root_cause(error.failures, place.world_size)
        if failures and failure.exitcode == -signal.SIGKILL:  # by `end_with_other_nodes`
            return report_exit(config, 1, failures[0])
        if not blames_peer(failure.message):
            watch.report_lost_rank(rank)  # the launchers of other nodes cannot know it
        code, reason = explain_exit(failure.exitcode, failure.message, received_signals)
        if blames_peer(failure.message):
            reason = f"lost a rank, which failed on another node or exited without an error ({reason})"
        code = report_exit(config, code, f"rank {rank}: {reason}")
        if not watch.token:
            rendezvous.report_failure(f"rank {rank}: {reason}")
        return code


def report_exit(config: TrainConfig, code: int, reason: str) -> int:
    """Print why the run failed, append it to log.txt, and return the exit code."""
    print(f"error: {reason}", file=sys.stderr)
    append_to_log(config.out_dir, "launcher", f"exit code {code}: {reason}")
    return code


def show_sample(config: TrainConfig) -> None:
    """Print a sample of text from the trained model. A failure here does not change the exit code of the run.

    A model with more than MAX_SAMPLED_PARAMS parameters is skipped, because one process would have to load it.
    """
    from nanoGPT import sample

    command = f"make sample RUN={quote(config.out_dir)}"
    try:
        manifest = next((manifest for _, manifest in read_manifests(Path(config.out_dir))), None)
        params = make_shape(manifest["model_args"]).count_params() if manifest else 0
        if params > MAX_SAMPLED_PARAMS:
            print(f"\nno sample: the model has more than {MAX_SAMPLED_PARAMS:,} parameters; for a sample: {command}")
            return
        print(f"\nA sample from {config.out_dir} (more: {command}):\n", flush=True)
        sample.main(sample.SampleConfig(out_dir=config.out_dir, max_new_tokens=300, device=config.device))
    except (Exception, SystemExit) as error:  # the handler of a signal raises SystemExit
        print(f"no sample: {error}", flush=True)


def main(arguments: list[str]) -> int:
    """Check the configuration, run the trainer, print a sample, and return the exit code."""
    arguments, trainer, trainer_arguments = split_arguments(arguments)
    place = command_line(NodeConfig, arguments)
    check_node_config(place)
    rendezvous = Rendezvous(place)
    with rendezvous.share_errors():
        config = read_checked_config(trainer, trainer_arguments, rendezvous)
        config = dataclasses.replace(config, out_dir=create_out_dir(config, place))
        check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
    code = run_job(rendezvous, [str(trainer), *trainer_arguments], config)
    if code == 0 and place.node_rank == 0 and has_finished(config):
        show_sample(config)
    return code


def read_checked_config(trainer: Path, arguments: list[str], rendezvous: Rendezvous) -> TrainConfig:
    """Parse the trainer's arguments, and check on this node all that can be checked before any rank starts.

    Raises:
        ConfigError: the run cannot work; the message says what to do.
    """
    config, node = read_config(trainer, arguments, rendezvous), rendezvous.node
    check_run(config, node.world_size, node.gpus)
    check_memory(config, node.world_size, node.gpus)
    if node.node_rank == 0:
        check_credentials(read_flags(config).track)
    return config


def read_config(trainer: Path, arguments: list[str], rendezvous: Rendezvous) -> TrainConfig:
    """Parse the trainer's arguments. Config files are executed on node 0 only; the other nodes receive their values.

    Raises:
        ConfigError: an argument is invalid on this node, or a config file is invalid on node 0.
    """
    config_class: type[TrainConfig] = load_trainer(trainer).Config
    if rendezvous.node.node_rank == 0:
        from_files = read_config_files(arguments, trainer)
        config = parse(config_class, arguments, trainer, rendezvous.node.world_size, from_files)
        rendezvous.open(config.timeout)
        rendezvous.publish("config files", from_files)
        rendezvous.compare_gpus()
        return config
    ranks = rendezvous.node.world_size
    config = parse(config_class, arguments, trainer, ranks, from_files={})  # reports a misspelt flag before they meet
    rendezvous.open(config.timeout)
    (from_node_0,) = rendezvous.fetch("config files", [0])
    if from_node_0 is None:
        (problem,) = rendezvous.fetch("error", [0])
        raise ConfigError(f"node 0 cannot start: {problem}")
    rendezvous.compare_gpus()
    return parse(config_class, arguments, trainer, ranks, from_node_0)


def config_to_env(config: TrainConfig) -> dict[str, str]:
    """Return the environment variable that passes a configuration to the ranks."""
    return {CONFIG_VARIABLE: json.dumps(dataclasses.asdict(config))}


def run_one_rank(command: list[str], config: TrainConfig, watch: StallDetector) -> int:
    """Run the trainer as one process without the elastic agent, forward signals to it, and return the exit code.

    The process has one thread per core.
    """
    # The variables of another job, to which this process may belong, would make the trainer wait for that job's ranks.
    inherited = {name: os.environ[name] for name in os.environ if name not in RANK_VARIABLES}
    # A thread of torch that waits for the others tries 2,000 times before it sleeps. Beside a busy process on 2
    # cores, a step then takes 3 times as long as alone, with libgomp's default 70 times. Alone, both are equally
    # fast; with 1,000 tries a step is 7% slower.
    environment = {"GLIBC_TUNABLES": MALLOC_TUNABLES, "GOMP_SPINCOUNT": "2000", **inherited, **config_to_env(config)}
    environment["NANOGPT_PARENT"] = str(os.getpid())
    received_signals: list[int] = []
    forward_signals(received_signals)
    code = subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True).wait()
    if code < 0:
        code, reason = explain_exit(code, "", received_signals)
        if (verdict := watch.verdict()) and verdict[0] == STALLED:
            return report_exit(config, *verdict)
        code = report_exit(config, code, f"rank 0: {reason}")
    elif code > 0:  # the rank has printed the reason
        append_to_log(config.out_dir, "launcher", f"exit code {code}")
    return code


if __name__ == "__main__":
    with report_errors():
        code = main(sys.argv[1:])
    os._exit(code)  # a normal exit would spend 0.6 s on the cleanup of torch's modules
