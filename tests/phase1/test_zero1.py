"""Zero1Optimizer with any module: it matches the unsharded optimizer and stores 1/N of its state on each rank."""

import copy
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from measure.ledger import CollectiveCounter
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import param_groups
from nanoGPT.options.muon import configure_muon
from phase1_zero1.backends import DdpOptimizer
from phase1_zero1.buckets import ELEMENTWISE
from phase1_zero1.muon import Zero1Muon, sharded_muon_groups
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.parallelize import Zero1Config, parallelize, shard_optimizer
from phase1_zero1.sharded_checkpoint import training_state
from phase1_zero1.zero1 import Zero1Optimizer
from phase2_triton.kernels.adamw import TritonAdamW
from phase3_fsdp.muon import ShardedMuon
from tests.helpers.marks import mark_slow
from workshop.ranks import RankFailed, run_on_ranks

# 2 KB: the model below has several buckets, and most of its parameters are split between ranks.
BUCKET_MB = 2e-3


class OddModel(nn.Module):
    """A model with tied, frozen, unused, uneven and tiny parameters: 2, 4 and 8 do not divide their sizes."""

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


def compute_loss(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(model(x, **options).flatten(0, 1).float(), x.roll(1, 1).flatten())


def make_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": lr / 2}]


def select_device(device: str) -> torch.device:
    return torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)


def compare_with_unsharded(
    make_optimizer: Callable[..., Zero1Optimizer],
    optimizer_class: type,
    options: dict[str, Any],
    device: str,
    reduces_every: bool = False,
) -> dict[str, Any]:
    """Train 8 steps of 2 micro-batches per rank with a sharded optimizer.

    Rank 0 also trains an unsharded model on the micro-batches of all ranks. With `reduces_every`, both backward passes
    of a step reduce gradients.
    """
    rank, ranks, rank_device = dist.get_rank(), dist.get_world_size(), select_device(device)
    torch.manual_seed(0)
    model = OddModel().to(rank_device)
    unsharded = copy.deepcopy(model)
    optimizer, reference = (
        make_optimizer(make_groups(model, options["lr"]), optimizer_class, **options),
        optimizer_class(make_groups(unsharded, options["lr"]), **options),
    )
    generator = torch.Generator().manual_seed(1)
    norms = []
    for step in range(8):
        for micro_batch in range(2):
            optimizer.require_backward_grad_sync = reduces_every or micro_batch == 1
            xs = torch.randint(0, 33, (ranks, 4, 6), generator=generator).to(rank_device)
            # In the first 4 steps only the first rank uses this parameter. Later, no rank uses it.
            forward_options = [{"with_sometimes": r == 0 and step < 4} for r in range(ranks)]
            (compute_loss(model, xs[rank], **forward_options[rank]) / 2).backward()
            for r in range(ranks if rank == 0 else 0):
                (compute_loss(unsharded, xs[r], **forward_options[r]) / 2 / ranks).backward()
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        if rank == 0:
            assert norms[-1] == pytest.approx(float(nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)), rel=1e-5)
            reference.step()
            reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), unsharded.parameters(), strict=True)
    gap = max((a - b).abs().max().item() for a, b in pairs) if rank == 0 else None
    num_moments = sum(
        v.numel() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()
    )
    is_unused_unchanged = torch.equal(model.unused.weight, unsharded.unused.weight)
    return {
        "gap": gap,
        "params": [p.detach().cpu() for p in model.parameters()],
        "norms": norms,
        "num_moments": num_moments,
        "is_unused_unchanged": is_unused_unchanged,
        "is_tied": model.head.weight is model.embedding.weight,
    }


def make_sharded(*args: Any, **kwargs: Any) -> Zero1Optimizer:
    return Zero1Optimizer(*args, bucket_mb=BUCKET_MB, **kwargs)


def make_zero2(*args: Any, **kwargs: Any) -> Zero1Optimizer:
    return make_sharded(*args, stage=2, **kwargs)


def make_muon(model: nn.Module, **kwargs: Any) -> Zero1Optimizer:
    config = Zero1Config(learning_rate=0.1)
    options = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), **kwargs}
    return Zero1Muon(sharded_muon_groups(model, config), torch.optim.AdamW, **options)


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
}
OTHER_CASES = {c.__name__: (c, {"lr": 1e-3}) for c in ELEMENTWISE if c.__name__ not in CASES}


@pytest.mark.parametrize(
    ("name", "ranks", "stage"),
    [
        ("AdamW", 1, 1),
        ("AdamW", 2, 1),
        ("AdamW", 4, 1),
        ("SGD", 4, 1),
        ("Adam", 4, 1),
        ("AdamW", 2, 2),
        ("AdamW", 4, 2),
        ("AdamW", 4, "2, which reduces once"),
        *mark_slow(("AdamW", 8, 1), ("AdamW", 8, 2)),
    ],
)
def test_it_equals_the_unsharded_optimizer(name, ranks, stage, device, need_ranks):
    """After 8 clipped and accumulated steps of SGD, Adam and AdamW, all parameters match those of one process.

    Tied parameters stay tied. A parameter without a gradient on any rank does not change. With sharded gradients the
    parameters match too, whether a step reduces them once or in every micro-batch.
    """
    need_ranks(ranks)
    make_optimizer = make_sharded if stage == 1 else make_zero2
    results = run_on_ranks(
        compare_with_unsharded, ranks, make_optimizer, *CASES[name], device, stage == 2, device=device
    )
    moments = {"SGD": 1}.get(name, 2)
    trained = sum(p.numel() for n, p in OddModel().named_parameters() if p.requires_grad and "unused" not in n)
    assert sum(result["num_moments"] for result in results) == moments * trained  # each moment is stored once
    assert results[0]["gap"] <= 1e-6
    for result in results:
        assert result["is_unused_unchanged"] and result["is_tied"]
        assert result["norms"] == results[0]["norms"]  # identical on all ranks, like the parameters
        assert all(torch.equal(a, b) for a, b in zip(result["params"], results[0]["params"], strict=True))


def train_other_cases() -> dict[str, float]:
    return {
        name: compare_with_unsharded(make_sharded, optimizer_class, options, "cpu")["gap"]
        for name, (optimizer_class, options) in OTHER_CASES.items()
    }


def test_every_listed_optimizer_is_elementwise():
    """Each class in ELEMENTWISE gives the unsharded parameters on 2 ranks, so a shard can begin inside a parameter."""
    gaps = run_on_ranks(train_other_cases, 2)[0]
    assert len(gaps) == 8 and max(gaps.values()) <= 2e-6, gaps
    make_sharded(OddModel().parameters(), torch.optim.Adafactor, elementwise=True)  # the caller may declare others


def train_in_two_groups(with_muon: bool) -> float:
    """Train one model on ranks 0 and 2 and another on ranks 1 and 3; return the max difference from one process.

    The ranks of a group have the same micro-batches. The second rank of each group has other weights than the first.
    """
    index, config = dist.get_rank() % 2, Zero1Config(learning_rate=0.1)
    group = [dist.new_group([first, first + 2]) for first in range(2)][index]
    model, single = (GPT(GPTConfig(1, 2, 16, 8, False, 32)) for _ in range(2))
    single.init_weights(index)
    model.init_weights(dist.get_rank())
    if with_muon:
        sharded, reference = make_muon(model, process_group=group), configure_muon(single, config)
    else:
        sharded = make_sharded(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
        reference = torch.optim.AdamW(single.parameters(), lr=1e-2)
    for step in range(2):
        x = torch.arange(8)[None] + index + step
        for m in (model, single):
            m(x, x).backward()
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        assert sharded.clip_grad_norm_(0.5).item() == pytest.approx(norm.item(), rel=1e-5)
        for optimizer in (sharded, reference):
            optimizer.step()
            optimizer.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), single.parameters(), strict=True))


@pytest.mark.parametrize("with_muon", [False, True])
def test_groups_of_ranks_train_separate_models(with_muon):
    """Each of two groups starts with its first rank's weights and matches one process with the data of the group.

    The owners of Muon's matrices are ranks of the group.
    """
    assert max(run_on_ranks(train_in_two_groups, 4, with_muon)) <= (1e-5 if with_muon else 1e-6)


def test_a_bucket_has_one_dtype():
    """Interleaved parameters of two dtypes get one bucket per dtype, keep their dtypes, and are all updated."""
    params = [nn.Parameter(torch.ones(40, dtype=(torch.float32, torch.bfloat16)[i % 2])) for i in range(6)]
    optimizer = Zero1Optimizer(params, torch.optim.SGD, lr=0.5)
    torch.stack([p.float().sum() for p in params]).sum().backward()
    optimizer.step()
    assert [{p.dtype for p in bucket.params} for bucket in optimizer.buckets] == [{torch.bfloat16}, {torch.float32}]
    assert [p.dtype for p in params] == [torch.float32, torch.bfloat16] * 3
    assert all(p.eq(0.5).all() for p in params)


# ---- overlap of communication and computation


def record_reductions_in_backward() -> dict[str, Any]:
    """Record how many reductions have started before the first layer's gradient is complete.

    Also count the collectives of the micro-batches that do not synchronize gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=1.2e-3)
    started_counts = []
    model[0].bias.register_post_accumulate_grad_hook(lambda _: started_counts.append(optimizer._num_started))
    unsynced_collectives = []
    for _ in range(3):
        optimizer.require_backward_grad_sync = False
        with CollectiveCounter() as traffic:
            model(torch.ones(2, 16)).sum().backward()
        unsynced_collectives.append(len(traffic.rows))
        optimizer.require_backward_grad_sync = True
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    return {"started": started_counts, "unsynced": unsynced_collectives, "buckets": len(optimizer.buckets)}


def test_reduction_overlaps_with_backward():
    """From the first step on, all reductions but the last start before the first layer's gradient is complete.

    A micro-batch that is not the last communicates nothing.
    """
    for counts in run_on_ranks(record_reductions_in_backward, 2):
        assert counts["buckets"] == 6
        assert counts["started"] == [0, 5] * 3
        assert counts["unsynced"] == [0, 0, 0]


def train_with_different_orders() -> tuple[list[int], list[float]]:
    """Train on ranks that use the layers in different orders; each rank omits a different layer.

    Returns:
        The order in which buckets are reduced, and how far each layer moved.
    """
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
        total = torch.ones(64)
        dist.all_reduce(total)  # as large as a bucket: if it paired with one, no error would be raised
        assert total.eq(3).all()
        optimizer.step()
    return optimizer._bucket_order, [
        float((layer.weight - old).abs().sum()) for layer, old in zip(layers, before, strict=True)
    ]


def test_ranks_can_fill_their_buckets_in_different_orders():
    """Ranks that use layers in different orders, and omit different layers, end with the same parameters.

    They still reduce the same buckets together, in rank 0's order. All reductions have started when the backward pass
    ends, so an all-reduce of the user before `step` never pairs with a bucket.
    """
    results = run_on_ranks(train_with_different_orders, 3)
    assert all(result == results[0] for result in results)
    assert results[0][0] == [0, 1, 2, 3, 4, 5] and all(distance > 0 for distance in results[0][1])


def is_compiled_by_block(n_embd: int) -> bool:
    """Return whether the blocks of a GPT are compiled one by one on two ranks. Nothing is compiled yet."""
    model, config = GPT(GPTConfig(2, 1, n_embd, 8, True, 16)), Zero1Config(compile=True)
    parallel_model = parallelize(model, shard_optimizer(model, config), config, create_runtime("cpu", "float32"))
    return parallel_model is model


def test_blocks_share_compiled_code_only_if_their_parameters_are_aligned():
    """On a GPU, the code of the first block may load 16 bytes at once. A view into a bucket can begin at any element.

    GPT-2's parameters have multiples of 4 elements. With 18 channels, they do not, and the full model is compiled.
    """
    assert [run_on_ranks(is_compiled_by_block, 2, width)[0] for width in (16, 18)] == [True, False]


def read_after_late_gather(reader: str) -> bool:
    """Delay rank 1's shard of a layer that the next forward does not use, then read that layer.

    Returns:
        Whether the all-gather of the layer is complete after the read.
    """
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
    work, waits = unused.work, []
    assert work is not None
    unused.work = SimpleNamespace(wait=lambda: (waits.append(reader), work.wait()))  # type: ignore[assignment]
    if reader == "backward":
        model[0](torch.ones(1, 8)).sum().backward()
    else:
        training_state(model, optimizer)
    return waits == [reader] and work.is_completed()


@pytest.mark.parametrize("reader", ["backward", "checkpoint"])
def test_backward_and_checkpoint_wait_for_a_pending_gather(reader):
    """A bucket that the forward does not use is complete before its gradients are reduced and before it is saved."""
    assert all(run_on_ranks(read_after_late_gather, 2, reader))


# ---- bfloat16


def train_in_bf16(make_optimizer: Callable[..., Zero1Optimizer], device: str) -> dict[str, Any]:
    """Train 16 steps in bf16, and set every second weight after 12 steps. Return all weights, and the optimizer state.

    AdamW changes each weight by the learning rate, which is less than half of the spacing of bf16 at 1.
    """
    params = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=select_device(device))) for size in (561, 34)]
    optimizer = make_optimizer(params, torch.optim.AdamW, lr=2.0**-11, weight_decay=0.0)
    for step in range(16):
        torch.stack([p.sum() for p in params]).sum().backward()
        optimizer.step()
        if step == 11:
            for param in params:
                param.data[::2] = 2.0
    state = [value for _, _, items in optimizer.local_state() for value in items.values()]
    return {
        "weights": [p.tolist() for p in params],
        "bytes": sum(v.nbytes for v in state if v.dim()),
        "dtypes": {v.dtype for v in state},
    }


@pytest.mark.parametrize(("ranks", "make_optimizer"), [(1, make_sharded), (4, make_sharded), (4, make_zero2)])
def test_bf16_parameters_have_an_fp32_master(ranks, make_optimizer, device, need_ranks):
    """bf16 parameters are updated through an fp32 copy of each shard, so updates that are too small for bf16 add up.

    The state is 12P/N bytes per rank. A weight that is set between two steps keeps its new value.
    """
    need_ranks(ranks)
    results = run_on_ranks(train_in_bf16, ranks, make_optimizer, device, device=device)
    assert sum(result["bytes"] for result in results) == 12 * (561 + 34)
    updated = 1 - 16 * 2.0**-11
    for result in results:
        assert result["dtypes"] == {torch.float32}
        assert result["weights"] == [[2.0, updated] * 280 + [2.0], [2.0, updated] * 17]


# ---- the interface of torch.optim.Optimizer


def create_optimizer(kind: str, model: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a class that is not torch's, over all parameters of a small GPT."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    config = Zero1Config(learning_rate=0.1)
    groups = param_groups(model, 0.1)
    factories: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "TritonAdamW": lambda: TritonAdamW(groups, 0.1),
        "Muon": lambda: configure_muon(model, config),
        "ShardedMuon": lambda: configure_muon(model, config, ShardedMuon),
        "DDP": lambda: DdpOptimizer(torch.optim.AdamW(groups, 0.1, fused=True)),
        "DDP and Muon": lambda: DdpOptimizer(configure_muon(model, config)),
        "DDP and ZeRO": lambda: DdpOptimizer(ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)),
        "naive": lambda: NaiveZero1Optimizer(groups, torch.optim.SGD, lr=0.1, momentum=0.9),
        "ZeRO-1": lambda: make_sharded(groups, torch.optim.AdamW, lr=torch.tensor(0.1)),
        "ZeRO-2": lambda: make_zero2(groups, torch.optim.AdamW, lr=0.1),
        "ZeRO-1 and Muon": lambda: make_muon(model),
        "ZeRO-2 and Muon": lambda: make_muon(model, stage=2),
    }
    return factories[kind.removesuffix(" in bf16")]()


OPTIMIZERS = ["TritonAdamW", "Muon", "ShardedMuon", "DDP", "DDP and Muon", "DDP and ZeRO", "naive", "ZeRO-1", "ZeRO-2"]
OPTIMIZERS += ["ZeRO-1 and Muon", "ZeRO-2 and Muon", "ZeRO-1 in bf16", "ZeRO-1 and Muon in bf16"]


def load_into_new_optimizers() -> list[tuple[str, str]]:
    """Save and load the state of every optimizer, and return what is wrong."""

    def create(kind: str, weights: dict[str, Tensor] | None = None) -> tuple[Any, torch.optim.Optimizer]:
        model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=8))
        model.init_weights(0)
        if "bf16" in kind:
            model.bfloat16()
        if weights:
            model.load_state_dict(weights)
        if kind == "ShardedMuon":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, create_optimizer(kind, model)

    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> list[Tensor]:
        x = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(seed))  # the same on every rank

        def closure() -> Tensor:
            loss = model(x, x)
            loss.backward()
            return loss.detach()

        assert optimizer.step(closure) > 0
        optimizer.zero_grad()
        return [local_shard(p).clone() for p in model.parameters()]

    faults = []
    for kind in OPTIMIZERS:
        model, optimizer = create(kind)
        for seed in (0, 1):
            before = step(model, optimizer, seed)
        state = copy.deepcopy(optimizer.state_dict())
        weights = {name: getattr(value, "full_tensor", value.clone)() for name, value in model.state_dict().items()}
        after = step(model, optimizer, 2)
        model, optimizer = create(kind, weights)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 - epoch)
        optimizer.load_state_dict(state if "ZeRO-" in kind else copy.deepcopy(state))  # ZeRO-1 and ZeRO-2 copy it
        scheduler.step()
        if not all(map(torch.equal, step(model, optimizer, 2), before)):
            faults.append((kind, "a scheduler or set_learning_rate has no effect after the load"))
        optimizer.load_state_dict(state)
        if not all(map(torch.equal, step(model, optimizer, 2), after)):
            faults.append((kind, "the state was not loaded"))
    return faults


def test_every_optimizer_loads_its_state():
    """A new optimizer continues as the saved one, calls closures, and obeys a scheduler that is older than the load."""
    for faults in run_on_ranks(load_into_new_optimizers, 2):
        assert not faults


def test_a_second_optimizer_can_replace_the_first():
    """A model keeps no optimizer alive: deleting the first frees its memory, and the second receives the gradients.

    One process needs no process group.
    """
    assert not dist.is_initialized()
    model = OddModel()
    first = make_sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    first_reference = weakref.ref(first)
    del first
    assert first_reference() is None
    before = model.up.weight.detach().clone()
    second = make_sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    compute_loss(model, torch.arange(24).view(4, 6)).backward()
    second.clip_grad_norm_(1.0)
    second.step()
    assert not torch.equal(model.up.weight, before)


def train_with_dropped_gradients(
    make_optimizer: Callable[..., Zero1Optimizer], is_uneven: bool
) -> tuple[float, list[int]]:
    """Train, and run backward passes whose gradients are dropped, before the first step and later.

    If `is_uneven`, the dropped gradients belong to different parameters on each rank.
    """
    torch.manual_seed(0)
    model = OddModel()
    plain = copy.deepcopy(model)
    skipping, reference = (
        make_optimizer(model.parameters(), torch.optim.AdamW),
        make_optimizer(plain.parameters(), torch.optim.AdamW),
    )
    for step in range(4):
        x = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        for _ in range(2 if step in (0, 2) else 0):
            if is_uneven and dist.get_rank():
                model.unused(torch.ones(1, 5)).sum().backward()
            else:
                compute_loss(model, x).backward()
            skipping.zero_grad()
        for m, optimizer in ((model, skipping), (plain, reference)):
            compute_loss(m, x).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
    gap = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    return gap, sorted(skipping._bucket_order)


@pytest.mark.parametrize("make_optimizer", [make_sharded, make_zero2])
@pytest.mark.parametrize("is_uneven", [False, True])
def test_zero_grad_drops_reduced_gradients(is_uneven, make_optimizer):
    """zero_grad drops gradients that are being reduced, also before the first step. Later steps are not affected."""
    for gap, order in run_on_ranks(train_with_dropped_gradients, 2, make_optimizer, is_uneven):
        assert gap == 0.0 and order == list(range(len(order)))


# ---- wrong use


def trigger_error(case: str) -> None:
    model = OddModel()
    x = torch.zeros(2, 6, dtype=torch.long)
    params = list(model.parameters())
    if case == "class":
        make_sharded(params, torch.optim.Adafactor)
    elif case == "shared":
        make_sharded([model.scale, nn.Parameter(model.scale.data)], torch.optim.SGD)
    elif case == "ranks":
        make_sharded(params[: 3 + dist.get_rank()], torch.optim.SGD)
    elif case == "outsider":
        first = dist.new_group([0])
        make_sharded(params, torch.optim.SGD, process_group=first if dist.get_rank() else None)
    else:
        optimizer = make_sharded(params, torch.optim.SGD)
        if case == "no gradient":
            optimizer.step()
        elif case == "copied":
            copy.deepcopy(optimizer)
        elif case == "unfrozen":
            model.frozen.requires_grad_(True)
            compute_loss(model, x).backward()
            optimizer.step()
        elif case == "after reducing":
            compute_loss(model, x).backward()
            optimizer.reduce_gradients()
            model.unused(torch.ones(1, 5)).sum().backward()
        elif case == "after clipping":
            optimizer = make_zero2(params, torch.optim.SGD)
            compute_loss(model, x).backward()
            optimizer.clip_grad_norm_(1.0)
            compute_loss(model, x).backward()
        elif case == "state of another rank":
            states: list[Any] = [None, None]
            dist.all_gather_object(states, optimizer.state_dict())
            optimizer.load_state_dict(states[1 - dist.get_rank()])
        elif case == "naive state of another rank":
            naive = NaiveZero1Optimizer(params, torch.optim.SGD)
            naive.load_state_dict({**naive.state_dict(), "place": (2, 2)})
        elif case == "moved":
            model.double()
            compute_loss(model, x).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("class", "Adafactor is not known to be elementwise.*elementwise=True"),
        ("ranks", "ranks have different parameters"),
        ("no gradient", "no rank has a gradient to step with"),
        ("unfrozen", "frozen when the optimizer was created: create a new optimizer"),
        ("after reducing", "a second backward.*require_backward_grad_sync"),
        ("after clipping", "gradients were reduced: call step.. or zero_grad"),
        ("shared", "two parameters share memory"),
        ("moved", "no longer points into its bucket"),
        ("outsider", "not in the process group"),
        ("state of another rank", "belongs to another model, rank or number of ranks"),
        ("naive state of another rank", "belongs to another rank"),
        ("copied", "a Zero1Optimizer cannot be copied or pickled: create one for the other model"),
    ],
)
def test_wrong_use_raises_one_clear_error(case, words):
    """Each wrong use raises an error immediately, with a sentence that states what to do."""
    with pytest.raises(RankFailed, match=words):
        run_on_ranks(trigger_error, 2, case)
