"""`run_on_ranks` runs functions on real ranks, for notebooks and tests."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.programs import run_in_new_interpreter
from workshop.ranks import RankFailed, run_on_ranks


def sum_over_ranks(start: float) -> float:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    print(f"hello from {dist.get_rank()}", end="")  # the line is shown although it has no line break
    return value.item()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_results_come_in_rank_order_and_lines_are_shown(ranks, capsys):
    """The results of all ranks are returned. With show=True, each line is printed after the number of its rank."""
    assert run_on_ranks(sum_over_ranks, ranks, 1.0) == [ranks + sum(range(ranks))] * ranks
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{r}] hello from {r}" for r in range(ranks)]
    run_on_ranks(sum_over_ranks, ranks, 1.0, show=False)
    assert capsys.readouterr().out == ""


def test_ranks_have_their_rank_and_the_environment_of_the_caller(monkeypatch):
    """Every rank has RANK, WORLD_SIZE and the current environment of the caller, also in a later call."""
    names = ("SET_BY_THE_CALLER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for value in ("first", "second"):
        monkeypatch.setenv("SET_BY_THE_CALLER", value)
        values = run_on_ranks(lambda: [os.environ[name] for name in names], 2)
        assert values == [[value, str(rank), "2", str(rank), "2"] for rank in range(2)]


def fail_on_rank_2() -> None:
    if dist.get_rank() == 2:
        raise ValueError("planted")
    dist.barrier()


def test_the_first_failing_ranks_traceback_is_raised():
    """The exception contains the traceback of the rank that failed first, not of a rank that lost its peer."""
    with pytest.raises(RankFailed, match=r"rank 2 failed:\n(.|\n)*fail_on_rank_2(.|\n)*ValueError: planted"):
        run_on_ranks(fail_on_rank_2, 4)


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(1000)


def test_a_rank_that_exits_is_named():
    """If a rank exits without an exception, it is named with its exit code, while another rank still runs."""
    with pytest.raises(RankFailed, match="rank 1 failed:\nthe process exited with code 7"):
        run_on_ranks(exit_on_rank_1, 2)


def test_ranks_that_exceed_the_timeout_are_named():
    """Ranks that exceed the timeout are named and stopped."""
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not finish within 1 seconds"):
        run_on_ranks(time.sleep, 2, 60, timeout=1)
    assert set(multiprocessing.active_children()) <= before


def test_a_function_without_a_module_runs():
    """A function that a notebook defines has no module. It is pickled by value and runs on the ranks."""
    offset = 5
    assert run_on_ranks(lambda: dist.get_rank() + offset, 3) == [5, 6, 7]


def test_the_server_does_not_start_cuda():
    """No preloaded module calls torch.cuda.is_available(), because forked ranks could then not use CUDA."""
    program = """
import torch

def fail():
    raise AssertionError("torch.cuda.is_available() was called by an import")

torch.cuda.is_available = fail
from operate.ranks import PRELOADED
for name in PRELOADED:
    __import__(name)
print("phases imported:", sum(name.endswith(".train") for name in PRELOADED))
"""
    completed = run_in_new_interpreter("-c", program)
    assert completed.stdout == "phases imported: 4\n", completed.stderr
