"""Run the kernels of notebooks in processes that are forked from a process with torch imported."""

import multiprocessing.forkserver
import os
from pathlib import Path
from typing import Any

from tests.helpers.programs import Program, wait_until


class ForkedKernel(Program):
    """A kernel that is forked from a process with torch imported, and whose ranks are forked from the same process."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], env: dict[str, str], cwd: str, **_: Any) -> None:
        super().__init__("ipykernel_launcher", *command[3:], cwd=Path(cwd), open_output=start_session, **env)
        wait_until(lambda: os.getpgid(self.pid) == self.pid)  # a signal to the kernel's group must not reach the tests


def start_session() -> int:
    """Start a new session, as jupyter_client does for a kernel. Return a descriptor that discards the output.

    Also fork the server of the kernel's ranks. Later the kernel has threads, and a fork could copy a lock of theirs.
    """
    os.setsid()
    output = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    multiprocessing.forkserver.ensure_running()
    return output
