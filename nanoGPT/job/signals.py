"""Stop a run at the end of a step on a signal.

Terminals, schedulers and clouds announce the end of a job with one of STOP_SIGNALS: to the launcher or all processes.
SIGQUIT is left to the observers.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from nanoGPT.distributed.runtime import Runtime

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def handle_stop_signals(handler: Callable[[int, Any], object]) -> dict[int, Any]:
    """Install a handler for STOP_SIGNALS, but not for one that is ignored: nohup ignores SIGHUP.

    Returns:
        The earlier handler of each signal.
    """
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def listen_for_signals(run: Runtime) -> None:
    """Install handlers for STOP_SIGNALS, which stop the run at the end of a step.

    On several ranks, this is the next step after which the ranks exchange their requests: within about a second.

    A SIGINT more than two seconds after the first signal stops the run at once.
    """
    requested_at = 0.0

    def request_stop(number: int, _frame: object) -> None:
        nonlocal requested_at
        if run.stop_reason and number == signal.SIGINT and time.monotonic() - requested_at > 2:
            raise KeyboardInterrupt
        requested_at = requested_at or time.monotonic()
        run.request_stop(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        handle_stop_signals(request_stop)
