"""Write what the phases change in the baseline's train.py as one HTML page, side by side: `workshop.diff_page`

The key `c` covers the changed lines of the phase. The page is one file and needs no network. The notes of a phase
(IMPLEMENTATION.md) explain its changes.
"""

import difflib
import re
import sys

from bench.phases import PHASES
from nanoGPT.files import write_atomically
from nanoGPT.job.command import command_line, report_errors
from workshop.diff import BASELINE, ROOT, TAG, find_hunks

DIFFS = ROOT / "out" / "diffs.html"
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>What the phases change in train.py</title>
<style>
body {{ margin: 1.5em; font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; }}
nav a {{ margin-right: 1.5em; }}
table.diff {{ border-collapse: collapse; margin-bottom: 1em; font: 12.5px/1.45 ui-monospace, Consolas, monospace; }}
td {{ padding: 0 0.5em; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; }}
td:nth-child(3n) {{ width: 50%; }} .diff_header {{ color: #666; white-space: nowrap; }}
td.changed {{ background: #fde3d3; }} td.changed:last-child {{ background: #d6e9fb; }}
body.covered tr:not(.open) td.changed:last-child {{ visibility: hidden; }}
</style></head><body>
<h1>What the phases change in train.py</h1>
<p>Left: the baseline, <code>nanoGPT/train.py</code>. Right: the phase. The link <code>n</code> leads to the next
change. For a workshop, press <kbd>c</kbd>: it covers the changed lines of the phase. Click on a line to show it.</p>
<nav>{links}</nav>
{tables}
<script>
document.addEventListener("click", (event) => event.target.closest("tr")?.classList.add("open"));
document.addEventListener("keydown", (event) => {{
  if (event.key !== "c" || event.ctrlKey || event.metaKey) return;
  document.body.classList.toggle("covered");
  document.querySelectorAll("tr.open").forEach((row) => row.classList.remove("open"));
}});
</script></body></html>
"""


def mark_changed_line(match: re.Match[str]) -> str:
    """Return a cell whose full line is marked, if difflib has marked a part of it."""
    line = re.sub("</?span[^>]*>", "", match[1])
    return match[0] if line == match[1] else f'<td class="changed">{line}</td>'


def render_phase(phase: str) -> str:
    """Return the side-by-side table of one phase."""
    before, after = (path.read_text().splitlines() for path in (BASELINE, ROOT / phase / "train.py"))
    table = difflib.HtmlDiff().make_table(before, after, "nanoGPT/train.py", f"{phase}/train.py")
    table = table.replace("&nbsp;", " ").replace(' nowrap="nowrap"', "")  # the style wraps long lines
    table = re.sub(r"<td>(.*?)</td>", mark_changed_line, table)
    hunks = find_hunks(phase)
    added = sum(len(hunk.added) for hunk in hunks)
    title = f'<h2 id="{phase}">{phase}: {len(hunks)} changes, {added} added lines (without the imports)</h2>'
    return title + "\n" + TAG.sub(r"<b>\g<0></b>", table)


def write_diffs() -> None:
    """Write the differences of all phases into one HTML page, out/diffs.html."""
    DIFFS.parent.mkdir(exist_ok=True)
    phases = [package for name, package in PHASES.items() if name != "baseline"]
    links = "".join(f'<a href="#{phase}">{phase}</a>' for phase in phases)
    write_atomically(DIFFS, PAGE.format(links=links, tables="\n".join(map(render_phase, phases))).encode())
    print(f"{DIFFS}: {len(phases)} phases; open it in a browser")


if __name__ == "__main__":
    with report_errors():
        command_line(write_diffs, sys.argv[1:])
