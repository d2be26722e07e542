"""Write the cheat sheet as one HTML page to print.

    python -m workshop.cheat_sheet      # out/cheat_sheet.html

The text is docs/cheat_sheet.md. The page has no links to other files.
"""

import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.files import write_atomically
from workshop.imports import ROOT

SOURCE = ROOT / "docs" / "cheat_sheet.md"
DEFAULT = ROOT / "out" / "cheat_sheet.html"
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Cheat sheet</title>
<style>
@page {{ size: A4 portrait; margin: 9mm 10mm; }}
body {{ font: 8.1pt/1.25 system-ui, sans-serif; color: #111; max-width: 190mm; margin: auto; }}
h1 {{ font-size: 15pt; margin: 0; }} h2 {{ font-size: 10.5pt; margin: 3mm 0 1mm; }} p {{ margin: 0 0 1mm; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ border: 0.3pt solid #888; padding: 0.3mm 1.2mm; text-align: left; vertical-align: top; }}
pre {{ background: #f2f4f7; padding: 1mm 2mm; margin: 0; white-space: pre-wrap; }}
pre, code {{ font: 7.4pt/1.25 ui-monospace, monospace; }}
</style></head><body>
{body}
</body></html>
"""


def make_page() -> str:
    """Return the cheat sheet as HTML. Links become plain text, because paper has none, and equations MathML."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", SOURCE.read_text())
    text = re.sub(r"\$([^$]+)\$", lambda match: convert(match[1]), text)
    return PAGE.format(body=MarkdownIt().enable("table").render(text))


def main(to: str = "") -> None:
    """Write the page.

    Args:
        to: path of the HTML file; empty: out/cheat_sheet.html.
    """
    path = Path(to) if to else DEFAULT
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, make_page().encode())
    print(f"wrote {path}: open it in a browser, and print it")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
