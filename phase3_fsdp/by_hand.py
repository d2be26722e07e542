"""FSDP written by hand for an nn.Module whose forward returns the loss: `Unit` and `HandmadeFSDP`, about 130 lines.

    OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc_per_node=2 -m phase3_fsdp.by_hand

The model is divided into units: the blocks, and the *root* with all other parameters. Every rank stores some rows of
each parameter, the *shard*, with its gradient and its optimizer state. The full parameters of a unit exist only while
the unit computes:

    forward     unit 0: all-gather, compute, free    unit 1: all-gather, compute, free    ...
    backward    unit 1: all-gather, compute, free, reduce-scatter the gradients    unit 0: ...    ...

The root stays all-gathered from its forward to its backward pass. While a unit computes, the parameters of the next one
are already on their way. `minimal.py` uses torch's `fully_shard` instead, which also supports meta devices, groups of
replicas, CPU offload and checkpoints.

Between two steps, the parameters of the model have no memory: do not print, copy or read them. `parameters()` returns
the shards, which are rows of matrices. The optimizer must therefore be elementwise, as AdamW is, unlike Muon.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.distributed.sharding import all_gather, reduce_scatter, row_range

ROOT = 0  # the number of the root unit


class Unit:
    """Some parameters of a model that are all-gathered and freed together.

    Of each parameter, rank r stores rows r k to (r + 1) k - 1, where k is the number of rows divided by the number of
    ranks, rounded up. Missing rows count as zeros in the collectives, so all ranks send equally many elements.

    Args:
        params: the full parameters, with their values. Their memory is freed.
        dtype: of the computation and of the all-gather. Shards and the sums of gradients are fp32.

    Attributes:
        shards: this rank's rows of each parameter, fp32: what the optimizer updates.
        gathered: bytes of full parameters that this unit has all-gathered since the start.
    """

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.params, self.dtype, self.ranks = params, dtype, dist.get_world_size()
        # Elements of a shard, with padding.
        self.sizes = [-(-len(param) // self.ranks) * (param.numel() // len(param)) for param in params]
        self.shards = []
        for param in params:
            begin, end = row_range(len(param), self.ranks, dist.get_rank())
            self.shards.append(nn.Parameter(param.detach()[begin:end].float().clone()))
            vars(self.shards[-1]).update(vars(param))  # attributes, which may select the parameter group
            param.data = param.data.to(dtype).contiguous()
        self.pending: tuple[Tensor, Any] | None = None  # an all-gather that has started: its output and its work
        self.is_full, self.missing_grads, self.gathered = True, 0, 0
        self.free()

    def start_all_gather(self) -> None:
        """Start to all-gather the full parameters. On a GPU, NCCL does this on a stream of its own."""
        if self.params and not self.is_full and self.pending is None:
            padded = [pad(shard.detach().to(self.dtype), size) for shard, size in self._shards_and_sizes()]
            sent = torch.cat(padded)  # (S,): this rank's rows of all parameters
            received = sent.new_empty(self.ranks * len(sent))
            self.pending = received, all_gather(received, sent, async_op=True)
            self.gathered += received.nbytes

    def wait_for_params(self) -> None:
        """Wait for the all-gather, and copy the rows of all ranks to their places in the parameters."""
        self.start_all_gather()
        if self.pending is None:
            return
        received, work = self.pending
        work.wait()
        columns = received.view(self.ranks, -1).split(self.sizes, dim=1)  # one per parameter: (N, its elements)
        for param, column in zip(self.params, columns, strict=True):
            param.untyped_storage().resize_(param.numel() * param.element_size())
            # Autograd has saved the parameter, and must not notice that its memory was freed and written again.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(param):
                param.copy_(column.reshape(-1)[: param.numel()].view_as(param))
        self.is_full, self.pending = True, None

    def free(self) -> None:
        """Free the full parameters and what was prefetched. The tensors stay, without memory: autograd saved them."""
        if self.pending:
            self.pending[1].wait()
        self.pending = None
        for param in self.params:
            param.untyped_storage().resize_(0)
        self.is_full = False

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce-scatter the gradients: `shard.grad` is the mean over the ranks of this rank's rows.

        A parameter without a gradient, the same ones on every rank, gets none.
        """
        parts, has_grad = [], [param.grad is not None for param in self.params]
        for param, size in zip(self.params, self.sizes, strict=True):
            grad = torch.zeros_like(param, dtype=torch.float32) if param.grad is None else param.grad.float()
            parts.append(pad(grad, self.ranks * size).view(self.ranks, size))
            param.grad = None
        sent = torch.cat(parts, dim=1).contiguous()  # (N, S): row r goes to rank r
        received = sent.new_empty(sent.size(1))
        reduce_scatter(received, sent.view(-1), dist.ReduceOp.AVG)
        for shard, part, has in zip(self.shards, received.split(self.sizes), has_grad, strict=True):
            shard.grad = part[: shard.numel()].view_as(shard) if has else None

    def _shards_and_sizes(self) -> Iterable[tuple[nn.Parameter, int]]:
        return zip(self.shards, self.sizes, strict=True)


def pad(tensor: Tensor, size: int) -> Tensor:
    """Return the elements of a tensor, followed by zeros: (size,)."""
    return nn.functional.pad(tensor.reshape(-1), (0, size - tensor.numel()))


class HandmadeFSDP:
    """A model whose parameters, gradients and optimizer state are sharded over all ranks.

    Args:
        model: the full model, with the same values on every rank, on the device of this rank.
        blocks: its modules that become units, in the order in which they compute. All their parameters are in no other
            unit, and each of them computes once in a forward pass.
        dtype: of the computation and of the all-gathers.

    Attributes:
        units: the root, then those of the blocks.
        is_last: whether the next backward pass reduces the gradients. Before, gradients are accumulated in full.

    Raises:
        ValueError: a parameter is frozen, complex, has no rows, or is in two blocks.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype = torch.float32) -> None:
        for name, param in model.named_parameters():
            if not param.requires_grad or param.is_complex() or not param.dim() or not param.numel():
                message = f"{name} is frozen, complex or has no rows: use `minimal.py`, or give a scalar the shape (1,)"
                raise ValueError(message)
        self.model, self.is_last = model, True
        inner = {param for block in blocks for param in block.parameters()}
        if len(inner) < sum(len(list(block.parameters())) for block in blocks):
            raise ValueError("two blocks share a parameter: share it only outside of the blocks")
        root = [param for param in model.parameters() if param not in inner]
        self.units = [Unit(params, dtype) for params in (root, *(list(block.parameters()) for block in blocks))]
        for number, module in enumerate((model, *blocks)):
            self._add_hooks(number, module)
        model.register_state_dict_pre_hook(refuse_to_save)

    def parameters(self) -> list[nn.Parameter]:
        """Return the shards of this rank: the parameters for the optimizer."""
        return [shard for unit in self.units for shard in unit.shards]

    def _add_hooks(self, number: int, module: nn.Module) -> None:
        """All-gather and free a unit around the forward and the backward pass of its module."""
        module.register_forward_pre_hook(lambda *_: self._before_forward(number))
        module.register_forward_hook(lambda _module, _inputs, output: self._after_forward(number, output))
        for param in self.units[number].params:
            param.register_post_accumulate_grad_hook(lambda _: self._after_gradient(number))

    def _before_forward(self, number: int) -> None:
        self.units[number].wait_for_params()
        if number + 1 < len(self.units):
            self.units[number + 1].start_all_gather()  # prefetch

    def _after_forward(self, number: int, output: Tensor) -> None:
        if number != ROOT:
            self.units[number].free()
        elif not torch.is_grad_enabled():  # no backward pass follows
            for unit in self.units:
                unit.free()
        if not isinstance(output, Tensor):
            raise TypeError(f"unit {number} returns {type(output).__name__}: let it return one tensor")
        if output.requires_grad:
            output.register_hook(lambda _: self._before_backward(number))

    def _before_backward(self, number: int) -> None:
        unit = self.units[number]
        unit.wait_for_params()
        unit.missing_grads = len(unit.params)
        if number > 1:
            self.units[number - 1].start_all_gather()  # prefetch
        if number == ROOT:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _after_gradient(self, number: int) -> None:
        unit = self.units[number]
        unit.missing_grads -= 1
        if unit.missing_grads == 0 and number != ROOT:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Free a unit after its backward pass, and in the last one of a step reduce its gradients."""
        unit.missing_grads = 0
        unit.free()
        if self.is_last:
            unit.reduce_gradients()

    def _end_backward(self) -> None:
        """Finish the root, units of which a parameter has no gradient, and units that only earlier passes have used."""
        for unit in self.units:
            has_grad = any(param.grad is not None for param in unit.params)
            if unit.is_full or unit.missing_grads or has_grad:
                self._finish(unit)
            unit.free()  # a unit that was prefetched and did not compute

    def train_step(
        self, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Any], max_norm: float
    ) -> tuple[float, float]:
        """Accumulate the gradients of this rank's micro-batches, clip them, and update the shards. Collective.

        Args:
            optimizer: elementwise, over `parameters()`.
            micro_batches: the arguments of the model, for equally many forward passes on every rank, at least one.
            max_norm: of the full gradient; 0 turns clipping off.

        Returns:
            The mean loss over the micro-batches of all ranks, and the global gradient norm before clipping.

        Raises:
            ValueError: the optimizer has other parameters.
        """
        if not {p for group in optimizer.param_groups for p in group["params"]} <= set(self.parameters()):
            raise ValueError("create the optimizer over `parameters()` of HandmadeFSDP, not over those of the model")
        device = next(iter(self.parameters())).device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, and of the squares of the gradient
        for i, micro_batch in enumerate(micro_batches):
            self.is_last = i + 1 == len(micro_batches)
            loss = self.model(*micro_batch)
            sums[0] += loss.detach()
            (loss / len(micro_batches)).backward()
        grads = [shard.grad for shard in self.parameters() if shard.grad is not None]
        sums[1] = torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square().sum()
        dist.all_reduce(sums)
        loss_sum, norm = sums[0].item(), math.sqrt(sums[1].item())
        if 0 < max_norm < norm:
            torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        return loss_sum / (len(micro_batches) * dist.get_world_size()), norm


def refuse_to_save(*_: Any) -> None:
    raise RuntimeError("the parameters of the model have no memory: save `parameters()` of each rank")


def main(max_iters: int = 20, micro_batches: int = 8) -> None:
    """Train the GPT of this repository with the default configuration for a CPU, and print what each rank stores.

    Args:
        max_iters: number of steps.
        micro_batches: per step, in total over all ranks.
    """
    from nanoGPT.dataset import TokenData, to_device
    from nanoGPT.job.command import read_launched_ranks
    from nanoGPT.model import GPT, GPTConfig
    from nanoGPT.train_config import TrainConfig
    from phase3_fsdp.minimal import join_ranks

    rank, ranks = read_launched_ranks(micro_batches)
    device, config = join_ranks(), TrainConfig()
    data = TokenData(config)
    model = GPT(GPTConfig.from_dict({**vars(config), "vocab_size": data.tokenizer["vocab_size"]})).to(device)
    model.init_weights(config.seed)  # the same values on every rank
    sharded = HandmadeFSDP(model, list(model.blocks))
    shards = sharded.parameters()
    groups = [
        {"params": [shard for shard in shards if shard.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [shard for shard in shards if shard.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, config.learning_rate, (config.beta1, config.beta2))
    for step in range(max_iters):
        batches = [data.batch("train", step, i) for i in range(rank, micro_batches, ranks)]
        loss, norm = sharded.train_step(optimizer, [to_device(batch, device) for batch in batches], config.grad_clip)
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}  gradient norm {norm:.4f}", flush=True)
    stored = sum(shard.numel() for shard in sharded.parameters())
    total = sum(param.numel() for param in model.parameters())
    gathered = sum(unit.gathered for unit in sharded.units)
    print(f"rank {rank} stores {stored:,} of {total:,} parameters and all-gathered {gathered:,} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    from nanoGPT.job.command import command_line, report_errors

    with report_errors():
        command_line(main, sys.argv[1:])
