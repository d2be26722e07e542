"""Run the Python programs that a shell script starts, but in forked processes with torch imported.

A new interpreter needs about three seconds of processor time to import torch, and a job of two nodes starts at least
four. A script with `PY=<the path from serve_python>` starts python_client.py instead, which asks for a forked process.
"""

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from tests.helpers import python_client
from tests.helpers.programs import Program, kill_programs


@contextlib.contextmanager
def serve_python(folder: Path) -> Iterator[str]:
    """Write a script into `folder` that replaces `python` for programs of this repository, and return its path.

    Programs that still run at the end are killed, and so is the program of a client that was killed.
    """
    address, script = folder / "python.socket", folder / "python"
    client = shlex.join([sys.executable, "-I", "-S", str(Path(python_client.__file__)), str(address)])
    script.write_text(f'#!/bin/bash\nexec {client} "$@"\n')
    script.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen()
        threading.Thread(target=accept_clients, args=(server,), daemon=True).start()
        try:
            yield str(script)
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends the thread's call of accept


def accept_clients(server: socket.socket) -> None:
    """Serve each client in a thread, until the server is shut down."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve_client, args=(connection,), daemon=True).start()


def serve_client(connection: socket.socket) -> None:
    """Run the program that a client asks for, with the client's standard output, and send its pid and exit code.

    If the client exits first, because it was killed, kill the program.
    """
    with connection, connection.makefile("rw") as stream:
        request = json.loads(stream.readline())
        words = [word for word in request["words"] if word not in ("-u", "-m")]
        open_output = partial(os.open, f"/proc/{request['pid']}/fd/1", os.O_WRONLY | os.O_APPEND)
        program = Program(*words, cwd=Path(request["cwd"]), open_output=open_output, **request["environment"])
        print(program.pid, file=stream, flush=True)
        if program.process.sentinel in wait([program.process.sentinel, connection]):
            program.process.join()
            print(program.returncode, file=stream, flush=True)
        else:  # the client sends nothing more, so its end of the connection is closed
            kill_programs([program])
