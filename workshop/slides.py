"""Write slides from the notebooks: their questions, their pictures and their lists to take home. `make slides`

The slides are one HTML file without links to other files, so it works from a USB stick. Keys: arrows, space, Home, End;
`p` prints one slide per page. A question always comes before the picture that answers it.
"""

import html
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.files import write_atomically
from workshop.imports import ROOT
from workshop.notebooks import list_scripts

DEFAULT = ROOT / "out" / "slides.html"
QUESTION = "**Predict first:**"
TAKE_HOME = "to take home"
LEFT_OUT = ("exercises",)  # sections without slides
MAX_INTRODUCTION = 2  # paragraphs of a notebook's beginning
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ margin: 0; font: 1.85vw/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }}
section {{ display: none; box-sizing: border-box; height: 100vh; padding: 4vh 6vw 7vh; flex-direction: column; }}
section.now {{ display: flex; }}
p {{ margin: 0 0 1.2vh; }}
h1 {{ font-size: 4vw; line-height: 1.15; margin: auto 0 2vh; }}
h2 {{ font-size: 2.9vw; margin: 0 0 2vh; line-height: 1.2; }}
section.title p {{ margin: 0 0 2vh; }} section.title p:last-child {{ margin-bottom: auto; }}
.part {{ font-size: 1.4vw; color: #666; margin: 0 0 1vh; }}
.question {{ border-left: 0.6vw solid #b45f06; background: #fff4e5; padding: 1.5vh 2vw; margin: 2vh 0; }}
.question p {{ margin: 0; }}
img {{ flex: 1; min-height: 0; object-fit: contain; width: 100%; }}
pre {{ margin: 0; font-size: 0.75em; line-height: 1.25; }}
code {{ background: #eef1f5; padding: 0 0.2em; border-radius: 0.2em; font-size: 0.9em; }}
li {{ margin-bottom: 0.6vh; }} ol, ul {{ margin-top: 0; font-size: 1.8vw; }}
table {{ border-collapse: collapse; }} td, th {{ border: 1px solid #aaa; padding: 0.3em 0.7em; }}
#number {{ position: fixed; right: 2vw; bottom: 1.5vh; font-size: 1.2vw; color: #666; }}
@media print {{ section {{ display: flex; page-break-after: always; }} #number {{ display: none; }}
@page {{ size: 13.33in 7.5in; margin: 0; }} }}
</style></head><body>
{slides}
<div id="number"></div>
<script>
const slides = [...document.querySelectorAll("section")];
let now = 0;
function show(index) {{
  now = Math.max(0, Math.min(slides.length - 1, index));
  slides.forEach((slide, i) => slide.classList.toggle("now", i === now));
  document.getElementById("number").textContent = (now + 1) + " / " + slides.length;
  history.replaceState(null, "", "#" + (now + 1));
}}
document.addEventListener("keydown", (event) => {{
  const steps = {{ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1,
                 Home: -slides.length, End: slides.length}};
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "p") print();
  if (!(event.key in steps)) return;
  event.preventDefault();
  show(now + steps[event.key]);
}});
window.addEventListener("hashchange", () => show((parseInt(location.hash.slice(1)) || 1) - 1));
show((parseInt(location.hash.slice(1)) || 1) - 1);
</script></body></html>
"""


@dataclass
class Section:
    """A section of a notebook: its title, its level (1 for the notebook itself), its paragraphs and pictures.

    Attributes:
        parts: in order, Markdown paragraphs ("text"), pictures as base64 in PNG ("picture"), and an empty text for each
            cell of code ("code").
    """

    title: str
    level: int
    parts: list[tuple[str, str]] = field(default_factory=list)


def read_sections(path: Path) -> list[Section]:
    """Return the sections of a notebook with outputs.

    Raises:
        ConfigError: it is not a notebook.
    """
    sections = [Section(path.stem, 1)]
    try:
        cells = nbformat.read(path, as_version=4).cells
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): restore it from git, or run make notebooks") from None
    for cell in cells:
        if cell.cell_type == "markdown":
            for paragraph in split_paragraphs(cell.source):
                if heading := re.fullmatch(r"(#+) (.*)", paragraph):
                    sections.append(Section(heading[2], len(heading[1])))
                else:
                    sections[-1].parts.append(("text", paragraph))
        else:
            sections[-1].parts.append(("code", ""))
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                sections[-1].parts.append(("picture", picture.replace("\n", "")))
    return sections[1:]


def split_paragraphs(text: str) -> list[str]:
    """Split Markdown at blank lines, and before and after headings. A block of code stays in one piece."""
    paragraphs, lines, is_code = [], list[str](), False
    for line in [*text.splitlines(), ""]:
        is_heading = line.startswith("#") and not is_code
        if (not line.strip() and not is_code) or is_heading:
            paragraphs += ["\n".join(lines)] * bool(lines) + [line] * is_heading
            lines = []
            continue
        is_code ^= line.lstrip().startswith("```")
        lines.append(line)
    return paragraphs


def render(markdown: str) -> str:
    """Return Markdown as HTML. Links become plain text, because the slides are one file."""
    without_links = re.sub(r"(?<!!)\[([^\]]+)\]\([^)]+\)", r"\1", markdown)
    return MarkdownIt("commonmark", {"html": False}).enable("table").render(without_links)


def make_slides(sections: list[Section]) -> Iterator[str]:
    """Yield the slides of one notebook as HTML."""
    title = sections[0].title
    texts = [text for kind, text in sections[0].parts if kind == "text"][:MAX_INTRODUCTION]
    yield f'<section class="title"><h1>{html.escape(title)}</h1>{"".join(map(render, texts))}</section>'
    yield from (make_picture_slide(title, "", content) for kind, content in sections[0].parts if kind == "picture")
    for section in sections[1:]:
        name = section.title.lower()
        has_picture = any(kind == "picture" for kind, _ in section.parts)
        if (section.level > 2 and not has_picture) or name.startswith(LEFT_OUT):
            continue
        heading = f'<p class="part">{html.escape(title)}</p><h2>{html.escape(section.title)}</h2>'
        if name.startswith(TAKE_HOME):
            lists = [text for kind, text in section.parts if kind == "text"]
            yield f"<section>{heading}{render(chr(10).join(lists))}</section>"
            continue
        yield from make_section_slides(section, heading)


def make_picture_slide(title: str, heading: str, content: str) -> str:
    """Return a slide with a picture, which is base64 in PNG."""
    source = f'src="data:image/png;base64,{content}"'
    return f'<section>{heading}<img alt="{html.escape(title)}" {source}></section>'


def make_section_slides(section: Section, heading: str) -> Iterator[str]:
    """Yield the slides of a section: its first paragraph with its first question, then questions and pictures in order.

    The paragraph before a question is on its slide, because the question may refer to it. Each question has its own
    slide, because the text after a question often answers it.
    """
    waiting, has_question = "", False  # the HTML of the next slide
    previous = ("code", "")  # the part before this one
    for index, (kind, content) in enumerate(section.parts):
        before, question = split_question(content) if kind == "text" else ("", "")
        if index == 0 and kind == "text":
            waiting = render(before)
        if question:
            if has_question:
                yield f"<section>{heading}{waiting}</section>"
                waiting = ""
            if index > 0:
                is_context = previous[0] == "text" and index > 1 and QUESTION not in previous[1]
                waiting += render(before or (previous[1] if is_context else ""))
            waiting, has_question = waiting + f'<div class="question">{render(question)}</div>', True
        elif kind == "text" and QUESTION in previous[1] and content.startswith(("1. ", "- ", "|")):
            waiting += render(content)  # the list or table of the question
        elif kind == "picture":
            if waiting:
                yield f"<section>{heading}{waiting}</section>"
                waiting, has_question = "", False
            yield make_picture_slide(section.title, heading, content)
        previous = (kind, content)
    if waiting:
        yield f"<section>{heading}{waiting}</section>"


def split_question(paragraph: str) -> tuple[str, str]:
    """Return the text of a paragraph before its question, and the question."""
    before, marker, question = paragraph.partition(QUESTION)
    return before.strip(), marker + question


def write_slides(to: str = "") -> None:
    """Write the slides of all notebooks into one HTML file.

    Args:
        to: path of the file; empty: out/slides.html.
    """
    path = Path(to) if to else DEFAULT
    path.parent.mkdir(parents=True, exist_ok=True)
    title = (ROOT / "README.md").read_text().splitlines()[0].removeprefix("# ")
    slides = [f'<section class="title"><h1>{html.escape(title)}</h1><p>Use the arrow keys.</p></section>']
    for script in list_scripts():
        slides += make_slides(read_sections(script.with_suffix(".ipynb")))
    write_atomically(path, PAGE.format(title=html.escape(title), slides="\n".join(slides)).encode())
    print(f"{path}: {len(slides)} slides, {path.stat().st_size / 1e6:.1f} MB; open it in a browser")


if __name__ == "__main__":
    with report_errors():
        command_line(write_slides, sys.argv[1:])
