"""ZeRO-2: like ZeRO-1, but each rank also stores only its slice of the gradients.

In ZeRO-1 a rank accumulates the full gradients of its micro-batches, and the last backward pass averages them over the
ranks. Then a rank uses only its slice. ZeRO-2 frees the rest (Rajbhandari et al. 2020, section 5.2). A bucket allocates
its buffer of full gradients when the first gradient of the bucket arrives, and reduce-scatters it when the bucket is
full. The rank adds its slice of the mean to `local_grads` and frees the buffer. If the buckets fill in the order in
which they are reduced, one bucket of each parameter group is being filled at any time, and at most two are reduced:

                      ZeRO-1                            ZeRO-2
    flat_params       4P                                4P
    gradients         4P        flat_grads              4P/N    local_grads
    AdamW             8P/N                              8P/N
    reduce-scatter    once per step                     once per micro-batch

With one micro-batch per rank and step, ZeRO-2 has the same communication volume as ZeRO-1. With more, it trades
communication for memory. `Zero1Optimizer(..., stage=2)` uses these buckets.
"""

import torch
from torch import Tensor

from phase1_zero1.buckets import Bucket


class Zero2Bucket(Bucket):
    """A bucket that stores only this rank's slice of the gradients, in fp32 if the parameters are in bf16 or fp16."""

    def _allocate_gradients(self) -> Tensor:
        self._free_full_gradients()
        length = self.local_slice.stop - self.local_slice.start
        is_low_precision = self.flat_params.dtype in (torch.bfloat16, torch.float16)
        return self.flat_params.new_zeros(length, dtype=torch.float32 if is_low_precision else None)

    def _free_full_gradients(self) -> None:
        self.flat_grads, self.grad_views = self.flat_params.new_empty(0), []

    def store_gradient(self, index: int) -> None:
        """Move a gradient that autograd allocated into the buffer of full gradients, which is allocated if needed."""
        if not self.grad_views:
            super()._allocate_gradients()
        super().store_gradient(index)

    def start_reduce(self) -> None:
        """Start averaging the gradients of one or more micro-batches over the ranks."""
        if not self.grad_views:  # this rank has no gradient, but other ranks may have one
            super()._allocate_gradients()
        super().start_reduce()
        for param in self.params:
            param.grad = None

    def add_average(self) -> None:
        """Wait for the average, add this rank's slice of it to `local_grads`, and free the full gradients."""
        self.wait()
        self.previous_work = None  # also frees gloo's copy of the bucket
        self.local_grads += self.flat_grads[self.local_slice]
        self._free_full_gradients()
        self.ready_params.clear()

    def clear_gradients(self) -> None:
        """Set all gradients to None or zero, ready for the next step."""
        super().clear_gradients()
        self._free_full_gradients()
        self.local_grads.zero_()
