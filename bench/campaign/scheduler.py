"""Run the parts of a campaign in order of worth, as many as fit into the minutes, in a worker process."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from bench.campaign.folder import CampaignFolder, Part
from nanoGPT.files import PACKAGE

HANG_FACTOR, HANG_SECONDS = 2, 30  # a part hangs if it takes longer than HANG_FACTOR times its estimate + HANG_SECONDS


class Worker:
    """The process of `worker.py`.

    Args:
        settings: arguments of `worker.Settings`.
        environment: environment variables of the process.
    """

    def __init__(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, "-u", "-m", "bench.campaign.worker", json.dumps(settings)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=PACKAGE.parent,
            text=True,
            start_new_session=True,
        )

    def run(self, part: Part, seconds: float) -> str:
        """Run a part and return how it ended: `next`, `stop` (the worker must be replaced), `crash` or `timeout`."""
        stdin, stdout = self._streams()
        try:
            print(json.dumps(vars(part)), file=stdin, flush=True)
        except BrokenPipeError:
            return "crash"
        if not select.select([stdout], [], [], max(seconds, 0))[0]:
            return "timeout"
        return stdout.readline().strip() or "crash"

    def kill(self) -> None:
        """Kill the process and its children, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in self._streams():
            with contextlib.suppress(BrokenPipeError):  # a part that the process has not read
                stream.close()

    def _streams(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin, self.process.stdout


def hang_limit(part: Part) -> float:
    """Return the seconds after which a part counts as hanging."""
    return HANG_FACTOR * part.estimate_seconds + HANG_SECONDS


def find_pending(parts: Sequence[Part], folder: CampaignFolder) -> list[Part]:
    """Return the parts that still have to run, in order of worth. Parts that were interrupted before go last."""
    interruptions = {part.key: folder.read(part)["interruptions"] for part in parts}
    pending = [part for part in parts if folder.read(part)["state"] == "pending"]
    return sorted(pending, key=lambda part: interruptions[part.key] > 0)


def find_running(parts: Sequence[Part], folder: CampaignFolder) -> list[Part]:
    """Return the part that was running when a campaign ended, if there is one."""
    return [part for part in parts if folder.read(part)["state"] == "running"]


def choose_next(pending: Sequence[Part], folder: CampaignFolder, seconds_left: float, is_first: bool) -> Part | None:
    """Return the first part that fits into the time.

    The first part of a call always fits, because no later call has more time. A part that was interrupted before gets
    all the time that it may take.
    """
    if is_first:
        return pending[0] if pending else None

    def needed_seconds(part: Part) -> float:
        return hang_limit(part) if folder.read(part)["interruptions"] else part.estimate_seconds

    return next((part for part in pending if needed_seconds(part) <= seconds_left), None)


def run_parts(
    parts: Sequence[Part],
    folder: CampaignFolder,
    start_worker: Callable[[], Worker],
    seconds: float,
) -> None:
    """Run pending parts until none is left or none fits into the time.

    Args:
        parts: in order of worth.
        folder: locked by the caller.
        start_worker: starts a worker process.
        seconds: time of this call. A part that is still running then is killed, and runs again in the next call.
    """
    deadline, is_first = time.monotonic() + seconds, True
    worker: Worker | None = None
    for stopped in find_running(parts, folder):
        folder.record_interruption(stopped, "the campaign ended while it ran")
    try:
        while part := choose_next(find_pending(parts, folder), folder, deadline - time.monotonic(), is_first):
            is_first = False
            worker = worker or start_worker()
            limit = min(deadline - time.monotonic(), hang_limit(part))
            outcome = worker.run(part, limit)
            is_over = time.monotonic() >= deadline
            if outcome != "next":
                worker.kill()  # from here on, it writes no record
            record_outcome(part, folder, outcome, worker, limit, is_over)
            if outcome != "next":
                worker = None
            print(format_outcome(part, folder), flush=True)
    except KeyboardInterrupt:
        for stopped in find_running(parts, folder):
            folder.forget(stopped)
        raise
    finally:
        if worker:
            worker.kill()


def record_outcome(
    part: Part, folder: CampaignFolder, outcome: str, worker: Worker, limit: float, is_over: bool
) -> None:
    """Write the record of a part that the worker has not written itself. The worker is killed, unless it continues."""
    if folder.read(part)["state"] not in ("pending", "running"):
        return
    if outcome == "crash":
        reason = f"the process ended with code {worker.process.returncode}"
        log = folder.log_path(part)
        tail = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        folder.write(part, "failed", reason=reason, traceback=tail)
    elif outcome == "timeout" and is_over:
        folder.record_interruption(part, f"did not finish in the {limit:.0f} s that were left")
    elif outcome == "timeout":
        folder.write(part, "failed", reason=f"did not finish within {limit:.0f} s")


def find_problems(record: dict[str, Any]) -> list[str]:
    """Return the problems that a part has found: wrong results, or failing tests."""
    problems: list[str] = (record.get("result") or {}).get("problems", [])
    return problems


def format_outcome(part: Part, folder: CampaignFolder) -> str:
    """Return the printed line of a part."""
    record = folder.read(part)
    seconds = f"{record['seconds']:6.1f} s" if "seconds" in record else " " * 8
    reason = "; ".join(find_problems(record)) or record.get("reason", "")
    return f"{record['state']:8}{seconds}  {part.stage}: {part.name}{'  ' + reason if reason else ''}"


def build_environment(dry_run: bool, site: Path | None) -> dict[str, str]:
    """Return the environment of the worker. A dry run sees no GPU and interprets the kernels.

    The repository need not be installed: it is on the path of the worker and of the programs that the worker starts.
    """
    folders = [str(PACKAGE.parent), str(site or ""), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if dry_run else environment
