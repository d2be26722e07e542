"""Record the runs behind the interactive pages: `python -m workshop.site.recordings`.

    python -m workshop.site.recordings                    # every recording
    python -m workshop.site.recordings --name=ring        # only this one

Each run uses real processes. The file `docs/data/NAME.json` contains the recording, the command, the commit and the
hardware. `make book` puts it into the page.
"""

import json
import sys

import torch

from bench.tables.records import FORMAT, describe_origin
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import write_atomically
from nanoGPT.job.program import command_line, report_errors
from workshop.site.recordings import flash_attention, fsdp_step, kill_save, ring, will_it_fit
from workshop.site.sources import ROOT

RECORDERS = {
    "ring": ring.record,
    "fsdp_step": fsdp_step.record,
    "will_it_fit": will_it_fit.record,
    "kill_save": kill_save.record,
    "flash_attention": flash_attention.record,
}
FOLDER = ROOT / "docs" / "data"
MAX_BYTES = 300_000  # of one file: a page contains its recording


def write_recordings(name: str = "") -> int:
    """Record one run or all of them, and write their files.

    Args:
        name: name of the recording; empty: all.

    Returns:
        0.

    Raises:
        ConfigError: the name is unknown, or a recording is too large.
    """
    if name and name not in RECORDERS:
        hint = did_you_mean(name, list(RECORDERS))
        raise ConfigError(f"--name={name} is unknown{hint} (known: {', '.join(RECORDERS)})")
    for each in [name] if name else RECORDERS:
        recording = {
            "format": FORMAT,
            "name": each,
            **describe_origin(torch.device("cpu")),
            "settings": {"command": f".venv/bin/python -m workshop.site.recordings --name={each}"},
            "samples": RECORDERS[each](),
        }
        content = json.dumps(recording, separators=(",", ":")).encode() + b"\n"
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{each} has {len(content):,} bytes, the limit is {MAX_BYTES:,}: record fewer steps")
        FOLDER.mkdir(exist_ok=True)
        write_atomically(FOLDER / f"{each}.json", content)
        print(f"docs/data/{each}.json: {len(content):,} bytes")
    return 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(command_line(write_recordings, sys.argv[1:]))
