"""What a sharded step costs by the formula: bytes that a rank keeps, gathers and sends. The ledger counts the same.

For P parameters of which P_root are the root's, M micro-batches a rank, and S ranks that share one of R copies, a rank
keeps 16P/S bytes and sends, as rings do, (S-1)/S of

    all-gather         M (2P - P_root)    each unit in the forward and in the backward, the root once
                       M P                with fsdp_reshard_after_forward=False
    reduce-scatter     P, or M P          once a step, or with fsdp_sync_every_micro_batch after every backward

and 2 (R-1)/R of P/S where there are R copies. Gathered elements have the bytes of `dtype`, reduced ones 4. What
`fully_shard` cuts it cuts in rows, and pads to a multiple of S rows: P is then a little more. The step after an
evaluation gathers less, since that leaves gathered what is not freed after a forward.
"""

from collections import Counter

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory.costs import Costs, ring_bytes
from nanoGPT.memory.costs import step_costs as ddp_costs
from nanoGPT.memory.savings import Needs, activation_savings, logits_bytes, name_ranks
from nanoGPT.model import GPT
from phase3_fsdp.activation_bytes import activation_bytes
from phase3_fsdp.fsdp import FsdpConfig, kernels_of

Traffic = Counter[tuple[str, int]]  # bytes of the full tensors, by kind of collective and number of ranks


def step_costs(model: GPT, optimizer: Optimizer, config: FsdpConfig, run: Runtime) -> Costs:
    """What the ledger should find on this rank.

    Args:
        model: from `shard_model`.
    """
    costs = ddp_costs(model, optimizer, config, run)
    if not config.use_fsdp:
        return costs
    params = [p for p in model.parameters() if isinstance(p, DTensor)]
    shards = params[0].device_mesh.size(-1)
    whole = sum(padded(unit, shards) for unit in model.modules() if isinstance(unit, FSDPModule))
    moments = sum(8 * p.to_local().numel() + 4 for p in params)
    state = {"parameters": 4 * whole // shards, "gradients": 4 * whole // shards, "optimizer_state": moments}
    if config.fsdp_cpu_offload and run.device.type == "cuda":  # each gradient is copied to the host, without padding
        state["gradients"] = 4 * sum(p.to_local().numel() for p in params)
    return Costs(state, expected_traffic(model, config, run), whole - sum(p.numel() for p in params))


def own_params(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a unit: those of the module that no unit inside it has."""
    inner = {id(p) for m in module.modules() if m is not module and isinstance(m, FSDPModule) for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in inner]


def padded(module: nn.Module, shards: int) -> int:
    """Elements of a unit's parameters, their rows filled up to a multiple of the ranks."""
    return sum(-(-len(p) // shards) * shards * (p.numel() // len(p)) for p in own_params(module))


def expected_traffic(model: GPT, config: FsdpConfig, run: Runtime) -> Traffic:
    """Bytes of the tensors that one step's collectives have, this rank's part in them not yet counted.

    Args:
        model: from `shard_model`.
    """
    micro_batches = config.gradient_accumulation_steps // run.world_size
    traffic: Traffic = Counter()
    if not config.use_fsdp:
        if run.world_size > 1:
            traffic["all-reduce", run.world_size] = 4 * sum(p.numel() for p in model.parameters())
        return traffic
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    shards, copies = mesh.size(-1), mesh.size() // mesh.size(-1)
    for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
        size = padded(unit, shards)
        gathers = 1 if unit is model or not config.fsdp_reshard_after_forward else 2
        if shards > 1:
            traffic["all-gather", shards] += micro_batches * gathers * size * run.dtype.itemsize
            traffic["reduce-scatter", shards] += 4 * size * (micro_batches if config.fsdp_sync_every_micro_batch else 1)
        if copies > 1:
            traffic["all-reduce", copies] += 4 * size // shards
    traffic["all-reduce", shards] += 8  # the squared norm, one fp64
    return traffic


def describe_sharding(model: GPT, config: FsdpConfig, run: Runtime) -> str:
    """What rank 0 says at the start: units, this rank's share, and the traffic of a step."""
    params = sum(p.numel() for p in model.parameters())
    traffic = expected_traffic(model, config, run)
    sent = sum(ring_bytes(kind, size, ranks) for (kind, ranks), size in traffic.items())
    work = ", ".join(f"{kind} {size / 1e6:,.1f} MB over {ranks}" for (kind, ranks), size in traffic.items() if size > 8)
    step = f"a step: {work}; a rank sends {sent / 1e6:,.1f} MB, as rings count"
    if not config.use_fsdp:
        return f"not sharded: each of {run.world_size} rank(s) keeps {16 * params / 1e6:,.1f} MB of state\n{step}"
    parts = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    sizes = Counter(sum(p.numel() for p in own_params(m)) for m in parts)
    mine = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    shards = next(p.device_mesh.size(-1) for p in model.parameters() if isinstance(p, DTensor))
    said = " + ".join(f"{count} x {size:,}" for size, count in sizes.items()) or "none"
    root = sum(p.numel() for p in own_params(model))
    return (
        f"sharded over {shards} of {run.world_size} rank(s): units of {said} parameters, the root's {root:,}; "
        f"rank 0 keeps {mine:,} of {params:,}, {16 * mine / 1e6:,.1f} MB of state\n{step}"
    )


# ---- what the options free where memory is short


def memory_savings(config: FsdpConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that every flag that is not set yet frees, and that more ranks would free."""
    savings = activation_savings(config, needs, run) | checkpointing_savings(config, needs, run)
    kernels = kernels_of(config)
    if needs.is_gpu and "loss" not in kernels:
        savings[f"--kernels={'loss' if kernels == 'none' else kernels + ',loss'}"] = logits_bytes(config, needs, run)
    return savings | (sharding_savings(config, needs, run) if config.use_fsdp else ddp_savings(needs, run))


def checkpointing_savings(config: FsdpConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return what recomputing every block in the backward pass frees, beyond what is recomputed already."""
    shape, mode = needs.shape, config.fsdp_activation_checkpointing
    now, full = (activation_bytes(shape, config.batch_size, config.block_size, run.dtype, m) for m in (mode, "full"))
    return {"--fsdp_activation_checkpointing=full": min(now - full, needs.activations)}


def sharding_savings(config: FsdpConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return what sharding over more ranks, and keeping the state elsewhere, frees of the state."""
    N, shards = run.world_size, config.shards(run.world_size, run.local_world_size)
    is_on_gpu = run.device.type != "cpu" and not config.fsdp_cpu_offload
    state = sum(needs.state.values()) if is_on_gpu == needs.is_gpu else 0  # else it is in the other memory
    savings = {f"`make phase3` on {name_ranks(2 * N, needs, run)}": state / 2}
    if shards < N:
        savings["--fsdp_shard_size=all"] = state * (1 - shards / N)
    if run.device.type != "cpu":
        savings[f"--fsdp_cpu_offload={is_on_gpu}"] = state
    if config.async_save and not needs.is_gpu:
        savings["--async_save=False"] = needs.state["parameters"] + needs.state["optimizer_state"]
    computes_here = needs.is_gpu or run.device.type == "cpu"
    return savings | (gathering_savings(config, needs, run) if computes_here and shards > 1 else {})


def gathering_savings(config: FsdpConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return what options free of the parameters and gradients that are whole for a while."""
    shape, shards = needs.shape, config.shards(run.world_size, run.local_world_size)
    block = 12 * shape.n_embd**2 * run.dtype.itemsize
    savings = {}
    if config.gradient_accumulation_steps > run.world_size and not config.fsdp_sync_every_micro_batch:
        savings["--fsdp_sync_every_micro_batch=True"] = 4 * shape.count_params() * (1 - 1 / shards)
    if not config.fsdp_reshard_after_forward:
        savings["--fsdp_reshard_after_forward=True"] = block * (shape.n_layer - 1)
    if config.fsdp_prefetch:
        savings["--fsdp_prefetch=0"] = block * min(config.fsdp_prefetch, shape.n_layer - 1)
    return savings


def ddp_savings(needs: Needs, run: Runtime) -> dict[str, float]:
    """Return what FSDP would free on a rank that shards nothing."""
    ranks, total = max(run.world_size, 2), sum(needs.state.values())
    if run.world_size > 1:
        return {"--use_fsdp=True": total * (1 - 1 / ranks)}
    return {f"`make phase3` on {name_ranks(ranks, needs, run)} with --use_fsdp=True": total / 2}
