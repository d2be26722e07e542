"""How a program ends: its errors, their exit codes, and who says what is wrong.

Exit codes: 0 done, or saved after SIGTERM or SIGINT; 2 a request that cannot be carried out; 3 a loss that is not
finite; 1 anything else.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words for it


class ConfigError(Exception):
    """A request that cannot be carried out. Its message is one sentence that says what to do; exit code 2.

    Args:
        message: the sentence.
        on_one_rank: other ranks may not have met it, so this one must speak.
    """

    def __init__(self, message: str, on_one_rank: bool = False) -> None:
        super().__init__(message)
        self.on_one_rank = on_one_rank


class NonFiniteLoss(Exception):
    """The loss or the gradient norm is not finite; every rank sees the same value at the same step. Exit code 3."""


class SaveError(Exception):
    """A checkpoint could not be saved; those before it stand. Every rank raises it. Exit code 1."""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Around a program: a ConfigError, or a full or read-only disk, becomes its sentence and exit code 2."""
    try:
        yield
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def fail(code: int, message: str, alike_on_all_ranks: bool = False) -> int:
    """Say why this rank ends, to the user and to the launcher; returns the exit code.

    Of an error that all ranks meet alike, the first rank of each machine speaks; the others give it a second.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    if "NANOGPT_LAUNCHER" in os.environ:
        return code  # the launcher speaks
    rank, speaks = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    if not alike_on_all_ranks:
        print(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", file=sys.stderr)
    elif speaks:
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(1)
    return code
