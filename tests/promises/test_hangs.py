"""A job that hangs: who is named, whose stacks are written, how it ends; and what is no hang."""

import gc
import json
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import STALLED
from nanoGPT.job.heartbeat import Heart, whereabouts
from nanoGPT.job.watchdog import Watch
from tests.helpers.programs import Program, launch
from tests.helpers.training import call_train, tiny
from workshop.ranks import start_ranks

PATIENCE = 4.0  # seconds without progress, in these tests
BEAT = {"step": 4, "stage": "micro-batch 3", "places": 30, "marks": 0, "waits": False, "line": "data.py:1, batch"}
BEAT |= {"run": "new", "host": "here", "pid": 1, "parent": 0, "ended": False, "time": 0.0}


class Job:
    """Heartbeats as ranks write them, and rank 0's watch over them, by a clock that the test turns."""

    def __init__(self, out: Path, ranks: int, stall_seconds: float = 10.0) -> None:
        self.out, self.now = out, time.monotonic()
        for folder in ("heartbeat", "stacks"):
            (out / folder).mkdir()
        self.watch = Watch(out, ranks, stall_seconds, 0, "new")

    def beat(self, rank: int, **changes) -> None:
        beat = {**BEAT, "time": self.now, **changes}
        if rank == 0:
            self.watch.note(0, beat)
        (self.out / "heartbeat" / f"rank{rank}.json").write_text(json.dumps(beat))

    def seconds(self, count: int, beats: dict[int, dict]) -> str | None:
        """Let time go by; each second every rank in `beats` tells of itself."""
        for _ in range(count):
            self.now += 1.0
            for rank, changes in beats.items():
                self.beat(rank, **changes)
            if said := self.watch.look(self.now):
                return said
        return None


WAITS = {"places": 31, "waits": True, "line": "runtime.py:80, any"}


@pytest.mark.parametrize(
    ("beats", "words"),
    [
        ({0: WAITS, 1: {}, 2: WAITS}, ["rank 1 ", "in step 4, micro-batch 3 (in data.py:1, batch), while the others"]),
        ({0: {"step": 5, "places": 9}, 1: WAITS}, ["rank 1 ", "in step 4", "waiting for the others"]),
        ({0: {**WAITS, "places": 30}, 1: {}}, ["rank 1 ", "while the others waited"]),
        ({0: {}, 1: {}}, ["and ranks [0, 1] stand alike"]),
        ({0: {}}, ["rank 0 ", "batch); stacks of all ranks are in"]),
    ],
    ids=["least marks", "earlier step", "not waiting", "alike", "alone"],
)
def test_the_rank_at_fault_is_named(beats, words, tmp_path):
    """Of the ranks that have come least far, the one that waits for nobody is named, with its step and its line."""
    said = Job(tmp_path, len(beats)).seconds(13, beats)
    assert said and all(word in said for word in [*words, "silent for 1"]), said


def test_a_rank_that_does_not_answer_is_named(tmp_path):
    """Of ranks that are equally far, one whose heartbeats have stopped is named, whatever the last of them said."""
    job = Job(tmp_path, 2)
    assert job.seconds(3, {0: {**WAITS, "marks": 1}, 1: WAITS}) is None
    said = job.seconds(13, {0: {**WAITS, "marks": 1}})
    assert said and said.startswith("rank 1 has been silent for 1") and "it does not answer" in said
    assert (tmp_path / "stacks" / "stalled-new.txt").read_text() == said + "\n"


def test_of_ranks_that_stand_alike_the_one_silent_longest_is_named(tmp_path):
    """Of two ranks in the same place, the one whose last sign of progress is older is at fault."""
    job = Job(tmp_path, 2)
    assert job.seconds(5, {0: {}, 1: {}}) is None
    said = job.seconds(13, {0: {"marks": 1}, 1: {}})
    assert said and said.startswith("rank 1 has been silent for 1") and "ranks [0, 1] stand alike" in said, said


def test_what_is_no_hang(tmp_path):
    """A paused machine, a rank that writes, one that has not begun, one of an earlier run and one that has ended."""
    job = Job(tmp_path, 2)
    assert job.seconds(30, {0: WAITS}) is None, "rank 1 has not begun"
    assert job.seconds(30, {0: WAITS, 1: {"run": "old"}}) is None, "rank 1's heartbeat is an earlier run's"
    for pause in range(5):
        assert job.seconds(3, {0: WAITS, 1: {"marks": pause}}) is None
        job.now += 10_000  # a closed laptop
    for mark in range(40):
        assert job.seconds(1, {0: WAITS, 1: {"marks": 100 + mark}}) is None, "rank 1 writes a file"
    assert job.seconds(30, {0: WAITS, 1: {"ended": True, "marks": 200}}) is None, "rank 1 has ended"
    assert job.seconds(13, {0: WAITS, 1: {}}), "and now it hangs"


def test_compiling_is_progress_and_a_compiled_model_is_none(tmp_path):
    """A main thread that compiles keeps its own pace, and every heartbeat counts it as progress; one that runs what was
    compiled does not."""
    (tmp_path / "heartbeat").mkdir()
    run = Runtime(0, 0, 1, 1, torch.device("cpu"), torch.float32)
    with open(tmp_path / "rank0.txt", "w") as file:
        heart = Heart(run, tmp_path, 10.0, file)
    found = []

    def backend(module, _inputs):
        found.append(whereabouts()["own_pace"])
        heart.beat()
        return module.forward

    @torch.compiler.disable
    def look(x):
        found.append(whereabouts()["own_pace"])
        return x

    @torch.compile(backend=backend)
    def model(x):
        return look(x + 1) * 2

    model(torch.ones(2))
    compiled = len(found)
    model(torch.ones(2))
    assert True in found[:compiled] and found[compiled:] == [False]
    marks = run.progress.marks
    heart.beat()
    assert run.progress.marks == marks == json.loads((tmp_path / "heartbeat" / "rank0.json").read_text())["marks"] > 0


def test_looking_at_the_stacks_keeps_nothing_alive():
    """What a function held while another thread looked at its frame is freed when it returns, at once: no tensor waits
    for the garbage collector."""

    def hold():
        tensor = torch.ones(4)
        died = weakref.ref(tensor)
        looker = threading.Thread(target=whereabouts)
        looker.start()
        looker.join()
        whereabouts()
        return died

    gc.collect()
    gc.disable()
    try:
        assert hold()() is None
    finally:
        gc.enable()


# What keeps Python's lock: a C call that waits for a mutex that is taken. After two minutes it returns, in case that
# the test fails.
KEEPS_THE_LOCK = """
import os

if os.environ.get("RANK") == "1":
    import ctypes
    import time

    from nanoGPT.dataset import TokenData

    read = TokenData.batch

    def batch(self, split, purpose, step, micro_batch):
        if (split, step) == ("train", 4):
            mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time()) + 120, 0)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_timedlock(mutex, until)
        return read(self, split, purpose, step, micro_batch)

    TokenData.batch = batch
"""


def train_with_a_fault(phase: str, config, faulty: int, fault: str) -> None:
    """Train; in step 4 the faulty rank does not come back from reading a batch."""
    read = TokenData.batch

    def batch(self, split, purpose, step, micro_batch):
        if (split, step) == ("train", 4):
            os.kill(os.getpid(), signal.SIGSTOP) if fault == "stops" else time.sleep(1000)
        return read(self, split, purpose, step, micro_batch)

    if int(os.environ["RANK"]) == faulty:
        TokenData.batch = batch
    call_train(phase, config)


def start_job(phase: str, ranks: int, faulty: int, fault: str, out: Path) -> list[Any]:
    """Start ranks that train, one of them with a fault; each one's process, and the connection to which it prints."""
    out.mkdir()
    config = tiny(phase, out, stall_seconds=PATIENCE, gradient_accumulation_steps=6, max_iters=100)
    return start_ranks(train_with_a_fault, ranks, phase, config, faulty, fault, folder=out)


def stacks(out: Path, ranks: int) -> list[str]:
    return [(out / "stacks" / f"rank{rank}.txt").read_text() for rank in range(ranks)]


def check_job(started: list[Any], faulty: int, out: Path) -> str:
    """All ranks have ended, with their stacks; the sentence on which they did."""
    deadline = time.monotonic() + 150  # for a test that fails
    for process, _ in started:
        process.join(deadline - time.monotonic())
        process.kill()
        process.join()
    codes = [process.exitcode for process, _ in started]
    assert set(codes) <= {STALLED, -signal.SIGKILL} and codes.count(STALLED) >= len(codes) - 1, codes
    written = stacks(out, len(started))
    assert all("train.py" in text for text in written) and "in batch" in written[faulty], written
    (said,) = [path.read_text() for path in (out / "stacks").glob("stalled-*.txt")]
    assert said.startswith(f"rank {faulty} has been silent for ") and "while the others waited for it" in said, said
    return said


def check_launched(process: Program, faulty: int, out: Path) -> None:
    """The launcher has ended, with code 4 and one sentence, and all ranks have written their stacks."""
    output, _ = process.communicate(timeout=150)
    assert process.returncode == STALLED and output.count("error:") == 1 and "Traceback" not in output, output
    said = output.splitlines()[-1]
    assert said.startswith(f"error: rank {faulty} has been silent for ") and "it does not answer" in said, output
    written = stacks(out, 2)
    assert all("train.py" in text for text in written) and "sitecustomize.py" in written[faulty], written


def test_a_rank_that_hangs_ends_the_job(tmp_path, monkeypatch):
    """Asleep (DDP), stopped (FSDP), in C with Python's lock (launched): it is named, all write stacks, all end."""
    (tmp_path / "sitecustomize.py").write_text(KEEPS_THE_LOCK)
    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", str(tmp_path))
        launched = launch(tmp_path / "locked", 2, stall_seconds=PATIENCE)
    try:
        asleep = start_job("nanoGPT", 3, 2, "sleeps", tmp_path / "asleep")
        stopped = start_job("phase3_fsdp", 2, 0, "stops", tmp_path / "stopped")
        assert "in step 4, micro-batch 2 (in promises/test_hangs.py" in check_job(asleep, 2, tmp_path / "asleep")
        assert "it is stopped" in check_job(stopped, 0, tmp_path / "stopped")
        check_launched(launched, 1, tmp_path / "locked")
    finally:
        launched.kill()
