"""Measure the time, and the memory of all processes that are started meanwhile: a notebook's kernel and its ranks."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

INTERVAL = 0.5  # seconds between two samples of the memory


@dataclass
class Usage:
    """What a notebook needed.

    Attributes:
        seconds: wall clock.
        peak_bytes: maximum of the sampled memory of all processes. Memory that processes share counts once (on Linux).
    """

    seconds: float = 0.0
    peak_bytes: int = 0


def sum_memory_of_children() -> int:
    """Return the bytes of memory of all processes that this process has started, directly or indirectly."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            memory = process.memory_full_info()
        except psutil.Error:  # the process has just ended, or belongs to another user
            continue
        total += getattr(memory, "pss", memory.rss)
    return total


@contextmanager
def measure_usage() -> Iterator[Usage]:
    """Measure until the end of the context; the Usage then contains the result."""
    usage, begin, has_ended = Usage(), time.monotonic(), threading.Event()

    def sample_memory() -> None:
        while not has_ended.wait(INTERVAL):
            usage.peak_bytes = max(usage.peak_bytes, sum_memory_of_children())

    sampler = threading.Thread(target=sample_memory, daemon=True)
    sampler.start()
    try:
        yield usage
    finally:
        has_ended.set()
        sampler.join()
        usage.seconds = time.monotonic() - begin
