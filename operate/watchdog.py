"""Stop a job that hangs, with the stacks of all ranks and one message that names the rank that caused the hang.

The ranks communicate through files under out_dir, a directory that all ranks share:

    heartbeat/rank{r}.json      the heartbeat of each rank, written every second
    stacks/stalled-{token}.txt  the message, written by the first process that detects the hang
    heartbeat/lost-{token}.txt  the message if a rank is lost, written by that rank or by its launcher. (NFS shows a
                                new file within a second only in a directory to which the client writes.)

A rank that makes progress reads no heartbeats. On more than 64 ranks, heartbeats are read less often.

If no rank makes progress for `stall_seconds`, every rank writes its stacks into stacks/rank{r}.txt and exits. Some
ranks cannot do this: a process may be stopped (SIGSTOP), or its main thread may hold Python's global interpreter lock
(GIL) in a C call. Such a rank receives SIGQUIT, on which faulthandler writes its stacks without Python, and then
SIGKILL. Another rank of the same launcher sends these signals, or `operate.launch` does. (If a single process was
started without the launcher, no other process can send them.) The message names the rank with the least progress; if
several ranks have made equally little progress, it names one that does not wait for other ranks.

If a rank dies, the other ranks wait for it in a collective. A rank that waits for its GPU meanwhile can neither notice
the loss nor handle SIGTERM. A rank that fails therefore writes a message, the launcher writes it for a rank that was
killed, and the threads that write the heartbeats exit the other ranks within seconds, on other nodes too.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoGPT.errors import LOST_RANK, STALLED
from operate.run_files import read_json_object

# A change of one of these fields of a heartbeat is progress. The host can queue work that keeps a GPU busy for minutes,
# so the stages that the GPU has reached count too.
PROGRESS = ("step", "stages_entered", "progress_reports", "device_stages")
GRACE_SECONDS = 2.0  # time to write stacks before processes are stopped
EXIT_SECONDS = 15.0  # time in which ranks that respond exit after the loss of a rank; trackers may still send
LOSS_SECONDS = 1.5  # without progress, after which a rank looks whether another rank was lost
HAS_PROC = Path("/proc/self/stat").exists()
MAX_CHECK_SECONDS = 2.0  # if more time passes between two checks, this process was suspended for the rest of it


def read_state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state (T if it is stopped) and its parent's id; "" and 0 if there is no such process."""
    words: list[str] = []
    with contextlib.suppress(OSError):  # the process has exited, or a container has no ps
        if HAS_PROC:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        else:
            command = ["ps", "-o", "stat=,ppid=", "-p", str(pid)]
            words = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return (words[0], int(words[1])) if words else ("", 0)


def list_children(parent: int) -> list[int]:
    """Return the process ids of a process's children; an empty list if the system has neither /proc nor pgrep."""
    with contextlib.suppress(OSError):
        if HAS_PROC:
            pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
            return [pid for pid in pids if read_state_and_parent(pid)[1] == parent]
        done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]
    return []


@dataclass
class RankStatus:
    """A rank's last heartbeat, with two times of the detector's clock.

    Attributes:
        heartbeat: the content of the rank's heartbeat file.
        last_progress: when a heartbeat last showed progress.
        last_heartbeat: when the last new heartbeat was recorded.
    """

    heartbeat: dict[str, Any]
    last_progress: float
    last_heartbeat: float


class StallDetector:
    """Reads the heartbeats of all ranks and detects a hang. Each rank and each launcher runs one detector.

    Args:
        out_dir: the run's directory, on a file system that all ranks share.
        world_size: number of ranks.
        stall_seconds: time without progress on any rank, after which the job is stopped.
        rank: the rank that runs this detector and passes its own heartbeats to `record`; None in a launcher.
        token: identifies this start of the job; heartbeats with another token belong to an earlier run. A launcher
            takes the token from the heartbeats of its children.
    """

    def __init__(
        self,
        out_dir: Path,
        world_size: int,
        stall_seconds: float,
        rank: int | None = None,
        token: str = "",
    ) -> None:
        self.out_dir, self.world_size, self.stall_seconds = out_dir, world_size, stall_seconds
        self.rank, self.token = rank, token
        self.clock, self.last_check, self.next_read = 0.0, time.monotonic(), 0.0
        self.start = time.time()
        self.own_ranks: set[int] = set()  # of a launcher: ranks that were seen to run as its children
        self.read_period = min(max(stall_seconds / 20, 1.0), 15.0) * max(1.0, world_size / 64)  # seconds
        self.statuses: dict[int, RankStatus] = {}

    def check(self, now: float) -> tuple[int, str] | None:
        """Return the exit code and the message with which the job stops, or None. Call it every second.

        Args:
            now: `time.monotonic()`. At most MAX_CHECK_SECONDS between two checks count: while this process was
                suspended, it could not observe the progress of other ranks.
        """
        self.clock, self.last_check = self.clock + min(now - self.last_check, MAX_CHECK_SECONDS), now
        idle = self.seconds_stalled(self.rank) if self.rank in self.statuses else math.inf
        if idle < LOSS_SECONDS:
            return None  # this rank makes progress, so the job does not hang: read no files
        if idle > 1 + self.read_period / 2 and self.clock >= self.next_read:
            self.next_read = self.clock + (self.read_period if self.statuses else 1)
            self.read_heartbeats()
            if self.is_stalled() and not self.verdict():
                self._write_verdict(self.describe_culprit())
        return self.verdict()

    def is_stalled(self) -> bool:
        """Return whether all ranks are in training, and none has made progress for `stall_seconds`."""
        training = [rank for rank, status in self.statuses.items() if not status.heartbeat["ended"]]
        return len(training) == self.world_size and min(map(self.seconds_stalled, training)) > self.stall_seconds

    def read_heartbeats(self) -> None:
        """Read and record the heartbeats of this start of the job."""
        folder = self.out_dir / "heartbeat"
        found = {rank: read_json_object(folder / f"rank{rank}.json") for rank in range(self.world_size)}
        if self.rank is None:
            self.own_ranks |= {rank for rank, each in found.items() if each and is_child_of(each, os.getpid())}
            tokens = [each["run"] for each in found.values() if each and self.has_started(each)]
            if tokens and tokens[0] != self.token:
                self.token, self.statuses = tokens[0], {}
        for rank, heartbeat in found.items():
            if heartbeat.get("run") == self.token:
                self.record(rank, heartbeat)

    def record(self, rank: int, heartbeat: dict[str, Any]) -> None:
        """Store a rank's heartbeat, and update its times if the heartbeat is new or shows progress."""
        status = self.statuses.setdefault(rank, RankStatus(heartbeat, self.clock, self.clock))
        if any(status.heartbeat.get(name) != heartbeat.get(name) for name in PROGRESS):
            status.last_progress = self.clock
        if status.heartbeat["time"] != heartbeat["time"]:
            status.last_heartbeat = self.clock
        status.heartbeat = heartbeat

    def seconds_stalled(self, rank: int) -> float:
        """Return the seconds since a rank last made progress."""
        return self.clock - self.statuses[rank].last_progress

    def has_started(self, heartbeat: dict[str, Any]) -> bool:
        """Return whether a heartbeat comes from a rank that this launcher has started; the rank may have exited."""
        is_child = (heartbeat["host"], heartbeat["parent"]) == (socket.gethostname(), os.getpid())
        return is_child and heartbeat["time"] > self.start

    def report_killed_rank(self) -> bool:
        """Write a message for all ranks if a rank of this launcher was killed. Return whether one was."""
        for rank, status in self.statuses.items():
            if rank in self.own_ranks and not is_alive(status.heartbeat["pid"]):
                last_heartbeat = read_json_object(self.out_dir / "heartbeat" / f"rank{rank}.json")
                if not last_heartbeat.get("ended"):
                    self.report_lost_rank(rank)
                    return True
        return False

    def report_lost_rank(self, rank: int) -> None:
        """Write a message for all ranks: this rank was killed, or has failed for a reason of its own.

        Before the first heartbeat there is no message: without a token, the next start would read it.
        """
        message = f"rank {rank} {LOST_RANK}: the output of its node gives the reason"
        if self.token:
            with contextlib.suppress(OSError):
                self._write_once(self.lost_file, message)

    def is_responding(self, rank: int) -> bool:
        """Return whether a rank's heartbeat thread still writes heartbeats."""
        return self.clock - self.statuses[rank].last_heartbeat < max(self.stall_seconds / 2, 3.0)

    def verdict(self) -> tuple[int, str] | None:
        """Return the exit code and the message that a process has written, about a hang or a lost rank; or None."""
        for path, code in ((self.stalled_file, STALLED), (self.lost_file, 1)) if self.token else ():
            with contextlib.suppress(OSError):
                text = path.read_text()
                if text.endswith("\n"):
                    return code, text.strip()
        return None

    @property
    def stalled_file(self) -> Path:
        return self.out_dir / "stacks" / f"stalled-{self.token}.txt"

    @property
    def lost_file(self) -> Path:
        return self.out_dir / "heartbeat" / f"lost-{self.token}.txt"

    def _write_verdict(self, message: str) -> None:
        """Write the message about a hang.

        If it cannot be written, heartbeats cannot be written either. All ranks then get another `stall_seconds`.
        """
        try:
            self._write_once(self.stalled_file, message)
        except OSError:
            for status in self.statuses.values():
                status.last_progress = self.clock

    def _write_once(self, path: Path, message: str) -> None:
        """Write a message into a file, unless another process has already written it.

        Raises:
            OSError: it cannot be written. Then there is no file.
        """
        try:
            path.parent.mkdir(exist_ok=True)  # needed if the run's directory was deleted and created again
            with open(path, "x") as file:
                file.write(message + "\n")
        except FileExistsError:
            pass
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def describe_culprit(self) -> str:
        """Return the message that names the rank at fault.

        Among the ranks with the least progress, on the host and then on the GPU, prefer ranks that do not wait. Among
        those, choose the rank that has made no progress for the longest time.
        """

        def progress_key(rank: int) -> tuple[int, int, int, bool]:
            heartbeat = self.statuses[rank].heartbeat
            waits = heartbeat["waits"] or heartbeat.get("waits_for_device", False)
            is_waiting = waits and self.is_responding(rank)
            return heartbeat["step"], heartbeat["stages_entered"], heartbeat.get("device_stages") or 0, is_waiting

        least_progress = min(map(progress_key, self.statuses))
        suspects = [rank for rank in self.statuses if progress_key(rank) == least_progress]
        rank = max(suspects, key=self.seconds_stalled)
        heartbeat = self.statuses[rank].heartbeat
        position = f"step {heartbeat['step']}, {heartbeat['stage']}"
        message = f"rank {rank} has made no progress for {self.seconds_stalled(rank):.0f} s in {position}"
        message += f" ({self._describe_location(rank)})"
        if len(suspects) > 1:
            message += f"; ranks {suspects} all stopped there"
        elif self.world_size > 1:
            is_waiting = least_progress[-1] and heartbeat["waits"]
            message += ", waiting for the other ranks" if is_waiting else ", while the other ranks waited for it"
        return f"{message}; stacks of all ranks are in {self.out_dir / 'stacks'}"

    def _describe_location(self, rank: int) -> str:
        """Return the line that a rank runs and how far its GPU is, or why the rank cannot report a line."""
        heartbeat = self.statuses[rank].heartbeat
        if self.is_responding(rank):
            if not heartbeat.get("waits_for_device"):
                return f"at {heartbeat['line']}"
            reached = f"has reached stage {heartbeat['device_stages']} of {heartbeat['stages_entered']}"
            return f"at {heartbeat['line']}, waiting for its GPU, which {reached}"
        if heartbeat["host"] == socket.gethostname() and read_state_and_parent(heartbeat["pid"])[0] in ("T", "t"):
            return "according to its last heartbeat; the process is stopped"
        return "according to its last heartbeat; the process does not respond, as if a C call held the GIL"

    def same_launcher(self, rank: int) -> list[int]:
        """Return the ranks that the same launcher on the same node has started, including `rank`."""
        reference = self.statuses[rank].heartbeat
        return [
            other
            for other, status in self.statuses.items()
            if all(status.heartbeat[name] == reference[name] for name in ("host", "parent"))
        ]


def is_alive(pid: int) -> bool:
    """Return whether a process of this user exists. One that has exited exists until its parent has waited for it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # a process of another user has got its number
        return False
    return True


def is_child_of(heartbeat: dict[str, Any], parent: int) -> bool:
    """Return whether a heartbeat comes from a running child of the process `parent` on this node."""
    has_same_parent = (heartbeat["host"], heartbeat["parent"]) == (socket.gethostname(), parent)
    return has_same_parent and read_state_and_parent(heartbeat["pid"])[1] == parent


def send_signal(pids: list[int], number: int) -> None:
    """Send a signal to processes, of which some may have exited already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def dump_and_kill(pids: list[int]) -> None:
    """Make processes that do not respond write their stacks, and kill them. SIGCONT resumes a stopped process first."""
    send_signal(pids, signal.SIGQUIT)
    send_signal(pids, signal.SIGCONT)
    time.sleep(GRACE_SECONDS)
    send_signal(pids, signal.SIGKILL)


def watch_children(detector: StallDetector, find_pids: Callable[[], list[int]]) -> None:
    """Wait until the job hangs or loses a rank, then kill the children that have not exited.

    A launcher runs this in a thread.

    Args:
        detector: the launcher's detector.
        find_pids: returns the process ids of the launcher's children.
    """
    while not (verdict := detector.check(time.monotonic())) and not detector.report_killed_rank():
        time.sleep(1.0)
    is_stalled = verdict is not None and verdict[0] == STALLED
    time.sleep(2 * GRACE_SECONDS if is_stalled else EXIT_SECONDS)  # ranks that respond exit in this time
    dump_and_kill(find_pids())
