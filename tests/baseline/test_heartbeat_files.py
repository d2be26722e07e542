"""The files of the heartbeats on several nodes: one per node, also if ranks end together or the node has no memory."""

import errno
from pathlib import Path

from nanoGPT.job.heartbeat_files import HeartbeatFiles, delete_leftovers, read_node_file

RUNNING, ENDED = {"run": "new", "ended": False}, {"run": "new", "ended": True}


def test_ranks_that_end_together_have_both_ended(tmp_path):
    """A rank that has read the other rank before it ended does not replace its last heartbeat. Nothing is left."""
    files = HeartbeatFiles(tmp_path, 4, range(2, 4))
    for rank in files.local_ranks:
        files.write(rank, RUNNING)
    stale = files.read_node()
    files.close(2, {2: ENDED, 3: RUNNING})
    files.close(3, stale | {3: ENDED})
    assert read_node_file(tmp_path / "heartbeat" / "node-2.json") == {2: ENDED, 3: ENDED}
    assert not files.node_folder.exists()


def test_a_node_without_its_directory_uses_that_of_the_run(tmp_path):
    """If the directory of the node cannot be written, a rank's heartbeat is in the run's directory, and it is found."""
    files = HeartbeatFiles(tmp_path, 4, range(2))
    files.node_folder = tmp_path / "file"
    files.node_folder.touch()
    files.write(1, RUNNING)
    assert files.read_node() == {1: RUNNING} and not files.is_watcher(2)
    assert [path.name for path in files.folder.iterdir()] == ["rank1.json"]


def test_a_heartbeat_uses_only_the_directory_of_its_node(tmp_path, monkeypatch):
    """After the first heartbeat, ranks of a job on several nodes create no directories and no files of the run."""
    files = HeartbeatFiles(tmp_path, 4, range(2))
    files.write(0, RUNNING)

    def fail(path: Path, *_arguments: object, **_options: object) -> None:
        raise AssertionError(path)

    for name in ("mkdir", "stat"):
        monkeypatch.setattr(Path, name, fail)
    files.write(0, ENDED)
    monkeypatch.undo()
    assert files.read_node() == {0: ENDED} and not files.folder.exists()
    (files.node_folder / "rank1-1.tmp").touch()  # of a rank that was killed
    delete_leftovers(tmp_path)
    assert not files.node_folder.exists()


def test_a_file_system_that_fails_ends_no_thread(tmp_path, monkeypatch):
    """If the file system of the run fails, the heartbeats of the other nodes are missing, and no error is raised."""
    files = HeartbeatFiles(tmp_path, 4, range(2))

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "glob", fail)
    assert files.read_other_nodes() == {}
