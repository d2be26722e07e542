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
# Out-of-memory messages of errors that are neither torch.OutOfMemoryError nor MemoryError. "Not initialized" is one of
# them: it nearly always means that cuBLAS or cuDNN found no memory for its workspace.
OUT_OF_MEMORY_MESSAGES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 ",
    "Cuda failure 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "MPS backend out of memory",
    "can't allocate memory: you tried",
    "not enough memory: you tried",
    "unable to mmap memory: you tried",
    "Cannot allocate memory",
    "std::bad_alloc",
)


class ConfigError(Exception):
    """A request that cannot be carried out. The message is one sentence that tells the user what to do. Exit code 2.

    Args:
        message: the sentence. Line breaks are replaced by spaces, and a very long message is shortened.
        on_one_rank: whether other ranks may not have this error, so that this rank must print it.
    """

    def __init__(self, message: str, on_one_rank: bool = False) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= MAX_MESSAGE_LENGTH else f"{line[:MAX_MESSAGE_LENGTH]}...")
        self.on_one_rank = on_one_rank


class LostConnection(ConfigError):
    """A connection to another node was lost or never established. An elastic job starts its ranks again."""


class NonFiniteLoss(Exception):
    """The loss or the gradient norm is not finite. Every rank raises it at the same step. Exit code 3."""


class DivergedRanks(Exception):
    """Ranks that must have the same values have different ones. Every rank raises it at the same step. Exit code 1."""


class ExplainedError(Exception):
    """An error that an observer of the run explains. The message is the sentence for the user. Exit code 1."""


class PeerFailed(Exception):
    """Another rank failed in a collective save or load. That rank reports the reason."""


class SaveError(Exception):
    """A checkpoint could not be saved. Earlier checkpoints remain valid. Every rank raises it. Exit code 1."""


def blames_peer(error: object) -> bool:
    """Return whether an error, or the text of one, means that a rank fails only because another rank has failed."""
    return isinstance(error, PeerFailed) or any(words in str(error) for words in LOST_PEER_MESSAGES)


def unreadable_checkpoint(path: Path, message: str, on_one_rank: bool = False) -> ConfigError:
    """Return the error for a checkpoint that cannot be read.

    Args:
        path: of a file or a directory of the checkpoint.
        message: what is wrong, unless the path no longer exists: then the run that saves there has deleted it.
        on_one_rank: as in ConfigError.
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
        values = f"the loss ({loss})" if grad_norm is None else f"the loss ({loss}) or the gradient norm ({grad_norm})"
        raise NonFiniteLoss(
            f"step {step}: {values} is not finite, and training stopped "
            "without saving: resume from the last checkpoint, or start again if there is none, with a lower "
            "--learning_rate or stronger gradient clipping, such as --grad_clip=0.5"
        )


def did_you_mean(name: str, names: list[str], prefix: str = "") -> str:
    """Return "; did you mean ...?" with the closest known name, or "" if no name is close.

    Names that begin with `name`, in upper or lower case, are preferred. `prefix` is printed before the name.
    """
    longer_names = [known for known in names if known.lower().startswith(name.lower())]
    closest = difflib.get_close_matches(name.lower(), longer_names, n=1) or difflib.get_close_matches(name, names, n=1)
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


def error_messages(error: BaseException) -> str:
    """Return the messages of an error and of its causes, one per line."""
    return "\n".join(map(str, list_causes(error)))


def quote_cause(error: BaseException) -> str:
    """Return the first line of the message of an error's first cause, shortened to MAX_QUOTE characters."""
    line = (str(list_causes(error)[-1]).strip().splitlines() or [""])[0]
    return line if len(line) <= MAX_QUOTE else line[:MAX_QUOTE] + "..."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, numpy, torch or a CUDA library means that memory ran out."""
    import torch  # here, because programs that need no torch import this module too, and start much faster without it

    text = error_messages(error)
    has_class = any(isinstance(each, MemoryError | torch.OutOfMemoryError) for each in list_causes(error))
    return has_class or any(message in text for message in OUT_OF_MEMORY_MESSAGES)


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
