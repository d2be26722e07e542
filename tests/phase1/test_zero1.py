"""Zero1Optimizer by itself: with any module it does what the unsharded optimizer does, and holds 1/N of its state."""

import copy
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.metrics.ledger import Traffic
from phase1_zero1.buckets import ELEMENTWISE
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.sharded_checkpoint import training_state
from phase1_zero1.zero1 import Zero1Optimizer
from tests.helpers.programs import Program
from tests.helpers.training import ROOT
from workshop.ranks import RankFailed, run_on_ranks

BUCKET_MB = 2e-3  # 2 KB: the module below has several buckets, and cuts go through most of its parameters


class Odd(nn.Module):
    """Tied, frozen, unused, uneven and tiny parameters: sizes that 2, 4 and 8 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 17)
        self.up = nn.Linear(17, 29)
        self.down = nn.Linear(29, 17, bias=False)
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.unused = nn.Linear(5, 7)
        self.sometimes = nn.Parameter(torch.ones(17))
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(17, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, with_sometimes: bool = False) -> Tensor:
        h = self.embedding(x)
        h = h + self.down(torch.tanh(self.up(h))) + self.frozen(h)
        if with_sometimes:
            h = h * self.sometimes
        return self.head(h) * self.scale.sum()


def loss_of(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(model(x, **options).flatten(0, 1).float(), x.roll(1, 1).flatten())


def groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": lr / 2}]


def place(device: str) -> torch.device:
    return torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)


def both(make: Callable[..., Zero1Optimizer], kind: type, options: dict[str, Any], device: str) -> dict[str, Any]:
    """Train 20 steps of 2 micro-batches a rank, sharded; and on rank 0 those of all ranks together, unsharded."""
    rank, ranks, where = dist.get_rank(), dist.get_world_size(), place(device)
    torch.manual_seed(0)
    sharded = Odd().to(where)
    whole = copy.deepcopy(sharded)
    ours, theirs = make(groups(sharded, options["lr"]), kind, **options), kind(groups(whole, options["lr"]), **options)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for step in range(20):
        for micro_batch in range(2):
            ours.require_backward_grad_sync = micro_batch == 1
            xs = torch.randint(0, 33, (ranks, 4, 6), generator=generator).to(where)
            # The first rank alone uses a parameter in the first 10 steps, no rank does after.
            used = [{"with_sometimes": r == 0 and step < 10} for r in range(ranks)]
            (loss_of(sharded, xs[rank], **used[rank]) / 2).backward()
            for r in range(ranks if rank == 0 else 0):
                (loss_of(whole, xs[r], **used[r]) / 2 / ranks).backward()
        norms.append(ours.clip_grad_norm_(0.5).item())
        if rank == 0:
            assert norms[-1] == pytest.approx(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5)), rel=1e-5)
            theirs.step()
            theirs.zero_grad()
        ours.step()
        ours.zero_grad()
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    gap = max((a - b).abs().max().item() for a, b in pairs) if rank == 0 else None
    held = sum(v.numel() for s in ours.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim())
    same = torch.equal(sharded.unused.weight, whole.unused.weight)
    return {
        "gap": gap,
        "params": [p.detach().cpu() for p in sharded.parameters()],
        "norms": norms,
        "held": held,
        "unused": same,
        "tied": sharded.head.weight is sharded.embedding.weight,
    }


def sharded(*args: Any, **kwargs: Any) -> Zero1Optimizer:
    return Zero1Optimizer(*args, bucket_mb=BUCKET_MB, **kwargs)


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
}
OTHERS = {kind.__name__: (kind, {"lr": 1e-3}) for kind in ELEMENTWISE if kind.__name__ not in CASES}


@pytest.mark.parametrize(
    ("name", "ranks"), [("AdamW", 1), ("AdamW", 2), ("AdamW", 4), ("AdamW", 8), ("SGD", 2), ("SGD", 4), ("Adam", 4)]
)
def test_it_equals_the_unsharded_optimizer(name, ranks, device, need_ranks):
    """After 20 clipped and accumulated steps of SGD, Adam and AdamW all parameters are those of one process; tied ones
    stay tied, and one without a gradient on any rank stays as it was."""
    need_ranks(ranks)
    kind, options = CASES[name]
    found = run_on_ranks(both, ranks, sharded, kind, options, device, device=device)
    moments = {"SGD": 1}.get(name, 2)
    trained = sum(p.numel() for n, p in Odd().named_parameters() if p.requires_grad and "unused" not in n)
    assert sum(each["held"] for each in found) == moments * trained  # no moment is held twice, none is missing
    assert found[0]["gap"] <= 1e-6
    for each in found:
        assert each["unused"] and each["tied"]
        assert each["norms"] == found[0]["norms"]  # to the last digit, as the parameters are
        assert all(torch.equal(a, b) for a, b in zip(each["params"], found[0]["params"], strict=True))


def every_other() -> dict[str, float]:
    return {name: both(sharded, kind, options, "cpu")["gap"] for name, (kind, options) in OTHERS.items()}


def test_every_elementwise_optimizer_is_one():
    """Each class in ELEMENTWISE gives the unsharded parameters on 2 ranks, so its shards may be cut anywhere."""
    gaps = run_on_ranks(every_other, 2)[0]
    assert len(gaps) == 8 and max(gaps.values()) <= 2e-6, gaps


def flat_against_naive() -> tuple[float, int]:
    torch.manual_seed(0)
    models = [Odd(), Odd()]
    models[1].load_state_dict(models[0].state_dict())
    made = [
        sharded(models[0].parameters(), torch.optim.AdamW),
        NaiveZero1Optimizer(models[1].parameters(), torch.optim.AdamW),
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        x = torch.randint(0, 33, (4, 6), generator=generator)
        for model, optimizer in zip(models, made, strict=True):
            if step == 2:  # gradients that are reduced, and dropped
                loss_of(model, x).backward()
                optimizer.reduce_gradients()
                optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            (model if step < 2 else optimizer).zero_grad()
    held = sum(v.numel() for s in made[1].state.values() for v in s.values() if v.dim())
    return max((a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in models), strict=True)), held


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_naive_version_is_right_too(ranks):
    """The first draft gives the flat version's parameters, also after a step that was dropped, and its moments too are
    held once over all ranks."""
    found = run_on_ranks(flat_against_naive, ranks)
    assert max(gap for gap, _ in found) <= 1e-6
    used = sum(p.numel() for n, p in Odd().named_parameters() if p.requires_grad and n[:5] not in ("unuse", "somet"))
    assert sum(held for _, held in found) == 2 * used


def in_groups() -> float:
    """Ranks 0 and 2 train one model together, ranks 1 and 3 another; one of a group has another seed than its first."""
    rank = dist.get_rank()
    group = [dist.new_group([first, first + 2]) for first in range(2)][rank % 2]
    torch.manual_seed(rank % 2)
    whole = Odd()
    torch.manual_seed(rank)
    model = Odd()
    model.frozen.load_state_dict(whole.frozen.state_dict())
    ours = sharded(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(5):
        for r in (rank % 2, rank % 2 + 2):
            x = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(10 * step + r))
            (loss_of(whole, x, with_sometimes=r == 0) / 2).backward()
            if r == rank:
                loss_of(model, x, with_sometimes=r == 0).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert ours.clip_grad_norm_(0.5).item() == pytest.approx(norm.item(), rel=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_groups_of_ranks_train_models_of_their_own():
    """Each of two process groups begins with its first rank's weights, and ends with those of one process that had the
    group's micro-batches: nothing of the other group's gets in."""
    assert max(run_on_ranks(in_groups, 4, timeout=30)) <= 1e-6


def test_a_bucket_has_one_dtype():
    """Interleaved parameters of two dtypes lie in a bucket for each, keep their dtypes, and are all updated."""
    params = [nn.Parameter(torch.ones(40, dtype=(torch.float32, torch.bfloat16)[i % 2])) for i in range(6)]
    optimizer = Zero1Optimizer(params, torch.optim.SGD, lr=0.5)
    torch.stack([p.float().sum() for p in params]).sum().backward()
    optimizer.step()
    assert [{p.dtype for p in bucket.params} for bucket in optimizer.buckets] == [{torch.bfloat16}, {torch.float32}]
    assert [p.dtype for p in params] == [torch.float32, torch.bfloat16] * 3
    assert all(p.eq(0.5).all() for p in params)


# ---- what is sent, and when


def sent_in_backward() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1.2e-3)
    early = []
    model[0].bias.register_post_accumulate_grad_hook(lambda _: early.append(optimizer._sent))
    silent = []
    for _ in range(3):
        optimizer.require_backward_grad_sync = False
        with Traffic() as traffic:
            model(torch.ones(2, 16)).sum().backward()
        silent.append(len(traffic.rows))
        optimizer.require_backward_grad_sync = True
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    return {"early": early, "silent": silent, "buckets": len(optimizer.buckets)}


def test_reduction_overlaps_with_backward():
    """From the first backward on, all buckets but the last are on their way before the first layer's gradient is
    there; a micro-batch that is not the last sends nothing."""
    for found in run_on_ranks(sent_in_backward, 2):
        assert found["buckets"] == 6
        assert found["early"] == [0, 5] * 3
        assert found["silent"] == [0, 0, 0]


def sent_in_step() -> list[tuple[int, int]]:
    """When a bucket is updated: its number, and how many others are being gathered by then."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1.2e-3)
    seen = []
    for number, bucket in enumerate(optimizer.buckets):
        assert bucket.inner is not None
        bucket.inner.register_step_pre_hook(
            lambda *_, number=number: seen.append((number, sum(b.work is not None for b in optimizer.buckets)))
        )
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return seen


def test_gathering_overlaps_with_the_update():
    """A bucket is on its way while the next is updated, and what the forward needs first, the last bucket, is first."""
    assert run_on_ranks(sent_in_step, 2) == [[(5, 0), (4, 1), (3, 2), (2, 3), (1, 4), (0, 5)]] * 2


def orders_differ() -> tuple[list[int], list[float]]:
    """Each rank uses its layers in another order, and leaves another one out."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
    optimizer = Zero1Optimizer(layers.parameters(), torch.optim.SGD, lr=1.0, bucket_mb=2e-4)
    before = [layer.weight.detach().clone() for layer in layers]
    order = [(i + 2 * rank) % 6 for i in range(6) if i != rank]
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.full((1, 8), 0.1 * (1 + rank))
        for i in order:
            x = torch.tanh(layers[i](x))
        x.sum().backward()
        optimizer.step()
    return optimizer._order, [
        float((layer.weight - old).abs().sum()) for layer, old in zip(layers, before, strict=True)
    ]


def test_ranks_may_fill_their_buckets_in_different_orders():
    """Ranks that use layers in different orders, and each leave another one out, still reduce the same buckets
    together, in rank 0's order, and end with the same parameters."""
    found = run_on_ranks(orders_differ, 3)
    assert all(each == found[0] for each in found)
    assert found[0][0] == [0, 1, 2, 3, 4, 5] and all(moved > 0 for moved in found[0][1])


def gathered_in_forward() -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = Odd()
    other = copy.deepcopy(model)
    ours, theirs = (sharded(m.parameters(), torch.optim.AdamW, lr=1e-2) for m in (model, other))
    ours.gather_during_forward(model)
    pending = []
    for step in range(6):
        x = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))
        for m, optimizer in ((model, ours), (other, theirs)):
            loss_of(m, x).backward()
            optimizer.step()
        pending.append(any(bucket.work is not None for bucket in ours.buckets))
    ours.wait_for_params()
    return [(a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True)], all(
        pending
    )


def test_parameters_can_be_gathered_during_the_next_forward():
    """With gather_during_forward, step returns while parameters are on their way, and nothing else differs."""
    for gaps, pending in run_on_ranks(gathered_in_forward, 4):
        assert max(gaps) == 0.0 and pending


def gathered_late(read: str) -> bool:
    """Rank 1 sends its part of a layer that the next forward leaves out half a second late."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=2e-4)
    optimizer.gather_during_forward(model)
    unused = optimizer.buckets[0]
    if dist.get_rank():
        assert unused.inner is not None
        unused.inner.register_step_post_hook(lambda *_: time.sleep(0.5))
    model[1](model[0](torch.ones(1, 8))).sum().backward()
    optimizer.step()
    on_its_way = unused.work
    if read == "backward":
        model[0](torch.ones(1, 8)).sum().backward()
    else:
        training_state(model, optimizer)
    assert on_its_way is not None
    return on_its_way.is_completed()


@pytest.mark.parametrize("read", ["backward", "checkpoint"])
def test_a_gather_is_waited_for_where_no_forward_does(read):
    """A bucket that the forward left out is whole before its gradients are sent, and before it is saved."""
    assert all(run_on_ranks(gathered_late, 2, read))


# ---- bfloat16


def low_precision(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    rank, ranks, where = dist.get_rank(), dist.get_world_size(), place(device)
    model = nn.Sequential(nn.Embedding(33, 17), nn.Linear(17, 33)).to(where, torch.bfloat16)
    whole = copy.deepcopy(model)
    optimizer = sharded(model.parameters(), torch.optim.AdamW, lr=1e-3)
    masters = [p.detach().float() for p in whole.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        xs = torch.randint(0, 33, (ranks, 4, 6), generator=generator).to(where)
        loss_of(model, xs[rank]).backward()
        optimizer.step()
        sums = [torch.zeros_like(m) for m in masters]
        for x in xs:
            whole.zero_grad()
            loss_of(whole, x).backward()
            for total, param in zip(sums, whole.parameters(), strict=True):
                total += param.grad.float() / ranks
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad
        reference.step()
        for param, master in zip(whole.parameters(), masters, strict=True):
            param.data.copy_(master)
    shards = list(optimizer.shards())
    return {
        "gap": max((a - b).abs().max().item() for a, b in zip(model.parameters(), whole.parameters(), strict=True)),
        "bytes": sum(v.nbytes for _, items in shards for v in items.values() if v.dim()),
        "dtypes": {str(v.dtype) for _, items in shards for v in items.values()},
    }


@pytest.mark.parametrize("ranks", [1, 4])
def test_bf16_parameters_have_an_fp32_master(ranks, device, need_ranks):
    """bf16 parameters are updated through an fp32 copy of each shard: 12P/N bytes, and updates too small for bf16 add
    up as they do in one process."""
    need_ranks(ranks)
    found = run_on_ranks(low_precision, ranks, device, device=device)
    params = 33 * 17 + 17 * 33 + 33
    assert sum(each["bytes"] for each in found) == 12 * params
    for each in found:
        assert each["dtypes"] == {"torch.float32"}
        assert each["gap"] <= 1e-2  # one step of bf16 at 1 is 7.8e-3; 30 updates of 1e-3 would vanish without a master


# ---- as any optimizer of torch


def as_any_optimizer(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Odd().to(dtype)
    optimizer = sharded(
        [p for n, p in model.named_parameters() if "head" not in n and "scale" not in n], torch.optim.Adam
    )
    optimizer.add_param_group({"params": [model.scale], "lr": 0.5})
    at_first = optimizer.state_dict()
    with pytest.raises(ValueError, match="share memory"):
        optimizer.add_param_group({"params": [nn.Parameter(model.scale.data)]})
    with pytest.raises(RuntimeError, match="no rank has a gradient"):
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    x = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(dist.get_rank()))

    def closure() -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(3):
        losses.append(float(optimizer.step(closure)))
        scheduler.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    at_save = [p.detach().clone() for p in model.parameters()]
    after = float(optimizer.step(closure))
    moved = [p.detach().clone() for p in model.parameters()]
    same = []
    for _ in range(2):  # what was loaded is not used up
        with torch.no_grad():
            for param, value in zip(model.parameters(), at_save, strict=True):
                param.copy_(value)
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        optimizer.load_state_dict(saved)
        same.append(after == float(optimizer.step(closure)))
        same += [torch.equal(a, b) for a, b in zip(moved, model.parameters(), strict=True)]
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(at_first)
    return {
        "losses": losses,
        "rates": rates,
        "calls": len(calls),
        "same": all(same),
        "empty": not any(optimizer.state.values()),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_an_optimizer_like_any_other(dtype):
    """Groups added later, schedulers, closures, hooks and state_dict work, masters and learning rates included, and it
    goes on after a group and a step that it refused."""
    for each in run_on_ranks(as_any_optimizer, 2, dtype):
        assert each["rates"] == [1e-3 / 8, 0.5 / 8] and each["same"] and each["empty"]
        assert each["losses"][2] < each["losses"][0] and each["calls"] == 6


def test_a_state_of_another_rank_or_model_is_refused():
    """load_state_dict takes what this rank gave, and no other's."""

    def take_the_others(other: int) -> None:
        model = nn.Linear(16, 16, bias=False)
        optimizers = [sharded(m.parameters(), torch.optim.Adam) for m in (model, nn.Linear(8, 8, bias=False))]
        for optimizer in optimizers:
            for param in optimizer.param_groups[0]["params"]:
                param.sum().backward()
            optimizer.step()
        states: list[Any] = [None, None]
        dist.all_gather_object(states, optimizers[0].state_dict())
        optimizers[0].load_state_dict(states[dist.get_rank()])  # its own
        optimizers[other].load_state_dict(states[dist.get_rank() if other else 0])

    for other in (0, 1):  # rank 0's on rank 1; another model's
        with pytest.raises(RankFailed, match="of another model, rank or number of ranks"):
            run_on_ranks(take_the_others, 2, other)


def run_the_script(text: str) -> list[Tensor]:
    names: dict[str, Any] = {}
    exec(compile(text, "mine.py", "exec"), names)
    return [names["loss"].detach(), *(p.detach() for p in names["model"].parameters())]


def test_the_script_in_the_notes_runs():
    """The script in IMPLEMENTATION.md learns, and leaves the same parameters on every rank."""
    text = (ROOT / "phase1_zero1/IMPLEMENTATION.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found = run_on_ranks(run_the_script, 4, script, show=False)
    assert found[0][0] < 1.0
    assert all(torch.equal(a, b) for each in found for a, b in zip(each[1:], found[0][1:], strict=True))


def test_the_script_ends_well(tmp_path):
    """As a program, right after whose last step Python ends: nothing of gloo's threads may want Python any more."""
    text = (ROOT / "phase1_zero1/IMPLEMENTATION.md").read_text()
    (tmp_path / "mine.py").write_text(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0])
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "mine.py"]
    for program in [Program(*words, cwd=tmp_path, PYTHONPATH=str(ROOT)) for _ in "123"]:
        output, _ = program.communicate()
        assert program.returncode == 0 and "loss 0." in output, output


def without_a_group() -> float:
    """In a process that never made a process group."""
    model = Odd()
    optimizer = sharded(model.parameters(), torch.optim.AdamW, lr=1e-2)
    x = torch.arange(24).view(4, 6)
    losses = []
    for _ in range(5):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses[0] - losses[-1]


def test_one_process_needs_no_process_group():
    """A plain script without ranks uses the same class."""
    assert not dist.is_initialized() and without_a_group() > 0


def test_a_second_optimizer_may_follow_the_first():
    """A model keeps no optimizer alive: the first one's memory is given back, and the next one has the gradients."""
    model = Odd()
    first = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    gone = weakref.ref(first)
    del first
    assert gone() is None
    before = model.up.weight.detach().clone()
    second = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    loss_of(model, torch.arange(24).view(4, 6)).backward()
    second.step()
    assert not torch.equal(model.up.weight, before)


def skipped_steps(uneven: bool) -> tuple[float, list[int]]:
    """Backward passes whose gradients are dropped, before the first step and later; `uneven`: of other parameters on
    each rank."""
    torch.manual_seed(0)
    model = Odd()
    other = copy.deepcopy(model)
    ours, theirs = sharded(model.parameters(), torch.optim.AdamW), sharded(other.parameters(), torch.optim.AdamW)
    for step in range(4):
        x = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        for _ in range(2 if step in (0, 2) else 0):
            if uneven and dist.get_rank():
                model.unused(torch.ones(1, 5)).sum().backward()
            else:
                loss_of(model, x).backward()
            ours.zero_grad()
        for m, optimizer in ((model, ours), (other, theirs)):
            loss_of(m, x).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
    gap = max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return gap, sorted(ours._order)


@pytest.mark.parametrize("uneven", [False, True])
def test_steps_may_be_skipped(uneven):
    """zero_grad drops a backward that has sent its gradients, before the first step too; nothing of it is left."""
    for gap, order in run_on_ranks(skipped_steps, 2, uneven):
        assert gap == 0.0 and order == list(range(len(order)))


def others_talk_too() -> float:
    """A layer that rank 1 does not use, and an all-reduce of the user's between backward and step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    whole = copy.deepcopy(layers)
    optimizer = Zero1Optimizer(layers.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=2e-4)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        total = torch.zeros(64)
        for r in range(2):
            x = torch.full((1, 8), 0.1 * (1 + r))
            for i in (0, 2) if r else (0, 1, 2):
                x = torch.tanh(whole[i](x))
            (x.sum() / 2).backward()
        x = torch.full((1, 8), 0.1 * (1 + rank))
        for i in (0, 2) if rank else (0, 1, 2):
            x = torch.tanh(layers[i](x))
        x.sum().backward()
        total += 1 + rank
        dist.all_reduce(total)  # as large as a bucket: mixed up with one, it would pass unnoticed
        optimizer.step()
        reference.step()
        reference.zero_grad()
        assert total.eq(3).all()
    return max((a - b).abs().max().item() for a, b in zip(layers.parameters(), whole.parameters(), strict=True))


def test_all_is_sent_when_backward_ends():
    """What a user sends between backward and step does not meet the buckets of a rank that left a parameter out."""
    assert max(run_on_ranks(others_talk_too, 2)) <= 1e-6


def a_group_joins_later() -> float:
    torch.manual_seed(0)
    models = [Odd(), Odd()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = []
    for m in models:
        optimizers.append(sharded([p for n, p in m.named_parameters() if "up" not in n], torch.optim.SGD, lr=0.1))
        if m is models[0]:
            optimizers[0].gather_during_forward(m)
    for step in range(4):
        if step == 2:
            for m, optimizer in zip(models, optimizers, strict=True):
                optimizer.add_param_group({"params": list(m.up.parameters())})
        x = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        for m, optimizer in zip(models, optimizers, strict=True):
            loss_of(m, x).backward()
            optimizer.step()
            assert not any(b.work for b in optimizer.buckets if b not in optimizer._awaited)
            optimizer.zero_grad()
            m.zero_grad()  # of what is not in a group yet
    optimizers[0].wait_for_params()
    return max((a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_a_group_may_join_after_the_forward_gathers():
    """step waits for whatever no module's forward waits for."""
    assert run_on_ranks(a_group_joins_later, 2) == [0.0, 0.0]


def bf16_muon() -> bool:
    from nanoGPT.model import GPT, GPTConfig
    from nanoGPT.train_config import TrainConfig
    from phase1_zero1.muon import Zero1Muon

    model = GPT(GPTConfig(1, 2, 16, 8, False, 32)).to(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Zero1Muon(model, TrainConfig(learning_rate=0.1))
    x = torch.arange(8)[None]
    model(x, x)[1].backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    return all(moved) and all(p.isfinite().all() for p in model.parameters())


def test_muon_has_masters_too():
    """A bf16 model's matrices are updated by their owners through fp32 masters."""
    assert all(run_on_ranks(bf16_muon, 2))


def muon_in_groups() -> float:
    """Ranks 0 and 2 train one model with Muon, ranks 1 and 3 another, from the same micro-batches within a group."""
    from nanoGPT.model import GPT, GPTConfig
    from nanoGPT.optim import configure_muon
    from nanoGPT.train_config import TrainConfig
    from phase1_zero1.muon import Zero1Muon

    which = dist.get_rank() % 2
    group = [dist.new_group([first, first + 2]) for first in range(2)][which]
    models = [GPT(GPTConfig(1, 2, 16, 8, False, 32)) for _ in range(2)]
    for model in models:
        model.init_weights(which)
    config = TrainConfig(learning_rate=0.1)
    for model, optimizer in zip(
        models, (Zero1Muon(models[0], config, process_group=group), configure_muon(models[1], config)), strict=True
    ):
        for _ in range(2):
            x = torch.arange(8)[None] + which
            model(x, x)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_muon_works_in_a_group_of_ranks():
    """Owners are ranks of the process group: each of two groups ends with the parameters of one process."""
    assert max(run_on_ranks(muon_in_groups, 4, timeout=30)) <= 1e-5


# ---- wrong use


class Mine(torch.optim.AdamW):
    pass


def wrong(case: str) -> None:
    model = Odd()
    x = torch.zeros(2, 6, dtype=torch.long)
    params = list(model.parameters())
    if case == "class":
        sharded(params, torch.optim.Adafactor)
    elif case == "unknown class":
        sharded(params, Mine)
    elif case == "devices":
        sharded([*params, nn.Parameter(torch.zeros(3, device="meta"))], torch.optim.SGD)
    elif case == "complex":
        sharded([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], torch.optim.SGD)
    elif case == "memory":
        sharded([nn.Parameter(params[0].data), *params], torch.optim.SGD)
    elif case == "ranks":
        sharded(params[: 3 + dist.get_rank()], torch.optim.SGD)
    elif case == "outsider":
        first = dist.new_group([0])
        sharded(params, torch.optim.SGD, process_group=first if dist.get_rank() else None)
    elif case == "lr":
        sharded(params, torch.optim.SGD, lr=-1.0)
    elif case == "keyword":
        sharded(params, torch.optim.SGD, learning_rate=1.0)
    elif case == "sparse":
        embedding = nn.Embedding(5, 3, sparse=True)
        sharded_one = sharded(embedding.parameters(), torch.optim.SGD)
        embedding(torch.tensor([1])).sum().backward()
        sharded_one.step()
    else:
        optimizer = sharded(params, torch.optim.SGD)
        if case == "no backward":
            optimizer.step()
        elif case == "twice":
            loss_of(model, x).backward()
            loss_of(model, x).backward()
        elif case == "after reducing":
            loss_of(model, x).backward()
            optimizer.reduce_gradients()
            model.unused(torch.ones(1, 5)).sum().backward()
        elif case == "late group":
            loss_of(model, x).backward()
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        elif case == "moved":
            model.double()
            loss_of(model, x).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("class", "Adafactor is not known to treat every element by itself.*elementwise=True"),
        ("unknown class", "Mine is not known"),
        ("devices", "parameters are on cpu and meta"),
        ("complex", "torch.complex64 cannot be sharded"),
        ("memory", "two parameters share memory"),
        ("ranks", "ranks give different parameters"),
        ("lr", "Invalid learning rate"),
        ("keyword", "unexpected keyword argument 'learning_rate'"),
        ("sparse", "a gradient is sparse.*sparse=False"),
        ("no backward", "no rank has a gradient to step with: call backward"),
        ("twice", "a second backward.*require_backward_grad_sync"),
        ("after reducing", "a second backward.*require_backward_grad_sync"),
        ("late group", "between backward.. and step"),
        ("moved", "has left its bucket"),
        ("outsider", "not in the process group"),
    ],
)
def test_wrong_use_is_one_clear_error(case, words):
    """Each wrong use raises at once, with a sentence that says what to do."""
    with pytest.raises(RankFailed, match=words):
        run_on_ranks(wrong, 2, case)


def test_a_class_may_be_said_to_be_elementwise():
    """elementwise=True lets in a class that torch does not have."""

    def said(params: Any, kind: type, **options: Any) -> Zero1Optimizer:
        return sharded(params, kind, elementwise=True, **options)

    assert run_on_ranks(both, 2, said, Mine, {"lr": 1e-2}, "cpu")[0]["gap"] <= 1e-6
