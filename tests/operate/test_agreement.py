"""Ranks and nodes that disagree or cannot start: every one prints the reason and exits before training starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from measure.ledger import CollectiveCounter
from nanoGPT.distributed import runtime
from nanoGPT.distributed.runtime import create_runtime
from operate import run_description
from operate.agreement import find_disagreement
from operate.run_description import describe_run
from tests.helpers.programs import Program, assert_refused, find_free_port, make_flags, run_program
from tests.helpers.training import TINY, tiny
from workshop.ranks import RankFailed, run_on_ranks

COUNTING_CONFIG = """
import time as _time
seed = _time.time_ns() % 2**31
with open({count!r}, "a") as _file:
    _file.write("executed\\n")
"""


def start_nodes(trainer: str, flags_per_node: list[list[str]], gpus=(1, 1)) -> list[Program]:
    """Start one launcher per node, all on this machine, each with its own flags of the trainer."""
    environment = {"MASTER_PORT": find_free_port(), "OMP_NUM_THREADS": "1"}
    base = [f"--nnodes={len(flags_per_node)}", "--master_addr=127.0.0.1"]
    return [
        Program(
            "operate.launch", *base, f"--gpus={gpus[node]}", f"--node_rank={node}", trainer, *node_flags, **environment
        )
        for node, node_flags in enumerate(flags_per_node)
    ]


def collect_outcomes(nodes: list[Program]) -> list[tuple[int, list[str]]]:
    """Return the exit code of each node, and its lines that begin with "error"."""
    try:
        outputs = [node.communicate()[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [
        (node.returncode, [line for line in output.splitlines() if line.startswith("error")])
        for node, output in zip(nodes, outputs, strict=True)
    ]


def test_nodes_with_different_flags_are_refused(tmp_path):
    """Two nodes with different learning rates exit with code 2 before training. The error names the flag, both values
    and the ranks."""
    flags_per_node = [make_run_flags(tmp_path), make_run_flags(tmp_path, learning_rate=0.5)]
    for code, errors in collect_outcomes(start_nodes("phase1_zero1/train.py", flags_per_node)):
        assert code == 2
        assert "--learning_rate is 0.002 on rank 0 and 0.5 on rank 1" in errors[0], errors
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("node", "wrong_flag"), [(0, "--dataset=nosuch"), (1, "--datset=x")])
def test_every_node_prints_the_error_of_a_node_that_cannot_start(node, wrong_flag, tmp_path):
    """A node with a missing dataset or a misspelled flag prints an error, and the other node prints the same error with
    the number of that node."""
    flags_per_node = [make_run_flags(tmp_path), make_run_flags(tmp_path)]
    flags_per_node[node].append(wrong_flag)
    outcomes = collect_outcomes(start_nodes("nanoGPT/train.py", flags_per_node))
    assert [code for code, _ in outcomes] == [2, 2]
    (own_error,), (other_error,) = outcomes[node][1], outcomes[1 - node][1]
    assert other_error == own_error.replace("error: ", f"error: node {node} cannot start: ")


def test_a_config_file_is_executed_once(tmp_path):
    """A launch executes a config file once, for two nodes and for two ranks of one node. All ranks train with the same
    values, even if each execution computes another seed."""
    file, count = tmp_path / "clock.py", tmp_path / "count"
    file.write_text(COUNTING_CONFIG.format(count=str(count)))
    flags_per_node = [[str(file), *make_run_flags(tmp_path / "run", max_iters=1)] for _ in range(2)]
    assert [code for code, _ in collect_outcomes(start_nodes("nanoGPT/train.py", flags_per_node))] == [0, 0]
    assert count.read_text() == "executed\n"
    two_ranks = ["--gpus=2", "nanoGPT/train.py", str(file), *make_run_flags(tmp_path / "two", max_iters=1)]
    assert run_program("operate.launch", *two_ranks).code == 0 and count.read_text() == "executed\n" * 2


def train_with_different_seeds(out: str) -> None:
    import torch.distributed as dist

    from nanoGPT import train

    train.train(tiny("nanoGPT", Path(out), seed=dist.get_rank()))


def test_ranks_of_a_notebook_are_compared(tmp_path):
    """Ranks that already have a process group, as in a notebook, are compared through this group."""
    with pytest.raises(RankFailed, match="--seed is 0 on rank 0 and 1 on rank 1"):
        run_on_ranks(train_with_different_seeds, 2, str(tmp_path), show=False)


def describe_tiny_run(phase: str = "nanoGPT", **fields) -> dict[str, object]:
    config = tiny(phase, Path("out"), **fields)
    return describe_run(config, create_runtime(config.device, config.dtype))


def test_every_difference_between_ranks_is_named(tmp_path, monkeypatch):
    """A difference in data, versions, dtype, trainer or weights is named. Equal descriptions have no difference."""
    reference = describe_tiny_run()

    def difference(other: dict[str, object]) -> str:
        return find_disagreement([reference, other]) or "none"

    assert difference(describe_tiny_run()) == "none"
    assert "the trainer is " in difference(describe_tiny_run("phase1_zero1"))
    assert "the dtype is float32 on rank 0 and bfloat16 on rank 1" in difference(describe_tiny_run(dtype="bfloat16"))
    assert "the prepared data is" in difference(
        {**describe_tiny_run(dataset="shakespeare"), "--dataset": reference["--dataset"]}
    )
    monkeypatch.setattr(run_description, "find_version", lambda name: "0.1")
    assert "the version of torch is " in difference(describe_tiny_run())
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    run = str(tmp_path / "run")
    assert run_description.digest_weights(run) == "step-00000005"
    assert run_description.describe_starting_point(run) == run, "a newer checkpoint may appear while the ranks start"


def test_the_digest_changes_with_the_code(tmp_path, monkeypatch):
    """One changed line in any module of the baseline or of the phase changes the hash. A changed config file does
    not."""
    for name in ("nanoGPT", "phase1_zero1"):
        (tmp_path / name / "config").mkdir(parents=True)
        (tmp_path / name / "train.py").write_text("one\n")
        (tmp_path / name / "config" / "small.py").write_text("one\n")
    monkeypatch.setattr(run_description, "PACKAGE", tmp_path / "nanoGPT")
    digests = [run_description.digest_code()]
    for file in ("nanoGPT/config/small.py", "nanoGPT/train.py", "phase1_zero1/train.py"):
        (tmp_path / file).write_text("two\n")
        digests.append(run_description.digest_code())
    assert digests[0] == digests[1] and len({*digests}) == 3


WRONG_ENVIRONMENTS = [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR= and MASTER_PORT=: start ranks with torchrun, or set all four"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ({"TORCHELASTIC_MAX_RESTARTS": "many"}, "TORCHELASTIC_MAX_RESTARTS=many"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "the environment "),
    ({"SLURM_STEP_NUM_TASKS": "2"}, "srun or mpirun has started 2 copies of this program"),
]


@pytest.mark.parametrize(("environment", "message"), WRONG_ENVIRONMENTS)
def test_a_wrong_launcher_environment_is_refused(environment, message, tmp_path, monkeypatch):
    """RANK without an address, a wrong port or count, or copies without ranks: one error, and exit code 2."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(run_program("nanoGPT/train.py", *make_run_flags(tmp_path), **environment), message)


# A node that cannot start waits until the other nodes have read its error. Here there are none: keep the wait short.
SHORT_TIMEOUT = """
import datetime, runpy
from nanoGPT import observers
from operate import nodes
nodes.ERROR_SECONDS = 1.0
observers.Flags.timeout = property(lambda self: datetime.timedelta(seconds=1.2))
runpy.run_module('operate.launch', run_name='__main__')
"""


def test_a_node_that_does_not_connect_is_named(tmp_path):
    """After the timeout, the waiting node names the node that did not connect, and exits with code 2."""
    words = ["--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", "--gpus=1", "nanoGPT/train.py"]
    program = tmp_path / "impatient.py"
    program.write_text(SHORT_TIMEOUT)
    flags = make_run_flags(tmp_path, stall_seconds=1)
    ((code, errors),) = collect_outcomes([Program(str(program), *words, *flags, MASTER_PORT=find_free_port())])
    assert code == 2 and "node 1 did not connect" in errors[0]


def stop_on_a_signal(signal_step: int) -> tuple[list[int], int]:
    """Run 100 steps: rank 1 has the slowest steps, and receives the signal. Return the exchanges and the last step."""
    run, now, exchanges = create_runtime("cpu", "float32"), 0.0, []
    runtime.time = SimpleNamespace(monotonic=lambda: now)  # type: ignore[assignment]
    run.last_exchange = now
    for step in range(100):
        now += 0.2 if run.rank == 1 else 0.01
        if step == signal_step and run.rank == 1:
            run.request_stop("SIGTERM")
        if step == 5 and run.rank == 2:
            run.request_save()
        with CollectiveCounter() as traffic:
            should_stop, should_save = run.exchange_requests(run.rank == 0 and step == 11)
        exchanges += [step] if traffic.rows else []
        assert should_save == (should_stop or step in (6, 11))
        if should_stop:
            break
    return exchanges, step


def test_ranks_exchange_requests_once_a_second_and_stop_after_the_same_step():
    """With steps of 0.2 s on the slowest rank, the ranks communicate after 1, 2, 4, 5, 5, ... steps, and stop there."""
    assert run_on_ranks(stop_on_a_signal, 3, 14, show=False) == 3 * [([0, 2, 6, 11, 16], 16)]


def make_run_flags(out, **fields):
    return make_flags(**{**TINY, **fields, "out_dir": out})


def test_nodes_with_other_numbers_of_ranks_are_refused(tmp_path):
    """Both nodes name the numbers of ranks, although neither of them divides the micro-batches."""
    flags = make_run_flags(tmp_path, gradient_accumulation_steps=5)
    for code, errors in collect_outcomes(start_nodes("phase3_fsdp/train.py", [flags, flags], gpus=(1, 2))):
        assert code == 2 and "the nodes have GPUS=[1, 2]" in errors[0], errors
