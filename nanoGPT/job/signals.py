"""Signals end a run after the step in progress, and a rank ends when its launcher is gone."""

import os
import signal
import threading
import time

from nanoGPT.distributed.runtime import Runtime


def listen_for_signals(run: Runtime) -> None:
    """SIGTERM, SIGINT and SIGHUP end the run after the step in progress; a SIGINT seconds later ends it at once."""
    asked_at = 0.0

    def ask(number: int, _frame: object) -> None:
        nonlocal asked_at
        if run.stop_signal and number == signal.SIGINT and time.monotonic() - asked_at > 2:
            raise KeyboardInterrupt
        if not run.stop_signal:
            run.stop_signal, asked_at = signal.Signals(number).name, time.monotonic()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, ask)


def end_with_launcher(launcher: int) -> None:
    """End this rank when its launcher is gone: a SIGKILL of the launcher must not leave ranks behind."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)
