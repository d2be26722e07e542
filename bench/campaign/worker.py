"""The process that runs the parts of a campaign, so that a crash or a hang in a kernel does not end the campaign.

It reads one part per line (JSON) from standard input, runs it, writes its record, and answers with one line. It exits
when standard input is closed, also in the middle of a part: then the campaign has ended or was killed.
"""

import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.campaign.folder import CampaignFolder, Part
from bench.campaign.settings import Settings, Skipped


def run_part(part: Part, settings: Settings, folder: CampaignFolder) -> bool:
    """Run a part and write its record. Return whether this process can run more parts."""
    start = time.perf_counter()
    folder.write(part, "running")
    module, _, name = part.function.partition(":")

    def write(state: str, **fields: Any) -> None:
        folder.write(part, state, seconds=round(time.perf_counter() - start, 1), **fields)

    try:
        result = getattr(importlib.import_module(module), name)(settings, *part.arguments)
        json.dumps(result)  # a result that is no JSON is an error of this part
        release_gpu()
    except Skipped as reason:
        write("skipped", reason=str(reason))
    except ModuleNotFoundError as error:
        write("skipped", reason=f"the package {error.name} is missing: name a directory of wheels with --wheels")
    except Exception as error:
        traceback.print_exc()
        write("failed", reason=f"{type(error).__name__}: {error}"[:500], traceback=traceback.format_exc())
        return settings.dry_run  # after an error, the CUDA context may be unusable
    else:
        write("done", result=result)
    return True


def release_gpu() -> None:
    """Wait for the GPU and release cached memory, which the processes of later parts need.

    Raises:
        RuntimeError: a kernel has failed, perhaps where the part caught the error. The CUDA context is unusable then.
    """
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def read_parts(parts: "queue.Queue[Part | None]") -> None:
    """Put each part of standard input into the queue. At its end, kill this process and its children."""
    for line in sys.stdin:
        parts.put(Part(**json.loads(line)))
    os.killpg(0, signal.SIGKILL)


def main(settings: Settings) -> None:
    """Run parts until standard input is closed. The parent has started this process in its own session."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    folder, parts = CampaignFolder(settings.folder), queue.Queue[Part | None]()
    threading.Thread(target=read_parts, args=(parts,), daemon=True).start()
    while part := parts.get():
        log_path = folder.log_path(part)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)  # ranks append to it, too
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log, descriptor)
        os.close(log)
        can_continue = run_part(part, replace(settings, log=log_path), folder)
        print("next" if can_continue else "stop", file=answers)


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    main(Settings(**{**values, "folder": Path(values["folder"])}))
