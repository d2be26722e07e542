"""Count the stages that a GPU has reached. The host only queues kernels, so it can be many stages ahead of the GPU."""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

MAX_PENDING = 1024  # events; if nobody counts them, the oldest are dropped


class DeviceProgress:
    """The stages that a GPU has reached, from a CUDA event at the beginning of each stage.

    Args:
        new_event: creates an event, such as `torch.cuda.Event`.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self.new_event, self.reached = new_event, 0
        self.pending: deque[tuple[int, Any]] = deque(maxlen=MAX_PENDING)

    def record(self, stage: int) -> None:
        """Record an event in the current stream: the GPU reaches it when everything that was queued before has run.

        Args:
            stage: number of the stage that begins.
        """
        event = self.new_event()
        event.record()
        self.pending.append((stage, event))

    def count_reached(self) -> int:
        """Return the number of the last stage that the GPU has reached, without waiting for it.

        After a CUDA error, such as an illegal address, every query fails. The number then does not change, so that the
        heartbeat and the files that explain the error can still be written.
        """
        with contextlib.suppress(RuntimeError):
            while self.pending and self.pending[0][1].query():
                self.reached = self.pending.popleft()[0]
        return self.reached


def watch_device(device: torch.device) -> DeviceProgress | None:
    """Return a counter for an NVIDIA GPU; None for other devices."""
    return DeviceProgress(torch.cuda.Event) if device.type == "cuda" else None
