"""A job that hangs is ended, with the stacks of all its ranks and one sentence that names the rank at fault.

Everything goes through files under out_dir, which all ranks see:

    heartbeat/rank{r}.json      what a rank tells of itself, renewed every second (`nanoGPT.job.heartbeat`)
    stacks/stalled-{token}.txt  the sentence, written by whoever finds first that nobody makes progress

When no rank has made any for `stall_seconds`, every rank writes its stacks into stacks/rank{r}.txt and ends itself. A
rank whose threads cannot run, since its main thread keeps Python's lock in a C call or the process was stopped, is sent
SIGUSR1, on which faulthandler writes stacks without Python, and then SIGKILL: by another rank of the same launcher, or
by `nanoGPT.launch`. (One process alone that was started without it has nobody.) The rank at fault is the one that has
come least far, and of those one that does not wait for others.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE = 2.0  # seconds in which stacks are written, before processes end
HAS_PROC = Path("/proc/self/stat").exists()
ASLEEP = 2.0  # seconds: of a longer time between two looks, this process was asleep for the rest


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state, T if it was stopped, and its parent; "" and 0 if there is no such process."""
    words: list[str] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile, or a container has no ps
        if HAS_PROC:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        else:
            command = ["ps", "-o", "stat=,ppid=", "-p", str(pid)]
            words = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return (words[0], int(words[1])) if words else ("", 0)


def children_of(parent: int) -> list[int]:
    """Return the ids of the processes that a process started; none where the system does not say."""
    with contextlib.suppress(OSError):
        if HAS_PROC:
            pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
            return [pid for pid in pids if state_and_parent(pid)[1] == parent]
        done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]
    return []


@dataclass
class Seen:
    """A rank's last heartbeat; the times, by the watch's clock, at which it last told progress, and anything at all."""

    beat: dict[str, Any]
    progressed: float
    answered: float


class Watch:
    """Looks at the heartbeats of all ranks; one runs in every rank, and one in each launcher.

    Args:
        out_dir: of the run, on a file system that all ranks see.
        world_size: number of ranks.
        stall_seconds: without progress of any rank, after which the job is ended.
        rank: whose watch it is, and who tells it its own heartbeat by `note`; None for a launcher.
        token: the run's; heartbeats of another are an earlier run's. A launcher takes its children's.
    """

    def __init__(
        self, out_dir: Path, world_size: int, stall_seconds: float, rank: int | None = None, token: str = ""
    ) -> None:
        self.out_dir, self.world_size, self.stall_seconds = out_dir, world_size, stall_seconds
        self.rank, self.token = rank, token
        self.clock, self.looked, self.due = 0.0, time.monotonic(), 0.0
        self.period = min(max(stall_seconds / 20, 1.0), 15.0)  # seconds: many ranks read many files
        self.seen: dict[int, Seen] = {}

    def look(self, now: float) -> str | None:
        """The sentence on which the job ends, when nobody makes progress; to be called every second.

        Args:
            now: `time.monotonic()`. Not all of it counts: who was asleep has not seen whether others made progress.
        """
        self.clock, self.looked = self.clock + min(now - self.looked, ASLEEP), now
        if self.clock >= self.due:
            self.due = self.clock + self.period
            self.read()
            if self.nobody_moves() and not self.verdict():
                self._tell(self.accuse())
        return self.verdict()

    def nobody_moves(self) -> bool:
        """Whether all ranks are in training, and none has made progress for `stall_seconds`."""
        training = [rank for rank, seen in self.seen.items() if not seen.beat["ended"]]
        return len(training) == self.world_size and min(map(self.seconds_stalled, training)) > self.stall_seconds

    def read(self) -> None:
        """Read the other ranks' heartbeats."""
        beats: dict[int, dict[str, Any]] = {}
        for rank in set(range(self.world_size)) - {self.rank}:
            with contextlib.suppress(OSError, ValueError):
                beats[rank] = json.loads((self.out_dir / "heartbeat" / f"rank{rank}.json").read_text())
        if self.rank is None:
            mine = [beat.get("run", "") for beat in beats.values() if is_child(beat, os.getpid())]
            if mine and mine[0] != self.token:
                self.token, self.seen = mine[0], {}
        for rank, beat in beats.items():
            if beat.get("run") == self.token:
                self.note(rank, beat)

    def note(self, rank: int, beat: dict[str, Any]) -> None:
        """Remember a rank's heartbeat, and what of it is new."""
        seen = self.seen.setdefault(rank, Seen(beat, self.clock, self.clock))
        if any(seen.beat[name] != beat[name] for name in ("step", "places", "marks")):
            seen.progressed = self.clock
        if seen.beat["time"] != beat["time"]:
            seen.answered = self.clock
        seen.beat = beat

    def seconds_stalled(self, rank: int) -> float:
        """Seconds since a rank was last seen to make progress."""
        return self.clock - self.seen[rank].progressed

    def answers(self, rank: int) -> bool:
        """Whether a rank's own thread still runs."""
        return self.clock - self.seen[rank].answered < max(self.stall_seconds / 2, 3.0)

    def verdict(self) -> str | None:
        """The sentence, if anybody has written it."""
        with contextlib.suppress(OSError):
            text = (self.out_dir / "stacks" / f"stalled-{self.token}.txt").read_text()
            return text.strip() if text.endswith("\n") else None
        return None

    def _tell(self, sentence: str) -> None:
        """Write the sentence, unless another rank was first.

        If the sentence cannot be written, heartbeats cannot either. All ranks then get another `stall_seconds`.
        """
        path = self.out_dir / "stacks" / f"stalled-{self.token}.txt"
        try:
            path.parent.mkdir(exist_ok=True)  # the run's directory may have been created again
            with open(path, "x") as file:
                file.write(sentence + "\n")
        except FileExistsError:
            pass
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            for seen in self.seen.values():
                seen.progressed = self.clock

    def accuse(self) -> str:
        """Name the rank at fault: of those that have come least far and do not wait, the one that is silent longest."""

        def come(rank: int) -> tuple[int, int, bool]:
            beat = self.seen[rank].beat
            return beat["step"], beat["places"], beat["waits"] and self.answers(rank)

        least = min(map(come, self.seen))
        suspects = [rank for rank in self.seen if come(rank) == least]
        rank = max(suspects, key=self.seconds_stalled)
        beat = self.seen[rank].beat
        where = f"step {beat['step']}, {beat['stage']}"
        words = f"rank {rank} has been silent for {self.seconds_stalled(rank):.0f} s in {where}"
        words += f" ({self._about(rank)})"
        if len(suspects) > 1:
            words += f", and ranks {suspects} stand alike"
        elif self.world_size > 1:
            words += ", waiting for the others" if least[2] else ", while the others waited for it"
        return f"{words}; stacks of all ranks are in {self.out_dir / 'stacks'}"

    def _about(self, rank: int) -> str:
        """What a rank does, as far as it tells or shows."""
        beat = self.seen[rank].beat
        if self.answers(rank):
            return f"in {beat['line']}"
        if beat["host"] == socket.gethostname() and state_and_parent(beat["pid"])[0] in ("T", "t"):
            return "where it was last heard of: it is stopped"
        return "where it was last heard of: it does not answer, as in a C call that keeps Python's lock"

    def same_launcher(self, rank: int) -> list[int]:
        """The ranks of the same launcher on the same machine, itself included."""
        mine = self.seen[rank].beat
        return [r for r, s in self.seen.items() if all(s.beat[name] == mine[name] for name in ("host", "parent"))]


def is_child(beat: dict[str, Any], parent: int) -> bool:
    """Whether a heartbeat is of a living child of a process of this machine."""
    told = (beat["host"], beat["parent"]) == (socket.gethostname(), parent)
    return told and state_and_parent(beat["pid"])[1] == parent


def end_mute(pids: list[int]) -> None:
    """Let processes that cannot end themselves write their stacks, for which stopped ones must go on, and end them."""
    for numbers in ((signal.SIGUSR1, signal.SIGCONT), (signal.SIGKILL,)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                for number in numbers:
                    os.kill(pid, number)
        time.sleep(GRACE if signal.SIGUSR1 in numbers else 0)


def guard(watch: Watch, children: Callable[[], list[int]]) -> None:
    """In a launcher: end children that hang and have nobody beside them to do it. A thread; it returns only then."""
    while not watch.look(time.monotonic()):
        time.sleep(1.0)
    time.sleep(2 * GRACE)  # those that can end by themselves do
    end_mute(children())
