"""Measure the memory that a rank needs while it reads a model."""

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from evaluation.generation import LanguageModel
from measure.memory_limits import process_bytes
from nanoGPT.costs import storage_bytes

KEEP_NOTHING = (-3, 2**16)  # M_MMAP_THRESHOLD: glibc returns larger blocks to the system as soon as they are freed


def measure_loading(load: Callable[[], LanguageModel]) -> tuple[int, int]:
    """Load a model. Return the bytes of this rank's part, and the most memory that the process had more than before.

    The memory is that of `process_bytes`, which does not count the page cache. The model is loaded twice, because the
    first time also imports libraries.
    """
    ctypes.CDLL(None).mallopt(*KEEP_NOTHING)
    load()
    begin, samples, is_loaded = process_bytes() or 0, [0], threading.Event()

    def sample() -> None:
        while not is_loaded.is_set():
            samples.append(process_bytes() or 0)
            time.sleep(0.0005)

    thread = threading.Thread(target=sample)
    thread.start()
    model = load()
    is_loaded.set()
    thread.join()
    module: torch.nn.Module = model.model  # type: ignore[attr-defined]
    return storage_bytes(module.parameters()), max(samples) - begin
