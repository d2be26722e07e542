"""The files through which the ranks and the launchers of a job see each other's heartbeats.

    out_dir/heartbeat/rank{r}.json      on one node: the heartbeat of rank r
    out_dir/heartbeat/node-{r}.json     on several nodes: the heartbeats of all ranks of the node whose first rank is r

On several nodes, every rank writes its heartbeat into a directory of its own node, in memory (/dev/shm). One rank per
node, the watcher, copies the heartbeats of its node into one file of `out_dir`. The shared file system then has one
write per node and second, and a process that compares all ranks reads one file per node. The watcher is the first rank
of the node whose heartbeat is recent, so that another rank takes over if the watcher is stopped.

A rank that cannot write into the directory of its node, for example because /dev/shm is full, writes rank{r}.json into
`out_dir` instead.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Heartbeats = dict[int, dict[str, Any]]  # by rank
LOCK = "lock"  # of the directory of a node
MAX_AGE_SECONDS = 4.0  # of the heartbeat of a watcher; it writes one per second


def find_node_folder(out_dir: Path) -> Path:
    """Return a directory of this node for the heartbeats of a run, in memory if the node has /dev/shm."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    user = getattr(os, "getuid", int)()  # 0 on a system without user ids
    return root / f"nanogpt-{user}-{hashlib.sha256(str(out_dir.resolve()).encode()).hexdigest()[:16]}"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def read_node_file(path: Path) -> Heartbeats:
    """Return the heartbeats in a file `node-{r}.json`; none if it is missing or damaged."""
    return {int(rank): heartbeat for rank, heartbeat in read_json(path).items() if rank.isdecimal()}


def delete_leftovers(out_dir: Path) -> None:
    """Delete what killed ranks of a run have left on this node. Other ranks of this node create the directory again."""
    shutil.rmtree(find_node_folder(out_dir), ignore_errors=True)


class HeartbeatFiles:
    """The heartbeat files of a job, for a rank or a launcher.

    Args:
        out_dir: the run's directory, on a file system that all ranks share.
        world_size: number of ranks.
        local_ranks: the ranks of this node.
    """

    def __init__(self, out_dir: Path, world_size: int, local_ranks: range) -> None:
        self.folder, self.local_ranks = out_dir / "heartbeat", local_ranks
        self.is_one_node = len(local_ranks) == world_size
        self.node_folder = self.folder if self.is_one_node else find_node_folder(out_dir)
        self.node_file = self.folder / f"node-{local_ranks.start}.json"

    def write(self, rank: int, heartbeat: dict[str, Any]) -> None:
        """Replace the heartbeat of a rank of this node.

        Raises:
            OSError: the file cannot be written, neither into the directory of this node nor into that of the run.
        """
        path = self.node_folder / f"rank{rank}.json"
        try:
            self._replace(path, heartbeat, rank)
        except OSError:
            if self.is_one_node:
                raise
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # else the old heartbeat there would be read
            self._replace(self.folder / path.name, heartbeat, rank)

    def find_file(self, rank: int) -> Path:
        """Return the file with the heartbeat of a rank of this node. It may be missing."""
        path = self.node_folder / f"rank{rank}.json"
        return path if self.is_one_node or path.exists() else self.folder / path.name

    def read_node(self) -> Heartbeats:
        """Return the heartbeats of the ranks of this node."""
        found = {rank: read_json(self.find_file(rank)) for rank in self.local_ranks}
        return {rank: heartbeat for rank, heartbeat in found.items() if heartbeat}

    def read_other_nodes(self) -> Heartbeats:
        """Return the heartbeats of the ranks of all other nodes; those that were read if the file system fails."""
        heartbeats: Heartbeats = {}
        with contextlib.suppress(OSError):
            for path in () if self.is_one_node else self.folder.glob("node-*.json"):
                heartbeats |= read_node_file(path) if path != self.node_file else {}
        return heartbeats

    def is_watcher(self, rank: int) -> bool:
        """Return whether no rank of this node before `rank` has written a heartbeat in the last MAX_AGE_SECONDS."""
        now = time.time()
        for other in range(self.local_ranks.start, rank):
            with contextlib.suppress(OSError):
                if now - self.find_file(other).stat().st_mtime < MAX_AGE_SECONDS:
                    return False
        return True

    def publish(self, rank: int, heartbeats: Heartbeats) -> None:
        """Replace the file of this node."""
        self._replace(self.node_file, heartbeats, rank)

    def close(self, rank: int, heartbeats: Heartbeats) -> None:
        """Publish the last heartbeat of a rank that ends. If all ranks of the node have ended, delete their directory.

        Args:
            heartbeats: of this run, of the ranks of this node.
        """
        if self.is_one_node:
            return
        token = heartbeats[rank]["run"]
        with self._lock():
            published = {r: each for r, each in read_node_file(self.node_file).items() if each.get("run") == token}
            ended = {r: each for r, each in published.items() if each["ended"]}  # newer than what this rank has read
            heartbeats = published | heartbeats | ended
            self.publish(rank, heartbeats)
            if len(heartbeats) == len(self.local_ranks) and all(each["ended"] for each in heartbeats.values()):
                self.delete_node_folder()

    def delete_node_folder(self) -> None:
        """On several nodes, delete the directory of this node. Its ranks must not write any more."""
        if self.is_one_node:
            return
        with contextlib.suppress(OSError):  # another process deletes it too, or another node of this machine uses it
            for rank in self.local_ranks:
                (self.node_folder / f"rank{rank}.json").unlink(missing_ok=True)
            (self.node_folder / LOCK).unlink(missing_ok=True)
            self.node_folder.rmdir()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let only one rank of this node close its files at a time, else the last one may publish an older state.

        If the directory of the node is missing, all ranks have ended, or they write into the directory of the run.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                file = stack.enter_context(open(self.node_folder / LOCK, "w"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _replace(self, path: Path, content: dict[Any, Any], rank: int) -> None:
        temporary = path.with_name(f"{path.stem}-{rank}.tmp")
        text = json.dumps(content) + "\n"
        try:
            temporary.write_text(text)
        except FileNotFoundError:  # at the first heartbeat, or if the run's directory was deleted and created again
            path.parent.mkdir(mode=0o777 if path.parent == self.folder else 0o700, exist_ok=True)
            temporary.write_text(text)
        os.replace(temporary, path)
