"""Prepare a dataset in two threads at the same time."""

import fcntl
import threading
from collections.abc import Callable

import pytest

from tests.helpers.programs import DEADLINE


def prepare_twice_at_once(
    prepare: Callable[[], object],
    has_started: threading.Event,
    may_continue: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Start a preparation, and a second one while the first one writes. Return when both have ended.

    Args:
        prepare: prepares the dataset.
        has_started: set by the test's own code when the first preparation writes.
        may_continue: the first preparation waits for this event, which is set when the second one waits for the lock.
    """
    is_waiting, real_flock = threading.Event(), fcntl.flock

    def flock(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            is_waiting.set()
        real_flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    threads = [threading.Thread(target=prepare) for _ in range(2)]
    threads[0].start()
    assert has_started.wait(DEADLINE)
    threads[1].start()
    has_waited = is_waiting.wait(DEADLINE)
    may_continue.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert has_waited
