"""How a program ends: its errors, their exit codes, and who says what is wrong.

Exit codes: 0 done, or saved after SIGTERM or SIGINT; 2 a request that cannot be carried out; 3 a loss that is not
finite; 4 a job that hung; 130 stopped by Ctrl-C with nothing saved; 1 anything else.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanoGPT.cli.program import unbreakable_output

if TYPE_CHECKING:
    from nanoGPT.distributed.runtime import Runtime

STALLED = 4
LONGEST_SENTENCE = 1500  # characters
# What a rank says that has only followed another: gloo's words, and ours.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "PeerFailed")


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


@contextlib.contextmanager
def one_sentence(output_is_optional: bool = True) -> Iterator[None]:
    """Wrap a program: a ConfigError, or a full or read-only disk, becomes one sentence and exit code 2.

    KeyboardInterrupt is passed on; where nothing catches it, Python ends with its own exit code, 130, and one word.

    Args:
        output_is_optional: the program goes on when its output cannot be printed any more.
    """
    with unbreakable_output() if output_is_optional else contextlib.nullcontext():
        try:
            yield
        except (ConfigError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.excepthook = lambda *_: print("\nstopped", file=sys.stderr)
            raise


def fail(code: int, message: str, alike_on_all_ranks: bool = False) -> int:
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


def check_finite(step: int, loss: float, norm: float, run: "Runtime") -> None:
    """Stop before a loss or gradient that is not finite reaches a checkpoint; in fp16 the scaler skips such gradients.

    Raises:
        NonFiniteLoss: on every rank at the same step, as all ranks see the same numbers.
    """
    if not math.isfinite(loss) or (not math.isfinite(norm) and run.dtype != torch.float16):
        raise NonFiniteLoss(
            f"step {step}: loss {loss}, gradient norm {norm}: not finite, so training stopped before a save; "
            "resume from the last checkpoint with a lower --learning_rate or --grad_clip"
        )


def listen_for_signals(run: "Runtime") -> None:
    """SIGTERM, SIGINT and SIGHUP end the run after the step in progress; a SIGINT seconds later ends it at once."""
    asked_at = 0.0

    def ask(number: int, _frame: object) -> None:
        nonlocal asked_at
        if run.stop_signal and number == signal.SIGINT and time.monotonic() - asked_at > 2:
            raise KeyboardInterrupt
        if not run.stop_signal:
            run.stop_signal, asked_at = signal.Signals(number).name, time.monotonic()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, ask)


def end_with_launcher(launcher: int) -> None:
    """End this rank when its launcher is gone: a SIGKILL of the launcher must not leave ranks behind."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)
