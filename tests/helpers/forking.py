"""Fork ranks from the process of a test instead of from the server of ranks."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from unittest import mock

from tests.helpers.programs import CAN_FORK_RANKS


@contextlib.contextmanager
def fork_ranks_from_this_process() -> Iterator[None]:
    """Fork the ranks and the workers that start inside this context from this process, if possible.

    Use it where this process has imported large packages. Otherwise each rank imports them again.
    """
    context = multiprocessing.get_context("fork" if CAN_FORK_RANKS else "forkserver")
    with mock.patch.object(multiprocessing, "get_context", lambda method: context):
        yield
