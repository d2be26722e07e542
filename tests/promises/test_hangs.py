"""Hangs: the rank that causes a hang is named, all ranks write their stacks and exit, and slow work is not a hang."""

import json
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanoGPT import train
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import STALLED
from operate.device_progress import DeviceProgress
from operate.heartbeat import HeartbeatThread, inspect_threads
from operate.watchdog import StallDetector
from tests.helpers.programs import DEADLINE, LONG_RUN, Program, await_steps, find_free_port, make_flags, wait_until
from tests.helpers.training import call_train, tiny
from workshop.ranks import start_ranks

STALL_SECONDS = 8.0  # seconds without progress; a step takes far less, also on a busy machine
HEARTBEAT = {
    "step": 4,
    "stage": "micro-batch 3",
    "stages_entered": 30,
    "progress_reports": 0,
    "waits": False,
    "line": "data.py:1, batch",
}
HEARTBEAT |= {"run": "new", "host": "here", "pid": 1, "parent": 0, "ended": False, "time": 0.0}


class SimulatedJob:
    """Heartbeat files as ranks write them, and the stall detector of rank 0, with a clock that the test advances."""

    def __init__(self, out: Path, ranks: int) -> None:
        self.out, self.now = out, time.monotonic()
        for folder in ("heartbeat", "stacks"):
            (out / folder).mkdir()
        self.detector = StallDetector(out, ranks, 10.0, 0, "new")

    def write_heartbeat(self, rank: int, **changes) -> None:
        heartbeat = {**HEARTBEAT, "time": self.now, **changes}
        if rank == 0:
            self.detector.record(0, heartbeat)
        (self.out / "heartbeat" / f"rank{rank}.json").write_text(json.dumps(heartbeat))

    def advance(self, seconds: int, heartbeats: dict[int, dict]) -> str | None:
        """Advance the clock. Each second, every rank in `heartbeats` writes one. Return the message of the detector."""
        for _ in range(seconds):
            self.now += 1.0
            for rank, changes in heartbeats.items():
                self.write_heartbeat(rank, **changes)
            if verdict := self.detector.check(self.now):
                assert verdict[0] == STALLED
                return verdict[1]
        return None


READING = {"waits_for_device": True, "device_stages": 30, "line": "train.py:132, train"}
WAITING = {"stages_entered": 31, "waits": True, "line": "runtime.py:80, any"}


@pytest.mark.parametrize(
    ("heartbeats", "words"),
    [
        (
            {0: WAITING, 1: {}, 2: WAITING},
            ["rank 1 ", "in step 4, micro-batch 3 (at data.py:1, batch), while the other ranks"],
        ),
        ({0: {"step": 5, "stages_entered": 9}, 1: WAITING}, ["rank 1 ", "in step 4", "waiting for the other ranks"]),
        ({0: {**WAITING, "stages_entered": 30}, 1: {}}, ["rank 1 ", "while the other ranks waited"]),
        ({0: {}, 1: {}}, ["; ranks [0, 1] all stopped there"]),
        (
            {0: READING, 1: {**READING, "device_stages": 28}},
            ["rank 1 ", "for its GPU, which has reached stage 28 of 30"],
        ),
        ({0: READING, 1: {"device_stages": 30}}, ["rank 1 ", "(at data.py:1, batch), while the other ranks waited"]),
        ({0: {}}, ["rank 0 ", "batch); stacks of all ranks are in"]),
    ],
    ids=["fewest places", "earlier step", "not waiting", "same place", "GPU behind", "not reading", "single rank"],
)
def test_the_rank_at_fault_is_named(heartbeats, words, tmp_path):
    """Of the ranks with the least progress, the one that does not wait is named, with its step and its line of code."""
    message = SimulatedJob(tmp_path, len(heartbeats)).advance(13, heartbeats)
    assert message and all(word in message for word in [*words, "no progress for 1"]), message


def test_a_rank_that_does_not_answer_is_named(tmp_path):
    """Of ranks with equal progress, the one whose heartbeats have stopped is named."""
    job = SimulatedJob(tmp_path, 2)
    assert job.advance(3, {0: {**WAITING, "progress_reports": 1}, 1: WAITING}) is None
    message = job.advance(13, {0: {**WAITING, "progress_reports": 1}})
    assert (
        message
        and message.startswith("rank 1 has made no progress for 1")
        and "the process does not respond" in message
    )
    assert (tmp_path / "stacks" / "stalled-new.txt").read_text() == message + "\n"


def test_no_false_hang_is_reported(tmp_path):
    """No hang is reported while a rank starts or writes a file, after it has ended, or after a pause of the computer.

    A heartbeat file of an earlier run is ignored.
    """
    job = SimulatedJob(tmp_path, 2)
    assert job.advance(30, {0: WAITING}) is None, "rank 1 has not started"
    assert job.advance(30, {0: WAITING, 1: {"run": "old"}}) is None, "the heartbeat of rank 1 is from an earlier run"
    for pause in range(5):
        assert job.advance(3, {0: WAITING, 1: {"progress_reports": pause}}) is None
        job.now += 10_000  # the computer was suspended
    for mark in range(40):
        assert job.advance(1, {0: WAITING, 1: {"progress_reports": 100 + mark}}) is None, "rank 1 is writing a file"
    assert job.advance(30, {0: WAITING, 1: {"ended": True, "progress_reports": 200}}) is None, "rank 1 has ended"
    assert job.advance(13, {0: WAITING, 1: {}}), "rank 1 hangs"


def test_work_that_the_gpu_completes_counts_as_progress(tmp_path):
    """While a rank waits for its GPU, no hang is reported as long as the GPU reaches new stages."""
    job = SimulatedJob(tmp_path, 1)
    for stage in range(5, 30):
        assert job.advance(1, {0: {**READING, "device_stages": stage}}) is None
    assert job.advance(13, {0: {**READING, "device_stages": 29}})


def test_stages_of_the_gpu_are_counted_by_completed_events():
    """The GPU has reached a stage when the events up to its beginning are complete."""
    is_complete = {1: False, 2: True, 3: False}
    events = [SimpleNamespace(record=lambda: None, query=partial(is_complete.get, stage)) for stage in is_complete]
    progress = DeviceProgress(partial(next, iter(events)))
    for stage in is_complete:
        progress.record(stage)
    assert progress.count_reached() == 0, "the events before it are not complete"
    is_complete[1] = True
    assert progress.count_reached() == 2


def test_a_rank_that_reads_a_value_from_the_device_is_recognized():
    """A thread inside `.item()`, a C function without a frame, is distinguished from other calls on that line."""

    class Tensor:
        def __init__(self, lock):
            self.item = self.multiply = partial(lock.acquire, True, DEADLINE)

    lock = threading.Lock()
    tensor, results, answers = Tensor(lock), [], []

    def inspect_and_release():
        wait_until(lambda: inspect_threads()["reads_device"])
        lock.release()
        wait_until(lambda: results)
        time.sleep(0.1)
        answers.append(inspect_threads()["reads_device"])
        lock.release()

    lock.acquire()
    thread = threading.Thread(target=inspect_and_release)
    thread.start()
    results.append(tensor.item())
    results.append(tensor.multiply())
    thread.join()
    assert answers == [False]


def test_compiling_counts_as_progress(tmp_path):
    """While the main thread compiles, every heartbeat counts as progress. While a compiled model runs, none counts."""
    (tmp_path / "heartbeat").mkdir()
    run = Runtime(0, 0, 1, 1, torch.device("cpu"), torch.float32)
    run.progress.stage = "forward"
    with open(tmp_path / "rank0.txt", "w") as file:
        heartbeat = HeartbeatThread(run, tmp_path, 10.0, file, "nanoGPT")
    exemptions = []

    def backend(module, _inputs):
        exemptions.append(inspect_threads()["is_exempt"])
        heartbeat.write_heartbeat()
        return module.forward

    @torch.compiler.disable
    def record(x):
        exemptions.append(inspect_threads()["is_exempt"])
        return x

    @torch.compile(backend=backend)
    def model(x):
        return record(x + 1) * 2

    model(torch.ones(2))
    count = len(exemptions)
    model(torch.ones(2))
    assert True in exemptions[:count] and exemptions[count:] == [False]
    marks = run.progress.progress_reports
    heartbeat.write_heartbeat()
    assert (
        run.progress.progress_reports
        == marks
        == json.loads((tmp_path / "heartbeat" / "rank0.json").read_text())["progress_reports"]
        > 0
    )


# A hang in C code that does not release Python's global interpreter lock: rank 1 waits for a mutex that it has already
# locked. The wait ends after two minutes, in case the test fails. The file is a launcher whose forked ranks inherit the
# changed method. If its ranks are new interpreters, each of them imports the file as `sitecustomize`.
HANG_WITH_THE_GIL = """
import os

if __name__ == "__main__" or "RANK" in os.environ:
    import ctypes
    import runpy
    import time

    from nanoGPT.dataset import TokenData

    read = TokenData.batch

    def batch(self, split, step, micro_batch):
        if (os.environ["RANK"], split, step) == ("1", "train", 4):
            mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time()) + 120, 0)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_timedlock(mutex, until)
        return read(self, split, step, micro_batch)

    TokenData.batch = batch
    if __name__ == "__main__":
        runpy.run_module("operate.launch", run_name="__main__", alter_sys=True)
"""


def train_with_a_fault(phase: str, config, faulty: int, fault: str) -> None:
    """Train. In step 4, the faulty rank hangs while it reads a batch. With 4 ranks, a node has 2 of them."""
    read, rank = TokenData.batch, int(os.environ["RANK"])
    if os.environ["WORLD_SIZE"] == "4":
        os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}

    def batch(self, split, step, micro_batch):
        if (split, step) == ("train", 4):
            os.kill(os.getpid(), signal.SIGSTOP) if fault == "stops" else time.sleep(1000)
        return read(self, split, step, micro_batch)

    if rank == faulty:
        TokenData.batch = batch
    call_train(phase, config)


def start_job(phase: str, ranks: int, faulty: int, fault: str, out: Path) -> list[Any]:
    """Start ranks that train, one of them with a fault. Return the process and the connection of each rank."""
    out.mkdir()
    fields = {"n_layer": 1, "gradient_accumulation_steps": 12, "max_iters": 100}
    config = tiny(phase, out, stall_seconds=STALL_SECONDS, **fields)
    return start_ranks(train_with_a_fault, ranks, phase, config, faulty, fault, folder=out)


def read_stacks(out: Path, ranks: int) -> list[str]:
    return [(out / "stacks" / f"rank{rank}.txt").read_text() for rank in range(ranks)]


def check_stalled_job(ranks: list[Any], faulty: int, out: Path) -> str:
    """Check that all ranks have exited and written their stacks. Return the message about the stall."""
    deadline = time.monotonic() + DEADLINE
    for process, _ in ranks:
        process.join(deadline - time.monotonic())
        process.kill()
        process.join()
    codes = [process.exitcode for process, _ in ranks]
    assert set(codes) <= {STALLED, -signal.SIGKILL} and codes.count(STALLED) >= len(codes) - 1, codes
    stacks = read_stacks(out, len(ranks))
    assert all("train.py" in text for text in stacks) and "in batch" in stacks[faulty], stacks
    (message,) = [path.read_text() for path in (out / "stacks").glob("stalled-*.txt")]
    assert message.startswith(f"rank {faulty} has made no progress for "), message
    assert "while the other ranks waited for it" in message, message
    return message


def check_stalled_launcher(process: Program, faulty: int, out: Path) -> None:
    """Check that the launcher has exited with code 4 and one sentence, and that all ranks have written their stacks."""
    output, _ = process.communicate()
    assert process.returncode == STALLED and output.count("error:") == 1 and "Traceback" not in output, output
    message = output.splitlines()[-1]
    assert message.startswith(f"error: rank {faulty} has made no progress for "), output
    assert "the process does not respond" in message, output
    stacks = read_stacks(out, 2)
    assert all("train.py" in text for text in stacks) and "sitecustomize.py" in stacks[faulty], stacks
    recorded = json.loads((out / "stacks" / f"collectives-rank{1 - faulty}.json").read_text())
    waiting = recorded["gloo"]["entries"][-1]
    assert waiting["process_group"][1] and waiting["collective_seq_id"] > 10, waiting


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_job(tmp_path):
    """If one rank hangs, it is named, and all ranks write their stacks and exit.

    The rank sleeps (DDP), is stopped (FSDP on two nodes), or runs C code that does
    not release the GIL (with the launcher).
    """
    (tmp_path / "sitecustomize.py").write_text(HANG_WITH_THE_GIL)
    fields = {**LONG_RUN, "n_layer": 1, "stall_seconds": STALL_SECONDS, "out_dir": tmp_path / "locked"}
    words = [str(tmp_path / "sitecustomize.py"), "--gpus=2", "phase3_fsdp/train.py", *make_flags(**fields)]
    launcher = Program(*words, PYTHONPATH=str(tmp_path))
    try:
        sleeping_job = start_job("nanoGPT", 3, 2, "sleeps", tmp_path / "asleep")
        stopped_job = start_job("phase3_fsdp", 4, 0, "stops", tmp_path / "stopped")
        assert "in step 4, micro-batch 2 (at promises/test_hangs.py" in check_stalled_job(
            sleeping_job, 2, tmp_path / "asleep"
        )
        assert "the process is stopped" in check_stalled_job(stopped_job, 0, tmp_path / "stopped")
        check_stalled_launcher(launcher, 1, tmp_path / "locked")
    finally:
        launcher.kill()


def deadlock_before_training(config) -> None:
    """Start a run on two ranks. Before the optimizer is created, each rank waits for data from the other one."""
    train.configure_optimizer = lambda *_: dist.recv(torch.zeros(1), 1 - dist.get_rank())
    train.train(config)


@pytest.mark.long
def test_ranks_that_wait_for_each_other_before_training_are_stopped(tmp_path):
    """Before the first step, reading a checkpoint is progress, but waiting for another rank is not."""
    ranks = start_ranks(deadlock_before_training, 2, tiny("nanoGPT", tmp_path, stall_seconds=4.0), folder=tmp_path)
    for process, _ in ranks:
        process.join(DEADLINE)
        process.kill()
    assert [process.exitcode for process, _ in ranks] == [STALLED, STALLED]
    (message,) = [path.read_text() for path in (tmp_path / "stacks").glob("stalled-*.txt")]
    assert "in step 0, build" in message and "all stopped there" in message, message


def test_a_start_that_fails_early_does_not_disturb_the_next_one(tmp_path):
    """A rank that ends before its first heartbeat leaves no message that the launcher of the next start would read."""
    for folder in ("heartbeat", "stacks"):
        (tmp_path / folder).mkdir()
    StallDetector(tmp_path, 2, 10.0).report_lost_rank(0)
    assert not list(tmp_path.rglob("*.txt"))
    for detector in (StallDetector(tmp_path, 2, 10.0, 1, "new"), StallDetector(tmp_path, 2, 10.0, 0, "new")):
        detector.report_lost_rank(1)
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["lost-new.txt"]
    assert StallDetector(tmp_path, 2, 10.0).verdict() is None
    assert StallDetector(tmp_path, 2, 10.0, 0, "new").verdict() is not None


def test_only_children_of_a_launcher_can_be_lost(tmp_path):
    """A rank of another node with the same host name and the same process id of the launcher is not taken for dead."""
    (tmp_path / "heartbeat").mkdir()
    detector = StallDetector(tmp_path, 1, 10.0)
    there = {**HEARTBEAT, "host": socket.gethostname(), "parent": os.getpid(), "pid": 2**22, "time": time.time() + 1}
    (tmp_path / "heartbeat" / "rank0.json").write_text(json.dumps(there))
    detector.read_heartbeats()
    assert detector.token == "new" and not detector.report_killed_rank()


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_cannot_meet_the_others_ends_both_nodes(faulty, tmp_path):
    """The ranks of one node cannot join the process group: the other node ends, too, and gives the reason."""
    words = ["phase3_fsdp/train.py", *make_flags(**{**LONG_RUN, "out_dir": tmp_path})]
    port, begin = find_free_port(), time.monotonic()
    programs = []
    for i in range(2):
        place = ["--nnodes=2", "--master_addr=127.0.0.1", f"--node_rank={i}"]
        interface = {"GLOO_SOCKET_IFNAME": "missing"} if i == faulty else {}
        programs.append(Program("operate.launch", *place, *words, MASTER_PORT=port, **interface))
    lines = [each.communicate()[0].splitlines()[-1] for each in programs]
    assert time.monotonic() - begin < 60, lines  # the ranks alone wait 30 minutes
    assert all(each.returncode for each in programs) and "missing" in lines[faulty], lines
    assert lines[1 - faulty].startswith(f"error: node {faulty} has failed: rank {faulty}: "), lines


@pytest.mark.parametrize(
    ("nodes", "fault", "code", "reason"),
    [(1, "fails", 1, "a planted error"), (2, "killed", 137, "it was killed by SIGKILL")],
)
def test_the_death_of_a_rank_ends_ranks_that_cannot_notice_it(nodes, fault, code, reason, tmp_path):
    """A rank dies while the other one waits as for a GPU: on both nodes the job ends within seconds and names it."""
    words = ["phase3_fsdp/train.py", *make_flags(**{**LONG_RUN, "n_layer": 1, "out_dir": tmp_path})]
    words += ["--observers=operate,tests.helpers.unreachable_rank"]
    place = [f"--gpus={2 // nodes}", f"--nnodes={nodes}", "--master_addr=127.0.0.1"]
    environment = {"MASTER_PORT": find_free_port(), "FAULT": fault}
    programs = [Program("operate.launch", *place, f"--node_rank={i}", *words, **environment) for i in range(nodes)]
    await_steps(tmp_path, 2, programs[0])
    begin = time.monotonic()
    outputs = [each.communicate()[0] for each in programs]
    assert time.monotonic() - begin < 25, outputs  # the elastic agent alone waits 30 s, and another node 1,000 s
    assert [each.returncode for each in programs] == [1, code][-nodes:], outputs
    lines = [output.splitlines()[-1] for output in outputs]
    assert lines[-1].startswith("error: rank 1: ") and reason in lines[-1], outputs
    assert nodes == 1 or "rank 1 has failed or was killed" in lines[0], outputs
