"""Muon with FSDP: the update equals that of full matrices, and one rank orthogonalizes each matrix."""

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nanoGPT.train_config import TrainConfig
from phase3_fsdp import muon
from phase3_fsdp.muon import ShardedMuon, orthogonalize
from tests.helpers.marks import mark_slow
from tests.helpers.training import call_train, gap, read_ledger, tiny, train, train_all
from workshop.ranks import run_on_ranks

STEPS = {"max_iters": 7, "lr_decay_iters": 7, "eval_interval": 4, "dtype": "float32", "compile": False}
STEPS |= {"optimizer": "muon"}
ROUND_SIZES = (64 * 2**20, 1)  # bytes; with 1, every round has one matrix per rank
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (4, {}),
    (8, {}),
    (4, {"fsdp_shard_size": "2"}),
    (2, {"fsdp_wrap": "4000", "fsdp_activation_checkpointing": "full"}),
    (2, {"fsdp_cpu_offload": True}),
]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, request):
    device = request.config.getoption("--device")
    return train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("baseline"), device=device, **STEPS))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [*(case for case in CASES if case[0] < 8), *mark_slow(*(case for case in CASES if case[0] == 8))],
    ids=str,
)
def test_it_trains_like_one_rank(ranks, options, baseline, tmp_path, device, need_ranks):
    """Over 7 steps the losses differ from those of one rank by at most 2e-4: bf16 rounds differently.

    State and communication match the formula exactly.
    """
    need_ranks(ranks)
    config = tiny("phase3_fsdp", tmp_path, device=device, ledger=True, **STEPS, **options)
    assert gap(baseline, train("phase3_fsdp", ranks, config)) <= (0 if ranks == 1 else 2e-4)
    ledger = read_ledger(tmp_path)
    matrices = 2 * 12 * 32**2
    sent = [row for row in ledger["ranks"][0]["collectives"] if row["kind"] == "all-to-all"]
    if ranks == 1:
        assert sent == []
    else:
        shards = ranks // (2 if "fsdp_shard_size" in options else 1)
        assert [(row["ranks"], row["calls"]) for row in sent] == [(shards, 2)]
        assert sent[0]["tensor_bytes"] == pytest.approx(2 * 2 * matrices / shards, rel=0.5)


class OddMatrices(nn.Module):
    """Matrices whose rows no number of ranks divides; some have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(12, 12), (5, 3), (3, 20), (20, 7), (12, 12), (1, 9), (13, 40), (12, 12), (33, 2)]
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


def make_gradients(step: int) -> list[torch.Tensor | None]:
    """Return the gradients of a step. In step 1, the last matrix has none."""
    generator = torch.Generator().manual_seed(step)
    grads: list[torch.Tensor | None] = [torch.randn(m.shape, generator=generator) for m in OddMatrices().matrices]
    return grads if step != 1 else [*grads[:-1], None]


def train_with_each_round_size() -> list[dict[str, Any]]:
    return [train_odd_matrices(round_bytes) for round_bytes in ROUND_SIZES]


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
            param.grad = None
            if grad is not None:
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
def test_the_update_equals_that_of_full_matrices(ranks):
    """After three steps parameters and momentum equal those of torch.optim.Muon. Each matrix is computed once.

    This holds for rows that the ranks do not divide, for empty shards, and if every round has one matrix per rank.
    """
    all_results = zip(*run_on_ranks(train_with_each_round_size, ranks), strict=True)
    for round_bytes, results in zip(ROUND_SIZES, all_results, strict=True):
        assert sum(result["computed"] for result in results) == 9
        for result in results:
            assert result["gap"] <= 1e-6 and result["momentum_gap"] <= 1e-7
            assert result["rounds"] == (1 if round_bytes > 1 else max(r["computed"] for r in results))


def train_and_resume_copy(cell: tuple[str, TrainConfig], other_cell: tuple[str, TrainConfig]) -> None:
    """Train on this rank, and resume a copy of the run with another configuration.

    A process locks the directory of its run until it exits, so it cannot resume a run in the same directory.
    """
    call_train(*cell)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(cell[1].out_dir, other_cell[1].out_dir)
    dist.barrier()
    call_train(*other_cell)


def test_a_run_resumes_in_other_phases_and_on_other_ranks(tmp_path):
    """Momentum is saved as shards of matrices. Phase 3 reads that of phase 1 and that of other ranks.

    Phase 1 and the baseline read phase 3's.
    """

    def make_cell(phase: str, out_dir: str, last_step: int, **options: Any) -> tuple[str, TrainConfig]:
        fields = {**STEPS, "init_from": "resume", "max_iters": last_step, **options}
        return phase, tiny(phase, tmp_path / out_dir, **fields)

    train_all(4, [make_cell("phase1_zero1", "a", 2, init_from="scratch")])
    cells = make_cell("phase3_fsdp", "a", 3, async_save=True), make_cell("phase1_zero1", "b", 4)
    run_on_ranks(train_and_resume_copy, 2, *cells, show=False)
    train_all(8, [make_cell("phase3_fsdp", "a", 6)])
    uninterrupted = ("nanoGPT", tiny("nanoGPT", tmp_path / "uninterrupted", **STEPS))
    *resumed, whole = train_all(1, [make_cell("nanoGPT", "a", 7), make_cell("nanoGPT", "b", 7), uninterrupted])
    assert all(gap(each, whole) <= 2e-4 for each in resumed)
