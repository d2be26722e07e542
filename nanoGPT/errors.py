"""The exceptions of this project, the exit codes of its programs, and how a rank reports why it exits.

0      the run is complete, or a checkpoint was saved after a signal
1      any other failure
2      an invalid request (ConfigError)
3      a loss or a gradient norm that is not finite (NonFiniteLoss)
4      a job that hung
130    stopped by Ctrl-C, and nothing was saved
"""

import contextlib
import difflib
import importlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

STALLED = 4  # exit code
MAX_MESSAGE_LENGTH, MAX_QUOTE = 1500, 600  # characters
LOST_RANK = "has failed or was killed"
# Messages of gloo, NCCL and this project from a rank that fails only because another rank has failed.
LOST_PEER_MESSAGES = (
    LOST_RANK,
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "Connection closed by remote peer",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
    "PeerFailed",
)


class RunError(Exception):
    """An error whose message explains it to the user. It is printed without a traceback. Exit code 1.

    Args:
        message: one sentence. Line breaks are replaced by spaces, and a very long message is shortened.
        on_one_rank: True if other ranks may continue without this error, so that this rank must print it.
    """

    exit_code = 1

    def __init__(self, message: str, on_one_rank: bool = False) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= MAX_MESSAGE_LENGTH else f"{line[:MAX_MESSAGE_LENGTH]}...")
        self.on_one_rank = on_one_rank


class ConfigError(RunError):
    """A request that cannot be carried out. The message tells the user what to do. Exit code 2."""

    exit_code = 2


class LostConnection(ConfigError):
    """A connection to another node was lost or never established. An elastic job starts its ranks again."""


class NonFiniteLoss(RunError):
    """The loss or the gradient norm is not finite. Every rank raises it at the same step. Exit code 3."""

    exit_code = 3


class DivergedRanks(RunError):
    """Ranks that must have the same values have different ones. Every rank raises it at the same step. Exit code 1."""


class SaveError(RunError):
    """A checkpoint could not be saved. Earlier checkpoints remain valid. Every rank raises it. Exit code 1."""


class PeerFailed(Exception):
    """Another rank failed in a collective save or load. That rank reports the reason."""


def blames_peer(error: object) -> bool:
    """Return whether an error, or the text of one, means that a rank fails only because another rank has failed."""
    return isinstance(error, PeerFailed) or any(words in str(error) for words in LOST_PEER_MESSAGES)


def unreadable_checkpoint(path: Path, message: str, on_one_rank: bool = False) -> ConfigError:
    """Return the error for a checkpoint that cannot be read.

    Args:
        path: of a file or a directory of the checkpoint.
        message: what is wrong, unless the path no longer exists: then the run that saves there has deleted it.
        on_one_rank: as in RunError.
    """
    if not path.exists():
        message = f"{path} was deleted while it was read, because its run has saved newer checkpoints: try again"
    return ConfigError(message, on_one_rank)


def check_finite(step: int, loss: float, grad_norm: float | None = None) -> None:
    """Check that the loss and the gradient norm are finite, before the step can be saved in a checkpoint.

    Raises:
        NonFiniteLoss: one of them is not. Every rank raises it at the same step, because the values are the same.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm or 0.0)):
        norm = "" if grad_norm is None else f" or the gradient norm ({grad_norm})"
        raise NonFiniteLoss(
            f"step {step}: the loss ({loss}){norm} is not finite, and training stopped "
            "without saving: resume from the last checkpoint, or start again if there is none, with a lower "
            "--learning_rate or stronger gradient clipping, such as --grad_clip=0.5"
        )


def did_you_mean(name: str, names: list[str], prefix: str = "") -> str:
    """Return "; did you mean ...?" with the closest known name, or "" if no name is close.

    Names that begin with `name`, in upper or lower case, are preferred. `prefix` is printed before the name.
    """
    longer_names = [known for known in names if known.lower().startswith(name.lower())]
    closest = difflib.get_close_matches(name.lower(), longer_names or names, n=1)
    return f"; did you mean {prefix}{closest[0]}?" if closest else ""


def import_optional(module: str, flag: str) -> Any:
    """Import a module that a copy of this code may lack.

    Args:
        module: its name.
        flag: the flag with its value that needs the module.

    Raises:
        ConfigError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{flag} needs {error.name}, which is not here: copy or install it, or remove the flag"
        ) from None


def list_causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, the first cause last."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def quote_cause(error: BaseException) -> str:
    """Return the first line of the message of an error's first cause, shortened to MAX_QUOTE characters."""
    line = (str(list_causes(error)[-1]).strip().splitlines() or [""])[0]
    return line if len(line) <= MAX_QUOTE else line[:MAX_QUOTE] + "..."


def ran_out_of_memory(error: Exception) -> bool:
    """Return whether a read has failed because memory ran out. On a CPU, torch raises a RuntimeError then."""
    return isinstance(error, MemoryError) or "allocate" in str(error)


def report_failure(code: int, message: str, on_one_rank: bool = True) -> int:
    """Report to the user and to the launcher why this rank exits, and return the exit code.

    If every rank fails with the same error, only the first rank of each node prints it. The other ranks wait for a
    second, so that no launcher stops the first rank before it has printed the message.

    Args:
        code: the exit code.
        message: the reason.
        on_one_rank: True if the other ranks may have another message, or none.
    """
    if report_to_launcher(message):
        return code
    if not on_one_rank and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)
        return code
    rank = os.environ.get("RANK", "0")
    place = f" on rank {rank}" if on_one_rank and rank != "0" else ""
    print(f"error{place}: {message}", file=sys.stderr)
    return code


def report_to_launcher(message: str) -> bool:
    """Write why this rank exits into the error file of torch's elastic agent.

    Returns:
        Whether the launcher of this rank will print the message.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
        except OSError:  # the disk is full; torch's agent could not read an incomplete file
            with contextlib.suppress(OSError):
                Path(path).unlink()
            return False
    return "NANOGPT_LAUNCHER" in os.environ
