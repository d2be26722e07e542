"""What a rank's memory holds, counted storage by storage and compared with the formulas."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bench.matrix.cells import config_of
from bench.plan.trace import fake_world, trace
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory.tracker import CATEGORIES, Memory
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.activation_bytes import activation_bytes, kept_by_ends, saved_activations
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from phase3_fsdp.fsdp import FsdpConfig, init_device, init_shards, shard_model
from workshop.ranks import run_on_ranks

SMALL = GPTConfig(n_layer=4, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=80)  # all divide by 4 ranks
OTHER = GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, bias=True, vocab_size=96)
MODES = ("full", "selective", "every_2")


def tokens_of(shape: GPTConfig, batch_size: int, tokens: int) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (batch_size, tokens))


def step(model: GPT, optimizer: torch.optim.Optimizer | None, x: torch.Tensor, micro_batches: int = 1) -> Memory:
    """One watched step; the last logits and loss are let go before it ends."""
    with Memory(model, optimizer) as memory:
        for _ in range(micro_batches):
            logits, loss = model(x, x)
            loss.backward()
            del logits, loss
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return memory


def adamw_step(mode: contextlib.AbstractContextManager[Any]) -> Memory:
    with mode:
        model = GPT(SMALL)
        return step(model, torch.optim.AdamW(model.parameters()), tokens_of(SMALL, 2, 16), micro_batches=2)


def test_every_storage_is_counted_once_and_by_its_kind():
    """A step of one process holds 4P of parameters and of gradients and 8P of optimizer state, and lets the rest go."""
    params = sum(p.numel() for p in GPT(SMALL).parameters())
    count = len(list(GPT(SMALL).parameters()))
    memory = adamw_step(contextlib.nullcontext())
    assert memory.after_forward is not None
    assert memory.after_forward["parameters"] == memory.after_forward["gradients"] == 4 * params
    end = dict.fromkeys(CATEGORIES, 0) | {"parameters": 4 * params, "optimizer_state": 8 * params + 4 * count}
    assert memory.snapshot() == end
    assert memory.peak["gradients"] == 4 * params
    assert sum(memory.peak.values()) == max(sum(totals.values()) for _, totals in memory.timeline)


def test_fake_tensors_are_counted_as_real_ones():
    """Under FakeTensorMode, which allocates nothing, a step is counted to the same bytes."""
    real, fake = adamw_step(contextlib.nullcontext()), adamw_step(FakeTensorMode())
    assert fake.peak == real.peak and fake.after_forward == real.after_forward and fake.snapshot() == real.snapshot()


def totals_of_both(mode: str) -> tuple[int, int]:
    """The peak of a step of FSDP on this rank, as counted here and by torch."""
    config = FsdpConfig(device="cpu", fsdp_activation_checkpointing=mode)
    run = Runtime(0, 0, 2, 1, torch.device("cpu"), torch.float32)
    peaks = []
    for _ in range(2):
        with init_device(config, run):
            model = GPT(SMALL)
        model = shard_model(model, config, run)
        init_shards(model, config, run)
        optimizer, x = torch.optim.AdamW(model.parameters()), tokens_of(SMALL, 2, 16)
        if not peaks:
            peaks.append(sum(step(model, optimizer, x).peak.values()))
            continue
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            logits, loss = model(x, x)
            loss.backward()
            del logits, loss
            optimizer.step()
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return peaks[0], peaks[1]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_total_is_that_of_torchs_own_tracker(mode):
    """At the peak of a step of FSDP, torch's MemTracker has as many bytes, to a thousandth; in a group that sends
    nothing, for gloo's copies come and go as its threads run."""
    with fake_world(2):
        ours, theirs = totals_of_both(mode)
    assert ours == pytest.approx(theirs, rel=0.001)


def test_what_is_to_be_reduced_is_not_gathered():
    """In the first block's backward that block and the root are whole; the gradients to be reduced are filed apart."""
    words = {"batch_size": 1, "block_size": 16, "gradient_accumulation_steps": 2, "dtype": "float32", "device": "cpu"}
    memory = trace(config_of("phase3", Path("out"), **words), SMALL, 2).memory
    model = GPT(SMALL)
    params, block = (4 * sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
    assert memory.peak_of_part()["first backward"]["gathered"] == params - 4 * block + block


def test_nothing_stays_behind_an_error():
    """An error inside leaves neither the hook on resizes nor hooks on model and optimizer."""
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), Memory(model, optimizer):
        assert torch.UntypedStorage.resize_ is not before
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is before
    assert not model._forward_hooks and not model._forward_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_what_a_backward_finds_is_no_gradient():
    """Of what is alive after a backward, only what was born in it is filed under gradients."""
    weight = torch.ones(10, requires_grad=True)
    with Memory() as memory:
        with torch.no_grad():
            buffer = torch.zeros(1000)
        (weight * 2).sum().backward()
        found = memory.snapshot()
    assert found["gradients"] == 40 and found["other"] == buffer.nbytes


def test_resizes_and_views():
    """A storage counts by the size it has now, whoever resized it, and a view of it counts nothing more."""
    with Memory() as memory:
        whole = torch.empty(1000)
        rows = [whole[:10], whole.view(10, 100)]
        assert sum(memory.snapshot().values()) == 4000
        whole.untyped_storage().resize_(0)
        assert sum(memory.snapshot().values()) == 0
        whole.untyped_storage().resize_(800)
        assert memory.snapshot()["gathered"] == 800
        del whole, rows
        assert sum(memory.snapshot().values()) == 0
    with Memory(device=torch.device("cuda")) as memory:
        on_the_host = torch.empty(1000)
        assert sum(memory.snapshot().values()) == 0 < on_the_host.nbytes  # of an offloaded model, say


def after_forward(shape: GPTConfig, dtype: torch.dtype, mode: str, x: torch.Tensor) -> int:
    model = GPT(shape)
    checkpoint_activations(model.to(dtype), mode)
    found = step(model, None, x).after_forward
    assert found is not None
    return found["activations"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("shape", "batch_size", "tokens"), [(SMALL, 2, 24), (OTHER, 3, 40)], ids=["small", "other"])
def test_what_checkpointing_saves(shape, batch_size, tokens, dropout, dtype):
    """At a forward's end each mode has saved what the arithmetic says, and without any as much is kept as it says, but
    for a few scalars."""
    shape = GPTConfig(**{**vars(shape), "dropout": dropout})
    x = tokens_of(shape, batch_size, tokens)
    kept = after_forward(shape, dtype, "none", x)
    said = activation_bytes(shape, batch_size, tokens, dtype)
    assert kept == pytest.approx(said, abs=64)
    for mode in MODES:
        saved = said - activation_bytes(shape, batch_size, tokens, dtype, mode)
        assert kept - after_forward(shape, dtype, mode, x) == pytest.approx(saved, abs=64), mode


def test_the_list_of_what_is_kept():
    """Without dropout a block keeps 16 tensors of (B, T, C), its products are 10 with its input; every row says why."""
    x = 4 * 2 * 24 * 32
    rows = {mode: saved_activations(SMALL, 2, 24, mode=mode) for mode in ("none", "selective", "full")}
    whole = {mode: sum(row.bytes for row in found if row.bytes >= x) for mode, found in rows.items()}
    assert whole == {"none": 16 * x, "selective": 10 * x, "full": x}
    assert all(row.why and row.shape for row in rows["none"] + kept_by_ends(SMALL, 2, 24))


def sharded(shape: GPTConfig, **options: Any) -> GPT:
    """This rank's share of a model, made as the trainer makes it."""
    config = FsdpConfig(device="cpu", **options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Runtime(rank, rank, ranks, ranks, torch.device("cpu"), torch.float32)
    with init_device(config, run):
        model = GPT(shape)
    shard_model(model, config, run)
    init_shards(model, config, run)
    return model


def kept_on_a_rank(shape: GPTConfig) -> dict[str, int]:
    x = tokens_of(shape, 2, 24)
    found = {}
    for mode in ("none", *MODES):
        model = sharded(shape, fsdp_activation_checkpointing=mode)
        found[mode] = (step(model, None, x).after_forward or {})["activations"]
    return found


def test_what_checkpointing_saves_with_fsdp():
    """Two ranks of FSDP save what one process saves: gathered parameters are not taken for activations."""
    shape = GPTConfig(**{**vars(SMALL), "dropout": 0.2})
    said = {mode: activation_bytes(shape, 2, 24, mode=mode) for mode in ("none", *MODES)}
    for kept in run_on_ranks(kept_on_a_rank, 2, shape):
        for mode in MODES:
            assert kept["none"] - kept[mode] == pytest.approx(said["none"] - said[mode], rel=0.05), mode


def watch_fsdp(reshard: bool) -> dict[str, Any]:
    """On a rank: what an evaluation leaves gathered, two steps after one more, and one that reduces once."""
    model = sharded(SMALL, fsdp_reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    x = tokens_of(SMALL, 2, 16)
    with torch.no_grad():
        model(x)
    with Memory(model, optimizer) as memory:
        found: dict[str, Any] = {"left": memory.snapshot()["gathered"]}
    step(model, optimizer, x)
    steps = [step(model, optimizer, x) for _ in range(2)]
    with Memory(model, optimizer) as memory:
        for last in (False, True):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            model(x, x)[1].backward()
    found["whole"], found["state"] = (memory.after_forward or {})["gradients"], memory.snapshot()
    found["gradients"] = max(totals["gradients"] for m in steps for _, totals in m.timeline)
    moments = [(m.after_forward or {}, m.peak, max(t["gathered"] for _, t in m.timeline)) for m in steps]
    found["steps"] = [(forward["gathered"], peak["gathered"], most) for forward, peak, most in moments]
    return found


@pytest.mark.parametrize("reshard", [True, False])
def test_what_fsdp_holds(reshard):
    """Of P parameters each of 4 ranks holds 16P/4 bytes of state, and at the peak a few gathered units."""
    model = GPT(SMALL)
    params, unit = (4 * sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
    root = params - 4 * unit
    # With resharding a block has its parameters and, in the forward, the flat buffer in which they came, which is kept
    # until the next one's have come; so for a moment there are three, two flat buffers and a copy. In the backward the
    # buffer goes at once, but that of the block before is gathered ahead. Without resharding all blocks are there, and
    # the same buffers on top.
    blocks, passing = (0, 2) if reshard else (4, 1)
    expected = (root + blocks * unit, root + (blocks + passing) * unit, root + (max(blocks, 1) + 2) * unit)
    ranks = run_on_ranks(watch_fsdp, 4, reshard)
    # A thread of gloo's may let go of a buffer late: what is needed is the least that was found.
    assert tuple(min(column) for column in zip(*(each for r in ranks for each in r["steps"]), strict=True)) == expected
    for found in ranks:
        state = found["state"]
        assert state["parameters"] == state["gradients"] == found["gradients"] == params // 4
        assert state["optimizer_state"] == 2 * params // 4 + 4 * len(list(model.parameters()))
        assert found["left"] == root + blocks * unit  # the root is not freed after a forward
        assert found["whole"] == params  # gradients that wait for the last micro-batch are not sharded


def init_on_a_rank(shape: GPTConfig) -> int:
    with Memory() as memory:
        sharded(shape)
    return sum(memory.peak.values())


def test_a_model_is_born_in_slices():
    """While a model is made on 4 ranks, each holds its share, the largest parameter and the ranks' numbers at most."""
    params = [4 * p.numel() for p in GPT(SMALL).parameters()]
    mesh = 4 * 4  # a DeviceMesh: one int32 a rank
    assert set(run_on_ranks(init_on_a_rank, 4, SMALL)) == {sum(params) // 4 + max(params) + mesh}
