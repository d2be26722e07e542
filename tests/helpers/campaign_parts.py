"""Parts of a campaign for tests of its worker. This module does not import torch, so that a worker starts quickly."""

import os
import signal
import time
from typing import Any

from bench.campaign.settings import Settings, Skipped


def succeed(settings: Settings, value: int) -> dict[str, Any]:
    print("this goes into the log")
    return {"value": value, "dry_run": settings.dry_run}


def fail(settings: Settings) -> None:
    raise ValueError("the kernel is wrong")


def skip(settings: Settings) -> None:
    raise Skipped("there is no such tool")


def need_a_package(settings: Settings) -> None:
    import a_package_that_nobody_has  # noqa: F401


def crash(settings: Settings) -> None:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(settings: Settings) -> None:
    (settings.folder / "hangs").touch()
    time.sleep(10_000)
