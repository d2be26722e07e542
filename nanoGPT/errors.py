"""The project's exceptions, and the exit code that each one ends a program with.

Exit codes: 0 done, or saved after SIGTERM or SIGINT; 2 a request that cannot be carried out; 3 a loss that is not
finite; 4 a job that hung; 130 stopped by Ctrl-C with nothing saved; 1 anything else.
"""

import difflib
import math

import torch

STALLED = 4
LONGEST_SENTENCE = 1500  # characters
# What a rank says that has only followed another: gloo's words, and ours.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "PeerFailed")
# Texts of errors that mean that memory ran out, beside torch.OutOfMemoryError and MemoryError. When cuBLAS or cuDNN is
# "not initialized", there is nearly always no memory left for its workspace.
ON_GPU = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2 ",
    "Cuda failure 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "MPS backend out of memory",
)
ON_HOST = (
    "can't allocate memory: you tried",
    "not enough memory: you tried",
    "unable to mmap memory: you tried",
    "Cannot allocate memory",
    "std::bad_alloc",
)


class ConfigError(Exception):
    """A request that cannot be carried out. Its message is one sentence that says what to do; exit code 2.

    Args:
        message: the sentence.
        on_one_rank: other ranks may not have met it, so this one must speak.
        is_shared: all ranks of all nodes have this sentence already.
    """

    def __init__(self, message: str, on_one_rank: bool = False, is_shared: bool = False) -> None:
        line = " ".join(message.splitlines())  # what a file or a library says may have several, or be endless
        super().__init__(line if len(line) <= LONGEST_SENTENCE else f"{line[:LONGEST_SENTENCE]}...")
        self.on_one_rank, self.is_shared = on_one_rank, is_shared


class NonFiniteLoss(Exception):
    """The loss or the gradient norm is not finite; every rank sees the same value at the same step. Exit code 3."""


class PeerFailed(Exception):
    """Another rank could not do its part of a save or a load; that one says why."""


class SaveError(Exception):
    """A checkpoint could not be saved; those before it stand. Every rank raises it. Exit code 1."""


def check_finite(step: int, loss: float, grad_norm: float = 0.0) -> None:
    """Stop before a loss or a gradient that is not finite reaches a checkpoint.

    Raises:
        NonFiniteLoss: on every rank at the same step, because all ranks see the same numbers.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise NonFiniteLoss(
            f"step {step}: loss {loss}, gradient norm {grad_norm}: not finite, so training stopped before a save; "
            "resume from the last checkpoint with a lower --learning_rate or --grad_clip"
        )


def did_you_mean(name: str, names: list[str]) -> str:
    """A half-sentence that names the closest known name, or nothing; one that begins so, in any case, is closer."""
    begin = [known for known in names if known.lower().startswith(name.lower())]
    close = difflib.get_close_matches(name.lower(), begin, n=1) or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def error_messages(error: BaseException | None) -> str:
    """Return what an error and those that caused it say."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return "\n".join(map(str, chain))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of Python, numpy, torch or a CUDA library, means that memory ran out."""
    text = error_messages(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in ON_GPU + ON_HOST)
