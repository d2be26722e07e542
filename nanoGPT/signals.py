"""Stop a run at the end of a step on a signal, and stop a rank when its launcher has exited.

Terminals, schedulers and clouds announce the end of a job with one of STOP_SIGNALS: to the launcher or all processes.
SIGQUIT makes a rank write its stacks (`nanoGPT.log`).
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from nanoGPT.distributed.environment import read_elastic_job
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
        if run.stop_signal and number == signal.SIGINT and time.monotonic() - requested_at > 2:
            raise KeyboardInterrupt
        if not run.stop_signal:
            run.stop_signal, requested_at = signal.Signals(number).name, time.monotonic()

    if threading.current_thread() is threading.main_thread():
        handle_stop_signals(request_stop)
        run.can_stop = True


def stop_with_launcher(launcher: int, run: Runtime) -> None:
    """Stop this process when its launcher has exited: a launcher that is killed must not leave ranks behind.

    A run that has begun saves first. A rank of an elastic job exits at once, because the other nodes start new ranks.

    Args:
        launcher: the launcher's process id.
        run: this rank's Runtime.
    """
    while os.getppid() == launcher:
        time.sleep(0.5)
    if not run.can_stop or read_elastic_job():
        os._exit(1)
    run.stop_signal = run.stop_signal or "the end of its launcher"
