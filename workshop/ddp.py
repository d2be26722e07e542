"""Data parallelism written by hand, three times. Every rank replaces its gradients by their mean over all ranks.

                          collectives          when they run                copy of the gradients
    average_each          one per parameter    after the backward pass      none
    average_in_buffer     one                  after the backward pass      all of them
    OverlappedAverage     one per bucket       during the backward pass     all of them

All three send 2n(N-1)/N bytes for gradients of n bytes on N ranks. They differ in how often they pay the latency of a
collective, and in how long the ranks wait for it. torch's DistributedDataParallel (Li et al. 2020) is the third one.
Every parameter needs a gradient on all ranks or on none.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase1_zero1.buckets import split_into_buckets


def average_each(params: Iterable[nn.Parameter]) -> None:
    """Average one gradient after another. Collective; call it after the last backward pass of a step."""
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)


def average_in_buffer(params: Iterable[nn.Parameter]) -> None:
    """Average all gradients in one flat buffer. Collective; call it after the last backward pass of a step."""
    grads = [param.grad for param in params if param.grad is not None]
    buffer = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(buffer, dist.ReduceOp.AVG)
    copy_back(buffer, grads)


def copy_back(buffer: Tensor, grads: Sequence[Tensor]) -> None:
    """Copy the parts of a flat buffer into the gradients, in their order."""
    for grad, part in zip(grads, buffer.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


class OverlappedAverage:
    """Averages the gradients of a bucket while the backward pass still computes those of earlier layers.

    A process group matches collectives by the order of their calls, so all ranks start the buckets in one order: a
    bucket waits until those before it have started.

    Args:
        params: of the model, in the order of the forward pass.
        bucket_bytes: maximum size of a bucket.

    Attributes:
        is_last: whether the next backward pass averages. Before, the gradients of micro-batches only accumulate.
        buckets: the parameters of each bucket; the one that is complete first comes first.
        started: the buffer and the handle of each all-reduce of this step.
    """

    def __init__(self, params: Iterable[nn.Parameter], bucket_bytes: float = 25 * 2**20) -> None:
        self.is_last = True
        self.buckets = split_into_buckets(params, bucket_bytes)
        self.bucket_of = {param: number for number, bucket in enumerate(self.buckets) for param in bucket}
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self._on_gradient_ready)
        self._begin_step()

    def _begin_step(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients that are not ready
        self.started: list[tuple[Tensor, Any]] = []

    def _on_gradient_ready(self, param: nn.Parameter) -> None:
        if self.is_last:
            self.missing[self.bucket_of[param]] -= 1
            while (number := len(self.started)) < len(self.buckets) and self.missing[number] == 0:
                self._start(number)

    def _start(self, number: int) -> None:
        buffer = torch.cat(self._grads(self.buckets[number]))
        self.started.append((buffer, dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True)))

    def _grads(self, bucket: Sequence[nn.Parameter]) -> list[Tensor]:
        return [param.grad.view(-1) for param in bucket if param.grad is not None] or [bucket[0].new_empty(0)]

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until all gradients are averaged. Call it after the last backward pass of a step. Collective."""
        while len(self.started) < len(self.buckets):  # their parameters have no gradients in this step
            self._start(len(self.started))
        for bucket, (buffer, work) in zip(self.buckets, self.started, strict=True):
            work.wait()
            copy_back(buffer, self._grads(bucket))
        self._begin_step()
