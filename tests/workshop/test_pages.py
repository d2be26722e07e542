"""`make slides` and `make diffs`: complete pages in one file each, without links to other files."""

import base64
import html
import re
from html.parser import HTMLParser

import nbformat
import pytest

from nanoGPT.errors import ConfigError
from workshop import cheat_sheet, diff_page, slides
from workshop.diff import BASELINE, ROOT, find_hunks
from workshop.notebooks import list_scripts
from workshop.phases import PHASES
from workshop.slides import QUESTION, Section, make_section_slides, split_paragraphs, write_slides

PHASE_PACKAGES = [package for name, package in PHASES.items() if name != "baseline"]


class Cells(HTMLParser):
    """Collects the text of the cells of each class, and all links to other files."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.current = ""

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [
            value for name, value in attrs if name in ("src", "href") and not value.startswith(("#", "data:"))
        ]
        if tag == "td":
            self.current = values.get("class", "")
            self.texts.setdefault(self.current, []).append("")

    def handle_data(self, data):
        if self.current:
            self.texts[self.current][-1] += data

    def handle_endtag(self, tag):
        self.current = "" if tag == "td" else self.current


def test_the_slides_have_every_picture_question_and_list(tmp_path, capsys):
    """One file has all pictures of the notebooks, each after its question, and every list to take home."""
    write_slides(str(tmp_path / "slides.html"))
    text = (tmp_path / "slides.html").read_text()
    assert re.search(r": \d+ slides, \d+\.\d MB", capsys.readouterr().out)
    parser = Cells()
    parser.feed(text)
    assert parser.links == []
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    expected = []
    for script in list_scripts():
        for cell in nbformat.read(script.with_suffix(".ipynb"), as_version=4).cells:
            data = [output.get("data", {}).get("image/png") for output in cell.get("outputs", [])]
            expected += [picture.replace("\n", "") for picture in data if picture]
    assert pictures == expected and len(pictures) > 30
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert text.count('<section class="title">') == len(list_scripts()) + 1
    assert text.count("<section>") > len(pictures) and text.count("To take home</h2>") >= 2
    first = text.index("e. Dropout with naive seeding")
    assert text.index('class="question"', first) < text.index("<img", first)


def test_paragraphs_keep_blocks_of_code():
    """Paragraphs end at blank lines and headings, but not inside a block of code, which may contain `#`."""
    text = "# A\nfirst\nline\n\n```\n# code\n\nmore\n```\n## B\n**Predict first:** what?"
    assert split_paragraphs(text) == [
        "# A",
        "first\nline",
        "```\n# code\n\nmore\n```",
        "## B",
        "**Predict first:** what?",
    ]


def test_each_question_has_its_own_slide_and_the_text_before_it():
    """A slide has one question, with the paragraph before it, and no answer to an earlier question."""
    texts = [
        "Introduction.",
        "Two files exist.",
        f"{QUESTION} which one is read?",
        "The first is read.",
        f"Now\n{QUESTION} why?",
    ]
    parts = [("text", text) for text in texts]
    first, second = make_section_slides(Section("a", 2, [*parts[:3], ("code", ""), *parts[3:]]), "")
    assert "Introduction." in first and "Two files exist." in first and "which one is read?" in first
    assert "why?" in second and "Now" in second and "read" not in second


def test_a_damaged_notebook_is_one_error(tmp_path, monkeypatch):
    """A notebook that cannot be read is named, with a remedy, and no slides are written."""
    (tmp_path / "a.ipynb").write_text("{")
    monkeypatch.setattr(slides, "list_scripts", lambda: [tmp_path / "a.py"])
    with pytest.raises(ConfigError, match="a.ipynb cannot be read.*restore it from git"):
        write_slides(str(tmp_path / "slides.html"))
    assert not (tmp_path / "slides.html").exists()


def test_the_diffs_have_every_line_of_both_files(tmp_path):
    """Both columns contain their file line by line; removed and added lines are those of the hunks and imports."""
    diff_page.write_diffs(str(tmp_path / "diffs.html"))
    text = (tmp_path / "diffs.html").read_text()
    assert all(f'id="{phase}"' in text for phase in PHASE_PACKAGES)
    for phase, part in zip(PHASE_PACKAGES, text.split("<h2 id=")[1:], strict=True):
        rows = re.findall(r'<tr><td class="line">(\d*)</td><td class="\w+">(.*?)</td><td class="line">(\d*)</td>'
                          r'<td class="\w+">(.*?)</td></tr>', part)  # fmt: skip
        for path, number, content in ((BASELINE, 0, 1), (ROOT / phase / "train.py", 2, 3)):
            lines = [html.unescape(re.sub(r"<[^>]+>", "", row[content])) for row in rows if row[number]]
            assert lines == path.read_text().splitlines(), path
        parser = Cells()
        parser.feed(part)
        assert parser.links == []
        added = [line for hunk in find_hunks(phase) for line in hunk.added]
        assert set(added) <= set(parser.texts["added"])
        assert "".join(parser.texts["note"]).count("micro-batch") >= 1 or phase == "phase2_triton"
        assert part.count('<tbody class="change">') >= len(find_hunks(phase))
        assert part.count('<b class="tag">') >= len(find_hunks(phase))


def test_the_cheat_sheet_is_written(tmp_path, capsys):
    """The cheat sheet has every heading of docs/cheat_sheet.md, and no links. With a browser it is also a PDF."""
    path = tmp_path / "sheet.html"
    cheat_sheet.main(str(path))
    parser, text = Cells(), path.read_text()
    parser.feed(text)
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", cheat_sheet.SOURCE.read_text(), flags=re.S), re.M)
    assert all(f">{heading}</h" in text for heading in headings) and parser.links == []
    if cheat_sheet.find_browser():
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    else:
        assert "there is no browser" in capsys.readouterr().out
