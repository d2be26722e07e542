"""ZeRO-1: every rank holds the whole model and its gradient, but only 1/N of the optimizer's state.

AdamW keeps two moments of each parameter, 8 bytes beside the 4 of the parameter itself. With plain data parallelism
every rank keeps all of them, to compute the same update as all others. Here rank r updates slice r, so that it needs
the moments of slice r only (Rajbhandari et al. 2020, section 5.1). An all-reduce is a reduce-scatter followed by an
all-gather; the update goes in between, and the bytes on the wire stay those of plain data parallelism:

                      rank 0       rank 1       rank 2       rank 3
    backward          [g g g g]    [g g g g]    [g g g g]    [g g g g]     each of its own micro-batches
    reduce-scatter    [G . . .]    [. G . .]    [. . G .]    [. . . G]     the mean over the ranks, one slice each
    update            [p . . .]    [. p . .]    [. . p .]    [. . . p]     8P/N bytes of moments on each
    all-gather        [p p p p]    [p p p p]    [p p p p]    [p p p p]     the whole model again

This module says when things are sent; `buckets.py`, where they lie. Neither knows of GPT.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from nanoGPT.optim import clip_grads, grad_norm
from phase1_zero1.buckets import (
    Bucket,
    Options,
    Shard,
    check_optimizer,
    check_params,
    control_device,
    rank_and_world_size,
    split_into_buckets,
)
from phase1_zero1.protocol import DataParallelOptimizer


class Zero1Optimizer(DataParallelOptimizer):
    """An optimizer whose state is sharded over ranks, called as torch's ZeroRedundancyOptimizer is.

    It averages the gradients too, so the model goes without DDP. What is sent, and when:

    1. *reduce*, in the backward pass: a bucket's gradients are reduce-scattered as soon as the last of them is there,
       while those of earlier layers are still being computed. All ranks send their buckets in the same order.
    2. *update*, in `step`: the inner optimizer sees this rank's shard of each parameter, never a bucket as a whole, and
       none of a parameter of which no rank has a gradient.
    3. *gather*, in `step`: a bucket's parameters are all-gathered as soon as they are updated, while the next are.

        optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for i, micro_batch in enumerate(micro_batches):
            optimizer.require_backward_grad_sync = i == len(micro_batches) - 1  # DDP's name for it
            (loss(model, micro_batch) / len(micro_batches)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    `step` uses the gradients up and leaves `.grad` None. Parameters are reduced and gathered in their own dtype. Of one
    in bf16 or fp16, the rank keeps its shard in fp32 too, the master: 12P/N bytes with AdamW. Load weights and move the
    model first, then make the optimizer. Buffers of a model, such as BatchNorm's, are not synchronised. A GradScaler
    does not work with it, for it looks for infinities in `.grad`, from where the gradients have left.

    Args:
        params: parameters or groups of them, the same on every rank. Those that need no gradient are left alone.
        optimizer_class: one of torch's elementwise optimizers.
        process_group: the ranks to shard over; default: all of them. Without any, one rank, to which nothing is sent.
        bucket_mb: a bucket is closed before it grows beyond this, in 2^20 bytes.
        elementwise: says so of a class that is not torch's.
        defaults: the arguments of `optimizer_class`.

    Raises:
        ValueError: the class is not known to be elementwise, or the parameters cannot be laid in buckets.
    """

    averages_gradients = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float = 25.0,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        check_optimizer(optimizer_class, elementwise)
        self.optimizer_class, self.process_group, self.bucket_mb = optimizer_class, process_group, bucket_mb
        self.rank, self.world_size = rank_and_world_size(process_group)
        self.require_backward_grad_sync = True
        self.buckets: list[Bucket] = []
        self._order: list[int] = []  # of sending buckets, the same on every rank
        self._filled: list[int] | None = []  # the order in which they fill here, until rank 0's is everybody's
        self._sent = 0  # how many of them, in this step
        self._reduced = self._closing = False
        self._awaited: set[Bucket] = set()  # by a module's forward, so not by step
        like = optimizer_class([torch.zeros(1)], **defaults)
        super().__init__(params, like.defaults)

    def add_param_group(self, param_group: Options) -> None:
        """Lay one more group of parameters in buckets. Collective."""
        if self._sent:
            raise RuntimeError("a group was added between backward() and step(): add it before backward()")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_params([p for g in self.param_groups for p in g["params"]], self.process_group)
        except ValueError:
            self.param_groups.pop()
            raise
        for bucket in self._make_buckets(group):
            for shard in bucket.shards:
                assert bucket.inner is not None
                self.state[shard.param] = bucket.inner.state[shard.tensor]  # one dict, under both names
            self._watch(bucket)

    def _make_buckets(self, group: Options) -> Iterator[Bucket]:
        def make_inner(shards: list[Tensor], group: Options) -> optim.Optimizer:
            options = {name: group[name] for name in self.defaults}
            return self.optimizer_class([{"params": shards, **options}])  # type: ignore[call-arg]

        for params in split_into_buckets(group["params"], self.bucket_mb * 2**20 if self.world_size > 1 else math.inf):
            yield Bucket(params, group, make_inner, self.process_group)

    def _watch(self, bucket: Bucket) -> None:
        """Learn of every gradient that autograd has completed in a bucket; a parameter used twice is told of once."""
        number, this = len(self.buckets), weakref.ref(self)  # the model shall not keep the optimizer alive
        self.buckets.append(bucket)
        self._order, self._filled = list(range(len(self.buckets))), []
        for index, param in enumerate(bucket.params):

            def hook(_: Tensor, index: int = index) -> None:
                if (optimizer := this()) is not None:
                    optimizer._gradient_arrived(number, index)

            param.register_post_accumulate_grad_hook(hook)

    # ---- 1. reduce

    def _gradient_arrived(self, number: int, index: int) -> None:
        bucket = self.buckets[number]
        grad = bucket.params[index].grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError("a gradient is sparse, and buckets are dense: give the nn.Embedding sparse=False")
        if index in bucket.arrived or self._sent == len(self.buckets):
            raise RuntimeError(
                "a second backward() came after one that had sent the gradients: set require_backward_grad_sync = "
                "False for all but the last of a step (and use_reentrant=False in checkpointing, which runs one too)"
            )
        bucket.collect(index)
        if self.require_backward_grad_sync:
            if not self._closing:  # at the backward's end also send what still waits for a parameter that is not used
                self._closing = True
                torch.autograd.Variable._execution_engine.queue_callback(
                    lambda: self._send_full_ones(and_the_rest=True)
                )
            bucket.arrived.add(index)
            if bucket.is_full:
                if self._filled is not None:
                    self._filled.append(number)
                self._send_full_ones()

    def _send_full_ones(self, and_the_rest: bool = False) -> None:
        """Send the next buckets as far as they are full, in the common order: in another, ranks would mix them up."""
        for number in self._order[self._sent :]:
            if not (and_the_rest or self.buckets[number].is_full):
                break
            self.buckets[number].start_reduce()
            self._sent += 1

    @torch.no_grad()
    def reduce_gradients(self) -> list[Tensor]:
        """Finish averaging the gradients. Collective; `step` calls it where nobody has.

        Returns:
            The gradients of this rank's shards, 1-D. They are what `step` will use: scale them in place to clip.

        Raises:
            RuntimeError: no rank has a gradient.
        """
        if not self._reduced:
            self._send_full_ones(and_the_rest=True)
            self._agree()
            for bucket in self.buckets:
                bucket.finish_reduce()
            if not any(has for bucket in self.buckets for has in bucket.has_grad):
                self._begin_step()
                raise RuntimeError("no rank has a gradient to step with: call backward() first")
            self._reduced = True
        grads = [s.tensor.grad for bucket in self.buckets for s in bucket.shards if s.tensor.grad is not None]
        return grads or [self.buckets[0].flat_grads[:0]]

    def _agree(self) -> None:
        """Which parameters have a gradient on any rank; and, once, in which order buckets fill: one byte each."""
        flags = [has for bucket in self.buckets for has in bucket.has_grad]
        if self.world_size > 1:
            device = control_device(self.buckets[0].flat_params.device, self.process_group)
            told = torch.tensor(flags, dtype=torch.uint8, device=device)
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.process_group)
            flags = told.bool().tolist()
            if self._filled is not None:
                rest = [number for number in self._order if number not in self._filled]
                order = torch.tensor([*self._filled, *rest], device=device)
                dist.broadcast(order, group=self.process_group, group_src=0)
                self._order = order.tolist()
        self._filled = None
        for bucket in self.buckets:
            bucket.has_grad, flags = flags[: len(bucket.params)], flags[len(bucket.params) :]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm over all ranks is at most `max_norm`; 0 leaves it. Collective.

        `torch.nn.utils.clip_grad_norm_` cannot: when the backward pass ends, gradients are being sent already, and when
        they have been, a rank's `.grad` is right in its own slice only.

        Returns:
            The norm before clipping, a scalar in fp64, the same on every rank.
        """
        grads = self.reduce_gradients()
        norm = grad_norm(grads, self.shard_group)
        clip_grads(grads, norm, max_norm)
        return norm

    # ---- 2. update, and 3. gather

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, update this rank's shards, gather the parameters. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for number in reversed(self._order):  # the next forward needs last what the backward had first
            self.buckets[number].update_shards()
            self.buckets[number].start_gather()
        for bucket in set(self.buckets) - self._awaited:
            bucket.wait()
        self._begin_step()
        return loss

    def wait_for_params(self) -> None:
        """Until every parameter is whole again; needed before reading them only after `gather_during_forward`."""
        for bucket in self.buckets:
            bucket.wait()

    def gather_during_forward(self, model: nn.Module) -> None:
        """Let `step` return before parameters are whole: each module waits for its own as its forward begins.

        Only for a model whose modules read no parameters but their own.
        """
        where = {param: bucket for bucket in self.buckets for param in bucket.params}
        for module in model.modules():
            for bucket in {where[p] for p in module.parameters(recurse=False) if p in where}:
                module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.wait())
                self._awaited.add(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those of a step that was not taken. They become None either way."""
        if self._sent:  # and never used
            self._send_full_ones(and_the_rest=True)
            self.wait_for_params()
        self._begin_step()

    def _begin_step(self) -> None:
        self._sent, self._reduced, self._closing = 0, False, False
        self._filled = None if self._filled is None else []
        for bucket in self.buckets:
            bucket.forget_gradients()

    # ---- state

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks whose shards make up the whole; None where this rank has all of it."""
        return None if self.world_size == 1 else self.process_group or dist.group.WORLD

    def local_state(self) -> Iterator[tuple[nn.Parameter, int, dict[str, Any]]]:
        """Yield this rank's optimizer state: a parameter, the element at which the state begins, and the state."""
        for shard, items in self.shards():
            yield shard.param, shard.offset, items

    def inner_optimizers(self) -> list[optim.Optimizer]:
        """Return the optimizers that hold this rank's state, at most one for each bucket."""
        return [bucket.inner for bucket in self.buckets if bucket.inner]

    def expected_state_bytes(self) -> int:
        """Return the bytes of state on this rank after a step."""
        return sum(bucket.expected_state_bytes() for bucket in self.buckets)

    def shards(self) -> Iterator[tuple[Shard, dict[str, Any]]]:
        """This rank's shard of each parameter, with its optimizer state, and its master where it has one."""
        for bucket in self.buckets:
            for shard in bucket.shards:
                master = {} if shard.tensor.dtype == shard.param.dtype else {"master": shard.tensor}
                yield shard, {**self.state[shard.param], **master}

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards only: for this rank, among as many ranks. `sharded_checkpoint` writes for any number."""
        content = super().state_dict()
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        content["state"] = {numbers[shard.param]: items for shard, items in self.shards() if items}
        content["place"] = (self.rank, self.world_size, [(s.offset, s.tensor.numel()) for s, _ in self.shards()])
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, on the same device.

        Raises:
            ValueError: it is of another model, rank or number of ranks.
        """
        if state_dict.get("place") != self.state_dict()["place"]:
            raise ValueError("this state is of another model, rank or number of ranks: use sharded_checkpoint.py")
        params = [p for group in self.param_groups for p in group["params"]]
        saved = {params[i]: items for i, items in state_dict["state"].items()}
        for shard, _ in self.shards():
            items = dict(saved.get(shard.param, {}))
            shard.tensor.copy_(items.pop("master", shard.tensor))
            self.state[shard.param].clear()
            self.state[shard.param].update(copy.deepcopy(items))
        for group, before in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
