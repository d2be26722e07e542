"""`make elastic`: a job continues when nodes join, die and leave, with the losses of an uninterrupted run."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from bench.tables import elastic_tables
from nanoGPT.errors import ConfigError
from nanoGPT.job.elastic import STOP_KEY, count_usable_ranks
from nanoGPT.job.watchdog import list_children
from operate import node_kills
from operate.elastic import ElasticConfig, check_agreement, name_job, wait_for_rank
from operate.node_monitor import kill_processes
from tests.helpers.programs import Program, assert_refused, find_free_port, make_flags, run_program, wait_until
from tests.helpers.training import TINY, tiny, train
from workshop.ranks import losses

FIELDS = {**TINY, "n_layer": 1, "max_iters": 100_000, "eval_interval": 25, "eval_iters": 1, "decay_lr": False}
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


def await_start(out: Path, earlier: int, ranks: int, nodes: list[Program]) -> int:
    """Wait until the run has started again, the last time on `ranks` ranks, and has logged steps since.

    Args:
        earlier: number of starts before the event that makes the job start again.

    Returns:
        The number of starts.
    """

    def has_started() -> bool:
        assert all(node.poll() is None for node in nodes), [node.output() for node in nodes]
        starts = node_kills.list_starts(out)
        if len(starts) <= earlier or starts[-1][1] != ranks:
            return False
        assert all(step > 0 for step, _ in starts[1:]), "the job begins again instead of resuming"
        logged = losses(out) if (out / "metrics.jsonl").exists() else {}
        return bool(logged) and max(logged) >= starts[-1][0] + 3

    wait_until(has_started)
    return len(node_kills.list_starts(out))


@pytest.mark.long
def test_nodes_join_die_and_leave(tmp_path):
    """A node joins, dies with all its ranks, joins again, and leaves after SIGTERM; then the store dies, and a new
    store and a new node resume.

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
    kill_processes(ranks, signal.SIGKILL)  # those that have not ended yet with their agent
    starts = await_start(out, starts, 2, [first])
    second = start_node(port, out, gpus=3)
    starts = await_start(out, starts, 4, [first, second])
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.output()
    starts = await_start(out, starts, 2, [second])
    store.kill()
    output, _ = second.communicate()
    assert second.returncode == 1 and "the store at 127.0.0.1" in output and "--init_from=resume" in output, output
    assert "is spare" in output and "rank 2 is spare" in (out / "logs" / "rank2.txt").read_text()
    start_store(port)
    starts = len(node_kills.list_starts(out))
    last = start_node(port, out, init_from="resume")
    await_start(out, starts, 2, [last])
    last.send_signal(signal.SIGTERM)
    assert last.wait() == 0, last.output()
    curve = losses(out)
    fields = {**FIELDS, "max_iters": max(curve) + 1}
    uninterrupted = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "uninterrupted", **fields))
    assert curve.keys() == uninterrupted.keys()
    assert max(abs(curve[step] - uninterrupted[step]) for step in uninterrupted) < 1e-6


def test_a_job_without_nodes_starts_again_with_other_inputs(monkeypatch, tmp_path):
    """A node that differs is refused while another node is alive. If none is left, its inputs become the job's.

    If the run has a checkpoint, other flags need --init_from=resume: without it, those of the checkpoint would be used.
    """
    beats = [lambda: store.add("job beats", 1)]  # another node beats during the first wait
    monkeypatch.setattr("operate.elastic.time", SimpleNamespace(sleep=lambda _: beats and beats.pop()()))
    config = tiny("nanoGPT", tmp_path)
    port = int(find_free_port())
    store = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    check_agreement(store, "job", {"--seed": 1, "--betas": (1, 2)}, config)
    check_agreement(store, "job", {"--seed": 1, "--betas": (1, 2)}, config)
    with pytest.raises(ConfigError, match="the nodes that train: --seed is 2 here and 1 there: start it with the same"):
        check_agreement(store, "job", {"--seed": 2, "--betas": (1, 2)}, config)
    check_agreement(store, "job", {"--seed": 2, "--betas": (1, 2)}, config)
    assert json.loads(store.get("job inputs")) == {"--seed": 2, "--betas": [1, 2]}
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    check_agreement(store, "job", {"--seed": 2, "the code": "new"}, config)
    with pytest.raises(ConfigError, match="started again with another value of --seed: add --init_from=resume"):
        check_agreement(store, "job", {"--seed": 3, "the code": "new"}, config)
    check_agreement(store, "job", {"--seed": 3, "the code": "new"}, replace(config, init_from="resume"))


def test_the_exit_code_of_a_rank_is_read_before_the_agent_reads_it():
    """A node that leaves reads the exit codes of its ranks, and leaves them to the agent, which waits for them too."""
    for command, code in (("exit 3", 3), ("kill -9 $$", 128 + signal.SIGKILL)):
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], {})
        assert wait_for_rank(pid) == wait_for_rank(pid) == code
        os.waitpid(pid, 0)
        assert wait_for_rank(pid) == 0


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


def test_the_largest_usable_number_of_ranks():
    """The ranks that train are the largest number that divides the micro-batches."""
    config = tiny("nanoGPT", Path("out"), gradient_accumulation_steps=12)
    assert [count_usable_ranks(config, ranks) for ranks in range(1, 14)] == [1, 2, 3, 4, 4, 6, 6, 6, 6, 6, 6, 12, 12]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "4:1"}, "NODES=4:1 is invalid"),
        ({"nodes": "many"}, "NODES=many is invalid"),
        ({"store": "10.0.0.1"}, "STORE=10.0.0.1 is not an address"),
        ({"store": "host:99999"}, "STORE=host:99999 is not an address"),
    ],
)
def test_invalid_options_are_named(options, message):
    """Each invalid number of nodes or address raises an error that names the option."""
    config = ElasticConfig(**options)
    with pytest.raises(ConfigError, match=message):
        config.parse_nodes()
        config.parse_store()


def test_a_node_that_cannot_start_says_why(tmp_path):
    """Without a store, without an --out_dir, or with an invalid flag, a node prints one sentence and exits."""
    node = ["operate.elastic", "--store=127.0.0.1:1", "nanoGPT/train.py", "--device=cpu"]
    assert_refused(run_program(*node, f"--out_dir={tmp_path}"), "STORE=127.0.0.1:1 does not answer")
    assert_refused(run_program(*node), "needs --out_dir")
    assert_refused(run_program(*node, f"--out_dir={tmp_path}", "--dropout=2"), "--dropout=2.0 is out of range")
    assert_refused(run_program(*node, f"--out_dir={tmp_path}", "--eval_only"), "--eval_only does not work")
    assert_refused(run_program("operate.elastic", "--gpus=0", *node[1:], f"--out_dir={tmp_path}"), "GPUS=0")
    assert_refused(run_program("operate.elastic", "serve", "--port=0"), "PORT=0 is not a port")


def test_two_nodes_agree_on_the_name_of_a_new_job(tmp_path):
    """Two nodes find the token of a stopped job at the same time: both get the same new name."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    stopped, names = name_job(store, str(tmp_path)), []
    store.set(f"{stopped} {STOP_KEY}", "1 stopped")

    class Slow:
        """The store of a node that is overtaken by another node after its first question."""

        compare_set, delete_key = store.compare_set, store.delete_key

        def check(self, keys: list[str]) -> bool:
            answer = store.check(keys)
            if not names:
                names.append(name_job(store, str(tmp_path)))
            return answer

    names.append(name_job(Slow(), str(tmp_path)))  # type: ignore[arg-type]
    assert names[0] == names[1] == name_job(store, str(tmp_path)) != stopped


def test_a_lost_node_that_did_not_interrupt_the_job_is_marked(tmp_path, monkeypatch):
    """Only a new start of the run shows that a loss interrupted the job. A step without a loss is reported."""
    monkeypatch.setattr(node_kills, "RESTART_SECONDS", 0.0)
    cluster = node_kills.Cluster(tmp_path, 0)
    cluster.out_dir.mkdir()
    line = "rank 0: started at step {} of 9, FsdpConfig, {} rank(s)\n"
    (cluster.out_dir / "log.txt").write_text(line.format(0, 4) + line.format(7, 2))
    assert node_kills.list_starts(cluster.out_dir) == [(0, 4), (7, 2)]
    assert cluster.wait_for_restart(1) and not cluster.wait_for_restart(2)
    result = node_kills.compare_curves({0: 3.0, 2: 1.5}, {0: 3.0, 1: 2.0, 2: 1.0})
    assert result == {"missing_steps": [1], "max_loss_difference": 0.5}
    assert list(node_kills.sample_curve(dict.fromkeys(range(101), 1.0), 101)) == list(range(0, 101, 3))


def test_only_losses_that_interrupted_the_job_are_in_the_table(monkeypatch):
    """The table and the picture leave out losses that did not interrupt the job; the picture has both loss curves."""
    row = {"kind": "node", "steps_lost": 6, "seconds": 8.0, "interrupted": True}
    rows = [row, {**row, "steps_lost": 0, "seconds": 0.0, "interrupted": False}]
    curves = {"with lost nodes": {"0": 4.0, "5": 3.0}, "uninterrupted": {"0": 4.0, "5": 3.0}}
    samples = {"rows": rows, "steps": 9, "max_loss_difference": 1e-7, "curves": curves}
    result = {"hardware": "A", "versions": {"torch": "2"}, "samples": samples}
    monkeypatch.setattr(elastic_tables, "read_results", lambda name: [result])
    table = elastic_tables.node_kills_table()
    assert "| 1 | 6.0 | 6 | 8.0 |" in table and "continued 1 times" in table and "Not counted: 1 loss of" in table
