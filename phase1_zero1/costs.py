"""Formulas for the cost of a ZeRO-1 step: model state and communication per rank. The ledger measures the same numbers.

For P parameters on N ranks, a rank stores 4P bytes of parameters, 4P of gradients and about 8P/N of AdamW's moments.
The communication volume per rank (ring algorithm) is (N-1)/N times

    flat               reduce-scatter P, all-gather P
    Muon's matrices    reduce P, broadcast P
    naive and torch    all-reduce P (counts twice), broadcast P

with 4 bytes per element. The flat backend also pads its buckets to N equal slices. It all-reduces one byte per
parameter, which says whether any rank has a gradient of it, and the squared gradient norm, a scalar of 8 bytes.
"""

from collections import Counter

from torch import nn

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory.costs import Costs
from nanoGPT.memory.savings import Needs, activation_savings, name_ranks
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.protocol import DataParallelOptimizer
from phase1_zero1.zero1 import Zero1Optimizer


def step_costs(model: nn.Module, optimizer: DataParallelOptimizer, config: Zero1Config, run: Runtime) -> Costs:
    """Return the costs that the ledger should measure on this rank, for any backend."""
    params, N = sum(p.numel() for p in model.parameters()), run.world_size
    if isinstance(optimizer, Zero1Optimizer):
        return flat_costs(optimizer, params, N)
    state = {"parameters": 4 * params, "gradients": 4 * params, "optimizer_state": optimizer.expected_state_bytes()}
    traffic = Counter({(kind, N): 4 * params for kind in optimizer.collectives})
    return Costs(
        state, traffic if N > 1 else Counter(), has_gradient_buffers=N > 1 and not optimizer.averages_gradients
    )


def flat_costs(optimizer: Zero1Optimizer, params: int, N: int) -> Costs:
    """Return the costs of the flat backend: full buckets with padding, and the moments of this rank's shards."""
    traffic: Counter[tuple[str, int]] = Counter()
    length = num_params = 0
    for bucket in optimizer.buckets:
        size = bucket.flat_params.numel()
        for kind in bucket.COLLECTIVES:
            traffic[kind, N] += 4 * size
        length, num_params = length + size, num_params + len(bucket.params)
    traffic["all-reduce", N] = num_params + 8
    state = {"parameters": 4 * length, "gradients": 4 * length, "optimizer_state": optimizer.expected_state_bytes()}
    return Costs(state, traffic if N > 1 else Counter(), length - params, has_gradient_buffers=True)


def memory_savings(config: Zero1Config, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that each flag, or another `make` command, frees on this rank."""
    state_savings = zero1_savings(needs, run) if config.use_zero1 else ddp_savings(needs, run)
    return activation_savings(config, needs, run) | state_savings


def zero1_savings(needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that more ranks, or FSDP, free on this rank."""
    N, ranks, optimizer_state = run.world_size, max(run.world_size, 2), needs.state["optimizer_state"]
    unsharded = sum(needs.state.values()) - optimizer_state
    return {
        f"`make phase1` on {name_ranks(2 * N, needs, run)}": optimizer_state / 2,
        f"`make phase3` on {name_ranks(ranks, needs, run)}": unsharded * (1 - 1 / ranks)
        + optimizer_state * (1 - N / ranks),
    }


def ddp_savings(needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that ZeRO-1, or FSDP, frees on a rank that shards nothing."""
    ranks, total = max(run.world_size, 2), sum(needs.state.values())
    flag = {"--use_zero1=True": needs.state["optimizer_state"] * (1 - 1 / ranks)} if run.world_size > 1 else {}
    return flag | {f"`make phase3` on {name_ranks(ranks, needs, run)}": total * (1 - 1 / ranks)}
