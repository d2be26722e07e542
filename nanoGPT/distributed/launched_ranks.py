"""Read the ranks that a launcher has started, for the lessons, which are programs without a `Runtime`."""

import os

from nanoGPT.distributed.environment import environment_number
from nanoGPT.errors import ConfigError


def read_launched_ranks(micro_batches: int) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, for a program that only a launcher can start.

    Raises:
        ConfigError: no launcher started this process, or the ranks cannot share the micro-batches of a step equally.
    """
    rank, ranks = environment_number("RANK"), environment_number("WORLD_SIZE")
    if not ranks or "RANK" not in os.environ:
        raise ConfigError("this program needs a launcher: start it with torchrun --standalone --nproc_per_node=2")
    if micro_batches < ranks or micro_batches % ranks:
        raise ConfigError(
            f"--micro_batches={micro_batches} cannot be divided by {ranks} ranks: use a multiple of {ranks}"
        )
    return rank, ranks
