"""Train with ZeRO-1 across the replicas of hybrid FSDP: a replica updates a part of the shard that all replicas store.

Call `train_hybrid` on 4 ranks. `bench.sharding.hybrid_zero1` compares it with hybrid FSDP alone.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.metrics.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.fsdp import FsdpConfig, init_shards, shard_model

STEPS, WARMUP = 12, 2  # the first steps are not timed


class ReplicatedShardAdamW:
    """AdamW on this replica's part of each local shard, followed by an all-gather of the parts over the replicas.

    Args:
        params: DTensors of a model that is sharded over a mesh of (replicas, shards) ranks.
    """

    def __init__(self, params: list[nn.Parameter], learning_rate: float) -> None:
        mesh = params[0].device_mesh  # type: ignore[attr-defined]
        self.group, self.rank, self.replicas = mesh.get_group(0), mesh.get_local_rank(0), mesh.size(0)
        self.params = params
        self.shards = [local_shard(p.detach()).view(-1) for p in params]
        self.parts = [nn.Parameter(self.cut(shard, self.rank)) for shard in self.shards]
        self.optimizer = torch.optim.AdamW(self.parts, lr=learning_rate)
        self.length = max(sum(len(self.cut(s, r)) for s in self.shards) for r in range(self.replicas))

    def cut(self, shard: Tensor, replica: int) -> Tensor:
        """Return the part of a flat shard that a replica updates, as a view. The parts of all shards vary by one."""
        return shard.tensor_split(self.replicas)[replica]

    def step(self) -> None:
        """Update this replica's part, and all-gather the parts. Collective over the replicas."""
        for part, param in zip(self.parts, self.params, strict=True):
            assert param.grad is not None
            part.grad = self.cut(local_shard(param.grad).view(-1), self.rank)
        self.optimizer.step()
        own = torch.zeros(self.length)
        torch.cat([part.detach() for part in self.parts], out=own[: sum(map(len, self.parts))])
        gathered = [torch.empty(self.length) for _ in range(self.replicas)]
        dist.all_gather(gathered, own, group=self.group)
        for replica, flat in enumerate(gathered):
            sizes = [len(self.cut(shard, replica)) for shard in self.shards]
            for shard, piece in zip(self.shards, flat[: sum(sizes)].split(sizes), strict=True):
                self.cut(shard, replica).copy_(piece)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for param in [*self.params, *self.parts]:
            param.grad = None

    def state_bytes(self) -> int:
        """Return the bytes of the moments on this rank."""
        return count_state_bytes(self.optimizer)


def count_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the moments of an optimizer on this rank."""
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    return sum(local_shard(each).numel() * each.element_size() for each in moments)


def train_hybrid(uses_zero1: bool, shape: GPTConfig, steps: int = STEPS) -> dict[str, Any]:
    """Train a model on 2 replicas of 2 shards. Return times, bytes of optimizer state and traffic, and losses."""
    run = create_runtime("cpu", "float32")
    config = FsdpConfig(fsdp_shard_size="2", device="cpu")
    with torch.device("meta"):
        model = GPT(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    params = list(dict.fromkeys(model.parameters()))
    zero1 = ReplicatedShardAdamW(params, 1e-3) if uses_zero1 else None
    plain = torch.optim.AdamW(params, lr=1e-3) if not uses_zero1 else None
    optimizer: Any = zero1 or plain
    times, cpu_times, update_times, losses, sent = [], [], [], [], 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + run.rank)
        tokens = torch.randint(shape.vocab_size, (2, shape.block_size + 1), generator=generator)
        run.barrier()
        begin, cpu_begin, counter = time.perf_counter(), time.process_time(), CollectiveCounter()
        with counter:
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
            before_update = time.perf_counter()
            optimizer.step()
        end, cpu_end = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        losses.append(float(run.sum(loss.detach().double())) / run.world_size)
        if step >= WARMUP:
            times.append(1000 * (end - begin))
            update_times.append(1000 * (end - before_update))
            cpu_times.append(1000 * (cpu_end - cpu_begin))
        sent = sum(row["ring_bytes"] for row in counter.rows.values())
    state = zero1.state_bytes() if zero1 else count_state_bytes(optimizer)
    times_ms = {"step_ms": times, "step_cpu_ms": cpu_times, "update_ms": update_times}
    return {**times_ms, "state_bytes": state, "sent_bytes": sent, "losses": losses}
