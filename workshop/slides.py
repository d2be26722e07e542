"""Write slides from the notebooks: their questions, their pictures and their lists to take home. `workshop.slides`

The slides are one HTML file without scripts and without links to other files, so it works from a USB stick. Each slide
fills the window. The space bar and Page Up move by one slide, and printing gives one slide per page. A question always
comes before the picture that answers it.
"""

import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt

from nanoGPT.errors import ConfigError
from nanoGPT.files import write_atomically
from nanoGPT.job.command import command_line, report_errors
from workshop.imports import ROOT
from workshop.notebooks import list_scripts

SLIDES = ROOT / "out" / "slides.html"
QUESTION = "**Predict first:**"
MAX_INTRODUCTION = 2  # paragraphs of a notebook's beginning
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
html {{ scroll-snap-type: y mandatory; }}
body {{ margin: 0; font: 1.85vw/1.45 system-ui, sans-serif; color: #1a1a1a; counter-reset: slide; }}
section {{ display: flex; flex-direction: column; box-sizing: border-box; height: 100vh; padding: 4vh 6vw 7vh;
  position: relative; overflow: hidden; scroll-snap-align: start; break-after: page; counter-increment: slide; }}
section::after {{ content: counter(slide); position: absolute; right: 2vw; bottom: 1.5vh; font-size: 1.2vw; }}
section.title {{ justify-content: center; }}
p {{ margin: 0 0 1.2vh; }}
h1 {{ font-size: 4vw; line-height: 1.15; margin: 0 0 2vh; }}
h2, h3 {{ font-size: 2.9vw; margin: 0 0 2vh; line-height: 1.2; }}
.part {{ font-size: 1.4vw; color: #666; margin: 0 0 1vh; }}
.question {{ border-left: 0.6vw solid #b45f06; background: #fff4e5; padding: 1.5vh 2vw; margin: 2vh 0; }}
img {{ flex: 1; min-height: 0; object-fit: contain; width: 100%; }}
pre {{ margin: 0; font-size: 0.75em; line-height: 1.25; }}
code {{ background: #eef1f5; padding: 0 0.2em; border-radius: 0.2em; font-size: 0.9em; }}
li {{ margin-bottom: 0.6vh; }} ol, ul {{ margin-top: 0; font-size: 1.65vw; line-height: 1.3; }}
table {{ border-collapse: collapse; }} td, th {{ border: 1px solid #aaa; padding: 0.3em 0.7em; }}
@page {{ size: 13.33in 7.5in; margin: 0; }}
</style></head><body>
{slides}
</body></html>
"""
Part = tuple[str, str]  # a kind (a heading such as "h2", "text", "code" or "picture"), and Markdown or a PNG in base64


def read_parts(path: Path) -> list[Part]:
    """Return the parts of a notebook with outputs, in order. The text of a cell of code is empty.

    Raises:
        ConfigError: it is not a notebook.
    """
    try:
        cells = nbformat.read(path, as_version=4).cells
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): restore it from git, or run .venv/bin/python -m workshop.notebooks"
        ) from None
    parts: list[Part] = []
    for cell in cells:
        parts += split_blocks(cell.source) if cell.cell_type == "markdown" else [("code", "")]
        pictures = [output.get("data", {}).get("image/png") for output in cell.get("outputs", [])]
        parts += [("picture", picture.replace("\n", "")) for picture in pictures if picture]
    return parts


def split_blocks(markdown: str) -> Iterator[Part]:
    """Yield the headings, paragraphs, lists, tables and blocks of code of a Markdown text."""
    lines = markdown.splitlines()
    for token in MARKDOWN.parse(markdown):
        if token.map and token.level == 0:
            kind = token.tag if token.type == "heading_open" else "text"
            yield kind, "\n".join(lines[slice(*token.map)])


def render(markdown: str) -> str:
    """Return Markdown as HTML. Links become plain text, because the slides are one file."""
    return MARKDOWN.render(re.sub(r"(?<!!)\[([^\]]+)\]\([^)]+\)", r"\1", markdown))


def make_slides(parts: list[Part]) -> Iterator[str]:
    """Yield the slides of one notebook as HTML: its beginning, its questions and pictures, and its list to take home.

    Each question has its own slide, because the text after a question often answers it. The paragraph before a
    question is on its slide, because the question may refer to it, and so is a list or table after it.
    """
    part = heading = ""
    for i, (kind, content) in enumerate(parts):
        before, after = parts[i - 1] if i else ("", ""), parts[i + 1] if i + 1 < len(parts) else ("", "")
        if kind == "h1":
            part = f'<p class="part">{html.escape(content.removeprefix("# "))}</p>'
            texts = [text for each, text in parts[i + 1 :] if each == "text"][:MAX_INTRODUCTION]
            yield f'<section class="title">{"".join(map(render, [content, *texts]))}</section>'
        elif kind.startswith("h"):
            heading = content
        elif kind == "picture":
            image = f'<img alt="{html.escape(heading.lstrip("# "))}" src="data:image/png;base64,{content}">'
            yield f"<section>{part}{render(heading)}{image}</section>"
        elif QUESTION in content:
            context, marker, question = content.partition(QUESTION)
            if not context and before[0] == "text" and QUESTION not in before[1]:
                context = before[1]
            answers = after[1] if after[0] == "text" and after[1].startswith(("1. ", "- ", "|")) else ""
            box = f'<div class="question">{render(marker + question)}</div>'
            yield f"<section>{part}{render(heading)}{render(context)}{box}{render(answers)}</section>"
        elif kind == "text" and heading.lower() == "## to take home":
            yield f"<section>{part}{render(heading)}{render(content)}</section>"


def write_slides() -> None:
    """Write the slides of all notebooks into one HTML file, out/slides.html."""
    SLIDES.parent.mkdir(exist_ok=True)
    title = html.escape((ROOT / "README.md").read_text().splitlines()[0].removeprefix("# "))
    slides = [f'<section class="title"><h1>{title}</h1><p>Press the space bar for the next slide.</p></section>']
    for script in list_scripts():
        slides += make_slides(read_parts(script.with_suffix(".ipynb")))
    write_atomically(SLIDES, PAGE.format(title=title, slides="\n".join(slides)).encode())
    print(f"{SLIDES}: {len(slides)} slides, {SLIDES.stat().st_size / 1e6:.1f} MB; open it in a browser")


if __name__ == "__main__":
    with report_errors():
        command_line(write_slides, sys.argv[1:])
