"""Phase 1 in the trainer: the baseline's losses, 1/N of its optimizer state, and no more on the wire than DDP."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bench.matrix.cells import as_expected
from bench.sharding.zero1 import state_on_ranks
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.metrics.ledger import tensors_in
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import muon_groups, param_groups
from phase1_zero1.buckets import ALIGN, assign_owners
from phase1_zero1.muon import cost
from phase1_zero1.parallelize import data_parallel, shard_optimizer
from phase1_zero1.sharded_checkpoint import load_shards, save_shards
from phase1_zero1.zero1 import Zero1Optimizer
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import call_train, gap, tiny, train
from workshop.ranks import RankFailed, losses, run_on_ranks

BACKENDS: dict[str, dict[str, Any]] = {
    "flat": {"zero1_bucket_mb": 0.01},
    "naive": {"zero1_backend": "naive"},
    "torch": {"zero1_backend": "torch"},
    "ddp": {"use_zero1": False},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_prints_the_same_losses(backend, tmp_path, device, need_ranks):
    """With dropout, clipping and accumulation, flat, naive, torch's ZeroRedundancyOptimizer and DDP are one curve."""
    need_ranks(4)
    options = {"device": device, "dtype": "float32", "compile": False}
    one = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **options))
    config = tiny("phase1_zero1", tmp_path / backend, **options, **BACKENDS[backend])
    assert gap(one, train("phase1_zero1", 4, config)) <= 1e-6


def test_one_rank_without_clipping_is_the_baseline_to_the_last_digit(tmp_path, device):
    """At one rank with clipping off, no digit of any loss differs: AdamW does not see how parameters are cut."""
    options = {"device": device, "grad_clip": 0.0}
    one = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **options))
    assert train("phase1_zero1", 1, tiny("phase1_zero1", tmp_path / "z", zero1_bucket_mb=0.01, **options)) == one


def report(out: Path) -> tuple[int, list[dict[str, int]], dict[str, dict[str, Any]]]:
    """Parameters, each rank's bytes of state, rank 0's collectives by kind; all are what `costs.py` says."""
    found = json.loads((out / "ledger.json").read_text())
    assert as_expected(found)
    for each in found["ranks"]:
        assert each["state_bytes"]["parameters"] == 4 * (found["parameters"] + each["padding"])
    rows: dict[str, dict[str, Any]] = {}
    for row in found["ranks"][0]["collectives"]:
        kept = rows.setdefault(row["kind"], {"calls": 0, "tensor_bytes": 0, "ring_bytes": 0.0})
        for name in kept:
            kept[name] += row[name]
    return found["parameters"], [each["state_bytes"] for each in found["ranks"]], rows


def padded(params: int, ranks: int) -> int:
    return ranks * ALIGN * math.ceil(params / (ranks * ALIGN))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flat_sends_what_ddp_sends(ranks, tmp_path):
    """2P(N-1)/N elements and padding in reduce-scatters and all-gathers, one scalar for the norm, and one byte a
    parameter that says who has a gradient; the optimizer state is 8P bytes over all ranks, held once."""
    train("phase1_zero1", ranks, tiny("phase1_zero1", tmp_path, ledger=True, max_iters=3))
    params, states, rows = report(tmp_path)
    model = GPT(GPTConfig(2, 2, 32, 16, False, 75))
    groups = [sum(p.numel() for p in group["params"]) for group in param_groups(model, 0.1)]
    length = sum(padded(numel, ranks) for numel in groups)
    names = len(list(model.parameters()))
    assert sum(groups) == params and length - params < 2 * ranks * ALIGN
    for each in states:
        assert each["parameters"] == each["gradients"] == 4 * length
    assert 8 * params < sum(each["optimizer_state"] for each in states) <= 8 * params + 4 * (names + 2 * ranks)
    assert max(each["optimizer_state"] for each in states) <= 8 * length // ranks + 4 * names  # counts of steps
    if ranks == 1:
        assert rows == {}
        return
    assert rows["reduce-scatter"] == rows["all-gather"]
    assert rows["all-gather"] == {
        "calls": 2,
        "tensor_bytes": 4 * length,
        "ring_bytes": 4 * length * (ranks - 1) / ranks,
    }
    assert (rows["all-reduce"]["calls"], rows["all-reduce"]["tensor_bytes"]) == (2, 8 + names)
    assert set(rows) == {"reduce-scatter", "all-gather", "all-reduce"}


@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_the_others_send_half_as_much_again(backend, tmp_path):
    """An all-reduce and then a broadcast are 3P(N-1)/N elements; the state is sharded all the same."""
    train("phase1_zero1", 4, tiny("phase1_zero1", tmp_path, ledger=True, max_iters=3, **BACKENDS[backend]))
    params, states, rows = report(tmp_path)
    assert rows["all-reduce"]["tensor_bytes"] == rows["broadcast"]["tensor_bytes"] == 4 * params
    assert sum(row["ring_bytes"] for row in rows.values()) == 3 * 4 * params * 3 / 4
    assert 8 * params < sum(each["optimizer_state"] for each in states) < 8 * params + 500


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_optimizer_state_of_124m(ranks):
    """GPT-2 124M: every rank holds 8P/N bytes of moments, to 0.1 percent, and all together exactly 8P."""
    params = 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    moments, flat = zip(*run_on_ranks(state_on_ranks, ranks, timeout=200), strict=True)
    assert sum(moments) == 8 * params
    assert max(moments) <= 1.001 * 8 * params / ranks
    assert max(flat) <= 1.001 * 4 * params


def test_saved_at_8_resumed_at_2_then_4_then_in_the_baseline(tmp_path, device, need_ranks):
    """One run in four parts, on 8, 2 and 4 ranks of phase 1 and on one of the baseline, has an uninterrupted run's
    losses; no rank ever held another's moments to save them."""
    need_ranks(8)
    whole = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "whole", device=device))
    parts = [("phase1_zero1", 8, 3), ("phase1_zero1", 2, 6), ("phase1_zero1", 4, 9), ("nanoGPT", 1, 12)]
    for phase, ranks, until in parts:
        first = {} if until > 3 else {"init_from": "scratch"}
        options = {"device": device, "max_iters": until, "lr_decay_iters": 12, "init_from": "resume", **first}
        train(phase, ranks, tiny(phase, tmp_path / "parts", **options))
    assert sorted(losses(tmp_path / "parts")) == list(range(12))
    assert gap(whole, losses(tmp_path / "parts")) <= 1e-6


def test_a_run_may_change_its_backend(tmp_path):
    """What one backend saved, any other resumes, on another number of ranks."""
    whole = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "whole"))
    parts = [("naive", 4, 2), ("flat", 2, 4), ("torch", 4, 6), ("flat", 1, 8), ("ddp", 2, 10), ("flat", 4, 12)]
    for backend, ranks, until in parts:
        options = {"max_iters": until, "lr_decay_iters": 12, "init_from": "resume" if until > 2 else "scratch"}
        train("phase1_zero1", ranks, tiny("phase1_zero1", tmp_path / "parts", **options, **BACKENDS[backend]))
    assert sorted(losses(tmp_path / "parts")) == list(range(12))
    assert gap(whole, losses(tmp_path / "parts")) <= 1e-6


@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_fsdp_shards_open_where_a_rank_owns_no_matrix(backend, tmp_path):
    """Phase 3's shards of a model with fewer matrices than ranks open in every backend, and the run goes on."""
    shape = {"n_layer": 1, "lr_decay_iters": 12}
    whole = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "whole", **shape))
    train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "run", max_iters=6, **shape))
    config = tiny("phase1_zero1", tmp_path / "run", init_from="resume", **shape, **BACKENDS[backend])
    assert gap(whole, train("phase1_zero1", 8, config)) <= 1e-5


class Partly(torch.nn.Module):
    """One layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(9, 9), torch.nn.Linear(3, 3)


def save_and_load(folder: str, dtype: torch.dtype) -> bool:
    torch.manual_seed(0)
    model = Partly()
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        model.used(torch.ones(1, 9)).sum().backward()
        optimizer.step()
    save_shards(NewFiles(Path(folder)), model, optimizer)
    fresh = Partly().to(dtype)
    again = Zero1Optimizer(fresh.parameters(), torch.optim.AdamW, lr=0.1)
    load_shards(Path(folder), fresh, again)
    for (_, ours), (shard, theirs) in zip(optimizer.shards(), again.shards(), strict=True):
        if "master" in theirs:  # what was saved in fp32 had none
            part = shard.param.detach().flatten()[shard.offset : shard.offset + theirs["master"].numel()]
            assert torch.equal(theirs.pop("master"), part.float())
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[item], theirs[item]) for item in ours)
    return all(torch.equal(a.to(dtype), b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def load_into_another(folder: str) -> None:
    model = Partly()
    save_shards(NewFiles(Path(folder)), model, Zero1Optimizer(model.parameters(), torch.optim.SGD))
    other = torch.nn.Sequential(Partly(), torch.nn.Linear(2, 2))
    load_shards(Path(folder), other, Zero1Optimizer(other.parameters(), torch.optim.SGD))


def test_shards_of_another_model_are_refused(tmp_path):
    """Shards that have other parameters than the model are one sentence, not a model that is half loaded."""
    with pytest.raises(RankFailed, match="and the model differ in 10 parameters, such as model.0.unused.bias"):
        run_on_ranks(load_into_another, 2, str(tmp_path / "shards"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_never_had_a_gradient_is_saved_and_loaded(dtype, tmp_path):
    """It has no state before and none after; and a checkpoint in fp32 opens in a bf16 model, masters included."""
    assert all(run_on_ranks(save_and_load, 2, str(tmp_path / "shards"), dtype))


# ---- Muon


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_sharded_muon_is_muon(ranks, tmp_path, device, need_ranks):
    """With --optimizer=muon phase 1 prints the baseline's losses, as nearly as the baseline's own ranks do: torch
    orthogonalises in bf16, where a last digit of the gradient may turn a rounding."""
    need_ranks(ranks)
    options = {"device": device, "dtype": "float32", "compile": False, "optimizer": "muon", "ledger": True}
    one = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **options))
    found = train("phase1_zero1", ranks, tiny("phase1_zero1", tmp_path / "z", zero1_bucket_mb=0.01, **options))
    assert gap(one, found) <= (0 if ranks == 1 else 1e-4)
    params, states, rows = report(tmp_path / "z")
    matrices = 2 * 12 * 32**2
    moments = 4 * matrices + 8 * (params - matrices)
    assert moments < sum(each["optimizer_state"] for each in states) <= moments + 4 * 8 * ranks
    if ranks > 1:
        assert rows["broadcast"]["tensor_bytes"] == 4 * matrices
        assert rows["reduce"] == rows["broadcast"]


def test_matrices_are_shared_out_evenly():
    """At GPT-2 124M the busiest of 8 ranks has at most 5 percent more to multiply than the mean."""
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=False))
    matrices = muon_groups(model, tiny("nanoGPT", Path()))[0]["params"]
    for ranks in (2, 4, 8):
        owner = assign_owners(matrices, ranks, cost)
        loads = [sum(cost(m) for m in matrices if owner[m] == rank) for rank in range(ranks)]
        assert max(loads) <= 1.05 * sum(loads) / ranks, loads


def test_a_run_with_muon_resumes_on_other_ranks(tmp_path):
    """Muon's momentum opens at another number of ranks, in the baseline, and not with another optimizer."""
    muon = {"optimizer": "muon", "lr_decay_iters": 12}
    whole = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "whole", **muon))
    cut = tmp_path / "cut"
    train("phase1_zero1", 4, tiny("phase1_zero1", cut, max_iters=4, **muon))
    ended = run_program("phase1_zero1/train.py", f"--out_dir={cut}", "--init_from=resume", "--optimizer=adamw")
    assert_refused(ended, "--optimizer=adamw", "trained with --optimizer=muon")
    train("phase1_zero1", 2, tiny("phase1_zero1", cut, max_iters=8, init_from="resume", **muon))
    train("nanoGPT", 1, tiny("nanoGPT", cut, init_from="resume", **muon))
    assert gap(whole, losses(cut)) <= 1e-4


@pytest.mark.parametrize(
    ("phase", "flags", "words"),
    [
        ("phase1_zero1", ["--optimizer=muon", "--zero1_backend=torch"], ["--zero1_backend=torch", "use_zero1=False"]),
        ("phase1_zero1", ["--optimizer=muon", "--zero1_backend=naive"], ["--zero1_backend=naive"]),
        ("phase1_zero1", ["--zero1_backend=flatt"], ["flatt"]),
        ("phase1_zero1", ["--zero1_bucket_mb=0"], ["--zero1_bucket_mb=0", "above 0"]),
        ("phase1_zero1", ["--zero_backend=flat"], ["did you mean --zero1_backend?"]),
        ("phase3_fsdp", ["--optimizer=muon"], ["--optimizer=muon", "phase 1"]),
        ("nanoGPT", ["--optimizer=lion"], ["lion"]),
    ],
)
def test_what_cannot_be_combined_is_refused(phase, flags, words, tmp_path):
    """An option or combination that cannot be is one sentence and exit code 2."""
    assert_refused(run_program(f"{phase}/train.py", f"--out_dir={tmp_path}", "--device=cpu", *flags), *words)


def after_a_step(config: Any) -> tuple[int, int]:
    """How many buckets there are, and how many of them are still on their way when the trainer's step returns."""
    model, run = GPT(GPTConfig(2, 2, 32, 16, False, 75)), create_runtime(config.device, config.dtype)
    optimizer = shard_optimizer(model, config, run)
    assert isinstance(optimizer, Zero1Optimizer)
    replica = data_parallel(model, optimizer, config, run)
    x = torch.zeros(1, 16, dtype=torch.int64)
    replica(x, x)[1].backward()
    optimizer.step()
    return len(optimizer.buckets), sum(bucket.work is not None for bucket in optimizer.buckets)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_trainers_step_returns_while_parameters_are_on_their_way(optimizer):
    """The buckets are of the size that is asked for, and it is the next forward that waits for them."""
    counts = []
    for mb in (25.0, 0.01):
        config = tiny("phase1_zero1", Path(), optimizer=optimizer, zero1_bucket_mb=mb, compile=False)
        ((buckets, sent), _) = run_on_ranks(after_a_step, 2, config)
        assert sent == buckets
        counts.append(buckets)
    assert counts[0] == (2 if optimizer == "adamw" else 8 + 2) < counts[1]


# ---- what goes wrong elsewhere


class Calls(TorchDispatchMode):
    """Every collective in the order of its call: name and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            one_sided = func.__name__.startswith(("gather_", "scatter_"))  # only the root has the whole
            size = 0 if one_sided else sum(t.nbytes for t in tensors_in(args[0]))
            self.seen.append((func.__name__, size))
        return func(*args, **(kwargs or {}))


def collectives(phase: str, config: Any) -> list[tuple[str, int]]:
    with Calls() as calls:
        call_train(phase, config)
    return calls.seen


@pytest.mark.parametrize(
    ("phase", "options"),
    [
        ("nanoGPT", {}),
        ("phase1_zero1", {"optimizer": "muon"}),  # which has flat buckets too
        ("phase3_fsdp", {}),
    ],
)
def test_nothing_collective_runs_on_one_rank_only(phase, options, tmp_path):
    """In a run that evaluates 3 batches on 4 ranks, clips, saves and resumes, all ranks call the same collectives with
    the same sizes in the same order."""
    train(phase, 4, tiny(phase, tmp_path, max_iters=6, lr_decay_iters=12, **options))
    config = tiny(phase, tmp_path, init_from="resume", **options)
    found = run_on_ranks(collectives, 4, phase, config, show=False, timeout=100)
    assert len(found[0]) > 30
    for rank in range(1, 4):
        assert found[rank] == found[0]


def norms(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["grad_norm"] for line in lines if line["grad_norm"] is not None]


@pytest.mark.parametrize("backend", [*BACKENDS, "muon"])
def test_the_norm_is_that_of_the_whole_gradient(backend, tmp_path):
    """Every backend on 2 ranks logs the baseline's gradient norm, though a rank of flat has half of the gradient;
    a learning rate of 1e-30 keeps the models alike, so that only the norms are compared."""
    still = {"max_iters": 4, "learning_rate": 1e-30, "min_lr": 0.0, "grad_clip": 0.01}
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **still))
    options = {"optimizer": "muon"} if backend == "muon" else BACKENDS[backend]
    train("phase1_zero1", 2, tiny("phase1_zero1", tmp_path / "two", **still, **options))
    assert norms(tmp_path / "two") == pytest.approx(norms(tmp_path / "one"), rel=1e-7)
    assert len(norms(tmp_path / "one")) == 4


def local_norm_differs() -> tuple[float, float]:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(64, 64)
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.randn(8, 64)).square().sum().backward()
    right = optimizer.clip_grad_norm_(1.0).item()
    wrong = float(torch.nn.utils.get_total_norm([s.tensor.grad for s, _ in optimizer.shards()]))  # type: ignore[misc]
    return right, wrong


def test_a_local_norm_would_be_wrong():
    """The norm of a rank's shards alone is another number on each rank, so this fault is one that the tests can see."""
    found = run_on_ranks(local_norm_differs, 4)
    assert len({right for right, _ in found}) == 1
    assert len({wrong for _, wrong in found}) == 4
    assert math.sqrt(sum(wrong**2 for _, wrong in found)) == pytest.approx(1.0, rel=1e-4)  # clipped to 1 as a whole
