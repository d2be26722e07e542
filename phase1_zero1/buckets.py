"""Flat buckets: the memory layout of parameters and gradients.

A collective over 25 MiB is faster than hundreds of collectives over single parameters. Reduce-scatter and all-gather
need equal slices. A bucket therefore stores its parameters one after another in a flat buffer, and their gradients in a
second buffer with the same layout. Both are padded to N equal slices, one per rank. A slice may begin or end inside a
parameter. The part of a parameter that is in this rank's slice is this rank's *shard* of it:

    params     |      mlp.c_proj       |       mlp.c_fc        |  a  |    attn.c_attn    |   a: attn.c_proj
    slices     |     rank 0      |     rank 1      |     rank 2      |     rank 3        |   padding at the end

The model does not change: each parameter, and its `.grad`, is a view into its buffer. Both collectives work in place.
This rank's slice is the output of reduce-scatter and the input of all-gather, so no second copy is needed.
"""

import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from nanoGPT.distributed.sharding import all_gather, reduce_scatter

ALIGN = 32  # elements; vectorized kernels and NCCL are faster on aligned slices

Options = dict[str, Any]  # a parameter group: its "params", and the arguments of the optimizer


# These optimizers update each element from its own gradient and state only, so a shard may be any part of a parameter.
ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
}  # fmt: skip


def rank_and_world_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank and the world size, or (0, 1) without `torch.distributed`.

    Raises:
        ValueError: this process is not a member of the group, or has not joined the other ranks.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ValueError("this process is one of several ranks: call dist.init_process_group() before")
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise ValueError("this process is not in the process group: create the optimizer only on members of the group")
    return rank, dist.get_world_size(group)


def control_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU if the group has a CPU backend, else `device`.

    Reading the result of a collective on the CPU does not wait for the kernels that are queued on the GPU.
    """
    return torch.device("cpu") if "cpu" in str(dist.get_backend_config(group)) else device


class Shard(NamedTuple):
    """This rank's part of one parameter; the inner optimizer updates only `tensor`."""

    param: nn.Parameter  # the full parameter
    param_index: int  # its position in the bucket
    offset: int  # of the shard's first element, in the flattened parameter
    bucket_slice: slice  # the shard's elements in the flat buffers
    tensor: Tensor  # the shard, 1-D, or Muon's whole matrix; for a parameter in bf16 or fp16 a copy in fp32, the master
    grad: Tensor  # the shard's view into local_grads


class Bucket:
    """Parameters of one group and one dtype in flat buffers, with their collectives and their inner optimizer.

    Args:
        params: in the order in which the flat buffer stores them.
        options: their parameter group; every update reads it.
        inner_class: the class of the inner optimizer, which updates this rank's shards.
        group: the process group over which the bucket is sharded.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        options: Options,
        inner_class: type[Optimizer],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.params, self.options, self.group = params, options, group
        self.rank, self.world_size = rank_and_world_size(group)
        length, self.local_slice = self._partition(sum(p.numel() for p in params))
        self.flat_params = torch.zeros(length, dtype=params[0].dtype, device=params[0].device)
        self.param_views = self._split_into_views(self.flat_params)
        for param, view in zip(params, self.param_views, strict=True):
            view.copy_(param.detach())
            param.data = view
        self.local_grads = self._allocate_gradients()
        if self.world_size > 1:  # as in DDP, all ranks start with rank 0's values
            dist.broadcast(self.flat_params, group=group, group_src=0)
        self.shards = self._create_shards()
        tensors: Any = [shard.tensor for shard in self.shards]
        self.inner = inner_class([{**options, "params": tensors}]) if tensors else None  # type: ignore[call-arg]
        # One flag per parameter: this rank has a gradient. After the reduction: at least one rank has one.
        self.has_grad = [False] * len(params)
        self.ready_params: set[int] = set()  # indices of the parameters whose gradient is complete in this step
        self.work: dist.Work | None = None  # the collective in flight
        # Keep the previous collective alive. Otherwise gloo's thread frees it and waits for Python's GIL, and a
        # program that is exiting at that moment crashes.
        self.previous_work: dist.Work | None = None

    def _partition(self, numel: int) -> tuple[int, slice]:
        """Return the padded length for `numel` elements, and this rank's slice."""
        slice_length = ALIGN * math.ceil(numel / (ALIGN * self.world_size))
        return slice_length * self.world_size, slice(self.rank * slice_length, (self.rank + 1) * slice_length)

    def _split_into_views(self, flat: Tensor) -> list[Tensor]:
        """Return one view into a flat buffer per parameter, in the shape of the parameter."""
        sizes = [p.numel() for p in self.params]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(param.shape) for part, param in zip(parts, self.params, strict=True)]

    def _allocate_gradients(self) -> Tensor:
        """Allocate the buffer of the gradients. Return a view of this rank's slice, for its averaged gradients."""
        self.flat_grads = torch.zeros_like(self.flat_params)
        self.grad_views = self._split_into_views(self.flat_grads)
        return self.flat_grads[self.local_slice]

    def _create_shards(self) -> list[Shard]:
        """Return the shards in this rank's slice. Padding is in no shard, so it is not in the state or the norm."""
        shards, begin = [], 0
        for index, param in enumerate(self.params):
            elements = slice(max(begin, self.local_slice.start), min(begin + param.numel(), self.local_slice.stop))
            if elements.start < elements.stop:
                part = self.flat_params[elements]
                is_low_precision = part.dtype in (torch.bfloat16, torch.float16)
                tensor = part.float() if is_low_precision else part
                first = elements.start - self.local_slice.start
                grad = self.local_grads[first : first + part.numel()]
                shards.append(Shard(param, index, elements.start - begin, elements, tensor, grad))
            begin += param.numel()
        return shards

    @property
    def is_ready(self) -> bool:
        """True if the gradients of all parameters are complete."""
        return len(self.ready_params) == len(self.params)

    def store_gradient(self, index: int) -> None:
        """Move a gradient that autograd allocated into the bucket, where later micro-batches accumulate."""
        param, grad_view = self.params[index], self.grad_views[index]
        if param.data_ptr() != self.param_views[index].data_ptr():
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} no longer points into its bucket, for example after "
                "model.to(): create the optimizer after the model is on its device and in its dtype"
            )
        if param.grad is not None and param.grad is not grad_view:
            grad_view.copy_(param.grad.detach())
            param.grad = grad_view

    def start_reduce(self) -> None:
        """Start averaging the gradients over the ranks; afterwards only this rank's slice of flat_grads is valid."""
        self.wait()
        for index, param in enumerate(self.params):
            self.has_grad[index] |= param.grad is not None
            if param.grad is None:
                self.grad_views[index].zero_()  # another rank may have a gradient
            self.store_gradient(index)
        if self.world_size > 1:
            self.work = self._reduce()

    def _reduce(self) -> dist.Work | None:
        local_grads = self.flat_grads[self.local_slice]
        return reduce_scatter(local_grads, self.flat_grads, dist.ReduceOp.AVG, self.group, async_op=True)

    def finish_reduce(self) -> None:
        """Wait for the average, and set each shard's gradient; to None if no rank has a gradient of the parameter."""
        self.wait()
        self.previous_work = None  # also frees gloo's copy of the bucket
        for shard in self.shards:
            shard.tensor.grad = shard.grad.to(shard.tensor.dtype) if self.has_grad[shard.param_index] else None

    def update_shards(self) -> None:
        """Step the inner optimizer with the current learning rate and other options of the parameter group."""
        self._update_masters()
        if self.inner:
            inner_group = self.inner.param_groups[0]
            inner_group.update({**self.options, "params": inner_group["params"]})
            self.inner.step()
        for shard in self._masters():
            self.flat_params[shard.bucket_slice].copy_(shard.tensor.view(-1))

    def _masters(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.tensor.dtype != self.flat_params.dtype]

    def _update_masters(self) -> None:
        """Let a weight that was set from outside replace its master copy."""
        for shard in self._masters():
            weights = self.flat_params[shard.bucket_slice].view_as(shard.tensor)
            shard.tensor.copy_(torch.where(shard.tensor.to(weights.dtype) == weights, shard.tensor, weights))

    def start_gather(self) -> None:
        """Start all-gathering the updated parameters from all ranks' slices."""
        if self.world_size > 1:
            self.work = self._gather()

    def _gather(self) -> dist.Work | None:
        return all_gather(self.flat_params, self.flat_params[self.local_slice], self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the collective in flight. On a GPU the stream waits, and the process continues."""
        if self.work:
            self.work.wait()
            self.previous_work, self.work = self.work, None

    def clear_gradients(self) -> None:
        """Set all gradients to None, ready for the next step."""
        self.ready_params.clear()
        self.has_grad = [False] * len(self.params)
        for tensor in (*self.params, *(shard.tensor for shard in self.shards)):
            tensor.grad = None


def split_into_buckets(params: Iterable[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Split parameters into buckets of at most `limit` bytes and one dtype; a larger parameter gets a separate bucket.

    The last parameters come first, because the backward pass computes their gradients first.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}  # one per dtype, with its bytes
    for param in reversed([p for p in params if p.requires_grad and p.numel()]):
        bucket, size = open_buckets.get(param.dtype, ([], 0))
        if not bucket or size + param.nbytes > limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(param)
        open_buckets[param.dtype] = bucket, size + param.nbytes
    return buckets


def check_optimizer(optimizer_class: type[Optimizer], elementwise: bool) -> None:
    """Check that an optimizer updates each element independently of the others.

    Raises:
        ValueError: the class is not one of torch's elementwise optimizers, and `elementwise` is False.
    """
    if not elementwise and optimizer_class not in ELEMENTWISE:
        known = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise ValueError(
            f"{optimizer_class.__name__} is not known to be elementwise, and a shard can be any part of a parameter: "
            f"use one of {known}, or pass elementwise=True if the class updates each element independently"
        )


def check_frozen(params: Iterable[nn.Parameter]) -> None:
    """Check that parameters that were frozen when the optimizer was created have no gradients.

    Raises:
        RuntimeError: one has a gradient, which the optimizer would ignore.
    """
    for param in params:
        if param.grad is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has a gradient, but it was frozen when the optimizer was "
                "created: create a new optimizer to train it"
            )


def check_params(params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Check that the parameters can be stored in buckets. Collective.

    Raises:
        ValueError: the parameters are on two devices, one is complex, two of them share memory, or the ranks have
            different parameters.
    """
    if any(p.is_complex() for p in params):
        raise ValueError("a parameter is complex: store its real and imaginary parts as one real parameter")
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {' and '.join(devices)}: move all of them to the device of this rank")
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes) for p in params if p.numel() and p.is_contiguous() and not p.is_meta
    )
    if any(end > begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)):
        raise ValueError("two parameters share memory, which buckets would undo: tie them by using one nn.Parameter")
    if rank_and_world_size(group)[1] > 1:
        local_specs = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]
        all_specs: list[Any] = [None] * rank_and_world_size(group)[1]
        dist.all_gather_object(all_specs, local_specs, group)
        if any(specs != all_specs[0] for specs in all_specs):
            counts = [len(specs) for specs in all_specs]
            raise ValueError(f"ranks have different parameters ({counts} of them): build the same model on every rank")
