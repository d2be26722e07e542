"""What a rank tells of itself every second, and its end when the job hangs.

    heartbeat/rank{r}.json      step, stage, counts of progress, where the main thread is, the process, the time

The main thread notes its progress (`Runtime.enter_stage`, `Runtime.report_progress`); a thread of its own writes it
down, looks at the other ranks' (`nanoGPT.job.watchdog`), and ends the process with its stacks in stacks/rank{r}.txt
when nobody makes any.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import STALLED
from nanoGPT.job.exits import tell_launcher
from nanoGPT.job.watchdog import GRACE, Watch, end_mute, is_child

# A thread in one of these compiles, on a GPU also the one of the backward, or somebody debugs: no time is too long for
# that. (Running what was compiled also has frames of torch._dynamo and torch._inductor, but not of these files.)
OWN_PACE = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "triton/compiler/compiler.py",
    "/pdb.py",
)
COLLECTIVE = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
STANDARD_LIBRARY = os.path.dirname(os.__file__)


class Place(NamedTuple):
    """Where a Python frame is."""

    file: str
    line: int
    function: str


def stack(frame: FrameType | None) -> Iterator[Place]:
    """A thread's Python frames, innermost first."""
    while frame:
        yield Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def stacks() -> dict[int, list[Place]]:
    """The stacks of all threads, by their idents. A frame that is kept keeps its variables, activations too, beyond its
    function's end, so none is."""
    frames = sys._current_frames()
    places = {thread: list(stack(frame)) for thread, frame in frames.items()}
    frames.clear()  # it holds this function's own frame: a cycle that only the garbage collector would undo
    return places


def is_library(file: str) -> bool:
    return "-packages/" in file or file.startswith((STANDARD_LIBRARY, "<frozen"))


def in_collective(files: list[str]) -> bool:
    """Whether the library code that a thread is in, given innermost first, is one that waits for other ranks."""
    for file in files:
        if not is_library(file) or "torch/distributed/checkpoint/" in file:  # which writes, when it does not wait
            return False
        if any(part in file for part in COLLECTIVE):
            return True
    return False


def whereabouts() -> dict[str, Any]:
    """Where this process is: whether it compiles; whether its main thread waits for other ranks, and in what line."""
    threads = stacks()
    main = threads.get(threading.main_thread().ident or 0, [])
    own = next((place for place in main if not is_library(place.file)), None)
    return {
        "own_pace": any(place.file.endswith(OWN_PACE) for places in threads.values() for place in places),
        "waits": in_collective([place.file for place in main]),
        "line": f"{'/'.join(Path(own.file).parts[-2:])}:{own.line}, {own.function}" if own else "",
    }


class Heart:
    """A rank's thread that tells the others where it is, and ends the rank when the job hangs.

    Args:
        run: this rank's Runtime.
        out_dir: of the run.
        stall_seconds: see `Watch`.
        stacks: this rank's file for stacks, open.
    """

    def __init__(self, run: Runtime, out_dir: Path, stall_seconds: float, stacks: IO[str]) -> None:
        self.run, self.stacks = run, stacks
        self.file = out_dir / "heartbeat" / f"rank{run.rank}.json"
        self.watch = Watch(out_dir, run.world_size, stall_seconds, run.rank, run.token)
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._go_on, daemon=True)

    def start(self) -> None:
        """Training begins. The first beat comes from here: a rank that has not told of itself is not watched yet."""
        self.beat()
        self.thread.start()

    def close(self) -> None:
        """Training has ended: beat once more, and watch no longer."""
        self.closing.set()
        self.thread.join(5 * GRACE)
        self.beat()

    def beat(self) -> None:
        """Tell where this rank is; while it compiles, that is progress."""
        where = whereabouts()
        if where.pop("own_pace"):
            self.run.report_progress()
        process = {"run": self.run.token, "host": socket.gethostname(), "pid": os.getpid(), "parent": os.getppid()}
        now = {"ended": self.closing.is_set(), "time": time.time()}
        beat = {**vars(self.run.progress), **where, **process, **now}
        self.watch.note(self.run.rank, beat)
        temporary = self.file.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk must not end a run that has nothing to save yet
            self.file.parent.mkdir(exist_ok=True)  # the run's directory may have been created again
            temporary.write_text(json.dumps(beat) + "\n")
            os.replace(temporary, self.file)

    def _go_on(self) -> None:
        while not self.closing.wait(1.0):
            self.beat()
            if (sentence := self.watch.look(time.monotonic())) and not self.closing.is_set():
                self._end(sentence)

    def _end(self, sentence: str) -> None:
        """Write stacks, help those beside that cannot, and end this process, whatever its main thread does."""
        faulthandler.dump_traceback_later(5 * GRACE, exit=True, file=self.stacks)  # if a disk or a terminal hangs, too
        self.watch.read()
        beside = self.watch.same_launcher(self.run.rank)
        mute = {rank: self.watch.seen[rank].beat for rank in beside if not self.watch.answers(rank)}
        first = self.run.rank == min(set(beside) - set(mute), default=self.run.rank)
        with contextlib.suppress(OSError):
            self.stacks.write(sentence + "\n")
            self.stacks.flush()
            faulthandler.dump_traceback(self.stacks)
        if first:
            end_mute([beat["pid"] for beat in mute.values() if is_child(beat, os.getppid())])
        else:
            time.sleep(GRACE)
        if not tell_launcher(sentence) and first:
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        os._exit(STALLED)
