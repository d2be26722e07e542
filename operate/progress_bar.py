"""A progress bar below the lines that a run prints, if standard error is a terminal."""

import sys
import threading

from tqdm import tqdm


class ProgressBar:
    """A progress bar of the steps of a run. `hide` removes it before a line is printed; `show` draws it again.

    Args:
        first_step: the step at which this start of the run begins.
        max_iters: number of steps of the run.
        is_main: whether this is rank 0, which alone shows the bar.
    """

    def __init__(self, first_step: int, max_iters: int, is_main: bool) -> None:
        # tqdm's default lock is shared by all processes, and leaks if ranks are forked.
        tqdm.set_lock(threading.RLock())
        is_shown = is_main and sys.stderr.isatty()
        self.bar = tqdm(total=max_iters, initial=first_step, unit="step", disable=not is_shown)
        self.is_hidden = False

    def hide(self, step: int) -> None:
        """Remove the bar, because a line for `step` will be printed."""
        self.bar.update(min(step + 1, self.bar.total) - self.bar.n)
        self.bar.clear()
        self.is_hidden = True

    def show(self) -> None:
        """Draw the bar again, if it is hidden."""
        if self.is_hidden:
            self.bar.refresh()
        self.is_hidden = False

    def close(self) -> None:
        """Close the bar. Its last state stays on the terminal."""
        self.bar.close()
