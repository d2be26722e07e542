"""Formulas for the cost of an FSDP step: model state and communication per rank. The ledger measures the same numbers.

There are P parameters, P_root of them in the root unit, M micro-batches per rank, and R replicas of the model, each
sharded over S ranks. A rank stores 16P/S bytes of state. Its communication volume (ring algorithm), in elements, is
(S-1)/S times

    all-gather         M (2P - P_root)    each unit in the forward and in the backward pass, the root once
                       P                  once per step with fsdp_reshard_after_forward=False
    reduce-scatter     P, or M P          once per step, or with fsdp_sync_every_micro_batch after every backward pass

and with R > 1 replicas also 2 (R-1)/R times P/S for the all-reduce. An all-gathered element has the bytes of `dtype`, a
reduced one 4 bytes. `fully_shard` shards parameters by rows and pads them to a multiple of S rows, which makes P
slightly larger. The first step after an evaluation all-gathers less: units that FSDP does not free after a forward pass
are still unsharded.

With Muon, the matrices of the blocks need 4 bytes of optimizer state per element instead of 8. A rank puts about 2/S of
their elements into all-to-alls, in bf16: its rows of all matrices, and all rows of the matrices that it owns.
"""

from collections import Counter

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import nanoGPT.costs
from nanoGPT.costs import Costs, optimizer_bytes, ring_bytes
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.model import GPT
from nanoGPT.options.muon import assign_owners, count_multiplications, muon_groups
from phase3_fsdp.fsdp import FsdpConfig

CollectiveBytes = Counter[tuple[str, int]]  # bytes of the full tensors, by collective and number of ranks


def step_costs(model: GPT, optimizer: Optimizer, config: FsdpConfig, run: Runtime) -> Costs:
    """Return the costs that the ledger should measure on this rank.

    Args:
        model: from `shard_model`.
    """
    params = [p for p in model.parameters() if isinstance(p, DTensor)]
    num_shards = params[0].device_mesh.size(-1)
    elements = sum(count_padded_elements(unit, num_shards) for unit in model.modules() if isinstance(unit, FSDPModule))
    state = {
        "parameters": 4 * elements // num_shards,
        "gradients": 4 * elements // num_shards,
        "optimizer_state": optimizer_bytes(optimizer),
    }
    if config.fsdp_cpu_offload and run.device.type == "cuda":  # each gradient is copied to the CPU without padding
        state["gradients"] = 4 * sum(p.to_local().numel() for p in params)
    return Costs(state, expected_traffic(model, config, run), elements - sum(p.numel() for p in params))


def own_params(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a unit: those of the module that belong to no unit inside it."""
    inner = {id(p) for m in module.modules() if m is not module and isinstance(m, FSDPModule) for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in inner]


def count_padded_elements(module: nn.Module, num_shards: int) -> int:
    """Return the number of elements of a unit's parameters, with rows padded to a multiple of `num_shards`."""
    return sum(pad_rows(p, num_shards) * (p.numel() // len(p)) for p in own_params(module))


def pad_rows(param: Tensor, num_shards: int) -> int:
    """Return the number of rows of a parameter after FSDP has padded it to a multiple of `num_shards`."""
    return -(-len(param) // num_shards) * num_shards


def expected_traffic(model: GPT, config: FsdpConfig, run: Runtime) -> CollectiveBytes:
    """Return the bytes of the full tensors in the collectives of one step, before the factors of the ring algorithm.

    Args:
        model: from `shard_model`.
    """
    micro_batches = config.gradient_accumulation_steps // run.world_size
    traffic: CollectiveBytes = Counter()
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    num_shards, replicas = mesh.size(-1), mesh.size() // mesh.size(-1)
    reductions = micro_batches if config.fsdp_sync_every_micro_batch else 1
    for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
        size = count_padded_elements(unit, num_shards)
        gathers = micro_batches * (1 if unit is model else 2) if config.fsdp_reshard_after_forward else 1
        if num_shards > 1:
            traffic["all-gather", num_shards] += gathers * size * run.dtype.itemsize
            traffic["reduce-scatter", num_shards] += reductions * size * 4
        if replicas > 1:
            traffic["all-reduce", replicas] += 4 * size // num_shards
    traffic["all-reduce", num_shards] += 8  # the squared norm, one fp64
    if config.optimizer == "muon" and num_shards > 1:
        traffic["all-to-all", num_shards] = muon_bytes_sent(model, config, mesh)
    return traffic


def muon_bytes_sent(model: GPT, config: FsdpConfig, mesh: DeviceMesh) -> int:
    """Return the bytes that this rank puts into Muon's all-to-alls: its rows, then full matrices, in bf16."""
    matrices = muon_groups(model, config)[0]["params"]
    owner = assign_owners(matrices, mesh.size(-1), count_multiplications)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return 2 * sum(local_shard(p).numel() + (p.numel() if owner[p] == rank else 0) for p in matrices)


def local_param_fraction(config: FsdpConfig, world_size: int, local_world_size: int, on_gpu: bool) -> float:
    """Return the fraction of all parameters that a rank stores in GPU memory, or in CPU memory."""
    return 0.0 if on_gpu and config.fsdp_cpu_offload else 1 / config.ranks_per_replica(world_size, local_world_size)


def min_gpu_state(config: FsdpConfig, world_size: int, local_world_size: int) -> float:
    """Return the bytes of model state per parameter that a rank stores in GPU memory just before an update."""
    state = nanoGPT.costs.min_gpu_state(config, world_size, local_world_size) if config.trains else 4
    return state * local_param_fraction(config, world_size, local_world_size, on_gpu=True)


def describe_sharding(model: GPT, config: FsdpConfig, run: Runtime) -> str:
    """Return what rank 0 prints at the start: the units, its shards, and the communication of one step."""
    params = sum(p.numel() for p in model.parameters())
    traffic = expected_traffic(model, config, run)
    volume = sum(ring_bytes(kind, size, ranks) for (kind, ranks), size in traffic.items())
    collectives = ", ".join(
        f"{kind} {size / 1e6:,.1f} MB over {ranks} ranks" for (kind, ranks), size in traffic.items() if size > 8
    )
    step = (
        f"per step: {collectives or 'no collectives'}; "
        f"communication volume per rank {volume / 1e6:,.1f} MB (ring algorithm)"
    )
    modules: dict[str, nn.Module] = dict(model.named_modules())
    parts = {name: m for name, m in modules.items() if isinstance(m, FSDPModule) and m is not model}
    sizes = Counter(sum(p.numel() for p in own_params(m)) for m in parts.values())
    local = sum(local_shard(p).numel() for p in model.parameters())
    num_shards = next(p.device_mesh.size(-1) for p in model.parameters() if isinstance(p, DTensor))
    units = [f"{count} unit{'s' * (count > 1)} of {size:,} parameters" for size, count in sizes.items()]
    root = sum(p.numel() for p in own_params(model))
    names = list(parts)
    shown = f"{names[0]} to {names[-1]}" if len(names) > 2 else ", ".join(names)
    if not names:
        largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
        shown = (
            f"no module has --fsdp_wrap={config.fsdp_wrap} parameters, so the full model is gathered at once: use "
            f"--fsdp_wrap={largest} or less, or --fsdp_wrap=block"
        )
    return (
        f"wrapping the model with FSDP2 (fully_shard): {', '.join([*units, f'a root unit of {root:,}'])} ({shown})\n"
        f"sharded over {num_shards} of {run.world_size} rank(s); rank 0 stores {local:,} of {params:,} parameters\n"
        f"{step}"
    )
