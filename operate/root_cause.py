"""Find the rank that has failed first, and explain its exit."""

import math
import signal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nanoGPT.errors import blames_peer

KILL_SECONDS = 3.0  # the launcher kills a rank that does not respond to the end of another one later than this


def find_root_cause(failures: dict[int, ProcessFailure], ranks: int) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure. The other ranks failed because they lost this rank.

    It is a rank that was killed; if there is none, the earliest rank whose message is not that of a lost connection.
    The agent sends SIGTERM to all ranks that are left. But if all `ranks` of the job have failed here, and none for a
    reason of its own, the cause was a SIGTERM to one of them. A rank that was killed KILL_SECONDS or more after another
    one had exited is not the cause: the launcher kills ranks that do not respond.
    """
    first_exit = min((each.timestamp for each in failures.values() if each.exitcode > 0), default=math.inf)

    def sort_key(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        _, failure = item
        if failure.exitcode == -signal.SIGABRT:  # NCCL's watchdog aborts a rank whose peer does not answer
            return 2, failure.timestamp
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return (0 if failure.timestamp < first_exit + KILL_SECONDS else 3), failure.timestamp
        if failure.exitcode == -signal.SIGTERM and len(failures) == ranks:
            return 2, failure.timestamp
        is_consequence = blames_peer(failure.message) or "Signal 15" in failure.message
        return (3 if is_consequence else 1), failure.timestamp

    return min(failures.items(), key=sort_key)


def explain_exit(exit_code: int, message: str, received_signals: list[int]) -> tuple[int, str]:
    """Return the exit code of a failed rank as a shell would report it, and the reason.

    Args:
        exit_code: of the process; minus the signal's number if a signal killed it.
        message: the reason that the rank reported.
        received_signals: the signals that the launcher has received.
    """
    if exit_code >= 0:
        has_no_message = message.startswith("To enable traceback")  # torch's text for a rank without an error file
        return exit_code, "its message is above, or in the output that it wrote last" if has_no_message else message
    if received_signals and -exit_code in (received_signals[0], signal.SIGTERM):
        name = signal.Signals(received_signals[0]).name
        return 128 + received_signals[0], f"{name} arrived before training had begun, so there was nothing to save"
    name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGABRT:
        name += " (NCCL sends it if a collective times out: see the output of the rank)"
    return 128 - exit_code, f"it was killed by {name}: resume with --init_from=resume if there is a checkpoint"
