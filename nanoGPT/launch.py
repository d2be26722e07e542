"""Start a trainer on one or several ranks, and end with one sentence and its exit code.

    python -m nanoGPT.launch --gpus=4 nanoGPT/train.py --dropout=0.2
    python -m nanoGPT.launch --gpus=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 phase3_fsdp/train.py    # and 1

`make baseline` and its like call this. The configuration is checked before any rank starts; ranks are started and
watched by torch's elastic agent, as torchrun does; SIGTERM, SIGINT and SIGHUP are passed on to them; at the end the
newest checkpoint writes a few lines of text. `torchrun` on the same train.py works too, without these services.
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
from pathlib import Path
from types import ModuleType

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch's import takes seconds: Ctrl-C ends it without a traceback

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import LOST_PEER, STALLED, ConfigError
from nanoGPT.job.nodes import Meeting, Place, check_place, master_port
from nanoGPT.job.out_dir import check_out_dir
from nanoGPT.job.parse import CONFIG_VARIABLE, parse, read_config_files
from nanoGPT.job.preflight import preflight
from nanoGPT.job.watchdog import Watch, children_of, guard
from nanoGPT.train_config import TrainConfig


def split_words(words: list[str]) -> tuple[list[str], Path, list[str]]:
    """The launcher's words, the trainer, and the trainer's words."""
    for i, word in enumerate(words):
        if not word.startswith("-"):
            return words[:i], Path(word), words[i + 1 :]
    raise ConfigError("name the trainer to start, such as nanoGPT/train.py")


def load_trainer(path: Path) -> ModuleType:
    """Import a train.py by its package name, for its `Config`."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give nanoGPT/train.py or a phase's")
    spec = importlib.util.find_spec(f"{path.resolve().parent.name}.train")
    if spec is None or spec.origin is None or not os.path.samefile(spec.origin, path):
        raise ConfigError(f"{path} is no trainer of this repository: give nanoGPT/train.py or a phase's")
    return importlib.import_module(spec.name)


def choose_out_dir(config: TrainConfig, trainer: Path, place: Place) -> str:
    """Return the run's directory: a new one under out/ for a run that names none.

    Several nodes agree on a name without talking; it has no time in it.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.out_dir != "out" or config.init_from == "resume":
        return config.out_dir
    name = trainer.resolve().parent.name
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
            raise ConfigError(f"{out_dir} cannot be made ({error.strerror}): give an --out_dir of yours") from None
    raise ConfigError("no free name under out/: give an --out_dir")


def children() -> list[int]:
    """Return the ids of this machine's ranks."""
    return children_of(os.getpid())


def pass_on_signals(asked: list[int]) -> None:
    """Hand signals to the ranks, which save and end by themselves; before there are any, end at once.

    A first SIGINT is handed on as SIGTERM: a rank that is still importing torch ends without a traceback.

    Args:
        asked: takes the number of every signal that comes.
    """

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        pids = children()
        if not pids:
            raise SystemExit(128 + number)
        passed = signal.SIGTERM if asked == [signal.SIGINT] else number
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, passed)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)


def wakeups() -> int:
    """A pipe into which every signal writes its number, also while the main thread waits where no handler can run."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)
    return ours


def end_while_waiting(asked: list[int], numbers: int) -> None:
    """End at a signal that finds the main thread in torch's C++, where it waits for the other nodes.

    Args:
        asked: the signals that Python's handler has had; one that comes here alone has found no way to it.
    """
    while number := os.read(numbers, 1)[0]:
        time.sleep(1)
        if not asked and not children():
            print("error: stopped by a signal before all nodes had met", file=sys.stderr, flush=True)
            os._exit(128 + number)


def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure the others only followed: one that was killed, else the first with a reason of its own."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        _, failure = item
        if failure.exitcode == -signal.SIGABRT:  # as NCCL's watchdog ends a rank that waits in vain for another
            return 2, failure.timestamp
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return 0, failure.timestamp
        follower = any(words in failure.message for words in (*LOST_PEER, "Signal 15"))
        return (3 if follower else 1), failure.timestamp

    return min(failures.items(), key=order)


def explain(exit_code: int, message: str, asked: list[int]) -> tuple[int, str]:
    """A failure's exit code, as a shell would give it, and its reason."""
    if exit_code >= 0:
        return exit_code, message
    if asked and -exit_code in (asked[0], signal.SIGTERM):
        name = signal.Signals(asked[0]).name
        return 128 + asked[0], f"{name} came before training had begun, so there was nothing to save"
    name = signal.Signals(-exit_code).name
    return 128 - exit_code, f"it was killed by {name}; --init_from=resume goes on from a checkpoint, if there is one"


def watch_over(config: TrainConfig, world_size: int) -> Watch:
    """Look after ranks that hang, beside what this process does; they have some seconds to end by themselves."""
    watch = Watch(Path(config.out_dir), world_size, config.stall_seconds + 10)
    threading.Thread(target=guard, args=(watch, children), daemon=True).start()
    return watch


def run_ranks(place: Place, command: list[str], config: TrainConfig, watch: Watch, logs: str) -> int:
    """Start this machine's ranks, wait for them, and return the job's exit code; `logs` is the agent's directory."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ |= {"OMP_NUM_THREADS": "1", **os.environ, "NANOGPT_LAUNCHER": str(os.getpid()), **handed(config)}
    alone = place.nnodes == 1
    launch = LaunchConfig(
        min_nodes=place.nnodes,
        max_nodes=place.nnodes,
        nproc_per_node=place.gpus,
        logs_specs=DefaultLogsSpecs(logs),
        run_id=f"nanogpt-{os.getpid()}" if alone else "nanogpt",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="127.0.0.1:0" if alone else f"{place.master_addr}:{master_port()}",
        rdzv_configs={} if alone else {"rank": place.node_rank},
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",
        local_addr="127.0.0.1" if alone else None,
    )
    asked: list[int] = []
    pass_on_signals(asked)
    if not alone:
        threading.Thread(target=end_while_waiting, args=(asked, wakeups()), daemon=True).start()
    try:
        elastic_launch(launch, sys.executable)(*command)
        return 0
    except ChildFailedError as error:
        if sentence := watch.verdict():
            print(f"error: {sentence}", file=sys.stderr)
            return STALLED
        rank, failure = root_cause(error.failures)
        code, reason = explain(failure.exitcode, failure.message, asked)
        print(f"error: rank {rank}: {reason}", file=sys.stderr)
        return code


def has_ended(config: TrainConfig) -> bool:
    """Whether the run did all its steps, and was not stopped before."""
    return any(path.name == f"step-{config.max_iters:08d}" for path in step_directories(Path(config.out_dir)))


def show_sample(config: TrainConfig) -> None:
    """Print a few lines of text from the model that was just trained. A failure does not make the run one."""
    from nanoGPT import sample

    print(f"\nA sample from {config.out_dir} (more: make sample ARGS=--out_dir={config.out_dir}):\n", flush=True)
    try:
        sample.main(sample.SampleConfig(out_dir=config.out_dir, max_new_tokens=300, device=config.device))
    except Exception as error:
        print(f"no sample: {error}", flush=True)


def main(words: list[str]) -> int:
    """Check, start, wait, and show what came of it; returns the exit code."""
    words, trainer, trainer_words = split_words(words)
    place = command_line(Place, words)
    check_place(place)
    meeting = Meeting(place)
    with meeting.shared_refusal():
        config = read_config(trainer, trainer_words, meeting)
        preflight(config, place.world_size, place.gpus)
        config = dataclasses.replace(config, out_dir=choose_out_dir(config, trainer, place))
        check_out_dir(Path(config.out_dir), resume=config.init_from == "resume")
    command = [str(trainer), *trainer_words]
    watch = watch_over(config, place.world_size)
    with tempfile.TemporaryDirectory(prefix="nanogpt-", ignore_cleanup_errors=True) as logs:
        if place.world_size == 1:
            code = run_alone(command, config, watch)
        else:
            code = run_ranks(place, command, config, watch, logs)
    if code == 0 and place.node_rank == 0 and has_ended(config):
        show_sample(config)
    return code


def read_config(trainer: Path, words: list[str], meeting: Meeting) -> TrainConfig:
    """Parse the trainer's words. A config file is executed on node 0 only, and the other nodes take what it set.

    Raises:
        ConfigError: a word that cannot be, on this node or, where a config file is concerned, on node 0.
    """
    config_class: type[TrainConfig] = load_trainer(trainer).Config
    if meeting.place.node_rank == 0:
        from_files = read_config_files(config_class, words, trainer)
        config = parse(config_class, words, trainer, from_files)
        meeting.open(config.timeout_minutes)
        meeting.tell("config files", from_files)
        return config
    config = parse(config_class, words, trainer, from_files={})  # a misspelt flag is reported before anybody waits
    meeting.open(config.timeout_minutes)
    (from_node_0,) = meeting.ask("config files", [0])
    if from_node_0 is None:
        (refusal,) = meeting.ask("refusal", [0])
        raise ConfigError(f"node 0 cannot start: {refusal}")
    return parse(config_class, words, trainer, from_node_0)


def handed(config: TrainConfig) -> dict[str, str]:
    """Return the part of a rank's environment that holds its configuration."""
    return {CONFIG_VARIABLE: json.dumps(dataclasses.asdict(config))}


def run_alone(command: list[str], config: TrainConfig, watch: Watch) -> int:
    """Run the trainer as one process, which needs no elastic agent, and pass signals on to it.

    Its threads, one a core, spin for a moment only when they wait for each other. By default libgomp's spin on, and
    beside two other busy processes a forward and backward took twice as long.
    """
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ, "NANOGPT_PARENT": str(os.getpid()), **handed(config)}
    asked: list[int] = []
    pass_on_signals(asked)
    code = subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True).wait()
    if code < 0:
        code, reason = explain(code, "", asked)
        sentence = watch.verdict()
        print(f"error: {sentence or f'rank 0: {reason}'}", file=sys.stderr)
        code = STALLED if sentence else code
    return code


if __name__ == "__main__":
    with report_errors():
        code = main(sys.argv[1:])
    os._exit(code)  # Python would take 0.6 s to take torch's modules apart
