"""Write what the phases change in the baseline's train.py as one HTML page, side by side: `make diffs`

Above each change stands the sentence of IMPLEMENTATION.md that explains it. Equal lines are folded: click to show them.
The key `c` covers the answers. The page is one file and needs no network.
"""

import difflib
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.files import write_atomically
from workshop.diff import BASELINE, BLOCK, ROOT, TAG, find_hunks
from workshop.phases import PHASES

DEFAULT = ROOT / "out" / "diffs.html"
CONTEXT = 3  # equal lines that stay visible around a change
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>What the phases change in train.py</title>
<style>
{style}
body {{ margin: 1.5em; font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; }}
nav a {{ margin-right: 1.5em; }}
table {{ border-collapse: collapse; width: 100%; table-layout: fixed; margin-bottom: 3em; }}
td {{ font: 12.5px/1.45 ui-monospace, Consolas, monospace; vertical-align: top; padding: 0 0.5em; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
td.line {{ width: 3em; color: #777; text-align: right; user-select: none; }} col.line {{ width: 3.5em; }}
td.removed {{ background: #fde3d3; }} td.added {{ background: #d6e9fb; }} td.none {{ background: #f3f3f3; }}
td.note {{ font: 15px/1.5 system-ui, sans-serif; background: #fff8dc; border-left: 5px solid #b45f06;
  padding: 0.5em 1em; white-space: normal; }} td.note p {{ margin: 0; }}
td.fold {{ background: #eef1f5; color: #444; text-align: center; cursor: pointer; }}
th {{ text-align: left; padding: 0.4em 0.5em; background: #eef1f5; position: sticky; top: 0; }}
body.covered tbody.change:not(.open) :is(td.added, td.note) {{ visibility: hidden; }}
b.tag {{ background: #b45f06; color: #fff; border-radius: 3px; padding: 0 0.3em; }}
</style></head><body>
<h1>What the phases change in train.py</h1>
<p>Left: the baseline, <code>nanoGPT/train.py</code>. Right: the phase. Orange lines are removed, blue lines are added.
Each change has a tag, and the text above it explains why. Click on a gray line to show the equal lines.
For a workshop, press <kbd>c</kbd>: it covers the added lines and the explanations. Click on a change to show it.</p>
<nav>{links}</nav>
{tables}
<script>
document.addEventListener("click", (event) => {{
  const fold = event.target.closest("tbody.fold");
  if (fold) {{ fold.nextElementSibling.hidden = false; fold.hidden = true; }}
  event.target.closest("tbody.change")?.classList.add("open");
}});
document.addEventListener("keydown", (event) => {{
  if (event.key !== "c" || event.ctrlKey || event.metaKey) return;
  document.body.classList.toggle("covered");
  document.querySelectorAll("tbody.open").forEach((change) => change.classList.remove("open"));
}});
</script></body></html>
"""


def highlight_lines(source: str) -> list[str]:
    """Return the lines of a Python source as HTML, with the classes of Pygments."""
    lines = [""]
    for token, text in PythonLexer(stripnl=False).get_tokens(source):
        while token not in STANDARD_TYPES:
            token = token.parent
        pieces = [html.escape(piece) for piece in text.split("\n")]
        name = STANDARD_TYPES[token]
        pieces = [f'<span class="{name}">{piece}</span>' if name and piece else piece for piece in pieces]
        lines[-1] += pieces[0]
        lines += pieces[1:]
    return [TAG.sub(lambda match: f'<b class="tag">{match[0]}</b>', line) for line in lines[: source.count("\n")]]


def read_explanations(phase: str) -> dict[str, str]:
    """Return for each tag the paragraph of IMPLEMENTATION.md before its diff block, as HTML."""
    text = (ROOT / phase / "IMPLEMENTATION.md").read_text()
    explanations, previous = {}, ""
    for match in BLOCK.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        if not paragraph.endswith("<!-- /diff -->"):
            previous = paragraph
        if match[2] == "phase":  # the name of the phase; the text before it is about the page
            continue
        explanations[match[2]] = MarkdownIt().render(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", previous))
    return explanations


def render_rows(left: list[tuple[int, str]], right: list[tuple[int, str]], kind: str) -> str:
    """Return table rows with numbered lines of both files next to each other.

    Args:
        left, right: numbers and HTML of lines; the shorter list is filled with empty cells.
        kind: "equal" or "changed".
    """
    rows = []
    for i in range(max(len(left), len(right))):
        cells = ""
        for lines, name in ((left, "removed"), (right, "added")):
            number, text = lines[i] if i < len(lines) else ("", "")
            style = "none" if i >= len(lines) else name if kind == "changed" else "equal"
            cells += f'<td class="line">{number}</td><td class="{style}">{text}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return "\n".join(rows)


def render_table(phase: str) -> str:
    """Return the side-by-side table of one phase."""
    sources = BASELINE.read_text(), (ROOT / phase / "train.py").read_text()
    before, after = (source.splitlines() for source in sources)
    left, right = (list(enumerate(highlight_lines(source), start=1)) for source in sources)
    explanations, bodies = read_explanations(phase), list[str]()
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    for kind, i1, i2, j1, j2 in opcodes:
        if kind == "equal":
            bodies += fold_equal_lines(left[i1:i2], right[j1:j2], is_first=i1 == 0, is_last=i2 == len(before))
            continue
        tags = dict.fromkeys(tag for line in after[j1:j2] for tag in TAG.findall(line))
        texts = dict.fromkeys(explanations[tag] for tag in tags if explanations.get(tag))
        notes = "".join(f'<tr><td class="note" colspan="4">{text}</td></tr>' for text in texts)
        rows = render_rows(left[i1:i2], right[j1:j2], "changed")
        bodies.append(f'<tbody class="change">{notes}{rows}</tbody>')
    hunks = find_hunks(phase)
    added = sum(len(hunk.added) for hunk in hunks)
    title = f'<h2 id="{phase}">{phase}: {len(hunks)} changes, {added} added lines (without the imports)</h2>'
    columns = '<col class="line"><col><col class="line"><col>'
    header = f'<tr><th colspan="2">nanoGPT/train.py</th><th colspan="2">{phase}/train.py</th></tr>'
    return f"{title}<table><colgroup>{columns}</colgroup><thead>{header}</thead>{''.join(bodies)}</table>"


def fold_equal_lines(
    left: list[tuple[int, str]], right: list[tuple[int, str]], is_first: bool, is_last: bool
) -> Iterator[str]:
    """Yield table bodies for equal lines: CONTEXT lines next to a change are visible, the others are folded."""
    begin, end = 0 if is_first else CONTEXT, len(left) - (0 if is_last else CONTEXT)
    if end - begin < 2:
        yield f"<tbody>{render_rows(left, right, 'equal')}</tbody>"
        return
    yield f"<tbody>{render_rows(left[:begin], right[:begin], 'equal')}</tbody>"
    yield f'<tbody class="fold"><tr><td class="fold" colspan="4">{end - begin} equal lines</td></tr></tbody>'
    yield f"<tbody hidden>{render_rows(left[begin:end], right[begin:end], 'equal')}</tbody>"
    yield f"<tbody>{render_rows(left[end:], right[end:], 'equal')}</tbody>"


def write_diffs(to: str = "") -> None:
    """Write the differences of all phases into one HTML page.

    Args:
        to: path of the file; empty: out/diffs.html.
    """
    path = Path(to) if to else DEFAULT
    path.parent.mkdir(parents=True, exist_ok=True)
    phases = [package for name, package in PHASES.items() if name != "baseline"]
    links = "".join(f'<a href="#{phase}">{phase}</a>' for phase in phases)
    style = HtmlFormatter(style="default").get_style_defs("td")
    write_atomically(path, PAGE.format(style=style, links=links, tables="\n".join(map(render_table, phases))).encode())
    print(f"{path}: {len(phases)} phases; open it in a browser")


if __name__ == "__main__":
    with report_errors():
        command_line(write_diffs, sys.argv[1:])
