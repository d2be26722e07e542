"""The files through which the ranks and the launchers of a job see each other's heartbeats.

    out_dir/heartbeat/rank{r}.json      on one node: the heartbeat of rank r
    out_dir/heartbeat/node-{r}.json     on several nodes: the heartbeats of all ranks of the node whose first rank is r

On several nodes, every rank writes its heartbeat into a directory of its own node. One rank per node, the watcher,
copies the heartbeats of its node into one file of `out_dir`. The shared file system then has one write per node and
second, and a process that compares all ranks reads one file per node. The watcher is the first rank of the node whose
heartbeat is recent, so that another rank takes over if the watcher is stopped.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

Heartbeats = dict[int, dict[str, Any]]  # by rank
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
        """Replace the heartbeat of a rank of this node."""
        self.node_folder.mkdir(mode=0o777 if self.is_one_node else 0o700, exist_ok=True)
        self._replace(self.node_folder / f"rank{rank}.json", heartbeat, rank)

    def read_node(self) -> Heartbeats:
        """Return the heartbeats of the ranks of this node."""
        found = {rank: read_json(self.node_folder / f"rank{rank}.json") for rank in self.local_ranks}
        return {rank: heartbeat for rank, heartbeat in found.items() if heartbeat}

    def read_other_nodes(self) -> Heartbeats:
        """Return the heartbeats of the ranks of all other nodes."""
        heartbeats: Heartbeats = {}
        for path in () if self.is_one_node else self.folder.glob("node-*.json"):
            heartbeats |= read_node_file(path) if path != self.node_file else {}
        return heartbeats

    def is_watcher(self, rank: int) -> bool:
        """Return whether no rank of this node before `rank` has written a heartbeat in the last MAX_AGE_SECONDS."""
        now = time.time()
        for other in range(self.local_ranks.start, rank):
            with contextlib.suppress(OSError):
                if now - (self.node_folder / f"rank{other}.json").stat().st_mtime < MAX_AGE_SECONDS:
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
        published = read_node_file(self.node_file)  # another rank may have deleted the directory already
        heartbeats = {r: each for r, each in published.items() if each.get("run") == token} | heartbeats
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
            self.node_folder.rmdir()

    def _replace(self, path: Path, content: dict[Any, Any], rank: int) -> None:
        self.folder.mkdir(exist_ok=True)  # needed if the run's directory was deleted and created again
        temporary = path.with_name(f"{path.stem}-{rank}.tmp")
        temporary.write_text(json.dumps(content) + "\n")
        os.replace(temporary, path)
