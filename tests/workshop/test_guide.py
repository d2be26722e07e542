"""The guide for leaders and the list of chapters agree with the code: clocks, exercises, diffs and notebooks."""

import re

from tests.helpers.training import ROOT
from workshop.diff import find_hunks
from workshop.notebooks import list_scripts

GUIDE = (ROOT / "workshop" / "GUIDE.md").read_text()
PHASE_OF_DIFF = {
    f"diff PHASE=phase{i}": name for i, name in enumerate(("phase1_zero1", "phase2_triton", "phase3_fsdp"), start=1)
}


def test_the_guide_explains_every_hunk_of_the_diffs():
    """The guide states the size of each diff, and has a row for each tag of the diffs of phases 1 and 3."""
    section = GUIDE.split("\n## What to say at each diff")[1].split("\n## ")[0]
    for target, phase in PHASE_OF_DIFF.items():
        part = section.split(f"**`make {target}`")[1].split("**`make")[0]
        hunks = find_hunks(phase)
        size = f"{len(hunks)} hunks, {sum(len(hunk.added) for hunk in hunks)} added lines"
        assert size in part, (target, size)
        tags = {tag for hunk in hunks for tag in hunk.tags} - {"phase", "apply"}
        explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", part, re.MULTILINE))))
        assert tags <= explained | {"phase"}, (target, tags - explained)


def test_every_notebook_is_listed():
    """Notebook 0 and the README lead to every notebook."""
    start = (ROOT / "notebooks" / "00_start_here.py").read_text()
    for script in list_scripts()[1:]:
        assert f"({script.stem}.ipynb)" in start, script.stem
        assert f"notebooks/{script.stem}.ipynb" in (ROOT / "README.md").read_text(), script.stem
