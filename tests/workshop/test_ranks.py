"""Functions on real ranks, as notebooks and tests run them."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.training import ROOT
from workshop.ranks import RankFailed, run_on_ranks


def total(start: float) -> float:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    print(f"hello from {dist.get_rank()}")
    return value.item()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_results_come_in_rank_order_and_lines_are_shown(ranks, capsys):
    """Every rank's result is returned, and its lines are printed after its number, or not at all."""
    assert run_on_ranks(total, ranks, 1.0) == [ranks + sum(range(ranks))] * ranks
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{r}] hello from {r}" for r in range(ranks)]
    run_on_ranks(total, ranks, 1.0, show=False)
    assert capsys.readouterr().out == ""


def test_ranks_know_their_place_and_the_callers_environment(monkeypatch):
    """What the caller has set since the first ranks were started is set on every rank, beside its place in the job."""
    names = ("SET_BY_THE_CALLER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for value in ("once", "again"):
        monkeypatch.setenv("SET_BY_THE_CALLER", value)
        found = run_on_ranks(lambda: [os.environ[name] for name in names], 2)
        assert found == [[value, str(rank), "2", str(rank), "2"] for rank in range(2)]


def fail_on_rank_2() -> None:
    if dist.get_rank() == 2:
        raise ValueError("planted")
    dist.barrier()


def test_the_first_failing_ranks_traceback_is_raised():
    """The exception holds the traceback of the rank that failed, not of those that lost it."""
    with pytest.raises(RankFailed, match=r"rank 2 failed:\n(.|\n)*fail_on_rank_2(.|\n)*ValueError: planted"):
        run_on_ranks(fail_on_rank_2, 4)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(1000)


def test_a_rank_that_dies_is_named():
    """A rank that ends without a word is named with its exit code, though another sleeps on."""
    with pytest.raises(RankFailed, match="rank 1 failed:\nthe process ended with exit code 7"):
        run_on_ranks(die_on_rank_1, 2)


def test_time_runs_out():
    """Ranks that do not end in time are named, and none is left."""
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] had not ended after 1 seconds"):
        run_on_ranks(time.sleep, 2, 60, timeout=1)
    assert set(multiprocessing.active_children()) <= before


def test_a_function_that_only_the_caller_has():
    """A function without a module, as a notebook defines it, runs on the ranks by value."""
    offset = 5
    assert run_on_ranks(lambda: dist.get_rank() + offset, 3) == [5, 6, 7]


def test_the_server_does_not_start_cuda():
    """Nothing that ranks are forked with asks for CUDA in a way that would keep them from using it (is_available)."""
    program = """
import torch

def asked():
    raise AssertionError("torch.cuda.is_available() was called by an import")

torch.cuda.is_available = asked
from workshop.ranks import PRELOADED
for name in PRELOADED:
    __import__(name)
print("phases imported:", sum(name.endswith(".train") for name in PRELOADED))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "phases imported: 4\n", done.stderr
