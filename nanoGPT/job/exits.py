"""Report the error that ends a rank: to the user, and to the launcher."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path


def report_failure(code: int, message: str, alike_on_all_ranks: bool = False) -> int:
    """Say why this rank ends, to the user and to the launcher; returns the exit code.

    Of an error that all ranks meet alike, the first rank of each machine speaks; the others give it a second.
    """
    if tell_launcher(message):
        return code
    rank, speaks = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    if not alike_on_all_ranks:
        print(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", file=sys.stderr)
    elif speaks:
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(1)
    return code


def tell_launcher(message: str) -> bool:
    """Hand torch's elastic agent the reason why this rank ends; whether the launcher will print it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    return "NANOGPT_LAUNCHER" in os.environ
