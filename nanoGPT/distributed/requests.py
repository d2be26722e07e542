"""Decide about once a second, and on all ranks at the same step, whether to stop or to save.

Ranks receive a signal at different moments, but all of them must stop after the same step. They agree with one small
all-reduce. An exchange after every step would delay short steps, and every rank would wait for the slowest one.
"""

import time
from collections.abc import Callable

PERIOD_SECONDS = 1.0
MAX_STEPS = 32  # a bound for the delay of a request if steps suddenly become slow


class RequestClock:
    """Counts steps until the next exchange of requests. All ranks have the same count.

    The ranks exchange the time of a step, too. Each of them computes the next count from the time of the slowest rank.

    Args:
        read_clock: returns seconds; a test may pass its own clock.
    """

    def __init__(self, read_clock: Callable[[], float] = time.monotonic) -> None:
        self.read_clock, self.last_exchange = read_clock, read_clock()
        self.steps = 1  # between the last exchange and the next one
        self.steps_left = 1

    def is_due(self) -> bool:
        """Count a step. Return whether the ranks exchange their requests after it; the same on all ranks."""
        self.steps_left -= 1
        return self.steps_left == 0

    def microseconds_per_step(self) -> int:
        """Return the mean time of a step of this rank since the last exchange, and begin a new period."""
        now = self.read_clock()
        seconds, self.last_exchange = now - self.last_exchange, now
        return round(1e6 * seconds / self.steps)

    def schedule(self, microseconds_per_step: int) -> None:
        """Set the number of steps until the next exchange: as many as take PERIOD_SECONDS, at most MAX_STEPS.

        The number at most doubles, because the first steps of a run are often not typical.

        Args:
            microseconds_per_step: of the slowest rank.
        """
        steps = int(1e6 * PERIOD_SECONDS / max(microseconds_per_step, 1))
        self.steps = self.steps_left = max(1, min(steps, 2 * self.steps, MAX_STEPS))
