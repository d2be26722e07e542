"""Write the table of exercises into docs/exercises.md: `python -m workshop.exercises document`."""

import re

from workshop.exercises.registry import CHAPTERS, CORE_TRACK, EXERCISES
from workshop.imports import ROOT

DOCUMENT = ROOT / "docs" / "exercises.md"
BLOCK = re.compile(r"(<!-- exercises:(\w+) -->\n).*?(<!-- /exercises -->)", re.DOTALL)


def render_table(name: str) -> str:
    """Return the table of a chapter, or of the core track, in Markdown: name, task, code, minutes and difficulty."""
    rows = ["| exercise | task | code | minutes | difficulty |", "|---|---|---|---:|---|"]
    for each in [EXERCISES[each] for each in CORE_TRACK] if name == "core_track" else CHAPTERS[name]:
        code = ", ".join(f"`{target.partition(':')[2]}`" for target in each.targets)
        rows.append(f"| `{each.name}` | {each.title} | {code} | {each.minutes} | {each.difficulty} |")
    return "\n".join(rows) + "\n"


def render_document(text: str) -> str:
    """Return the document with updated tables.

    Raises:
        KeyError: a block names an unknown chapter.
    """
    return BLOCK.sub(lambda match: match[1] + render_table(match[2]) + match[3], text)


def write_document() -> None:
    """Update the tables in docs/exercises.md."""
    DOCUMENT.write_text(render_document(DOCUMENT.read_text()))
