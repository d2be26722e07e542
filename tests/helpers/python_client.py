"""The `python` of shell scripts in tests: ask the test's process to run a program, and exit with its exit code.

It starts in 20 ms, because it imports no package. See python_server.py.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(address: str, *words: str) -> int:
    """Run `python words...` and wait for its exit. Forward signals to it."""
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process to forward them to
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
        connection.connect(address)
        request = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
        print(json.dumps(request), file=stream, flush=True)
        pid = int(stream.readline())
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        code = int(stream.readline())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
