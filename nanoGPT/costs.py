"""Formulas for the memory and communication of a training step.

This module is for a trainer without sharding, in which every rank stores the full model state. The `step_costs` of
phases 1 and 3 are in their modules `costs`.

The communication volume per rank is that of the ring algorithm (Patarasuk & Yuan 2009). With N ranks it is 2n(N-1)/N
bytes for an all-reduce of n bytes. It is n(N-1)/N bytes for a reduce, reduce-scatter, all-gather or broadcast whose
full tensor has n bytes, and for an all-to-all in which a rank has n bytes for all ranks together.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.optim import optimizer_bytes
from nanoGPT.train_config import TrainConfig


def ring_bytes(kind: str, tensor_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends for one collective with the ring algorithm.

    Args:
        kind: all-reduce, all-gather, reduce-scatter, broadcast, reduce or all-to-all.
        tensor_bytes: size of the full tensor, such as the output of an all-gather or the input of a reduce-scatter. For
            an all-to-all, the input of this rank.
        ranks: number of ranks in the group.
    """
    return (2 if kind == "all-reduce" else 1) * tensor_bytes * (ranks - 1) / ranks


def tokens_to_hide(flops: float, bandwidth: float, moved: int, computed: int) -> float:
    """Return how many tokens of a micro-batch take as long to compute as the parameters take to communicate.

    With more tokens per rank, the computation of a unit hides the communication of the next one.

    Args:
        flops: FLOP/s that matrix products reach on a rank.
        bandwidth: bytes/s in one direction: of a GPU's link to its node, or of all network adapters of a node together,
            because NCCL sends a part of the data over each of them. The smaller one counts.
        moved: bytes per parameter on the link, such as 2 for an all-gather in bf16.
        computed: FLOPs per parameter and token: 2 in the forward pass, 4 in the backward pass.
    """
    return moved / bandwidth * flops / computed


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors on this rank. Shared storage counts once; a sharded tensor counts with its shard."""
    storages = {}
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # not data_ptr(): it is 0 for tensors on the meta device
    return sum(storages.values())


@dataclass
class Costs:
    """The predicted costs of a step on this rank. The ledger prints them next to the measured ones.

    Attributes:
        state: bytes of parameters, gradients and optimizer_state.
        traffic: bytes of the full tensors of the collectives, by kind and number of ranks.
        padding: number of padding elements in these tensors, which make them divisible by the number of ranks.
    """

    state: dict[str, int]
    traffic: "Counter[tuple[str, int]]" = field(default_factory=Counter)
    padding: int = 0


def step_costs(model: nn.Module, optimizer: Optimizer, config: TrainConfig, run: Runtime) -> Costs:
    """Return the costs with DDP: the full model state in fp32 on every rank, and one all-reduce of the gradients.

    Args:
        model: the full model.
        optimizer: the optimizer of its parameters.
        config: not used here; in a phase, options change the costs.
        run: this rank's Runtime.
    """
    size = 4 * sum(p.numel() for p in model.parameters())
    state = {"parameters": size, "gradients": size, "optimizer_state": optimizer_bytes(optimizer)}
    traffic = Counter({("all-reduce", run.world_size): size} if run.world_size > 1 else {})
    return Costs(state, traffic)
