"""Checks of the exercises on variants of ZeRO-1: the naive optimizer, the owners of full parameters, and ZeRO-2."""

from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from phase1_zero1 import zero1
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.exercises.checks.zero1 import (
    BUCKET_MB,
    build_model,
    check_same_on_all_ranks,
    flatten,
    train_sharded,
)
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import is_close


def split_weights(weights: Tensor) -> list[Tensor]:
    return list(weights.split([p.numel() for p in build_model().parameters()]))


def check_naive(answer: ModuleType, expected: dict[str, Any]) -> None:
    made: list[NaiveZero1Optimizer] = []

    def make(*args: Any, **kwargs: Any) -> NaiveZero1Optimizer:
        made.append(NaiveZero1Optimizer(*args, **kwargs))
        return made[0]

    result = train_sharded(make)
    local = sum(p.numel() for group in made[0].local_optimizer.param_groups for p in group["params"])
    owned = sum(p.numel() for p, owner in made[0].owner.items() if owner == dist.get_rank())
    expect(
        local == owned,
        f"The local optimizer has {local} elements after the step, and this rank owns {owned}: it has the state of all "
        'parameters. Copy every option of a group except "params".',
    )
    weights, traffic = result["weights"], result["traffic"]
    check_same_on_all_ranks(
        weights,
        "The ranks have different parameters after the step: a rank updates only the parameters that it owns. "
        "Broadcast each parameter from its owner.",
    )
    initial = flatten(build_model())
    expect(not torch.equal(weights, initial), "The parameters have not changed: step the local optimizer.")
    unchanged = [torch.equal(a, b) for a, b in zip(*(split_weights(w) for w in (weights, initial)), strict=True)]
    expect(
        not any(unchanged),
        f"{sum(unchanged)} of the parameters have not changed. Only its owner has the new values of a parameter, so "
        "broadcast each parameter from its owner.",
    )
    calls, size = traffic.get("broadcast", (0, 0))
    expect(
        size == initial.nbytes,
        f"The ledger counts broadcasts of {size:,} bytes, but the parameters have {initial.nbytes:,}: each parameter "
        "is broadcast once, from its owner.",
    )
    expect(
        traffic.get("all-reduce", (0, 0))[1] == initial.nbytes,
        "The gradients must be averaged once per step: call reduce_gradients, which remembers that it has run.",
    )
    expect(
        is_close(weights, expected["weights"]),
        "The parameters are equal on all ranks, but differ from one process. The learning rate changes in every "
        "step: copy the options of self.param_groups to the groups of the local optimizer before its step.",
    )


def check_owners(answer: ModuleType, _: Any) -> None:
    def get_loads(sizes: tuple[int, ...], ranks: int) -> list[int]:
        params = [torch.empty(size) for size in sizes]
        owner = answer.assign_owners(params, ranks, Tensor.numel)
        expect(len(owner) == len(params), "Each parameter must have exactly one owner.")
        return [sum(p.numel() for p, r in owner.items() if r == rank) for rank in range(ranks)]

    expect(
        max(get_loads((8, 7, 1, 1, 1), 2)) <= 10,
        "One rank gets nearly all parameters: give each parameter to the rank that has the least so far.",
    )
    loads = get_loads((2, 2, 2, 6), 2)
    expect(
        loads == [6, 6],
        f"The ranks store {loads} elements instead of 6 each. Assign the largest parameters first, and then each one "
        "to the rank whose parameters have the smallest total cost so far. A large parameter at the end cannot be "
        "balanced.",
    )
    owner = answer.assign_owners([torch.empty(n) for n in (1, 2, 3, 4)], 2, lambda p: 12 // p.numel())
    loads = [sum(12 // p.numel() for p, r in owner.items() if r == rank) for rank in range(2)]
    expect(sorted(loads) == [12, 13], f"The costs {loads} ignore the argument `cost`.")


def check_zero2(answer: ModuleType, expected: dict[str, Any]) -> None:
    def make(params: Any, optimizer_class: type[AdamW], lr: float) -> Zero1Optimizer:
        with mock.patch.object(zero1, "Zero2Bucket", answer.Zero2Bucket):
            return Zero1Optimizer(params, optimizer_class, bucket_mb=BUCKET_MB, stage=2, lr=lr)

    result = train_sharded(make, sync_all=True)
    expect(
        result["gradient_bytes"] == 0,
        f"Between two backward passes a rank stores {result['gradient_bytes']:,} bytes of full gradients: ZeRO-2 "
        "frees the buffer of a bucket as soon as its reduce-scatter has ended and this rank's slice is added to "
        "local_grads.",
    )
    ratio = result["norms"][0] / expected["norms"][0]
    expect(
        is_close(ratio, 1.0, 1e-4),
        f"The gradient norm of step 0 is {ratio:.3f} times that of one process. Each micro-batch reduces its own "
        "gradient: set param.grad to None in start_reduce. In add_average, wait, and add this rank's slice of every "
        "average to local_grads in place, because the shards are views of it.",
    )
    ratio = result["norms"][1] / expected["norms"][1]
    expect(
        is_close(ratio, 1.0, 1e-4),
        f"The gradient norm of step 1 is {ratio:.3f} times that of one process, and step 0 was right: the gradients "
        "of step 0 are still in local_grads. Set them to zero in clear_gradients, in place.",
    )
    reduced, gathered = (result["traffic"][kind][1] for kind in ("reduce-scatter", "all-gather"))
    expect(
        reduced == 2 * gathered,
        f"The ledger counts reduce-scatters of {reduced:,} bytes and all-gathers of {gathered:,} in a step with 2 "
        "micro-batches. ZeRO-2 reduces every bucket once per micro-batch.",
    )
    expect(is_close(result["weights"], expected["weights"]), "The weights differ from one process.")
