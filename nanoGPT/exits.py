"""Report to the user and to the launcher why a rank exits."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path


def report_failure(code: int, message: str, is_same_on_all_ranks: bool = False) -> int:
    """Report to the user and to the launcher why this rank exits, and return the exit code.

    If every rank fails with the same error, only the first rank of each node prints it. The other ranks wait for a
    second, so that no launcher stops the first rank before it has printed the message.
    """
    if write_error_file(message):
        return code
    rank, is_first_of_node = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_same_on_all_ranks:
        print(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", file=sys.stderr)
    elif is_first_of_node:
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(1)
    return code


def write_error_file(message: str) -> bool:
    """Write why this rank exits into the error file of torch's elastic agent.

    Returns:
        Whether `operate.launch` has started this rank, and will print the message.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    return "NANOGPT_LAUNCHER" in os.environ
