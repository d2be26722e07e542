"""Write a heartbeat every second, and stop the process when the job hangs or has lost a rank.

    heartbeat/rank{r}.json      step, stage, progress counters, current line of the main thread, process ids, time;
                                whether the main thread waits for other ranks or for its GPU (else it computes), and
                                the number of stages that the GPU has reached

The main thread reports its progress (`Runtime.enter_stage`, `Runtime.report_progress`). A separate thread writes the
heartbeat and reads the heartbeats of the other ranks (`operate.watchdog`). If no rank makes progress, this thread
writes the process's stacks into stacks/rank{r}.txt and its last collectives into stacks/collectives-rank{r}.json, and
exits the process. It does the same if another rank has failed or was killed, and this rank does not notice it.
"""

import contextlib
import faulthandler
import itertools
import json
import linecache
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as distributed_c10d

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import report_to_launcher
from operate.device_progress import DeviceProgress
from operate.run_files import replace_json
from operate.watchdog import GRACE_SECONDS, StallDetector, dump_and_kill, is_child_of

# A frame in one of these files means that the thread compiles or that a debugger runs: both may take any amount of
# time. On a GPU, the backward pass is compiled in another thread. (Compiled code also has frames of torch._dynamo and
# torch._inductor, but not of these files.)
COMPILER_AND_DEBUGGER = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "triton/compiler/compiler.py",
    "/pdb.py",
)
COLLECTIVE = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
# Calls that wait until the GPU has run everything that was queued. Most are C functions, which have no Python frame.
READS_DEVICE = re.compile(
    r"\.(item|tolist|cpu|numpy|synchronize|_cuda_synchronize|_accelerator_synchronizeDevice)\([^()]*\)$"
)
STANDARD_LIBRARY = os.path.dirname(os.__file__)


class CodeLocation(NamedTuple):
    """The file, line and function of a Python frame, and the instruction of its code that runs."""

    file: str
    line: int
    function: str
    code: CodeType
    instruction: int


def walk_frames(frame: FrameType | None) -> Iterator[CodeLocation]:
    """Yield the locations of a thread's Python frames, innermost first."""
    while frame:
        yield CodeLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, frame.f_code, frame.f_lasti)
        frame = frame.f_back


def collect_stacks() -> dict[int, list[CodeLocation]]:
    """Return the stacks of all threads, by thread identifier.

    Keep no reference to a frame: a frame holds the function's local variables, such as activations, even after the
    function has returned.
    """
    frames = sys._current_frames()
    stacks = {thread: list(walk_frames(frame)) for thread, frame in frames.items()}
    frames.clear()  # it contains this function's own frame: a cycle that only the garbage collector would free
    return stacks


def is_library_file(file: str) -> bool:
    """Return whether a source file belongs to an installed package or to the standard library."""
    return "-packages/" in file or file.startswith((STANDARD_LIBRARY, "<frozen"))


def is_in_collective(files: list[str]) -> bool:
    """Return whether a thread is inside library code that waits for other ranks.

    Args:
        files: the files of the thread's frames, innermost first.
    """
    for file in files:
        if not is_library_file(file) or "torch/distributed/checkpoint/" in file:  # it may be writing, not waiting
            return False
        if any(part in file for part in COLLECTIVE):
            return True
    return False


def is_reading_device(location: CodeLocation) -> bool:
    """Return whether a frame is inside a call that copies a value from the device, such as `loss.item()`.

    On a GPU, such a call waits for all kernels that were queued before, collectives included.
    """
    positions = location.code.co_positions()
    _, line, _, end = next(
        itertools.islice(positions, max(location.instruction, 0) // 2, None), (None, None, None, None)
    )
    if line is None or end is None:
        return False
    source = linecache.getline(location.file, line).encode()[:end].decode()  # up to the end of the call that runs
    return READS_DEVICE.search(source) is not None


def inspect_threads() -> dict[str, Any]:
    """Return what this process does, read from the stacks of its threads.

    Returns:
        `is_exempt`: whether a thread compiles or a debugger runs, so that a lack of progress is no hang. `waits`:
        whether the main thread waits for other ranks. `reads_device`: whether it copies a value from the device.
        `line`: the main thread's innermost line outside of libraries.
    """
    stacks = collect_stacks()
    main = stacks.get(threading.main_thread().ident or 0, [])
    innermost = next((location for location in main if not is_library_file(location.file)), None)
    line = f"{'/'.join(Path(innermost.file).parts[-2:])}:{innermost.line}, {innermost.function}" if innermost else ""
    return {
        "is_exempt": any(frame.file.endswith(COMPILER_AND_DEBUGGER) for stack in stacks.values() for frame in stack),
        "waits": is_in_collective([location.file for location in main]),
        "reads_device": any(map(is_reading_device, main[:1])),
        "line": line,
    }


def dump_collectives() -> dict[str, Any]:
    """Return the last collectives of this rank by backend, from torch's flight recorders: shapes, states and times.

    A rank whose last collective has a smaller `collective_seq_id` than that of the others is the one they wait for.
    A run on GPUs uses both backends: gloo for signals and saves. The main thread may be waiting in a collective: this
    function does not use the process group.
    """
    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {
        backend: json.loads(getattr(distributed_c10d, name)())
        for backend, name in recorders.items()
        if hasattr(distributed_c10d, name)  # a build of torch without CUDA has no NCCL
    }


def write_collectives(out_dir: Path, rank: int) -> None:
    """Write the last collectives of a rank into stacks/collectives-rank{r}.json."""
    (out_dir / "stacks" / f"collectives-rank{rank}.json").write_text(json.dumps(dump_collectives()))


class HeartbeatThread:
    """A thread of a rank that writes the rank's heartbeats, and exits the process when the job cannot continue.

    Args:
        run: this rank's Runtime.
        out_dir: the run's directory.
        stall_seconds: see `StallDetector`.
        stack_file: the open file for this rank's stacks.
        trainer: package of the trainer, such as "phase3_fsdp".
        device_progress: counts the stages that the GPU has reached; None on a CPU.

    Attributes:
        beats, waiting_beats: number of heartbeats, and of those in which the main thread waited for other ranks. If one
            rank rarely waits and all others often wait, this rank is the straggler.
    """

    def __init__(
        self,
        run: Runtime,
        out_dir: Path,
        stall_seconds: float,
        stack_file: IO[str],
        trainer: str,
        device_progress: DeviceProgress | None = None,
    ) -> None:
        self.run, self.stack_file, self.device_progress = run, stack_file, device_progress
        backend = dist.get_backend() if dist.is_initialized() else "none"
        self.names = {"trainer": trainer, "backend": backend, "device": run.device.type}
        self.beats = self.waiting_beats = 0
        self.out_dir, self.file = out_dir, out_dir / "heartbeat" / f"rank{run.rank}.json"
        self.detector = StallDetector(out_dir, run.world_size, stall_seconds, run.rank, run.token)
        self.is_closing = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, and start the thread. A rank is monitored only after its first heartbeat."""
        self.write_heartbeat()
        self.thread.start()

    def close(self) -> None:
        """Stop the thread when training has ended, and write a last heartbeat."""
        self.is_closing.set()
        self.thread.join(5 * GRACE_SECONDS)
        self.write_heartbeat()

    def write_heartbeat(self) -> None:
        """Write this rank's heartbeat.

        Compilation and work before training count as progress: reading a large checkpoint takes a long time. A rank
        that waits for others makes no progress.
        """
        activity = inspect_threads()
        is_preparing = self.run.progress.stage in ("start", "build") and not activity["waits"]
        if activity.pop("is_exempt") or is_preparing:
            self.run.report_progress()
        device = self.device_progress
        activity["waits_for_device"] = activity.pop("reads_device") and device is not None
        activity["device_stages"] = device.count_reached() if device else None
        process = {"run": self.run.token, "host": socket.gethostname(), "pid": os.getpid(), "parent": os.getppid()}
        self.beats += 1
        self.waiting_beats += activity["waits"]
        counts = {"beats": self.beats, "waiting_beats": self.waiting_beats, **self.names}
        status = {**counts, "ended": self.is_closing.is_set(), "time": time.time()}
        heartbeat = {**vars(self.run.progress), **activity, **process, **status}
        self.detector.record(self.run.rank, heartbeat)
        with contextlib.suppress(OSError):  # a full disk must not stop a run that has nothing to save yet
            replace_json(self.file, heartbeat)

    def _run(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.set_device(self.run.device)  # a new thread starts on GPU 0
        while not self.is_closing.wait(1.0):
            self.write_heartbeat()
            if (verdict := self.detector.check(time.monotonic())) and not self.is_closing.is_set():
                self._stop_process(*verdict)

    def _stop_process(self, code: int, message: str) -> None:
        """Write this process's stacks and exit. The first rank that responds also kills the ranks that do not respond.

        Args:
            code: the exit code.
            message: why the job stops.
        """
        # If a disk or a terminal hangs too, faulthandler exits the process.
        faulthandler.dump_traceback_later(5 * GRACE_SECONDS, exit=True, file=self.stack_file)
        self.detector.read_heartbeats()
        local_ranks = self.detector.same_launcher(self.run.rank)
        unresponsive = {
            rank: self.detector.statuses[rank].heartbeat
            for rank in local_ranks
            if not self.detector.is_responding(rank)
        }
        is_first = self.run.rank == min(set(local_ranks) - set(unresponsive), default=self.run.rank)
        with contextlib.suppress(OSError):
            self.stack_file.write(message + "\n")
            self.stack_file.flush()
            faulthandler.dump_traceback(self.stack_file)
        with contextlib.suppress(Exception):  # torch's recorder must not stop this rank from ending the job
            write_collectives(self.out_dir, self.run.rank)
        if is_first:
            dump_and_kill([each["pid"] for each in unresponsive.values() if is_child_of(each, os.getppid())])
        else:
            time.sleep(GRACE_SECONDS)
        if not report_to_launcher(message) and is_first:
            print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(code)
