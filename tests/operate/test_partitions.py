"""A node of an elastic job is cut off the network: it ends, the others continue, and a run never has two writers."""

import re
import subprocess
import sys
import threading
import time

import pytest

from bench.tables import elastic_tables
from nanoGPT.distributed.environment import ELASTIC_VARIABLE
from nanoGPT.errors import LostConnection
from nanoGPT.job import elastic
from nanoGPT.job.out_dir import DirectoryLock
from operate.node_monitor import LEASE_SECONDS, LOST_SECONDS, Beats, Round
from operate.partitions import UNSHARE, count_lines_out_of_order, explain_missing_namespaces
from tests.helpers.programs import DEADLINE
from tests.helpers.training import ROOT

REASON = explain_missing_namespaces()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"this machine has no network namespaces: {REASON}")


def run_in_namespaces(*words: str) -> str:
    """Run `python words...` in new user and network namespaces. Return what it prints."""
    command = [*UNSHARE, sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_namespaces
@pytest.mark.parametrize("way", ["drop", pytest.param("down", marks=pytest.mark.slow)])
def test_both_sides_of_a_cut_end_their_ranks(way):
    """The node that is cut off exits with a message, before the other node ends its own ranks and stays in the job."""
    output = run_in_namespaces("-m", "tests.helpers.cut_nodes", way)
    assert "error: the store at 10.77.0.1:29400 is lost: check the network of this node" in output
    assert "node 0: exit code 1" in output and "node 1: exit code 0" in output
    assert "1 node(s) sent no heartbeat to the store" in output
    assert output.index("node 0: exit code 1") < output.index("node 1: its rank ended with -9")


@needs_namespaces
@pytest.mark.slow
def test_a_job_continues_without_a_node_that_was_cut_off():
    """No rank of the lost node runs when the others start again; the node joins again; no loss changes."""
    output = run_in_namespaces("-m", "operate.partitions", "--cuts=1")
    assert re.search(r"\(exit code 1\); the others started after .*, while 0 of its ranks ran; .*joined again", output)
    assert "not logged: 0; lines out of order: 0" in output
    assert float(re.findall(r"uninterrupted run (\S+);", output)[0]) < 1e-6


def test_a_node_is_missing_after_its_beats_stop():
    """A node counts as missing if its beats stop, or if it never began the round; a node of spare ranks does not."""
    assert LEASE_SECONDS < LOST_SECONDS
    beats, current = Beats(), Round("b", 0, 2)
    beats.record({"one": "7 b 0", "two": "3 b 1", "three": "5 b 2"}, 100.0)
    assert beats.count_missing(current, 100.0) == 0
    beats.record({"one": "8 b 0", "two": "3 b 1", "three": "5 b 2"}, 101.0 + LOST_SECONDS)
    assert beats.is_silent("two", 101.0 + LOST_SECONDS) and beats.count_missing(current, 101.0 + LOST_SECONDS) == 1
    beats.record({"two": "4 c 1"}, 101.0 + LOST_SECONDS)
    assert beats.count_missing(current, 101.0 + LOST_SECONDS) == 1


def test_a_second_writer_waits_for_the_lock(tmp_path, monkeypatch):
    """Rank 0 of a new start waits until the earlier rank 0 has ended, and reports it if it does not end."""
    monkeypatch.setenv(ELASTIC_VARIABLE, "127.0.0.1:1 job")
    earlier = DirectoryLock(tmp_path)
    earlier.write("job")
    monkeypatch.setattr(elastic, "LOCK_SECONDS", 0.0)
    with pytest.raises(LostConnection, match="ranks of an earlier start of this job still write into"):
        elastic.lock_directory(tmp_path)
    monkeypatch.setattr(elastic, "LOCK_SECONDS", 30.0)
    begin = time.monotonic()
    threading.Timer(0.2, earlier.close).start()
    elastic.lock_directory(tmp_path).close()
    assert time.monotonic() - begin > 0.1  # a longer wait is right too


def test_the_table_and_the_picture_show_each_cut(tmp_path, monkeypatch):
    """Each cut has a row and a pair of bars. Metrics that two writers have mixed are noticed."""
    seconds = {"ranks_ended": 15.0, "node_ended": 15.0, "others_started": 30.0, "joined": 9.0}
    row = {"way": "drop", "node": 2, "exit_code": 1, "steps_lost": 4, "ranks_in_both": 0, "seconds": seconds}
    curve = {"0": 4.0, "5": 3.0}
    samples = {"rows": [row], "steps": 9, "missing_steps": [], "gaps": 0, "max_loss_difference": 1e-7}
    samples |= {
        "brief": [{"cut_seconds": 3.0, "starts": 0}],
        "curves": {"with lost nodes": curve, "uninterrupted": curve},
    }
    result = {"hardware": "A", "versions": {"torch": "2"}, "samples": samples}
    monkeypatch.setattr(elastic_tables, "read_results", lambda name: [result])
    table = elastic_tables.partitions_table()
    assert "| dropped packets | 2 | 1 | 15.0 | 30.0 | 4 | 0 | 9.0 |" in table and "started again 0 times" in table
    assert "0 lines are out of order" in table
    lines = [f'{{"step": {step}, "loss": 1.0}}' for step in (0, 1, 2, 1, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert count_lines_out_of_order(tmp_path) == 2
