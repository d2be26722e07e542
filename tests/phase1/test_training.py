"""Phase 1 in the trainer: the baseline's losses, 1/N of its optimizer state, and the communication volume of DDP."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoGPT.checkpoint.manifest import Checkpoint, NewFiles
from nanoGPT.model import GPT, GPTConfig
from phase1_zero1.buckets import ALIGN
from phase1_zero1.sharded_checkpoint import load_shards, save_shards
from phase1_zero1.zero1 import Zero1Optimizer
from tests.helpers import training
from tests.helpers.marks import mark_slow
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import gap, tiny, train, train_all
from workshop.ranks import losses, run_on_ranks

BACKENDS: dict[str, dict[str, Any]] = {
    "flat": {"zero1_bucket_mb": 0.01},
    "naive": {"zero1_backend": "naive"},
    "torch": {"zero1_backend": "torch"},
    "ZeRO-2": {"zero1_bucket_mb": 0.01, "zero_stage": 2},
}
# Few steps and one evaluation: a run on 4 ranks takes about a second of processor time. Ledgers measure the third step.
# The last part of a resumed run has two steps: only the second loss depends on the optimizer state that it has loaded.
STEPS = {"max_iters": 4, "lr_decay_iters": 4, "eval_interval": 4}


@pytest.fixture(scope="module")
def train_backends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """Return a function that trains the baseline, and every backend on 4 ranks, once per device.

    It returns the output directories.
    """
    parent = tmp_path_factory.mktemp("backends")

    @functools.cache
    def train_once(device: str) -> dict[str, Path]:
        outs = {name: parent / f"{name}-{device}" for name in ("baseline", *BACKENDS)}
        options = {**STEPS, "device": device, "dtype": "float32", "compile": False}
        train("nanoGPT", 1, tiny("nanoGPT", outs["baseline"], **options))
        configs = [tiny("phase1_zero1", outs[name], ledger=True, **options, **BACKENDS[name]) for name in BACKENDS]
        train_all(4, [("phase1_zero1", config) for config in configs])
        return outs

    return train_once


def test_every_backend_prints_the_same_losses(train_backends, device, need_ranks):
    """With dropout, clipping and accumulation, ZeRO-1, naive, torch's ZeroRedundancyOptimizer and ZeRO-2 print the
    baseline's losses."""
    need_ranks(4)
    outs = train_backends(device)
    for backend in BACKENDS:
        assert gap(losses(outs["baseline"]), losses(outs[backend])) <= 1e-6, backend


def test_kernels_and_zero_go_together(tmp_path, device, need_ranks):
    """With the kernels of phase 2, ZeRO-1 and ZeRO-2 print the baseline's losses, and cost what they cost before.

    Kernels read parameters of other modules, so `step` has to wait for its all-gathers.
    """
    need_ranks(2)
    options = {**STEPS, "max_iters": 3, "eval_interval": 3, "device": device, "dtype": "float32", "compile": False}
    options |= {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 8, "dropout": 0.0}
    options |= {"gradient_accumulation_steps": 4, "batch_size": 1}
    baseline = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **options))
    fields = {**options, "kernels": "triton", "ledger": True, "zero1_bucket_mb": 0.01}
    kinds: dict[str, dict[str, Any]] = {"zero1": {}, "zero2": {"zero_stage": 2}}
    configs = [tiny("phase1_zero1", tmp_path / kind, **fields, **changes) for kind, changes in kinds.items()]
    for kind, curve in zip(kinds, train_all(2, [("phase1_zero1", config) for config in configs]), strict=True):
        assert gap(baseline, curve) <= 1e-5, kind
        training.read_ledger(tmp_path / kind)


def test_one_rank_without_clipping_is_bitwise_identical_to_the_baseline(tmp_path, device):
    """Every loss is identical: AdamW is elementwise, so it computes the same values in flat buckets."""
    options = {**STEPS, "device": device, "dtype": "float32", "deterministic": device == "cuda", "grad_clip": 0.0}
    baseline = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **options))
    config = tiny("phase1_zero1", tmp_path / "z", zero1_bucket_mb=0.01, **options)
    assert train("phase1_zero1", 1, config) == baseline


def read_ledger(out: Path) -> tuple[int, list[dict[str, int]], dict[str, dict[str, Any]]]:
    """Check a run's ledger against the formulas in `costs.py`.

    Returns:
        The number of parameters, each rank's bytes of state, and rank 0's collectives by kind.
    """
    ledger = training.read_ledger(out)
    for rank in ledger["ranks"]:
        assert rank["state_bytes"]["parameters"] == 4 * (ledger["parameters"] + rank["padding"])
    rows: dict[str, dict[str, Any]] = {}
    for row in ledger["ranks"][0]["collectives"]:
        sums = rows.setdefault(row["kind"], {"calls": 0, "tensor_bytes": 0, "ring_bytes": 0.0})
        for name in sums:
            sums[name] += row[name]
    return ledger["parameters"], [rank["state_bytes"] for rank in ledger["ranks"]], rows


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_flat_communicates_as_much_as_ddp(ranks, stage, tmp_path):
    """Reduce-scatters and all-gathers communicate 2P(N-1)/N elements and padding.

    With ZeRO-2, each rank stores 1/N of the gradients, and every micro-batch has reduce-scatters. Two small all-
    reduces follow: a scalar for the norm, and one byte per parameter that reports whether it has a gradient. All
    ranks together store the optimizer state of 8P bytes once.
    """
    options = {"ledger": True, "max_iters": 3, "gradient_accumulation_steps": 4, "zero_stage": stage}
    micro_batches = 1 if stage == 1 else 4 // ranks
    train("phase1_zero1", ranks, tiny("phase1_zero1", tmp_path, **options))
    params, states, rows = read_ledger(tmp_path)
    length, num_tensors = states[0]["parameters"] // 4, len(list(GPT(GPTConfig(2, 2, 32, 16, False, 75)).parameters()))
    assert length % (ranks * ALIGN) == 0 and 0 <= length - params < 2 * ranks * ALIGN  # two groups with padding
    for state in states:
        assert state["parameters"] == 4 * length
        assert state["gradients"] == 4 * length // (1 if stage == 1 else ranks)
    assert 8 * params < sum(state["optimizer_state"] for state in states) <= 8 * params + 4 * (num_tensors + 2 * ranks)
    assert max(state["optimizer_state"] for state in states) <= 8 * length // ranks + 4 * num_tensors  # counts of steps
    if ranks == 1:
        assert rows == {}
        return
    assert rows["reduce-scatter"] == {name: micro_batches * value for name, value in rows["all-gather"].items()}
    assert rows["all-gather"] == {
        "calls": 2,
        "tensor_bytes": 4 * length,
        "ring_bytes": 4 * length * (ranks - 1) / ranks,
    }
    assert (rows["all-reduce"]["calls"], rows["all-reduce"]["tensor_bytes"]) == (2, 8 + num_tensors)
    assert set(rows) == {"reduce-scatter", "all-gather", "all-reduce"}


def test_naive_and_torch_backends_communicate_half_as_much_again(train_backends):
    """An all-reduce and then a broadcast communicate 3P(N-1)/N elements. The optimizer state is sharded as in flat."""
    outs = train_backends("cpu")
    for backend in ("naive", "torch"):
        params, states, rows = read_ledger(outs[backend])
        assert rows["all-reduce"]["tensor_bytes"] == rows["broadcast"]["tensor_bytes"] == 4 * params, backend
        assert sum(row["ring_bytes"] for row in rows.values()) == 3 * 4 * params * 3 / 4, backend
        assert 8 * params < sum(state["optimizer_state"] for state in states) < 8 * params + 500, backend


@pytest.mark.slow
def test_a_run_saved_at_8_ranks_resumes_with_others(tmp_path, device, need_ranks):
    """A run on 8, 2, 4 and 3 ranks of phase 1 and then in the baseline has an uninterrupted run's losses.

    Each part resumes the checkpoint of another backend or stage.
    """
    need_ranks(8)
    steps = {**STEPS, "max_iters": 9, "lr_decay_iters": 9, "device": device, "dtype": "float32"}
    steps["gradient_accumulation_steps"] = 24
    uninterrupted = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "uninterrupted", **steps))
    parts = [("flat", 8), ("flat", 2), ("naive", 4), ("ZeRO-2", 3), ("torch", 2), ("flat", 3), ("ZeRO-2", 2)]
    for step, (backend, ranks) in enumerate(parts):
        options = {**steps, "max_iters": step + 1, "init_from": "resume" if step else "scratch", **BACKENDS[backend]}
        train("phase1_zero1", ranks, tiny("phase1_zero1", tmp_path / "parts", **options))
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "parts", init_from="resume", **steps))
    assert sorted(losses(tmp_path / "parts")) == list(range(9))
    assert gap(uninterrupted, losses(tmp_path / "parts")) <= 1e-6


class PartlyUsedModel(torch.nn.Module):
    """A model with one layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(9, 9), torch.nn.Linear(3, 3)


def save_and_load(folder: str, dtype: torch.dtype) -> bool:
    """Save shards, load them into a new model of `dtype`, and return whether all parameters are equal."""
    torch.manual_seed(0)
    model = PartlyUsedModel()
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        model.used(torch.ones(1, 9)).sum().backward()
        optimizer.step()
    save_shards(NewFiles(Path(folder)), model, optimizer)
    new_model = PartlyUsedModel().to(dtype)
    new_optimizer = Zero1Optimizer(new_model.parameters(), torch.optim.AdamW, lr=0.1)
    load_shards(Checkpoint(Path(folder), {"phase": "zero1"}), new_model, new_optimizer)
    for (_, _, saved_state), (param, offset, loaded_state) in zip(
        optimizer.local_state(), new_optimizer.local_state(), strict=True
    ):
        if "master" in loaded_state:  # the checkpoint of the fp32 model has no master
            part = param.detach().flatten()[offset : offset + loaded_state["master"].numel()]
            assert torch.equal(loaded_state.pop("master"), part.float())
        assert saved_state.keys() == loaded_state.keys()
        assert all(torch.allclose(saved_state[item], loaded_state[item]) for item in saved_state)
    return all(torch.equal(a.to(dtype), b) for a, b in zip(model.parameters(), new_model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_never_had_a_gradient_is_saved_and_loaded(dtype, tmp_path):
    """The parameter has no state before and after. An fp32 checkpoint also loads into a bf16 model with masters."""
    assert all(run_on_ranks(save_and_load, 2, str(tmp_path / "shards"), dtype))


# ---- Muon

MUON = {**STEPS, "dtype": "float32", "compile": False, "optimizer": "muon"}


@pytest.fixture(scope="module")
def muon_losses(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, float]:
    options = {**MUON, "device": request.config.getoption("--device")}
    return train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("muon"), **options))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 1), (4, 2), *mark_slow((8, 1))])
def test_sharded_muon_matches_muon(ranks, stage, muon_losses, tmp_path, device, need_ranks):
    """With --optimizer=muon, ZeRO-1 and ZeRO-2 print the baseline's losses: identical on 1 rank, to 1e-4 on more ranks.

    Torch orthogonalizes in bf16, where the last digit of a gradient can change a rounding.
    """
    need_ranks(ranks)
    config = tiny("phase1_zero1", tmp_path, device=device, zero1_bucket_mb=0.01, zero_stage=stage, ledger=True, **MUON)
    assert gap(muon_losses, train("phase1_zero1", ranks, config)) <= (0 if ranks == 1 else 1e-4)
    params, states, rows = read_ledger(tmp_path)
    matrices = 2 * 12 * 32**2
    moments = 4 * matrices + 8 * (params - matrices)
    assert moments < sum(state["optimizer_state"] for state in states) <= moments + 4 * 8 * ranks
    if ranks > 1:
        assert rows["broadcast"]["tensor_bytes"] == 4 * matrices
        micro_batches = 1 if stage == 1 else 8 // ranks
        assert rows["reduce"] == {name: micro_batches * value for name, value in rows["broadcast"].items()}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optimizer=muon", "--zero1_backend=torch"], ["--optimizer=muon", "--zero1_backend=flat"]),
        (["--zero_stage=2", "--zero1_backend=torch"], ["--zero_stage=2", "--zero1_backend=flat"]),
        (["--zero_stage=3"], ["--zero_stage=3", "make phase3"]),
        (["--kernels=adamw"], ["--kernels=adamw", "or some of attention"]),
    ],
)
def test_options_that_cannot_be_combined_are_refused(flags, words, tmp_path):
    """An invalid option or combination is refused with one sentence and exit code 2."""
    assert_refused(run_program("phase1_zero1/train.py", f"--out_dir={tmp_path}", "--device=cpu", *flags), *words)


def record_gradient_buffers() -> tuple[list[int], int]:
    """Run a backward pass of two micro-batches.

    Returns:
        The bytes of all buffers of full gradients whenever a gradient is complete, and at the end of a backward pass;
        and the bytes of the largest bucket.
    """
    model = GPT(GPTConfig(4, 2, 32, 16, False, 75))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, bucket_mb=0.03, stage=2)
    sizes: list[int] = []
    x = torch.zeros(1, 16, dtype=torch.int64)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: sizes.append(sum(b.flat_grads.nbytes for b in optimizer.buckets))
        )
    for _ in range(2):
        model(x, x).backward()
        assert not any(b.flat_grads.nbytes for b in optimizer.buckets)
        assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.buckets) > 6
    return sizes, max(b.flat_params.nbytes for b in optimizer.buckets)


def test_at_most_three_buckets_have_full_gradients():
    """One bucket is filling and two are being reduced. After a backward pass no full gradient is left."""
    for sizes, largest in run_on_ranks(record_gradient_buffers, 2):
        assert 0 < max(sizes) <= 3 * largest
