"""`make elastic`: a job continues when nodes join, die and leave, with the losses of an uninterrupted run."""

import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nanoGPT.errors import LostConnection
from nanoGPT.files import lock_directory
from operate import restart
from operate.elastic import wait_for_rank
from operate.node_monitor import LEASE_SECONDS, LOST_SECONDS, Beats
from operate.restart import count_usable_ranks
from operate.watchdog import list_children, send_signal
from tests.helpers.programs import Program, assert_refused, find_free_port, make_flags, run_program, wait_until
from tests.helpers.training import TINY, tiny, train
from workshop.ranks import losses

FIELDS = {**TINY, "n_layer": 1, "max_iters": 100_000, "eval_interval": 25, "decay_lr": False}
FIELDS |= {"learning_rate": 1e-4}


def start_node(port: str, out: Path, nodes: str = "1:2", gpus: int = 2, **fields) -> Program:
    """Start a node of an elastic job. After a few steps its ranks train slowly, because the tests wait."""
    words = make_flags(**{**FIELDS, **fields, "out_dir": out})
    arguments = [f"--gpus={gpus}", f"--nodes={nodes}", f"--store=127.0.0.1:{port}", "phase3_fsdp/train.py"]
    return Program("tests.helpers.slow_steps", "operate.elastic", *arguments, *words)


def start_store(port: str) -> Program:
    """Start the store of the job, and wait until it serves."""
    store = Program("operate.elastic", "serve", f"--port={port}")
    wait_until(lambda: "serving" in store.output())
    return store


def list_starts(out: Path) -> list[tuple[int, int]]:
    """Return the step and the number of ranks of each start of the run."""
    log = out / "log.txt"
    found = re.findall(r"started at step (\d+) .*?, (\d+) rank\(s\)", log.read_text() if log.exists() else "")
    return [(int(step), int(ranks)) for step, ranks in found]


def await_start(out: Path, earlier: int, ranks: int, nodes: list[Program]) -> int:
    """Wait until the run has started again, the last time on `ranks` ranks, and has logged steps since.

    Args:
        earlier: number of starts before the event that makes the job start again.

    Returns:
        The number of starts.
    """

    def has_started() -> bool:
        assert all(node.poll() is None for node in nodes), [node.output() for node in nodes]
        starts = list_starts(out)
        if len(starts) <= earlier or starts[-1][1] != ranks:
            return False
        assert all(step > 0 for step, _ in starts[1:]), "the job begins again instead of resuming"
        logged = losses(out) if (out / "metrics.jsonl").exists() else {}
        return bool(logged) and max(logged) >= starts[-1][0] + 3

    wait_until(has_started)
    return len(list_starts(out))


@pytest.mark.long
def test_nodes_join_die_and_leave(tmp_path):
    """A node joins, dies with all its ranks, joins again, and leaves after SIGTERM; a rank is killed; then the store
    dies, and a new store and a new node resume.

    The job continues each time on the available ranks. A node with another flag is refused, and the others do not
    notice it. With three ranks per node, some ranks are spare, because 3 and 6 do not divide 8 micro-batches. The
    losses equal those of an uninterrupted run, to 1e-6.
    """
    port, out = find_free_port(), tmp_path / "run"
    store = start_store(port)
    first = start_node(port, out, gpus=3)
    starts = await_start(out, 0, 2, [first])
    second = start_node(port, out, gpus=3)
    starts = await_start(out, starts, 4, [first, second])
    stranger = start_node(port, out, gpus=3, seed=7)
    output, _ = stranger.communicate()
    assert stranger.returncode == 2 and "--seed is 7 here and 1337 there" in output, output
    ranks = list_children(second.pid)
    second.kill()
    send_signal(ranks, signal.SIGKILL)  # those that have not ended yet with their agent
    starts = await_start(out, starts, 2, [first])
    second = start_node(port, out, gpus=3)
    starts = await_start(out, starts, 4, [first, second])
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.output()
    assert "was killed by" not in first.output()
    starts = await_start(out, starts, 2, [second])
    send_signal(list_children(second.pid)[:1], signal.SIGKILL)
    starts = await_start(out, starts, 2, [second])
    assert "a rank of this node was killed by SIGKILL: the ranks restart" in second.output()
    store.kill()
    output, _ = second.communicate()
    assert second.returncode == 1 and "the store at 127.0.0.1" in output and "--init_from=resume" in output, output
    assert "is spare" in output and "rank 2 is spare" in "".join(
        log.read_text() for log in out.glob("logs/*/attempt_*/2/stdout.log")
    )
    start_store(port)
    starts = len(list_starts(out))
    last = start_node(port, out, init_from="resume")
    await_start(out, starts, 2, [last])
    last.send_signal(signal.SIGTERM)
    assert last.wait() == 0, last.output()
    curve = losses(out)
    fields = {**FIELDS, "max_iters": max(curve) + 1}
    uninterrupted = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "uninterrupted", **fields))
    assert curve.keys() == uninterrupted.keys()
    assert max(abs(curve[step] - uninterrupted[step]) for step in uninterrupted) < 1e-6


def test_ranks_that_cannot_notice_the_death_of_a_rank_restart(tmp_path, monkeypatch):
    """A rank is killed while the other one waits as for a GPU: the job starts again within seconds."""
    monkeypatch.setenv("FAULT", "killed")
    port = find_free_port()
    start_store(port)
    node = start_node(port, tmp_path, nodes="1:1", observers="operate,tests.helpers.unreachable_rank")
    wait_until(lambda: "a rank of this node was killed by SIGKILL" in node.output())
    begin = time.monotonic()
    wait_until(lambda: len(list_starts(tmp_path)) == 2)
    assert time.monotonic() - begin < 25, node.output()  # torch's agent alone waits 30 s


def test_an_error_that_would_repeat_stops_all_nodes(tmp_path):
    """A loss that is not finite stops both nodes with exit code 3 and the same message. The job does not restart."""
    port = find_free_port()
    store = start_store(port)
    nodes = [start_node(port, tmp_path, nodes="2:2", gpus=1, learning_rate=1e30) for _ in range(2)]
    try:
        for node in nodes:
            output, _ = node.communicate()
            assert node.returncode == 3 and "error: the job was stopped: step" in output, output
    finally:
        store.kill()


def test_a_run_never_has_two_writers(tmp_path, monkeypatch):
    """A node without an answer of the store ends its ranks before the others count it as lost and start again.

    In addition, rank 0 of a new start waits until the earlier rank 0 has ended, and reports it if it does not end.
    """
    assert LEASE_SECONDS < LOST_SECONDS
    beats = Beats()
    beats.record({"one": "7", "two": "3"}, 100.0)
    beats.record({"one": "8", "two": "3"}, 101.0 + LOST_SECONDS)
    assert beats.count_alive(101.0) == 2 and beats.count_alive(101.0 + LOST_SECONDS) == 1
    earlier = lock_directory(tmp_path)
    monkeypatch.setattr(restart, "LOCK_SECONDS", 0.0)
    with pytest.raises(LostConnection, match="ranks of an earlier start of this job still write into"):
        restart.wait_for_lock(tmp_path)
    monkeypatch.setattr(restart, "LOCK_SECONDS", 30.0)
    threading.Timer(0.2, earlier.close).start()
    restart.wait_for_lock(tmp_path)
    assert earlier.closed


def test_a_node_that_cannot_start_says_why(tmp_path):
    """Without a store, without an --out_dir, or with an invalid flag, a node prints one sentence and exits."""
    config = tiny("nanoGPT", tmp_path, gradient_accumulation_steps=12)
    assert [count_usable_ranks(config, ranks) for ranks in (1, 5, 7, 11, 13)] == [1, 4, 6, 6, 12]
    node = ["operate.elastic", "--store=127.0.0.1:1", "nanoGPT/train.py", "--device=cpu"]
    assert_refused(run_program(*node, f"--out_dir={tmp_path}"), "STORE=127.0.0.1:1 does not answer")
    assert_refused(run_program(*node), "needs --out_dir")
    assert_refused(run_program(*node, f"--out_dir={tmp_path}", "--dropout=2"), "--dropout=2.0 is out of range")
    assert_refused(run_program(node[0], "--nodes=4:1", *node[2:], f"--out_dir={tmp_path}"), "NODES=4:1")
    words = ["--gpus=2", "--nodes=1:3", "phase3_fsdp/train.py", "--device=cpu", "--fsdp_shard_size=node"]
    words += [f"--out_dir={tmp_path}", "--gradient_accumulation_steps=10"]
    assert_refused(run_program(*node[:2], *words), "with 3 nodes, 5 ranks train, but --fsdp_shard_size=node needs")


def test_a_killed_rank_has_the_exit_code_of_a_shell():
    """It is 128 plus the number of the signal, as that of `operate.launch`."""
    for command, code in ((["sleep", "60"], 128 + signal.SIGTERM), (["sh", "-c", "exit 3"], 3)):
        with subprocess.Popen(command) as process:
            if code > 128:
                process.terminate()
            assert wait_for_rank(process.pid) == code
