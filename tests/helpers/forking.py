"""Fork processes that have already imported torch, instead of starting new interpreters that would import it again."""

import contextlib
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from operate.ranks import PRELOADED

CAN_FORK_RANKS = sys.platform == "linux" and torch.cuda.device_count() == 0  # a forked process cannot use CUDA

start_interpreter = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


def start_rank_server() -> None:
    """Fork this process to run the server from which `run_on_ranks` and `Program` fork their processes, if possible.

    By default, multiprocessing starts this server with the first rank, in a new interpreter that imports the same
    modules again.
    """
    if not CAN_FORK_RANKS:
        return
    for name in PRELOADED:
        importlib.import_module(name)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork_rank_server):
        multiprocessing.forkserver.ensure_running()


def fork_rank_server(path: Any, args: list[Any], pass_fds: list[int]) -> int:
    """Fork this process to run the server from which `run_on_ranks` forks ranks. Return its process id.

    All other interpreters of multiprocessing are started as usual.
    """
    if not str(args[-1]).startswith("from multiprocessing.forkserver import main"):
        return start_interpreter(path, args, pass_fds)
    if pid := os.fork():
        return pid
    try:
        # The parent process holds the lock of its server object while it forks. Replace the copy of the lock.
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
        prepare_fork({1, 2, *pass_fds})
        sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
        redirect_logs()
        exec(args[-1])
    except SystemExit:  # the parent process has ended, and with it the server
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def redirect_logs() -> None:
    """Let the loggers of imported modules write to the new standard error.

    torch's handlers keep the standard error of the time of its import, whose descriptor is closed. In a program that is
    forked later, another file has this number: the pipe on which the server waits for the end of all programs.
    """
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr


def prepare_fork(descriptors: set[int]) -> None:
    """Remove what a new interpreter does not have: handlers of signals and errors, and open files.

    Args:
        descriptors: the file descriptors that stay open, besides 0.
    """
    gc.freeze()  # a destructor of the parent's objects could close a descriptor of this process
    gc.enable()
    faulthandler.disable()
    # torch makes a new pool of threads here. Later, several threads of a backward pass may make it at once, and abort.
    torch.set_num_threads(torch.get_num_threads())
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, *descriptors}:
        with contextlib.suppress(OSError):  # the descriptor of the listed directory
            os.close(descriptor)


@contextlib.contextmanager
def fork_ranks_from_this_process() -> Iterator[None]:
    """Fork the ranks and the workers that start inside this context from this process, if possible.

    Use it where this process has imported large packages. Otherwise each rank imports them again.
    """
    context = multiprocessing.get_context("fork" if CAN_FORK_RANKS else "forkserver")
    with mock.patch.object(multiprocessing, "get_context", lambda method: context):
        yield
