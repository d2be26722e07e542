"""Memory per rank by category: the tracker counts every storage, and the totals match the formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

import nanoGPT.model
from bench.matrix.cells import make_config
from bench.plan.trace import fake_process_group, trace
from measure.tracker import CATEGORIES, MemoryTracker
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.activation_bytes import activation_bytes
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from tests.helpers.fsdp_options import make_sharded_model
from workshop.ranks import run_on_ranks

# All sizes of SMALL_SHAPE are divisible by 4 ranks, so that FSDP adds no padding.
SMALL_SHAPE = GPTConfig(n_layer=4, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=80)
OTHER_SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, bias=True, vocab_size=96)
MODES = ("full", "selective", "every_2")


def random_tokens(shape: GPTConfig, batch_size: int, tokens: int) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (batch_size, tokens))


def run_step(
    model: GPT, optimizer: torch.optim.Optimizer | None, x: torch.Tensor, micro_batches: int = 1
) -> MemoryTracker:
    """Run one step inside a MemoryTracker. The last loss is freed before it ends."""
    with MemoryTracker(model, optimizer) as memory:
        for _ in range(micro_batches):
            loss = model(x, x)
            loss.backward()
            del loss
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return memory


def test_every_storage_is_counted_once_in_its_category():
    """A step of one process uses 4P bytes for parameters, 4P for gradients and 8P for optimizer state. Only parameters
    and optimizer state remain after it."""
    model = GPT(SMALL_SHAPE)
    params, count = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    optimizer, x = torch.optim.AdamW(model.parameters()), random_tokens(SMALL_SHAPE, 2, 16)
    memory = run_step(model, optimizer, x, micro_batches=2)
    assert memory.after_forward is not None
    assert memory.after_forward["parameters"] == memory.after_forward["gradients"] == 4 * params
    end = dict.fromkeys(CATEGORIES, 0) | {"parameters": 4 * params, "optimizer_state": 8 * params + 4 * count}
    assert memory.snapshot() == end
    assert memory.peak["gradients"] == 4 * params
    assert sum(memory.peak.values()) == max(sum(totals.values()) for _, totals in memory.timeline)


def measure_peaks(mode: str) -> tuple[int, int]:
    """Return the peak memory of a step of FSDP on this rank, as counted by MemoryTracker and by torch's MemTracker."""
    peaks = []
    for _ in range(2):
        model, _ = make_sharded_model(SMALL_SHAPE, fsdp_activation_checkpointing=mode)
        optimizer, x = torch.optim.AdamW(model.parameters()), random_tokens(SMALL_SHAPE, 2, 16)
        if not peaks:
            peaks.append(sum(run_step(model, optimizer, x).peak.values()))
            continue
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            loss = model(x, x)
            loss.backward()
            del loss
            optimizer.step()
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return peaks[0], peaks[1]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_peak_matches_torchs_mem_tracker(mode, monkeypatch):
    """The peak memory of a step of FSDP equals that of torch's MemTracker within 0.1%. The process group is a fake one,
    because the buffers of gloo's threads come and go."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with fake_process_group(2):
        peak, torch_peak = measure_peaks(mode)
    assert peak == pytest.approx(torch_peak, rel=0.001)


def test_gradients_before_the_reduction_are_not_counted_as_gathered():
    """In the backward pass of the first block, `gathered` is that block and the root. The unreduced gradients are in
    another category."""
    fields = {"batch_size": 1, "block_size": 16, "gradient_accumulation_steps": 2, "dtype": "float32", "device": "cpu"}
    memory = trace(make_config("phase3", Path("out"), **fields), SMALL_SHAPE, 2).memory
    model = GPT(SMALL_SHAPE)
    params, block = (4 * sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
    assert memory.peak_of_part()["first backward"]["gathered"] == params - 4 * block + block


def activations_after_forward(shape: GPTConfig, dtype: torch.dtype, mode: str, x: torch.Tensor) -> int:
    """Return the bytes of activations at the end of a forward pass."""
    model = GPT(shape)
    checkpoint_activations(model.to(dtype), mode)
    totals = run_step(model, None, x).after_forward
    assert totals is not None
    return totals["activations"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("shape", "batch_size", "tokens"), [(SMALL_SHAPE, 2, 24), (OTHER_SHAPE, 3, 40)], ids=["small", "other"]
)
def test_checkpointing_saves_the_predicted_memory(shape, batch_size, tokens, dropout, dtype):
    """At the end of a forward pass, the activations without checkpointing, and the savings of each mode, match the
    prediction except for a few scalars."""
    shape = GPTConfig(**{**vars(shape), "dropout": dropout})
    x = random_tokens(shape, batch_size, tokens)
    measured = activations_after_forward(shape, dtype, "none", x)
    predicted = activation_bytes(shape, batch_size, tokens, dtype)
    assert measured == pytest.approx(predicted, abs=64)
    for mode in MODES:
        saved = predicted - activation_bytes(shape, batch_size, tokens, dtype, mode)
        assert measured - activations_after_forward(shape, dtype, mode, x) == pytest.approx(saved, abs=64), mode


def measure_fsdp_step(reshard: bool) -> dict[str, Any]:
    """Return the bytes that remain all-gathered after an evaluation, the memory of two ordinary steps, and the memory
    of a step of two micro-batches that reduces its gradients once."""
    model, _ = make_sharded_model(SMALL_SHAPE, fsdp_reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    x = random_tokens(SMALL_SHAPE, 2, 16)
    with torch.no_grad():
        model(x)
    with MemoryTracker(model, optimizer) as memory:
        measured: dict[str, Any] = {"gathered_after_evaluation": memory.snapshot()["gathered"]}
    run_step(model, optimizer, x)
    steps = [run_step(model, optimizer, x) for _ in range(2)]
    with MemoryTracker(model, optimizer) as memory:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            model(x, x).backward()
    measured["accumulated_gradients"], measured["state"] = (memory.after_forward or {})["gradients"], memory.snapshot()
    measured["gradients"] = max(totals["gradients"] for m in steps for _, totals in m.timeline)
    moments = [(m.after_forward or {}, m.peak, max(t["gathered"] for _, t in m.timeline)) for m in steps]
    measured["steps"] = [
        (forward["gathered"], peak["gathered"], most_gathered) for forward, peak, most_gathered in moments
    ]
    return measured


def measure_fsdp_steps() -> dict[bool, dict[str, Any]]:
    """Return the results of `measure_fsdp_step` with and without resharding after the forward pass."""
    return {reshard: measure_fsdp_step(reshard) for reshard in (True, False)}


@pytest.fixture(scope="module")
def fsdp_steps() -> list[dict[bool, dict[str, Any]]]:
    return run_on_ranks(measure_fsdp_steps, 4)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_memory_matches_the_formula(reshard, fsdp_steps):
    """With P parameters on 4 ranks, each rank uses 16P/4 bytes of state. The peak adds a few all-gathered units."""
    model = GPT(SMALL_SHAPE)
    params, unit = (4 * sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
    root = params - 4 * unit
    # With resharding, a block has its parameters. In the forward pass, it also has the flat buffer of its all-gather,
    # which is freed only after the next all-gather. For a moment, three units exist: two flat buffers and a copy. In
    # the backward pass, the flat buffer is freed at once, but the previous block is already prefetched. Without
    # resharding, the parameters of all blocks exist, and the same buffers in addition.
    blocks, buffers = (0, 2) if reshard else (4, 1)
    expected = (root + blocks * unit, root + (blocks + buffers) * unit, root + (max(blocks, 1) + 2) * unit)
    ranks = [measured[reshard] for measured in fsdp_steps]
    # A gloo thread may free a buffer late, so the minimum over all ranks is the memory that a step needs.
    assert tuple(min(column) for column in zip(*(step for r in ranks for step in r["steps"]), strict=True)) == expected
    for measured in ranks:
        state = measured["state"]
        assert state["parameters"] == state["gradients"] == measured["gradients"] == params // 4
        assert state["optimizer_state"] == 2 * params // 4 + 4 * len(list(model.parameters()))
        assert measured["gathered_after_evaluation"] == root + blocks * unit  # a forward does not free the root
        assert measured["accumulated_gradients"] == params  # unsharded until the last micro-batch


def measure_init_peak(shape: GPTConfig, chunk_elements: int) -> int:
    """Return the peak memory of this rank while it creates a sharded model, with chunks of `chunk_elements`."""
    nanoGPT.model.MAX_CHUNK_ELEMENTS = chunk_elements
    with MemoryTracker() as memory:
        make_sharded_model(shape)
    return sum(memory.peak.values())


def test_a_model_is_initialized_in_shards():
    """While 4 ranks create a model, the peak memory of each is its shard, one chunk of rows, and the ranks' numbers in
    the DeviceMesh."""
    shard = sum(4 * p.numel() for p in GPT(SMALL_SHAPE).parameters()) // 4
    chunk = 4 * 4 * SMALL_SHAPE.n_embd  # one row of the widest matrix, or four rows of the others
    mesh = 4 * 4  # a DeviceMesh: one int32 per rank
    assert set(run_on_ranks(measure_init_peak, 4, SMALL_SHAPE, chunk // 4)) == {shard + chunk + mesh}
