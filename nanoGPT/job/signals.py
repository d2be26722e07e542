"""Stop a run at the end of a step on a signal, and exit a rank when its launcher has exited."""

import os
import signal
import threading
import time

from nanoGPT.distributed.runtime import Runtime


def listen_for_signals(run: Runtime) -> None:
    """Install handlers for SIGTERM, SIGINT and SIGHUP, which stop the run at the end of a step.

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
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, request_stop)


def exit_with_launcher(launcher: int) -> None:
    """Exit this process when its launcher has exited: a launcher that is killed by SIGKILL must not leave ranks behind.

    Args:
        launcher: the launcher's process id.
    """
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)
