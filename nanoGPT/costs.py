"""Formulas for the memory and communication of a training step, and functions that read an optimizer to measure it.

This module is for a trainer without sharding, in which every rank stores the full model state. The modules `costs` of
phases 1 and 3 override some of these functions (see `measure/formulas.py`).

The communication volume per rank is that of the ring algorithm (Patarasuk & Yuan 2009). With N ranks it is 2n(N-1)/N
bytes for an all-reduce of n bytes. It is n(N-1)/N bytes for a reduce, reduce-scatter, all-gather or broadcast whose
full tensor has n bytes, and for an all-to-all in which a rank has n bytes for all ranks together.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.model import GPTConfig
from nanoGPT.options.muon import MuonWithAdamW
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


def count_gpt2_params(shape: GPTConfig) -> int:
    """Return the number of parameters of a GPT-2, without building it. The tied embedding and head count once."""
    C = shape.n_embd
    block = 12 * C * C + 2 * C + (11 * C if shape.bias else 0)  # matrices, two LayerNorm gains, all biases
    return shape.n_layer * block + (shape.vocab_size + shape.block_size) * C + C + (C if shape.bias else 0)


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the state of Muon, AdamW or both, on this rank after a step."""
    if isinstance(optimizer, MuonWithAdamW):
        return sum(map(optimizer_bytes, optimizer.optimizers))
    numels = [local_shard(p).numel() for group in optimizer.param_groups for p in group["params"]]
    if "ns_steps" in optimizer.defaults:  # Muon, with Newton-Schulz steps: one momentum in fp32
        return 4 * sum(numels)
    return 8 * sum(numels) + 4 * len(numels)  # AdamW: two moments in fp32, and a step count per tensor


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


def local_param_fraction(config: TrainConfig, world_size: int, local_world_size: int, on_gpu: bool) -> float:
    """Return the fraction of all parameters that a rank stores in GPU memory, or in CPU memory."""
    return 1.0


def min_gpu_state(config: TrainConfig, world_size: int, local_world_size: int) -> float:
    """Return the bytes of model state per parameter that a rank stores in GPU memory just before an update."""
    return 8 + moment_bytes(config)


def moment_bytes(config: TrainConfig) -> int:
    """Return the bytes of optimizer state per parameter. Muon stores 4 for a matrix of a block, and 8 for the rest."""
    return 4 if config.optimizer == "muon" else 8


def local_gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with this rank's part of its averaged gradient."""
    for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        yield param, local_shard(param.grad)


def gradient_buffers(optimizer: Optimizer) -> list[Tensor]:
    """Return the buffers of gradients that stay allocated between steps."""
    return []


def wait_for_params(optimizer: Optimizer) -> None:
    """Wait until every parameter is complete on this rank; return at once if `step` already waited."""
