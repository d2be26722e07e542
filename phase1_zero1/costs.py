"""Formulas for the cost of a step with ZeRO-1 or ZeRO-2: model state and communication per rank.

The ledger measures the same numbers. For P parameters on N ranks, a rank stores 4P bytes of parameters, 4P of gradients
and about 8P/N of AdamW's moments. The communication volume per rank (ring algorithm) is (N-1)/N times

    flat               reduce-scatter P, all-gather P
    Muon's matrices    reduce P, broadcast P
    naive and torch    all-reduce P (counts twice), broadcast P

with 4 bytes per element. With ZeRO-2, gradients use 4P/N bytes, and each of M micro-batches reduces them. The flat
backend also pads its buckets to N equal slices. It all-reduces one byte per parameter, which says whether any rank has
a gradient of it, and the squared gradient norm, a scalar of 8 bytes.
"""

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

import nanoGPT.costs
from nanoGPT.costs import Costs, moment_bytes, optimizer_bytes
from nanoGPT.distributed.runtime import Runtime
from phase1_zero1.muon import OwnedMatrix
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.protocol import DataParallelOptimizer
from phase1_zero1.zero1 import Zero1Optimizer

AnyZero1Optimizer = Zero1Optimizer | DataParallelOptimizer


def step_costs(model: nn.Module, optimizer: AnyZero1Optimizer, config: Zero1Config, run: Runtime) -> Costs:
    """Return the costs that the ledger should measure on this rank, for any backend."""
    params, N = sum(p.numel() for p in model.parameters()), run.world_size
    if isinstance(optimizer, Zero1Optimizer):
        return flat_costs(optimizer, params, config.gradient_accumulation_steps // N, N)
    state = {"parameters": 4 * params, "gradients": 4 * params, "optimizer_state": inner_state_bytes(optimizer)}
    traffic = Counter({(kind, N): 4 * params for kind in ("all-reduce", "broadcast")})
    return Costs(state, traffic if N > 1 else Counter())


def flat_costs(optimizer: Zero1Optimizer, params: int, micro_batches: int, N: int) -> Costs:
    """Return the costs of the flat backend: full buckets with padding, and the moments of this rank's shards."""
    traffic: Counter[tuple[str, int]] = Counter()
    length = num_params = local_length = 0
    for bucket in optimizer.buckets:
        size = bucket.flat_params.numel()
        has_owner = isinstance(bucket, OwnedMatrix)
        reduce, gather = ("reduce", "broadcast") if has_owner else ("reduce-scatter", "all-gather")
        traffic[reduce, N] += 4 * size * (micro_batches if optimizer.shards_gradients else 1)
        traffic[gather, N] += 4 * size
        if bucket.shards:
            local_length += bucket.local_slice.stop - bucket.local_slice.start
        length, num_params = length + size, num_params + len(bucket.params)
    traffic["all-reduce", N] = num_params + 8
    state = {
        "parameters": 4 * length,
        "gradients": 4 * (local_length if optimizer.shards_gradients else length),
        "optimizer_state": inner_state_bytes(optimizer),
    }
    return Costs(state, traffic if N > 1 else Counter(), length - params)


def inner_state_bytes(optimizer: AnyZero1Optimizer) -> int:
    """Return the bytes of optimizer state on this rank after the first step."""
    return sum(map(optimizer_bytes, optimizer.inner_optimizers))


def min_gpu_state(config: Zero1Config, world_size: int, local_world_size: int) -> float:
    """Return the bytes of model state per parameter that a rank stores in GPU memory just before an update."""
    sharded_gradients = 4 if config.zero_stage == 2 else 0
    return 8 - sharded_gradients + (sharded_gradients + moment_bytes(config)) / world_size


def local_gradients(optimizer: AnyZero1Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with this rank's part of its averaged gradient: its shard with the flat backend."""
    if isinstance(optimizer, Zero1Optimizer):
        return ((shard.param, shard.grad) for shard in optimizer.shards)
    return nanoGPT.costs.local_gradients(optimizer)


def gradient_buffers(optimizer: AnyZero1Optimizer) -> list[Tensor]:
    """Return the buffers of all buckets that hold this rank's averaged gradients, and with ZeRO-1 all gradients."""
    return [bucket.local_grads for bucket in optimizer.buckets] if isinstance(optimizer, Zero1Optimizer) else []


def wait_for_params(optimizer: AnyZero1Optimizer) -> None:
    """Wait until every parameter is complete on this rank; return at once if `step` already waited."""
    optimizer.wait_for_params()
