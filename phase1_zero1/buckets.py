"""Where things lie: parameters and gradients in flat buckets, a bucket in slices, a slice in shards.

One collective over 25 MB is faster than hundreds over single parameters, and equal slices are what reduce-scatter and
all-gather want. So parameters lie end to end in one buffer, their gradients in a second one like it, both padded to N
equal slices. A cut may go through a parameter:

    params     | c_proj ........ | c_fc ............................ | ln | pad
    slices     | rank 0              | rank 1              | rank 2              |

The model does not notice: each parameter, and its `.grad`, is a view into its buffer. Both collectives work in place,
a slice of the buffer being the output or the input, so that no second copy is held.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from nanoGPT.optim import adamw_bytes

# torch 2.13 renamed both, and warns on the old names; 2.11 has only those.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALIGN = 32  # elements: slices begin where vectorised kernels and NCCL like to begin

Options = dict[str, Any]  # a parameter group: its "params", and the arguments of the optimizer


# What these do to an element depends on that element's own past alone, so a parameter may be cut anywhere.
ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
}  # fmt: skip


def rank_and_world_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank and the world size; (0, 1) where no process group was ever made.

    Raises:
        ValueError: it is not in the group.
    """
    if not dist.is_initialized():
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise ValueError("this process is not in the process group: make the optimizer on its members only")
    return rank, dist.get_world_size(group)


def control_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """The CPU, if the group can talk through it, so that reading an answer does not wait for the GPU's queue."""
    return torch.device("cpu") if "cpu" in str(dist.get_backend_config(group)) else device


class Shard(NamedTuple):
    """This rank's part of one parameter: all that the inner optimizer knows of it."""

    param: nn.Parameter  # whole
    number: int  # of the parameter in the bucket
    offset: int  # of the part's first element, in the flattened parameter
    place: slice  # of the part in the flat buffer
    tensor: Tensor  # the part, 1-D; of a parameter in bf16 or fp16 an fp32 copy, the master
    grad: Tensor  # its place in flat_grads


class Bucket:
    """Some parameters of one group and dtype, and everything that is done to them in a step.

    Args:
        params: in the order in which they shall lie.
        options: their group, read at every update.
        make_inner: makes the optimizer of this rank's shards, from the shards and the group.
        group: the ranks that share the work.
    """

    COLLECTIVES = ("reduce-scatter", "all-gather")  # of a step, as the ledger names them

    def __init__(
        self,
        params: list[nn.Parameter],
        options: Options,
        make_inner: Callable[[list[Tensor], Options], Optimizer],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.params, self.options, self.group = params, options, group
        self.rank, self.world_size = rank_and_world_size(group)
        length, self.mine = self._cut(sum(p.numel() for p in params))
        self.flat_params = torch.zeros(length, dtype=params[0].dtype, device=params[0].device)
        self.flat_grads = torch.zeros_like(self.flat_params)
        self.values: list[Tensor] = []  # each parameter's place in flat_params, in its shape
        self.grads: list[Tensor] = []  # and its gradient's in flat_grads
        begin = 0
        for param in params:
            place = slice(begin, begin + param.numel())
            self.values.append(self.flat_params[place].view(param.shape))
            self.grads.append(self.flat_grads[place].view(param.shape))
            self.values[-1].copy_(param.detach())
            param.data = self.values[-1]
            begin = place.stop
        if self.world_size > 1:  # as DDP does: all ranks begin with rank 0's values
            dist.broadcast(self.flat_params, group=group, group_src=0)
        self.shards = self._own()
        self.inner = make_inner([shard.tensor for shard in self.shards], options) if self.shards else None
        self.has_grad = [False] * len(params)  # on this rank, then on any
        self.arrived: set[int] = set()  # parameters whose gradient is complete in this step
        self.work: dist.Work | None = None  # the collective in flight
        # The one before, kept: else gloo's thread frees it and asks for Python's lock, which a program that ends here
        # does not survive.
        self.last: dist.Work | None = None

    def _cut(self, numel: int) -> tuple[int, slice]:
        """The padded length, and this rank's slice of it."""
        each = ALIGN * math.ceil(numel / (ALIGN * self.world_size))
        return each * self.world_size, slice(self.rank * each, (self.rank + 1) * each)

    def _own(self) -> list[Shard]:
        """What of each parameter lies in this rank's slice; padding is in no shard, so in no norm and no state."""
        shards, begin = [], 0
        for index, param in enumerate(self.params):
            place = slice(max(begin, self.mine.start), min(begin + param.numel(), self.mine.stop))
            if place.start < place.stop:
                part = self.flat_params[place]
                low = part.dtype in (torch.bfloat16, torch.float16)
                tensor, grad = part.float() if low else part, self.flat_grads[place]
                shards.append(Shard(param, index, place.start - begin, place, tensor, grad))
            begin += param.numel()
        return shards

    def expected_state_bytes(self) -> int:
        """Return the bytes of optimizer state for this rank's shards, which are AdamW's."""
        return adamw_bytes(shard.tensor for shard in self.shards)

    @property
    def is_full(self) -> bool:
        return len(self.arrived) == len(self.params)

    def collect(self, index: int) -> None:
        """Move a gradient that autograd has just made into the bucket, where later micro-batches add to it."""
        param, place = self.params[index], self.grads[index]
        if param.data_ptr() != self.values[index].data_ptr():
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has left its bucket, as model.to() makes it: "
                "make the optimizer after the model is on its device and in its dtype"
            )
        if param.grad is not None and param.grad is not place:
            place.copy_(param.grad.detach())
            param.grad = place

    def start_reduce(self) -> None:
        """Send the gradients; this rank's slice becomes the mean over the ranks, the rest is spent."""
        self.wait()
        for index, param in enumerate(self.params):
            self.has_grad[index] = param.grad is not None
            if param.grad is None:
                self.grads[index].zero_()  # another rank may have one
            self.collect(index)
        if self.world_size > 1:
            self.work = self._reduce()

    def _reduce(self) -> dist.Work | None:
        mine = self.flat_grads[self.mine]
        return reduce_scatter(mine, self.flat_grads, dist.ReduceOp.AVG, self.group, async_op=True)

    def finish_reduce(self) -> None:
        """Wait for the mean, and give each shard its part of it. What no rank has a gradient of gets none."""
        self.wait()
        self.last = None  # and with it gloo's copy of the bucket
        for shard in self.shards:
            shard.tensor.grad = shard.grad.to(shard.tensor.dtype) if self.has_grad[shard.number] else None

    def update_shards(self) -> None:
        """Step the inner optimizer, with the learning rate and all else that the group says today."""
        if self.inner:
            mine = self.inner.param_groups[0]
            mine.update({name: self.options[name] for name in mine if name in self.options and name != "params"})
            self.inner.step()
        for shard in self.shards:
            if shard.tensor.dtype != self.flat_params.dtype:
                self.flat_params[shard.place].copy_(shard.tensor.view(-1))

    def start_gather(self) -> None:
        """Send this rank's slice of the parameters to all others."""
        if self.world_size > 1:
            self.work = self._gather()

    def _gather(self) -> dist.Work | None:
        return all_gather(self.flat_params, self.flat_params[self.mine], self.group, async_op=True)

    def wait(self) -> None:
        """Until the collective in flight has ended; on a GPU it is the stream that waits, not the process."""
        if self.work:
            self.work.wait()
            self.last, self.work = self.work, None

    def forget_gradients(self) -> None:
        """Be ready for the next step's."""
        self.arrived.clear()
        for tensor in (*self.params, *(shard.tensor for shard in self.shards)):
            tensor.grad = None


def split_into_buckets(params: Iterable[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Share parameters out to buckets of at most `limit` bytes and one dtype; a larger parameter has its own.

    The last come first: it is their gradients that the backward pass finishes first.
    """
    buckets: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}  # the open bucket of each dtype, and its bytes
    for param in reversed([p for p in params if p.requires_grad and p.numel()]):
        bucket, size = last.get(param.dtype, ([], 0))
        if not bucket or size + param.nbytes > limit:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(param)
        last[param.dtype] = bucket, size + param.nbytes
    return buckets


def assign_owners(
    params: list[nn.Parameter], world_size: int, cost: Callable[[Tensor], int]
) -> dict[nn.Parameter, int]:
    """Owners of whole parameters: the costliest first, each to the rank that has the least so far (Graham 1969)."""
    load = [0] * world_size
    owner = {}
    for param in sorted(params, key=cost, reverse=True):
        owner[param] = load.index(min(load))
        load[owner[param]] += cost(param)
    return owner


def check_optimizer(optimizer_class: type[Optimizer], elementwise: bool) -> None:
    """Refuse an optimizer that looks at more than one element at a time.

    Raises:
        ValueError: it is not one of torch's elementwise ones, and nobody said that it is elementwise.
    """
    if not elementwise and optimizer_class not in ELEMENTWISE:
        known = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise ValueError(
            f"{optimizer_class.__name__} is not known to treat every element by itself, and shards cut through "
            f"parameters: use one of {known}, or give elementwise=True if you know that it does"
        )


def check_params(params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Refuse what cannot be laid in buckets. Collective.

    Raises:
        ValueError: two devices, two parameters in the same memory, a trained one that is not of floating point, or
            other parameters than another rank's.
    """
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {' and '.join(devices)}: a rank shards what is on one device, its own")
    for param in params:
        if param.requires_grad and not param.is_floating_point():
            raise ValueError(f"a parameter of dtype {param.dtype} cannot be sharded: only floating-point ones can")
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes) for p in params if p.numel() and p.is_contiguous() and not p.is_meta
    )
    if any(end > begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)):
        raise ValueError("two parameters share memory, and would no longer: tie them by using one nn.Parameter")
    if rank_and_world_size(group)[1] > 1:
        ours = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]
        theirs: list[Any] = [None] * rank_and_world_size(group)[1]
        dist.all_gather_object(theirs, ours, group)
        if any(other != theirs[0] for other in theirs):
            counts = [len(other) for other in theirs]
            raise ValueError(f"ranks give different parameters ({counts} of them): build the same model on every rank")
