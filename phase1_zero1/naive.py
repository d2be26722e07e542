"""Naive ZeRO-1: all-reduce the gradients, update the parameters that this rank owns, and broadcast them.

This first version is correct, shards the optimizer state, and fits on one page. It has three costs, which `zero1.py`
avoids (`make diff FROM=phase1_zero1/naive.py TO=phase1_zero1/zero1.py` compares the functions of both versions):

- The all-reduce gives every rank the full mean gradient, but a rank uses only 1/N of it. With the broadcast, the
  communication volume per rank is three times P(N-1)/N elements, where two would be enough.
- Communication does not overlap with the backward pass or with other communication, because a rank waits for each
  collective before it starts the next.
- Each rank owns full parameters, so one large parameter can make the partition uneven.

This file is also a program, without the services of `train.py`. It trains the repository's GPT on Shakespeare:

    OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc_per_node=2 -m phase1_zero1.naive
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from nanoGPT.costs import storage_bytes
from nanoGPT.dataset import TokenData, to_device
from nanoGPT.job.command import command_line, read_launched_ranks, report_errors
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import clip_grads, grad_norm, param_groups
from nanoGPT.options.muon import assign_owners  # Muon assigns its matrices in the same way
from nanoGPT.shared_optimizer import run_closure
from nanoGPT.train_config import TrainConfig
from phase1_zero1.buckets import check_frozen
from phase1_zero1.protocol import DataParallelOptimizer


class NaiveZero1Optimizer(DataParallelOptimizer):
    """ZeRO-1 without buckets. All ranks must have gradients for the same parameters.

    Args:
        params: parameters or parameter groups, the same on every rank and with the same values.
        optimizer_class: any optimizer that updates each parameter independently of the others.
        defaults: the arguments of `optimizer_class`.
    """

    def __init__(self, params: Iterable[Any], optimizer_class: type[Optimizer], **defaults: Any) -> None:
        super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.trainable_params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._frozen_params = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        self.local_optimizer = optimizer_class(self._create_shards(), **defaults)  # has state for these parameters only
        self.inner_optimizers = [self.local_optimizer]
        self.state = self.local_optimizer.state
        self._is_reduced = False

    def _create_shards(self) -> list[dict[str, Any]]:
        """Assign an owner to every parameter, and return the parameter groups with those that this rank owns."""
        self.owner = assign_owners(self.trainable_params, self.world_size, Tensor.numel)
        return [
            {**group, "params": [p for p in group["params"] if self.owner.get(p) == self.rank]}
            for group in self.param_groups
        ]

    def _reduce(self, grad: Tensor) -> None:
        dist.all_reduce(grad, dist.ReduceOp.AVG)

    @torch.no_grad()
    def reduce_gradients(self) -> list[Tensor]:
        """Average every gradient over the ranks and return all of them. Collective."""
        check_frozen(self._frozen_params)
        grads = [p.grad for p in self.trainable_params if p.grad is not None]
        if not self._is_reduced:
            for grad in grads:
                self._reduce(grad)
            self._is_reduced = True
        return grads

    def update_shards(self) -> None:
        """Step the local optimizer with the current learning rate and other options of the parameter groups."""
        for local_group, group in zip(self.local_optimizer.param_groups, self.param_groups, strict=True):
            local_group.update({name: value for name, value in group.items() if name != "params"})
        self.local_optimizer.step()

    def _gather(self, param: Tensor) -> None:
        dist.broadcast(param, src=self.owner[param])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters and receive the others from their owners. Collective."""
        loss = run_closure(closure)
        self.reduce_gradients()
        self.update_shards()
        for param in self.trainable_params:
            self._gather(param)
        self._is_reduced = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including averaged gradients that no `step` has used."""
        super().zero_grad(set_to_none)
        self._is_reduced = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the parameters that this rank owns. It loads only on the same rank."""
        return {**super().state_dict(), "place": (self.rank, self.world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`.

        Raises:
            ValueError: the state belongs to another rank or number of ranks.
        """
        if state_dict.get("place") != (self.rank, self.world_size):
            raise ValueError("this state belongs to another rank or number of ranks: use sharded_checkpoint.py")
        super().load_state_dict(state_dict)


def main(max_iters: int = 20, micro_batches: int = 8) -> None:
    """Train the GPT of this repository with the default configuration for a CPU, and print the state of each rank.

    Args:
        max_iters: number of steps.
        micro_batches: per step, in total over all ranks.
    """
    rank, ranks = read_launched_ranks(micro_batches)
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    config = TrainConfig()
    data = TokenData(config)
    model = GPT(GPTConfig.from_dict({**vars(config), "vocab_size": data.tokenizer["vocab_size"]}))
    model.init_weights(config.seed)  # the same values on every rank
    model.to(device)
    groups, betas = param_groups(model, config.weight_decay), (config.beta1, config.beta2)
    optimizer = NaiveZero1Optimizer(groups, torch.optim.AdamW, lr=config.learning_rate, betas=betas, fused=True)

    for step in range(max_iters):
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in range(rank, micro_batches, ranks):  # the micro-batches of this rank
            loss = model(*to_device(data.batch("train", step, micro_batch), device))
            loss_sum += loss.detach()
            (loss / (micro_batches // ranks)).backward()
        grads = optimizer.reduce_gradients()
        norm = grad_norm(grads)
        clip_grads(grads, norm, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"step {step}  loss {loss_sum.item() / micro_batches:.6f}  gradient norm {norm:.4f}", flush=True)
    state = storage_bytes(value for items in optimizer.state.values() for value in items.values())
    total = sum(p.numel() for p in model.parameters())
    owned = sum(p.numel() for p in optimizer.state)
    print(f"rank {rank} owns {owned:,} of {total:,} parameters, {state:,} bytes of optimizer state", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a normal exit with gloo sometimes aborts: "terminate called without an active exception"
