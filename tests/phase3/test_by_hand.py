"""`phase3_fsdp/by_hand.py`: FSDP written by hand has the losses of full training and the bytes of the formula."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.distributed.sharding import row_range
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp import by_hand
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from phase3_fsdp.by_hand import HandmadeFSDP
from tests.helpers.delays import delay_results
from workshop.lessons.by_hand import compare_with_fully_shard, print_versions
from workshop.ranks import run_on_ranks

SHAPE = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=19, dropout=0.0)


class OddModel(nn.Module):
    """A model that is no GPT: a convolution, 3 rows that 2 and 4 ranks cannot divide, and a parameter without use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8)) for _ in range(3))
        self.unused, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.conv(x)  # (B, 5, 8)
        used = 1 if y.sum() > 0 else 2  # the third block has no gradient
        for block in self.blocks[:used]:
            x = x + block(x)
        return ((x.mean(1) * self.scale - y) ** 2).mean()


def make_batches(kind: str, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return four micro-batches of a step.

    Of those of the odd model, only the first one of each rank uses the second block.
    """
    generator = torch.Generator().manual_seed(step)
    if kind == "gpt":
        tokens = torch.randint(0, SHAPE.vocab_size, (4, 2, 2, 8), generator=generator)
        return [(x, y) for x, y in tokens]
    signs = [-1] * dist.get_world_size() + [1] * 4
    xs, ys = torch.randn(4, 3, 2, 8, generator=generator), torch.rand(4, 3, 8, generator=generator)
    return [(x, sign * y) for x, y, sign in zip(xs, ys, signs[:4], strict=True)]


def train_by_hand(kind: str, mode: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train four steps on this rank, and a full copy of the model in this process.

    Returns:
        The losses and norms of both, the largest difference of a parameter, the largest number of units whose
        parameters were full at once, the bytes that were all-gathered, and those of the formula.
    """
    torch.manual_seed(3)
    model = GPT(SHAPE) if kind == "gpt" else OddModel()
    full, rank, ranks = copy.deepcopy(model), dist.get_rank(), dist.get_world_size()
    if mode == "checkpointing":
        checkpoint_activations(model, "full")
    sharded = HandmadeFSDP(model, list(model.blocks), dtype)
    # With a small eps, AdamW would amplify the rounding error of gradients that are zero.
    optimizers = [torch.optim.AdamW(params, lr=0.05, eps=1e-3) for params in (sharded.parameters(), full.parameters())]
    most, results = 0, []

    def count_full_units(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.is_full for unit in sharded.units))

    for module in model.modules():
        module.register_forward_hook(count_full_units)
        module.register_full_backward_hook(count_full_units)
    for step in range(4):
        batches = make_batches(kind, step)
        ours = sharded.train_step(optimizers[0], batches[rank::ranks], 0.5)
        losses = [full(*batch) for batch in batches]
        sum(losses).div(len(batches)).backward()
        norm = nn.utils.clip_grad_norm_(full.parameters(), 0.5)
        optimizers[1].step()
        optimizers[1].zero_grad()
        results.append((*ours, torch.stack(losses).mean().item(), norm.item()))
    sizes = [sum(unit.sizes) * ranks * dtype.itemsize for unit in sharded.units]
    root, *blocks = sizes
    expected = 4 * (4 // ranks) * (root + 2 * sum(blocks))
    if kind == "odd":  # a block that does not compute was only prefetched, by the block before it
        first, second, third = blocks
        expected = 4 * (4 // ranks) * (root + 2 * first + second) + 4 * (second + third)
    rows = [row_range(len(p), ranks, rank) for p in full.parameters()]
    shards = {id(param): shard for unit in sharded.units for param, shard in zip(unit.params, unit.shards, strict=True)}
    pairs = zip(model.parameters(), full.parameters(), rows, strict=True)
    gaps = [(shards[id(p)] - q[a:b]).detach().abs().max().item() for p, q, (a, b) in pairs if b > a]
    with torch.no_grad():
        evaluated = model(*make_batches(kind, 9)[0]).item() - full(*make_batches(kind, 9)[0]).item()
    return {
        "results": results,
        "most": most,
        "gap": max(gaps),
        "evaluated": abs(evaluated),
        "is_free": not any(param.untyped_storage().nbytes() for unit in sharded.units for param in unit.params),
        "gathered": sum(unit.gathered for unit in sharded.units) - sum(sizes),  # without those of the evaluation
        "formula": expected,
        "stored": sum(shard.numel() for shard in sharded.parameters()),
        "params": sum(p.numel() for p in full.parameters()),
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("kind", "mode"), [("gpt", "none"), ("gpt", "checkpointing"), ("odd", "none")])
def test_it_trains_like_the_full_model(kind, mode, ranks):
    """Losses and gradient norms are those of full training, for a GPT with and without activation checkpointing, and
    for a model that is no GPT. At most the root and two blocks are full at once, a rank stores its rows only, and the
    all-gathered bytes are those of the formula."""
    reports = run_on_ranks(train_by_hand, ranks, kind, mode, torch.float32, show=False)
    for report in reports:
        for loss, norm, full_loss, full_norm in report["results"]:
            assert loss == pytest.approx(full_loss, abs=1e-6) and norm == pytest.approx(full_norm, abs=1e-5)
        assert report["most"] <= 3 and report["is_free"] and report["evaluated"] < 1e-6 and report["gap"] < 1e-4
        assert report["gathered"] == report["formula"]
    assert sum(report["stored"] for report in reports) == reports[0]["params"]


def train_by_hand_with_delays() -> dict[str, Any]:
    by_hand.all_gather = delay_results(by_hand.all_gather)
    return train_by_hand("gpt", "none", torch.float32)


def test_it_waits_for_its_collectives():
    """With delayed all-gathers, losses and gradient norms are those of the full model."""
    for loss, norm, full_loss, full_norm in run_on_ranks(train_by_hand_with_delays, 2, show=False)[0]["results"]:
        assert loss == pytest.approx(full_loss, abs=1e-6) and norm == pytest.approx(full_norm, abs=1e-5)


def train_without_root() -> list[tuple[float, float]]:
    """Train a model without parameters in its root; on one rank, with both micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    sharded = HandmadeFSDP(nn.Sequential(model, MeanSquare()), list(model))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.05)
    batches = [(torch.linspace(-1, i, 6).view(2, 3),) for i in range(2)]
    return [sharded.train_step(optimizer, batches[dist.get_rank() :: dist.get_world_size()], 0.5) for _ in range(3)]


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_a_root_may_be_empty():
    """A model whose root has no parameters of its own has the same losses and norms on 1 and 2 ranks."""
    one, two = (run_on_ranks(train_without_root, ranks, show=False)[0] for ranks in (1, 2))
    assert torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-6)


@pytest.mark.parametrize(
    "param",
    [
        nn.Parameter(torch.ones(())),
        nn.Parameter(torch.ones(2, 2), requires_grad=False),
        nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    ],
    ids=["scalar", "frozen", "complex"],
)
def test_parameters_that_it_cannot_shard_are_refused(param):
    """Scalars, complex parameters and frozen ones get one sentence with their name."""
    model = nn.Module()
    model.odd = param
    with pytest.raises(ValueError, match="odd is frozen, complex or has no rows"):
        HandmadeFSDP(model, [])


def test_blocks_that_share_a_parameter_are_refused():
    """A parameter belongs to one unit."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="two blocks share a parameter"):
        HandmadeFSDP(model, list(model))


class TwoOutputs(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def misuse() -> None:
    """An optimizer over the model's parameters, a saved state dict and a unit with two outputs are refused."""
    model = nn.Sequential(TwoOutputs(4, 4))
    model[0].weight.group = "matrices"
    wrong = torch.optim.SGD(model.parameters(), 0.1)
    sharded = HandmadeFSDP(model, list(model))
    assert [getattr(shard, "group", None) for shard in sharded.parameters()] == ["matrices", None]
    with pytest.raises(ValueError, match="over `parameters\\(\\)` of HandmadeFSDP"):
        sharded.train_step(wrong, [(torch.ones(1, 4),)], 0.0)
    with pytest.raises(RuntimeError, match="have no memory"):
        model.state_dict()
    with pytest.raises(TypeError, match="unit 1 returns tuple"):
        sharded.train_step(torch.optim.SGD(sharded.parameters(), 0.1), [(torch.ones(1, 4),)], 0.0)


def test_misuse_is_refused():
    """An optimizer over full parameters, a state dict of freed ones, and a unit with two outputs are refused."""
    run_on_ranks(misuse, 2, show=False)


def test_low_precision_halves_the_bytes():
    """In bfloat16, the all-gathers have half the bytes, and losses are near those of fp32. Shards stay in fp32."""
    for report in run_on_ranks(train_by_hand, 2, "gpt", "none", torch.bfloat16, show=False):
        assert report["gathered"] == report["formula"]
        assert all(abs(loss - full_loss) < 0.05 for loss, _, full_loss, _ in report["results"])


def test_it_costs_what_fully_shard_costs():
    """The comparison of notebook 6: the same bytes and the same loss, and about the same peak memory."""
    print_versions(run_on_ranks(compare_with_fully_shard, 2, replace(SHAPE, n_embd=64), show=False)[0])
