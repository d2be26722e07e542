"""Delay the results of asynchronous collectives, so that a missing wait is noticed.

On a CPU a collective often ends before a missing wait matters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DelayedWork:
    """An asynchronous collective whose output is NaN, until `wait` writes the result into it."""

    def __init__(self, collective: Callable[..., Any], output: Tensor, source: Tensor, *args: Any) -> None:
        self.output, self.source, self.is_done = output.detach(), source.detach(), False
        self.sent, self.received = self.source.clone(), torch.empty_like(self.output)
        self.work = collective(self.received, self.sent, *args, async_op=True)
        write(self.output, torch.full_like(self.output, float("nan")))
        if len(self.output) > len(self.source):  # this rank's part of an all-gather is there already
            write(self.source, self.sent)

    def wait(self) -> None:
        if self.is_done:
            return
        self.work.wait()
        is_input = ~self.source.isnan()  # an in-place reduce-scatter overwrites a part of its input
        assert torch.equal(self.source[is_input], self.sent[is_input]), "the input has changed"
        write(self.output, self.received)
        self.is_done = True


def write(target: Tensor, values: Tensor) -> None:
    """Write values as a collective does: autograd does not notice it."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(values)


def delay_results(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective; with `async_op=True` it returns a DelayedWork."""
    return lambda *args, async_op=False: DelayedWork(collective, *args) if async_op else collective(*args)
