"""Checks of the exercises on FSDP."""

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from measure.ledger import CollectiveCounter
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp import activation_checkpointing, fsdp
from phase3_fsdp.by_hand import HandmadeFSDP
from phase3_fsdp.fsdp import FsdpConfig, put_parameters_on_meta
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import collect_traffic, draw_normal, is_close

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=31)
SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 8, "gradient_accumulation_steps": 4}


def make_config(**changes: Any) -> FsdpConfig:
    return FsdpConfig(**{**SMALL, **changes})


def build_sharded(config: FsdpConfig) -> GPT:
    """Return a small model, sharded over all ranks, with its initial weights."""
    run = create_runtime("cpu", "float32")
    with put_parameters_on_meta():
        model = GPT(SHAPE)
    model = fsdp.shard_model(model, config, run)
    fsdp.init_shards(model, config, run)
    return model


def run_micro_batches(model: nn.Module, config: FsdpConfig, count: int = 2) -> dict[str, tuple[int, int]]:
    """Run forward and backward for the micro-batches of one step, and return the traffic by collective."""
    with CollectiveCounter() as traffic:
        for i in range(count):
            fsdp.set_gradient_sync(model, config, last=i == count - 1)
            x = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
            (model(x, x.roll(1, 1)) / count).backward()
    return collect_traffic(traffic.rows)


def measure_saved_bytes(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return the result of a forward pass, and the bytes that it saves for the backward pass, each storage once.

    Scalars do not count.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim():
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return result, sum(saved.values())


def count_tensors(numel: int) -> int:
    """Return the number of tensors with `numel` elements that Python can reach."""
    return sum(type(value) is Tensor and value.numel() == numel for value in gc.get_objects())


def check_sharded_linear(answer: ModuleType, _: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full, x, dy = draw_normal(12, 8), draw_normal(3, 8, seed=10 + rank), draw_normal(3, 12, seed=20 + rank)
    rows = full.chunk(ranks)[rank].clone().requires_grad_()
    leaf_x, leaf_full = x.clone().requires_grad_(), full.clone().requires_grad_()
    before = count_tensors(full.numel())
    with CollectiveCounter() as traffic:
        y, saved_bytes = measure_saved_bytes(lambda: answer.ShardedLinear.apply(leaf_x, rows))
        expect(
            is_close(y, x @ full.T),
            "The forward pass must compute x W^T with the full weight: all-gather the rows first.",
        )
        expect(
            saved_bytes < x.nbytes + full.nbytes,
            f"The forward pass saves {saved_bytes} bytes for the backward pass, but x and this rank's rows have only "
            f"{x.nbytes + rows.nbytes}. If the full weight is saved, FSDP saves no memory: save the rows, and "
            "all-gather again.",
        )
        expect(
            count_tensors(full.numel()) == before,
            "After the forward pass, the full weight is still in memory: save the rows, and all-gather again in the "
            "backward pass.",
        )
        y.backward(dy)
    exact_x = x.clone().requires_grad_()
    (exact_x @ leaf_full.T).backward(dy)
    assert leaf_full.grad is not None and rows.grad is not None
    expect(is_close(leaf_x.grad, exact_x.grad), "The gradient of x is dy W, with the full weight.")
    mean = leaf_full.grad.clone()
    dist.all_reduce(mean)
    local_sum = mean.chunk(ranks)[rank]
    expect(
        not is_close(rows.grad, local_sum),
        "The gradient of the rows is the sum over the ranks. Data parallelism needs the mean: use ReduceOp.AVG.",
    )
    expect(
        not is_close(rows.grad, leaf_full.grad.chunk(ranks)[rank]),
        "The gradient contains only this rank's examples. Reduce-scatter it, so that each rank gets the mean of its "
        "rows.",
    )
    expect(is_close(rows.grad, local_sum / ranks), "The gradient of the rows is not the mean of dy^T x over the ranks.")
    counts = {kind: calls for kind, (calls, _) in collect_traffic(traffic.rows).items()}
    expected = {"all-gather": 2, "reduce-scatter": 1}
    expect(counts == expected, f"The ledger counts {counts}, but a layer needs {expected}.")


def check_gradient_sync(answer: ModuleType, _: Any) -> None:
    for every in (False, True):
        config = make_config(fsdp_sync_every_micro_batch=every)
        model = build_sharded(config)
        calls, _ = run_micro_batches(model, config, 3).get("reduce-scatter", (0, 0))
        expected = 3 * (3 if every else 1)
        flag = f"With fsdp_sync_every_micro_batch={every}, the ledger counts {calls} reduce-scatters in a step with 3 "
        advice = "reduce after every backward pass" if every else "reduce only after the last backward pass of a step"
        expect(calls == expected, f"{flag}micro-batches and 3 units, instead of {expected}: {advice}.")
    if dist.get_world_size() == 4:
        config = make_config(fsdp_shard_size="2", fsdp_sync_every_micro_batch=True, gradient_accumulation_steps=8)
        calls, _ = run_micro_batches(build_sharded(config), config).get("all-reduce", (0, 0))
        expect(
            calls == 3,
            f"With 2 replicas of the model, the ledger counts {calls} all-reduces between replicas instead of 3: "
            "all-reduce only after the last micro-batch, because shards can be accumulated before.",
        )


class ReusedBlock(nn.Module):
    """A stem, and a block with dropout that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = self.block(x)
        return x


def check_recompute(answer: ModuleType, _: Any) -> None:
    plain, x = ReusedBlock(), draw_normal(16, 8)
    torch.manual_seed(1)
    y, plain_bytes = measure_saved_bytes(lambda: plain(x))
    y.square().sum().backward()
    model = ReusedBlock()
    model.block.forward = answer.recompute_in_backward(model.block.forward, None)  # type: ignore[method-assign]
    torch.manual_seed(1)
    y, saved_bytes = measure_saved_bytes(lambda: model(x))
    expect(
        saved_bytes < plain_bytes / 2,
        f"The forward pass saves {saved_bytes:,} bytes, and without checkpointing {plain_bytes:,}: the activations "
        "inside the block are still saved. Wrap the call in torch.utils.checkpoint.checkpoint.",
    )
    torch.rand(100)
    y.square().sum().backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    expect(
        all(is_close(a.grad, b.grad) for a, b in pairs),
        "The gradients differ from those without checkpointing: the recomputation draws other dropout masks than "
        "the forward pass. The random state must be saved with the input.",
    )
    parallel = DDP(model)
    try:
        parallel(x).square().sum().backward()
    except RuntimeError as error:
        if "marked as ready twice" in str(error) or "mark a variable ready" in str(error):
            expect(
                False,
                "DDP reports that a parameter was marked as ready twice. The reentrant form runs a second backward "
                "inside the backward pass, once per use of the block. Use the form with saved-tensor hooks.",
            )
        raise
    calls: list[Any] = []

    def record_call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return activation_checkpointing.save_products(*args, saves_attention=False, **kwargs)

    answer.recompute_in_backward(ReusedBlock(), record_call)(x).sum().backward()
    expect(
        bool(calls),
        "The policy is never called: pass it to checkpoint as context_fn, with create_selective_checkpoint_contexts.",
    )


class SmallNet(nn.Module):
    """Two blocks whose rows 2 ranks cannot divide, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.spare = nn.Linear(6, 10), nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 10)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def draw_batches(step: int) -> list[tuple[Tensor]]:
    """Return the four micro-batches of a step, of all ranks."""
    return [(draw_normal(5, 6, seed=10 * step + i),) for i in range(4)]


def train_full() -> dict[str, Any]:
    """Train three steps in this process. Return the losses, the norms and the parameters at the end."""
    model = SmallNet()
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1), [], []
    for step in range(3):
        batch_losses = [model(*batch) for batch in draw_batches(step)]
        loss = torch.stack(batch_losses).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "params": [param.detach() for param in model.parameters()]}


def check_unit(_: ModuleType, expected: dict[str, Any]) -> None:
    model, rank, ranks = SmallNet(), dist.get_rank(), dist.get_world_size()
    sharded = HandmadeFSDP(model, list(model.blocks))
    optimizer = torch.optim.AdamW(sharded.parameters(), 0.01, weight_decay=0.1)
    kept: list[int] = []
    buffers: list[bool] = []
    for unit, block in zip(sharded.units[1:], model.blocks, strict=True):
        block.register_forward_pre_hook(lambda *_, unit=unit: buffers.append(unit.pending is not None))
        block.register_forward_hook(
            lambda block, *_: kept.append(sum(param.untyped_storage().size() for param in block.parameters()))
        )
    for step in range(3):
        loss, norm = sharded.train_step(optimizer, draw_batches(step)[rank::ranks], 1.0)
        expect(
            not any(kept),
            f"After its forward pass, a block still has {max(kept)} bytes of full parameters: set the size of the "
            "storage of each parameter to 0.",
        )
        expect(
            not any(buffers),
            "A unit that computes still holds the buffer of its all-gather: clear self.pending when it is used up.",
        )
        expect(
            all(param.grad is None for param in model.parameters()),
            "After its reduction, a parameter still has its full gradient: set param.grad to None.",
        )
        expect(
            step > 0 or is_close(loss, expected["losses"][0]),
            f"The first loss is {loss:.6f} instead of {expected['losses'][0]:.6f}: the unit does not compute with the "
            "parameters of all ranks. Rank r has sent its rows of every parameter, one parameter after another, with "
            "padding. The first rows of a parameter come from rank 0. Wait for the all-gather before you copy.",
        )
        ratio = norm / expected["norms"][step]
        expect(
            not is_close(ratio, ranks, 1e-3),
            f"The gradient is {ranks} times too large: it is the sum over the ranks, not the mean.",
        )
        expect(
            is_close(ratio, 1.0, 1e-4),
            f"The gradient norm of step {step} is {ratio:.4f} times that of one process: a shard needs the gradient of "
            "its own rows, divided once by N. Rank r receives row r of what is sent.",
        )
    root, *blocks = [ranks * sum(unit.sizes) * 4 for unit in sharded.units]
    gathered, enough = sum(unit.gathered for unit in sharded.units), 3 * 2 * (root + 2 * sum(blocks))
    expect(
        gathered == enough,
        f"The units all-gather {gathered:,} bytes, and {enough:,} are enough: the root once for each micro-batch, and "
        "the blocks twice. A unit that is full gathers again: set self.is_full.",
    )
    spare = sharded.units[0].shards[[*model.parameters()].index(model.spare)] if rank == 0 else torch.ones(2)
    expect(
        bool((spare == 1).all()),
        "A parameter that no rank has used was updated: its shard has a gradient of zeros, so weight decay changes it. "
        "Leave the gradient None.",
    )
    check_final_params(sharded, list(model.parameters()), expected["params"])
    check_free_after_prefetch(sharded)
    check_reduction_in_fp32()


def check_free_after_prefetch(sharded: HandmadeFSDP) -> None:
    for unit in sharded.units:
        unit.free()
        unit.start_all_gather()
        unit.free()
        expect(unit.pending is None, "After `free`, a unit still has the buffer of its prefetch: clear self.pending.")


def check_reduction_in_fp32() -> None:
    """In bfloat16, the reduce-scatter of a unit has 4 bytes per element, and a shard's gradient is fp32."""
    model = SmallNet()
    del model.spare
    half = HandmadeFSDP(model, list(model.blocks), torch.bfloat16)
    with CollectiveCounter() as traffic:
        half.train_step(
            torch.optim.SGD(half.parameters(), 0.0), [draw_batches(0)[dist.get_rank()][0].bfloat16()[None]], 0.0
        )
    calls, size = collect_traffic(traffic.rows).get("reduce-scatter", (0, 0))
    expect(
        calls == len(half.units),
        f"The ledger counts {calls} reduce-scatters for {len(half.units)} units: reduce each unit in one of them.",
    )
    elements = dist.get_world_size() * sum(sum(unit.sizes) for unit in half.units)
    expect(
        size == 4 * elements,
        f"With a computation in bfloat16, the reduce-scatters have {size} bytes for {elements} elements: add up "
        "gradients in fp32.",
    )


def check_final_params(sharded: HandmadeFSDP, params: list[nn.Parameter], expected: list[Tensor]) -> None:
    for unit in sharded.units:
        unit.wait_for_params()
    differ = [i for i, (param, full) in enumerate(zip(params, expected, strict=True)) if not is_close(param, full)]
    expect(not differ, "Losses and norms are right, but some parameters differ after three steps.")
