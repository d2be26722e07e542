"""What a training step costs a rank by the formula, and what flags would free where memory is short.

Each trainer has a `costs` module with the same two functions, `step_costs` and `memory_savings`: this one is for a
trainer in which every rank keeps everything. A ring sends per rank (Patarasuk & Yuan 2009) 2n(N-1)/N bytes for an
all-reduce of n bytes over N ranks, and n(N-1)/N for a reduce, reduce-scatter, all-gather or broadcast whose full tensor
has n bytes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory.savings import Needs, activation_savings, name_ranks
from nanoGPT.optim import HasStateBytes, adamw_bytes
from nanoGPT.train_config import TrainConfig


def ring_bytes(kind: str, tensor_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring for a collective whose full tensor has `tensor_bytes`.

    Args:
        kind: as in `COLLECTIVES`: all-reduce, all-gather, reduce-scatter, broadcast or reduce.
        tensor_bytes: of the whole tensor: an all-gather's output, a reduce-scatter's input.
        ranks: in the group.
    """
    return (2 if kind == "all-reduce" else 1) * tensor_bytes * (ranks - 1) / ranks


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors hold on this rank, each storage once; of a sharded tensor, this rank's shard."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass
class Costs:
    """What a step costs this rank by the formula; the ledger prints it beside what it counted.

    Attributes:
        state: bytes of parameters, gradients and optimizer_state.
        traffic: bytes of the full tensors of its collectives, by kind and number of ranks.
        padding: elements among them that only make shapes divide.
        has_gradient_buffers: whether all gradients have a place in buffers, also while there are none.
    """

    state: dict[str, int]
    traffic: "Counter[tuple[str, int]]" = field(default_factory=Counter)
    padding: int = 0
    has_gradient_buffers: bool = False


def step_costs(model: nn.Module, optimizer: Optimizer, config: TrainConfig, run: Runtime) -> Costs:
    """Return the costs with DDP: everything on every rank, in fp32, and one all-reduce of the gradient.

    Args:
        model: whole on this rank.
        optimizer: of the model's parameters.
        config: not needed here; a phase's options change its costs.
        run: this rank's Runtime.
    """
    size = 4 * sum(p.numel() for p in model.parameters())
    state = {"parameters": size, "gradients": size, "optimizer_state": optimizer_bytes(optimizer)}
    traffic = Counter({("all-reduce", run.world_size): size} if run.world_size > 1 else {})
    return Costs(state, traffic, has_gradient_buffers=run.world_size > 1)


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state for the parameters of an optimizer, which may say so itself; else they are AdamW's."""
    if isinstance(optimizer, HasStateBytes):
        return optimizer.expected_state_bytes()
    return adamw_bytes(p for group in optimizer.param_groups for p in group["params"])


def memory_savings(config: TrainConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that flags, or another `make` command, free where every rank keeps everything."""
    ranks = max(run.world_size, 2)
    where, optimizer_state = name_ranks(ranks, needs, run), needs.state["optimizer_state"]
    return activation_savings(config, needs, run) | {
        f"`make phase1` on {where}": optimizer_state * (1 - 1 / ranks),
        f"`make phase3` on {where}": sum(needs.state.values()) * (1 - 1 / ranks),
    }
