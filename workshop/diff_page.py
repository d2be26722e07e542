"""Write what the phases change in the baseline's train.py as one HTML page, side by side: `workshop.diff_page`

Below each diff are the sentences of IMPLEMENTATION.md that explain its changes. The key `c` covers the changed lines of
the phase. The page is one file and needs no network.
"""

import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from bench.phases import PHASES
from nanoGPT.files import write_atomically
from nanoGPT.job.program import command_line, report_errors
from workshop.diff import BASELINE, BLOCK, ROOT, TAG, find_hunks

DEFAULT = ROOT / "out" / "diffs.html"
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
details {{ background: #fff8dc; border-left: 5px solid #b45f06; padding: 0.3em 1em; margin-bottom: 0.5em; }}
</style></head><body>
<h1>What the phases change in train.py</h1>
<p>Left: the baseline, <code>nanoGPT/train.py</code>. Right: the phase. The link <code>n</code> leads to the next
change. Each change has a tag, and the texts below a table explain it: click on a tag. For a workshop, press
<kbd>c</kbd>: it covers the changed lines of the phase. Click on a line to show it.</p>
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


def render_explanations(phase: str) -> Iterator[str]:
    """Yield for each tag the paragraph of IMPLEMENTATION.md before its diff block, as HTML."""
    text, previous = (ROOT / phase / "IMPLEMENTATION.md").read_text(), ""
    for match in BLOCK.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        if not paragraph.endswith("<!-- /diff -->"):
            previous = paragraph
        if match[2] != "phase":  # the name of the phase; the text before it is about the page
            explanation = MarkdownIt().render(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", previous))
            yield f"<details><summary>{match[2]}</summary>{explanation}</details>"


def mark_changed_line(match: re.Match[str]) -> str:
    """Return a cell whose full line is marked, if difflib has marked a part of it."""
    line = re.sub("</?span[^>]*>", "", match[1])
    return match[0] if line == match[1] else f'<td class="changed">{line}</td>'


def render_phase(phase: str) -> str:
    """Return the side-by-side table of one phase, and the explanations of its changes."""
    before, after = (path.read_text().splitlines() for path in (BASELINE, ROOT / phase / "train.py"))
    table = difflib.HtmlDiff().make_table(before, after, "nanoGPT/train.py", f"{phase}/train.py")
    table = table.replace("&nbsp;", " ").replace(' nowrap="nowrap"', "")  # the style wraps long lines
    table = re.sub(r"<td>(.*?)</td>", mark_changed_line, table)
    hunks = find_hunks(phase)
    added = sum(len(hunk.added) for hunk in hunks)
    title = f'<h2 id="{phase}">{phase}: {len(hunks)} changes, {added} added lines (without the imports)</h2>'
    return "\n".join([title, TAG.sub(r"<b>\g<0></b>", table), *render_explanations(phase)])


def write_diffs(to: str = "") -> None:
    """Write the differences of all phases into one HTML page.

    Args:
        to: path of the file; empty: out/diffs.html.
    """
    path = Path(to) if to else DEFAULT
    path.parent.mkdir(parents=True, exist_ok=True)
    phases = [package for name, package in PHASES.items() if name != "baseline"]
    links = "".join(f'<a href="#{phase}">{phase}</a>' for phase in phases)
    write_atomically(path, PAGE.format(links=links, tables="\n".join(map(render_phase, phases))).encode())
    print(f"{path}: {len(phases)} phases; open it in a browser")


if __name__ == "__main__":
    with report_errors():
        command_line(write_diffs, sys.argv[1:])
