"""Record the planner's formulas for the page "Will it fit?": `python -m workshop.site.recordings`. It takes minutes.

Run it after a change of the planner, or of the memory or communication of a phase. The file
`docs/data/will_it_fit.json` contains the formulas, the command, the commit and the hardware. `make book` puts it into
the page.
"""

import json
import sys

import torch

from bench.tables.records import describe_origin
from nanoGPT.files import write_atomically
from nanoGPT.job.program import command_line, report_errors
from workshop.site.explorers import RECORDINGS
from workshop.site.recordings import will_it_fit


def write_recording() -> None:
    """Record the formulas, and write their file."""
    recording = {
        "name": "will_it_fit",
        **describe_origin(torch.device("cpu")),
        "settings": {"command": ".venv/bin/python -m workshop.site.recordings"},
        "samples": will_it_fit.record(),
    }
    content = json.dumps(recording, separators=(",", ":")).encode() + b"\n"
    write_atomically(RECORDINGS / "will_it_fit.json", content)
    print(f"docs/data/will_it_fit.json: {len(content):,} bytes")


if __name__ == "__main__":
    with report_errors():
        command_line(write_recording, sys.argv[1:])
