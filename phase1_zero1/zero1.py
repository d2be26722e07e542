"""ZeRO-1: every rank stores the full model and its full gradient, but only 1/N of the optimizer state.

AdamW stores two moments for each parameter: 8 bytes per parameter, next to the 4 bytes of the parameter itself. With
plain data parallelism every rank stores all moments, and all ranks compute the same update. In ZeRO-1 rank r updates
only slice r, so it needs the moments of slice r only (Rajbhandari et al. 2020, section 5.1). An all-reduce is a
reduce-scatter followed by an all-gather. ZeRO-1 puts the update between the two, so the communication volume is the
same as in plain data parallelism:

                      rank 0       rank 1       rank 2       rank 3
    backward          [g g g g]    [g g g g]    [g g g g]    [g g g g]     gradients of this rank's micro-batches
    reduce-scatter    [G . . .]    [. G . .]    [. . G .]    [. . . G]     the mean over the ranks, one slice per rank
    update            [p . . .]    [. p . .]    [. . p .]    [. . . p]     8P/N bytes of moments on each rank
    all-gather        [p p p p]    [p p p p]    [p p p p]    [p p p p]     the full model again

This module decides when the ranks communicate; `buckets.py` defines the memory layout. Neither depends on GPT.
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
from nanoGPT.shared_optimizer import SharedOptimizer, run_closure
from phase1_zero1.buckets import (
    Bucket,
    Options,
    Shard,
    check_frozen,
    check_optimizer,
    check_params,
    control_device,
    rank_and_world_size,
    split_into_buckets,
)
from phase1_zero1.zero2 import Zero2Bucket


class Zero1Optimizer(SharedOptimizer):
    """An optimizer whose state is sharded over ranks, with the interface of torch's ZeroRedundancyOptimizer.

    It also averages the gradients, so the model needs no DDP. A step has three stages:

    1. *reduce*, in the backward pass: reduce-scatter the gradients of a bucket as soon as all of them are complete,
       while autograd computes those of earlier layers. All ranks reduce their buckets in the same order.
    2. *update*, in `step`: the inner optimizer, a torch optimizer over this rank's shards, updates them. It skips a
       parameter if no rank has a gradient of it.
    3. *gather*, in `step`: all-gather the parameters of a bucket as soon as they are updated, while the next bucket is
       being updated.

        optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for i, micro_batch in enumerate(micro_batches):
            optimizer.require_backward_grad_sync = i == len(micro_batches) - 1  # the same attribute as in DDP
            (loss(model, micro_batch) / len(micro_batches)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    `step` sets `.grad` to None. Gradients are reduced and parameters all-gathered in the dtype of the parameter. For a
    parameter in bf16 or fp16, a rank also stores a master copy of its shard in fp32. Master copies and AdamW's moments
    then take 12P/N bytes per rank. Load the weights and move the model to its device before you create the optimizer.
    Buffers of the model, such as BatchNorm's, are not synchronized. torch's GradScaler does not work with this
    optimizer: it checks `.grad` for infinities, but after the reduction `.grad` is valid only inside this rank's slice.

    Args:
        params: parameters or parameter groups, the same on every rank. Parameters that need no gradient are ignored.
        optimizer_class: one of torch's elementwise optimizers.
        process_group: the ranks to shard over; default: all ranks. Without `torch.distributed` there is one rank, and
            no communication.
        bucket_mb: the maximum size of a bucket, in 2^20 bytes.
        elementwise: True declares that `optimizer_class` is elementwise. Use it for a class that is not torch's.
        stage: 2: also shard the gradients (ZeRO-2, see `zero2.py`). Then all ranks must call `backward` equally often,
            and each call must compute the gradient of at least one parameter. For the smallest memory, leave
            `require_backward_grad_sync` True. With one rank there is nothing to shard.
        defaults: the arguments of `optimizer_class`.

    Raises:
        ValueError: the class is not known to be elementwise, or the parameters cannot be stored in buckets.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float = 25.0,
        elementwise: bool = False,
        stage: int = 1,
        **defaults: Any,
    ) -> None:
        check_optimizer(optimizer_class, elementwise)
        self.optimizer_class, self.process_group, self.bucket_mb = optimizer_class, process_group, bucket_mb
        self.rank, self.world_size = rank_and_world_size(process_group)
        self.shards_gradients = stage == 2 and self.world_size > 1
        self.require_backward_grad_sync = True
        self._num_started = 0  # the number of buckets whose reduction has started in this step, or micro-batch
        self._in_flight: Any = None  # with stage 2, the bucket that was reduced last
        self._flags_in_flight: Any = None  # the last exchange of `_sync_grad_flags`
        self._is_reduced = self._has_final_callback = False
        self._deferred_buckets: set[Bucket] = set()  # a forward hook waits for their all-gathers, not `step`
        super().__init__(params, optimizer_class([torch.zeros(1)], **defaults).defaults)
        all_params = [p for group in self.param_groups for p in group["params"]]
        check_params(all_params, process_group)
        self._frozen_params = [p for p in all_params if not p.requires_grad]  # in no bucket
        self.buckets = [bucket for group in self.param_groups for bucket in self._make_buckets(group)]
        self.inner_optimizers = [bucket.inner for bucket in self.buckets if bucket.inner]
        self._bucket_order = list(range(len(self.buckets)))  # the order in which all ranks reduce the buckets
        self._fill_order: list[int] | None = []  # the order on this rank; None after all use rank 0's
        for bucket_index, bucket in enumerate(self.buckets):
            for shard in bucket.shards:
                assert bucket.inner is not None
                self.state[shard.param] = bucket.inner.state[shard.tensor]  # the same dict under both keys
            self._register_hooks(bucket_index, bucket)

    def _make_buckets(self, group: Options) -> Iterator[Bucket]:
        for params in split_into_buckets(group["params"], self.bucket_mb * 2**20 if self.world_size > 1 else math.inf):
            bucket_class = Zero2Bucket if self.shards_gradients else Bucket
            yield bucket_class(params, group, self.optimizer_class, self.process_group)

    def _register_hooks(self, bucket_index: int, bucket: Bucket) -> None:
        """Register a hook for each parameter of a bucket. Autograd calls it once per backward pass and parameter."""
        optimizer_ref = weakref.ref(self)  # weak: hooks must not keep it alive
        for index, param in enumerate(bucket.params):

            def hook(_: Tensor, index: int = index) -> None:
                if (optimizer := optimizer_ref()) is not None:
                    optimizer._on_gradient_ready(bucket_index, index)

            param.register_post_accumulate_grad_hook(hook)

    # ---- 1. reduce

    def _on_gradient_ready(self, bucket_index: int, index: int) -> None:
        bucket = self.buckets[bucket_index]
        grad = bucket.params[index].grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError("a gradient is sparse, but buckets are dense: create the nn.Embedding with sparse=False")
        if self.shards_gradients and not self._is_reduced and self._num_started == len(self.buckets):
            self._num_started = 0  # the next micro-batch
        if index in bucket.ready_params or self._num_started == len(self.buckets):
            raise RuntimeError(
                "a second backward() ran after the gradients were reduced: call step() or zero_grad() of the optimizer "
                "first, or set require_backward_grad_sync = False for all but the last backward() of a step "
                "(reentrant activation checkpointing runs one too: use use_reentrant=False)"
            )
        bucket.store_gradient(index)
        if self.require_backward_grad_sync:
            if not self._has_final_callback:  # when backward ends, also reduce the buckets with unused parameters
                self._has_final_callback = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            bucket.ready_params.add(index)
            if bucket.is_ready:
                if self._fill_order is not None and bucket_index not in self._fill_order:
                    self._fill_order.append(bucket_index)
                self._reduce_ready_buckets()

    def _reduce_ready_buckets(self, include_partial: bool = False) -> None:
        """Start reducing the next buckets in the common order.

        Collectives match by the order of their calls, so all ranks must use one order.
        """
        for bucket_index in self._bucket_order[self._num_started :]:
            if not (include_partial or self.buckets[bucket_index].is_ready):
                break  # a later bucket may be ready, but not on another rank
            self._start_reduce(self.buckets[bucket_index])
            self._num_started += 1

    def _start_reduce(self, bucket: Bucket) -> None:
        """Start reducing a bucket. With stage 2, also finish the one before it, so that at most two are in flight."""
        bucket.start_reduce()
        if self.shards_gradients:
            self._add_average()
            self._in_flight = bucket

    def _add_average(self) -> None:
        if self._in_flight:
            self._in_flight.add_average()
        self._in_flight = None

    def _end_backward(self) -> None:
        """Reduce the buckets that are left, also those with unused parameters."""
        self._reduce_ready_buckets(include_partial=True)
        self._add_average()
        self._has_final_callback = False

    @torch.no_grad()
    def reduce_gradients(self) -> list[Tensor]:
        """Finish averaging the gradients. Collective. `step` calls it if you did not.

        Returns:
            The gradients of this rank's shards: 1-D, or whole matrices of Muon. `step` uses these tensors: scale them
            in place to clip.

        Raises:
            RuntimeError: no rank has a gradient, or a parameter has one that was frozen at first.
        """
        check_frozen(self._frozen_params)
        if not self._is_reduced:
            self._end_backward()
            self._sync_grad_flags()
            for bucket in self.buckets:
                bucket.finish_reduce()
            if not any(has for bucket in self.buckets for has in bucket.has_grad):
                self._begin_step()
                raise RuntimeError("no rank has a gradient to step with: call backward() first")
            self._is_reduced = True
        grads = [shard.tensor.grad for shard in self.shards if shard.tensor.grad is not None]
        # A rank whose shards have no gradients takes part in the collectives of the norm with an empty tensor.
        return grads or [self.buckets[0].local_grads[:0]]

    def _sync_grad_flags(self) -> None:
        """Set `has_grad` to True if any rank has a gradient, with one byte per parameter tensor. Collective.

        A rank that has all gradients knows the result. It launches the update without waiting.
        The first call also replaces the order of the buckets on all ranks by the order in which they filled on rank 0.
        """
        flags = [has for bucket in self.buckets for has in bucket.has_grad]
        if self.world_size > 1:
            device = control_device(self.buckets[0].flat_params.device, self.process_group)
            flag_bytes = torch.tensor(flags, dtype=torch.uint8, device=device)
            if self._flags_in_flight:
                self._flags_in_flight.wait()
            self._flags_in_flight = dist.all_reduce(flag_bytes, dist.ReduceOp.MAX, self.process_group, async_op=True)
            if not all(flags):
                self._flags_in_flight.wait()
                flags = flag_bytes.bool().tolist()
            if self._fill_order is not None:
                rest = [bucket_index for bucket_index in self._bucket_order if bucket_index not in self._fill_order]
                order = torch.tensor([*self._fill_order, *rest], device=device)
                dist.broadcast(order, group=self.process_group, group_src=0)
                self._bucket_order = order.tolist()
        self._fill_order = None
        for bucket in self.buckets:
            bucket.has_grad, flags = flags[: len(bucket.params)], flags[len(bucket.params) :]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient: scale it so that its global norm is at most `max_norm`; 0 turns clipping off. Collective.

        `torch.nn.utils.clip_grad_norm_` does not work here, because the reduction starts during the backward pass.
        After the reduction, `.grad` is valid only inside this rank's slice.

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
        """Finish the reduction, update this rank's shards, and all-gather the parameters. Collective."""
        loss = run_closure(closure)
        self.reduce_gradients()
        for bucket_index in reversed(self._bucket_order):  # the forward pass needs them in the opposite order
            self.buckets[bucket_index].update_shards()
            self.buckets[bucket_index].start_gather()
        for bucket in set(self.buckets) - self._deferred_buckets:
            bucket.wait()
        self._begin_step()
        return loss

    def wait_for_params(self) -> None:
        """Wait until every parameter is complete. After `gather_during_forward`, call it before reading parameters."""
        for bucket in self.buckets:
            bucket.wait()

    def gather_during_forward(self, model: nn.Module) -> None:
        """Let `step` return before the all-gathers end: each module waits for its parameters when it is called.

        Use it only if each module of the model reads no parameters of other modules.
        """
        bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        for module in model.modules():
            for bucket in {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}:
                module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.wait())
                self._deferred_buckets.add(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, also those that were reduced and that no `step` used."""
        if self._num_started:  # finish the collectives that all ranks have started
            self._reduce_ready_buckets(include_partial=True)
            self.wait_for_params()
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_started, self._in_flight, self._is_reduced, self._has_final_callback = 0, None, False, False
        self._fill_order = None if self._fill_order is None else []
        for bucket in self.buckets:
            bucket.clear_gradients()
        for param in self._frozen_params:
            param.grad = None

    # ---- state

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks whose shards make up the full gradient; None if this rank has the full gradient."""
        return None if self.world_size == 1 else self.process_group or dist.group.WORLD

    @property
    def shards(self) -> list[Shard]:
        """This rank's shards of all parameters."""
        return [shard for bucket in self.buckets for shard in bucket.shards]

    def local_state(self) -> Iterator[tuple[nn.Parameter, int, dict[str, Any]]]:
        """Yield this rank's state of each parameter with its offset in the flattened parameter, and fp32 masters."""
        for shard in self.shards:
            master = {} if shard.tensor.dtype == shard.param.dtype else {"master": shard.tensor}
            yield shard.param, shard.offset, {**self.state[shard.param], **master}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards. It loads only on the same rank of the same number of ranks.

        `sharded_checkpoint.py` writes checkpoints that load on any number of ranks.
        """
        content = super().state_dict()
        param_ids = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        content["state"] = {param_ids[param]: items for param, _, items in self.local_state() if items}
        content["place"] = self.rank, self.world_size, [(shard.offset, shard.tensor.numel()) for shard in self.shards]
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`, on the same device.

        Raises:
            ValueError: the state belongs to another model, rank or number of ranks.
        """
        if state_dict.get("place") != self.state_dict()["place"]:
            raise ValueError("this state belongs to another model, rank or number of ranks: use sharded_checkpoint.py")
        params = [p for group in self.param_groups for p in group["params"]]
        saved = {params[i]: items for i, items in state_dict["state"].items()}
        for shard in self.shards:
            items = dict(saved.get(shard.param, {}))
            shard.tensor.copy_(items.pop("master", shard.tensor))
            self.state[shard.param].clear()
            self.state[shard.param].update(copy.deepcopy(items))
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: copy.deepcopy(value) for name, value in saved_group.items() if name != "params"})
