"""Helpers of notebooks 6 and 6b: measure the memory and the communication of a step, and print what was measured.

`workshop/lessons/fsdp_pictures.py` draws it.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from measure.ledger import CollectiveCounter
from measure.tracker import STATE, MemoryTracker
from nanoGPT.costs import ring_bytes
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer, grad_norm
from phase3_fsdp.activation_bytes import saved_activations
from phase3_fsdp.costs import count_padded_elements, describe_sharding, expected_traffic, own_params
from phase3_fsdp.fsdp import FsdpConfig, local_grads, set_gradient_sync, shard_group
from workshop.lessons.loss_curves import compute_max_loss_difference

Step = Mapping[str, Any]  # what measure_fsdp_steps measured in one step
BuildModel = Callable[[FsdpConfig], tuple[GPT, Runtime]]
Marks = list[tuple[str, int | None, int]]


def compute_max_difference(weights: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest absolute difference of an element between two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(weights, others, strict=True))


def describe_layout(model: GPT, config: FsdpConfig, run: Runtime) -> dict[str, Any]:
    """Return each unit's parameters as (name, rows, local rows, elements per row), and the trainer's message."""
    names = {p: name.removeprefix("transformer.").removesuffix(".weight") for name, p in model.named_parameters()}
    units = [
        [(names[p], len(p), len(p.to_local()), p.numel() // len(p)) for p in own_params(module)]  # type: ignore[attr-defined]
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return {"units": units, "message": describe_sharding(model, config, run)}


def count_local_elements(layout: Mapping[str, Any]) -> int:
    """Return the number of elements that a rank stores."""
    return sum(local_rows * width for unit in layout["units"] for _, _, local_rows, width in unit)


def record_blocks(model: GPT, memory: MemoryTracker, marks: Marks) -> list:
    """Register hooks that append (what, block, event of `memory`) to `marks`.

    `what` is "forward", "forward ends" or "backward", when that pass of a block starts or ends.
    """

    def make_recorder(what: str, block: int) -> Callable[..., None]:
        return lambda *_: marks.append((what, block, memory.timeline[-1][0]))

    def make_end_hook(block: int) -> Callable[..., None]:
        def record_end(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            make_recorder("forward ends", block)()
            output.register_hook(make_recorder("backward", block))

        return record_end

    handles = []
    for number, block in enumerate(model.blocks):
        handles += [block.register_forward_pre_hook(make_recorder("forward", number))]
        handles += [block.register_forward_hook(make_end_hook(number), prepend=True)]  # before FSDP's hook, which frees
    return handles


def measure_fsdp_steps(
    build_model: BuildModel, config: FsdpConfig, micro_batches: int = 1, steps: int = 2
) -> dict[str, Any]:
    """Train one warm-up step on this rank, then measure memory and communication of each further step.

    Args:
        build_model: returns this rank's shards of the model.
        config: of the run.
        micro_batches: per rank and step.
        steps: number of steps to measure.

    Returns:
        `bytes` of each unit with padding, the root first; the `expected` communication by the formula; and for each
        of the `steps`: the `marks` of the blocks, the bytes `communicated`, the `timeline` of memory, and memory at
        its `peak`, `after_forward` and `before_update`.
    """
    ranks = dist.get_world_size()
    config = dataclasses.replace(config, gradient_accumulation_steps=ranks * micro_batches)
    model, run = build_model(config)
    optimizer = configure_optimizer(model, config)
    results = [measure_fsdp_step(model, optimizer, config, micro_batches, step) for step in range(1 + steps)]
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {
        "bytes": [4 * count_padded_elements(unit, ranks) for unit in units],
        "expected": dict(expected_traffic(model, config, run)),
        "steps": results[1:],
    }


def measure_fsdp_step(model: GPT, optimizer: Any, config: FsdpConfig, micro_batches: int, step: int) -> dict[str, Any]:
    """Run one step, and return its marks, communication and memory, as in `measure_fsdp_steps`."""
    rank, ranks, marks = dist.get_rank(), dist.get_world_size(), Marks()
    data = TokenData(config)
    with CollectiveCounter() as traffic, MemoryTracker(model, optimizer) as memory:
        handles = record_blocks(model, memory, marks)
        for i in range(micro_batches):
            set_gradient_sync(model, config, i == micro_batches - 1)
            loss = model(*data.batch("train", step, i * ranks + rank))
            (loss / micro_batches).backward()
            marks.append(("backward ends", None, memory.timeline[-1][0]))
            del loss
        grad_norm(local_grads(model), shard_group(model))
        before_update = memory.snapshot()
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    communicated = {key: row["tensor_bytes"] for key, row in traffic.rows.items()}
    usage = {"peak": memory.peak, "after_forward": memory.after_forward, "before_update": before_update}
    return {"marks": marks, "communicated": communicated, "timeline": memory.timeline, **usage}


def find_max_gathered_bytes(step: Step) -> int:
    """Return the largest number of bytes of full parameters and flat buffers in a step."""
    return max(usage["gathered"] for _, usage in step["timeline"])


def print_gathered_blocks(variants: Sequence[Mapping[str, Any]], expected_blocks: Mapping[str, int]) -> None:
    """Print the gathered bytes of each variant in units of a block, and check the maximum.

    Args:
        variants: for each rank, what `measure_fsdp_steps` returned for each variant.
        expected_blocks: for each variant, the maximum in blocks, without the root.
    """
    root_bytes, block_bytes = variants[0]["default"]["bytes"][:2]
    print(f"block: {block_bytes:,} bytes; root: {root_bytes:,} bytes, or {root_bytes / block_bytes:.2f} blocks\n")
    print("gathered bytes (blocks)    maximum   between forward and backward")
    for name, blocks in expected_blocks.items():
        steps = [step for rank in variants for step in rank[name]["steps"]]
        # gloo may free a buffer late in some steps, so take the lowest maximum
        maximum = min(find_max_gathered_bytes(step) for step in steps)
        between = min(step["after_forward"]["gathered"] for step in steps)
        print(f"{name:25} {maximum / block_bytes:8.2f} {between / block_bytes:30.2f}")
        assert maximum == root_bytes + blocks * block_bytes
        assert between == root_bytes + (4 * block_bytes if "no reshard" in name else 0)


def sum_state_bytes(usage: Mapping[str, int]) -> int:
    """Return the bytes of model state: parameters, gradients and moments."""
    return sum(usage[name] for name in STATE)


def select_usages(ranks: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the memory before the update of the rank with the largest state, and the lowest peak of a step."""
    steps = [step for rank in ranks for step in rank["steps"]]
    state = max((step["before_update"] for step in steps), key=sum_state_bytes)
    return state, min((step["peak"] for step in steps), key=lambda usage: sum(usage.values()))


def print_memory(usages: Mapping[int, tuple[Mapping[str, int], Mapping[str, int]]], P: int, tensors: int) -> None:
    """Print model state and peak memory for each number of ranks, and check them.

    Args:
        usages: for each number of ranks, the result of `select_usages`.
        P: number of parameters.
        tensors: number of parameter tensors.
    """
    heads = ("parameters", "gradients", "moments", "total", "16P/N", "gathered", "activations", "other")
    print(f"{'model state per rank before the update (bytes)':>61}{'peak memory of a step (bytes)':>37}")
    print("N  " + "".join(f"{head:>12}" for head in heads))
    for number, (state, peak) in usages.items():
        columns = [state[name] for name in STATE] + [sum_state_bytes(state), 16 * P // number]
        columns += [peak[name] for name in ("gathered", "activations", "other")]
        print(f"{number}  " + "".join(f"{count:12,}" for count in columns))
        step_counters = 4 * tensors  # AdamW stores a step count of 4 bytes per parameter tensor
        extra_bytes = sum_state_bytes(state) - step_counters - 16 * P / number
        assert 0 <= extra_bytes < 16 * 64  # a rank stores at most one row of wte more than 1/N
    assert len({peak["activations"] for _, peak in usages.values()}) == 1
    assert all(peak["gradients"] == 0 for _, peak in usages.values())


def print_saved_activations(shape: GPTConfig, B: int, T: int) -> None:
    """Print the tensors that a block saves for its backward pass, in units of one (B, T, C) tensor."""
    btc_bytes = 4 * B * T * shape.n_embd
    print("size (BTC)  tensor                       why the backward pass needs it" + " " * 31 + "also saved with")
    for row in saved_activations(shape, B, T):
        modes = ", ".join(mode for mode in ("selective", "full") if mode in row.modes)
        print(f"{row.bytes / btc_bytes:10.2f}  {row.name:28} {row.why:60} {modes}")


def count_btc_per_block(shape: GPTConfig, B: int, T: int) -> dict[str, float]:
    """Return for each mode of checkpointing what a block saves, in units of one (B, T, C) tensor."""
    btc_bytes = 4 * B * T * shape.n_embd
    counts = {
        mode: sum(row.bytes for row in saved_activations(shape, B, T, mode=mode)) / btc_bytes
        for mode in ("none", "selective", "full")
    }
    return counts | {"every_2": (counts["none"] + counts["full"]) / 2}  # the mean over the blocks


def measure_activation_bytes(model: GPT, x: Tensor) -> int:
    """Return the bytes of activations after a forward pass, without the input tokens."""
    with MemoryTracker(model) as memory:
        loss = model(x, x)
        loss.backward()
    assert memory.after_forward is not None
    return memory.after_forward["activations"] - x.nbytes


def measure_relative_time(models: Mapping[str, GPT], x: Tensor) -> dict[str, float]:
    """Return the CPU time of a forward and backward pass of each model, relative to the model named "none"."""

    def measure_seconds(model: GPT) -> float:
        begin = time.process_time()  # other processes do not change it
        model(x, x).backward()
        return time.process_time() - begin

    rounds = [{mode: measure_seconds(model) for mode, model in models.items()} for _ in range(8)]
    return {mode: min(each[mode] for each in rounds) / min(each["none"] for each in rounds) for mode in models}


def print_modes(
    measured: Mapping[str, int], predicted: Mapping[str, int], btc: Mapping[str, float], times: Mapping[str, float]
) -> None:
    """Print memory and time of each mode of checkpointing, and check the prediction."""
    print("           activations (MB)         per block  time of a step")
    print("mode       measured   predicted     (BTC)      (relative to none, measured here)")
    for mode in measured:
        print(f"{mode:10} {measured[mode] / 1e6:8.2f} {predicted[mode] / 1e6:11.2f}", end="")
        print(f" {btc[mode]:9.2f} {times[mode]:11.2f}")
        assert abs(measured[mode] / predicted[mode] - 1) < 0.01
    assert measured["full"] < measured["every_2"] < measured["selective"] < measured["none"]


def print_costs(costs: Mapping[str, Mapping[str, Any]], P: int) -> None:
    """Print communication and memory of each configuration in units of P, and check both.

    In a ring of four ranks, only one rank of each pair sends to the other pair. In the hybrid configuration both ranks
    of a pair all-reduce with the other pair.
    """
    print(f"{'full tensors of the collectives (P)':>52}{'volume sent (P)':>21}{'memory per rank (bytes / P)':>35}")
    heads = ("all-gather", "reduce-scatter", "all-reduce", "by a rank", "by a node", "model state", "gathered (max)")
    widths = (11, 16, 12, 13, 11, 15, 16)
    print(" " * 14 + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for name, each in costs.items():
        step = each["steps"][-1]
        volumes = step["communicated"]
        assert volumes == each["expected"], name  # exactly the same bytes
        full = {kind: sum(size for key, size in volumes.items() if key[0] == kind) / 4 / P for kind, _ in volumes}
        per_rank = per_node = sum_sent_bytes(volumes) / 4 / P
        if name == "hybrid 2 x 2":
            per_node = 2 * ring_bytes("all-reduce", volumes["all-reduce", 2], 2) / 4 / P
        gather, scatter, reduce = (full.get(kind, 0.0) for kind in ("all-gather", "reduce-scatter", "all-reduce"))
        state, gathered = sum_state_bytes(step["before_update"]) / P, find_max_gathered_bytes(step) / P
        print(f"{name:14}{gather:11.3f}{scatter:16.3f}{reduce:12.3f}{per_rank:13.3f}{per_node:11.3f}", end="")
        print(f"{state:15.2f}{gathered:16.2f}")
        assert abs(state - 16 / (2 if name == "hybrid 2 x 2" else 4)) < 0.01


def sum_sent_bytes(volumes: Mapping[tuple[str, int], int]) -> float:
    """Return the bytes that a rank sends in rings. `volumes` has the bytes of full tensors by (collective, ranks)."""
    return sum(ring_bytes(kind, size, ranks) for (kind, ranks), size in volumes.items())


def print_loss_curves(curves: Mapping[str, Mapping[int, float]], baseline: Mapping[int, float]) -> None:
    """Print some losses of each run, and its largest difference from the baseline."""
    shown_steps = (0, 1, 3, 5)
    print(f"{'loss at step':28}" + "".join(f"{step:11}" for step in shown_steps) + "   max loss difference")
    for name, curve in curves.items():
        difference = compute_max_loss_difference(curve, baseline)
        print(f"{name:28}" + "".join(f"{curve[step]:11.7f}" for step in shown_steps) + f"{difference:22.1e}")
        assert curve.keys() == baseline.keys() and difference < (1e-6 if name != "FSDP, 1 rank" else 1e-12)
