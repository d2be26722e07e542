"""Muon with FSDP: the update equals that of full matrices, and one rank orthogonalizes each matrix."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.matrix.cells import matches_formula
from phase3_fsdp import muon
from phase3_fsdp.muon import ShardedMuon, orthogonalize
from tests.helpers.marks import mark_slow
from tests.helpers.training import gap, tiny, train
from workshop.ranks import losses, run_on_ranks

STEPS = {"max_iters": 7, "lr_decay_iters": 7, "eval_interval": 4, "dtype": "float32", "compile": False}
STEPS |= {"optimizer": "muon"}
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, float]:
    """The losses of the baseline with Muon on one rank."""
    options = {**STEPS, "device": request.config.getoption("--device")}
    return train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("muon"), **options))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (4, {}),
        *mark_slow((8, {})),
        (4, {"fsdp_shard_size": "2"}),
        (2, {"fsdp_min_num_params": 4_000, "fsdp_activation_checkpointing": "full"}),
        (2, {"fsdp_cpu_offload": True}),
        (2, {"use_fsdp": False}),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_it_trains_like_one_rank(ranks, options, one_rank, tmp_path, device, need_ranks):
    """Over 7 steps the losses differ from those of one rank by at most 2e-4: bf16 rounds differently.

    State and communication match the formula exactly.
    """
    need_ranks(ranks)
    config = tiny("phase3_fsdp", tmp_path, device=device, ledger=True, **{**STEPS, **options})
    assert gap(one_rank, train("phase3_fsdp", ranks, config)) <= (0 if ranks == 1 else 2e-4)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert matches_formula(ledger)
    matrices = 2 * 12 * 32**2
    params, replicas = ledger["parameters"], 2 if "fsdp_shard_size" in options or "use_fsdp" in options else 1
    moments = 4 * matrices + 8 * (params - matrices)
    total = sum(rank["state_bytes"]["optimizer_state"] for rank in ledger["ranks"]) / replicas
    assert moments < total <= moments + 4 * 8 * ranks  # a step count of 4 bytes for each of AdamW's tensors
    sent = [row for row in ledger["ranks"][0]["collectives"] if row["kind"] == "all-to-all"]
    if ranks == 1 or "use_fsdp" in options:
        assert sent == []
    else:
        shards = ranks // replicas
        assert [(row["ranks"], row["calls"]) for row in sent] == [(shards, 2)]
        assert sent[0]["tensor_bytes"] == pytest.approx(2 * 2 * matrices / shards, rel=0.5)


class OddMatrices(nn.Module):
    """Matrices whose rows no number of ranks divides; some have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(12, 12), (5, 3), (3, 20), (20, 7), (12, 12), (1, 9), (13, 40), (12, 12), (33, 2)]
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


def make_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(m.shape, generator=generator) for m in OddMatrices().matrices]


def train_odd_matrices(round_bytes: int) -> dict[str, Any]:
    """Step a sharded Muon and torch's Muon on full matrices with the same gradients; count what this rank computes."""
    muon.ROUND_BYTES = round_bytes
    model, reference = OddMatrices(), OddMatrices()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = ShardedMuon([{"params": list(model.parameters()), **OPTIONS}])
    library = torch.optim.Muon([{"params": list(reference.parameters()), **OPTIONS}])
    computed = []

    def count(matrices: torch.Tensor, *args: Any) -> torch.Tensor:
        computed.extend(matrices)
        return orthogonalize(matrices, *args)

    muon.orthogonalize = count
    for step in range(3):
        for param, grad in zip(model.parameters(), make_gradients(step), strict=True):
            param.grad = DTensor(split_like(param, grad), param._spec, requires_grad=False)
        for param, grad in zip(reference.parameters(), make_gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
        library.step()
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    states = [(optimizer.state[a]["momentum_buffer"], library.state[b]["momentum_buffer"]) for a, b in pairs]
    return {
        "gap": max((a.full_tensor() - b).abs().max().item() for a, b in pairs),
        "momentum_gap": max((a.full_tensor() - b).abs().max().item() for a, b in states),
        "computed": len(computed) / 3,
        "rounds": len(optimizer.rounds),
    }


def split_like(param: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of `full`, with torch's own rule."""
    parts = full.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return parts[rank].clone() if rank < len(parts) else full[:0].clone()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("round_bytes", [64 * 2**20, 1])
def test_the_update_equals_that_of_full_matrices(ranks, round_bytes):
    """After three steps parameters and momentum equal those of torch.optim.Muon. Each matrix is computed once.

    This holds for rows that the ranks do not divide, for empty shards, and if every round has one matrix per rank.
    """
    results = run_on_ranks(train_odd_matrices, ranks, round_bytes)
    assert sum(result["computed"] for result in results) == 9
    for result in results:
        assert result["gap"] <= 1e-6 and result["momentum_gap"] <= 1e-7
        assert result["rounds"] == (1 if round_bytes > 1 else max(r["computed"] for r in results))


def test_newton_schulz_orthogonalizes():
    """The singular values of the result are about 1, and its singular vectors are those of the matrix."""
    torch.manual_seed(0)
    for shape in ((2, 32, 64), (2, 32, 96), (2, 96, 32)):
        matrices = torch.randn(shape)
        result = orthogonalize(matrices.bfloat16(), (3.4445, -4.7750, 2.0315)).float()
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.6 and values.max() < 1.3
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert (result * (u @ v)).sum() / result.norm() / (u @ v).norm() > 0.95


def step_without_gradient() -> str:
    model = OddMatrices()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = ShardedMuon([{"params": list(model.parameters()), **OPTIONS}])
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_missing_gradient_is_one_clear_error():
    """A matrix without a gradient raises an error on every rank, before any communication."""
    assert all("has no gradient: call backward() first" in text for text in run_on_ranks(step_without_gradient, 2))


def test_a_run_resumes_in_other_phases_and_on_other_ranks(tmp_path):
    """Momentum is saved as shards of matrices. Phase 3 reads that of phase 1, and the baseline reads phase 3's."""
    uninterrupted = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "uninterrupted", **STEPS))
    out_dir = tmp_path / "resumed"
    resume = {**STEPS, "init_from": "resume"}
    train("phase1_zero1", 4, tiny("phase1_zero1", out_dir, **{**STEPS, "max_iters": 2}))
    train("phase3_fsdp", 4, tiny("phase3_fsdp", out_dir, **{**resume, "max_iters": 3}))
    train("phase3_fsdp", 2, tiny("phase3_fsdp", out_dir, async_save=True, **{**resume, "max_iters": 4}))
    train("phase1_zero1", 2, tiny("phase1_zero1", out_dir, **{**resume, "max_iters": 5}))
    train("phase3_fsdp", 8, tiny("phase3_fsdp", out_dir, **{**resume, "max_iters": 6}))
    train("nanoGPT", 1, tiny("nanoGPT", out_dir, **resume))
    assert gap(uninterrupted, losses(out_dir)) <= 2e-4
