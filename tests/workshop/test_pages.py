"""`workshop.slides` and `workshop.diff_page`: complete pages in one file each, without links to other files."""

import html
import re

import nbformat

from bench.phases import PHASES
from workshop import diff_page
from workshop.diff import BASELINE, ROOT, find_hunks
from workshop.notebooks import list_scripts
from workshop.slides import write_slides

PHASE_PACKAGES = [package for name, package in PHASES.items() if name != "baseline"]


def find_links(text: str) -> list[str]:
    """Return what a page links to or loads, except its own sections and embedded pictures."""
    return re.findall(r'\b(?:src|href)="(?!#|data:)([^"]*)"', text)


def test_the_slides_have_every_picture_question_and_list(tmp_path, capsys):
    """One file has all pictures of the notebooks, each after its question, and every list to take home."""
    write_slides(str(tmp_path / "slides.html"))
    text = (tmp_path / "slides.html").read_text()
    assert re.search(r": \d+ slides, \d+\.\d MB", capsys.readouterr().out)
    assert find_links(text) == []
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    cells = [c for script in list_scripts() for c in nbformat.read(script.with_suffix(".ipynb"), as_version=4).cells]
    data = [output.get("data", {}).get("image/png") for cell in cells for output in cell.get("outputs", [])]
    assert pictures == [picture.replace("\n", "") for picture in data if picture] and len(pictures) > 30
    assert text.count('<section class="title">') == len(list_scripts()) + 1
    assert text.count("<section>") > len(pictures) and text.count("To take home</h2>") >= 2
    first = text.index("e. Dropout with naive seeding")
    assert text.index('class="question"', first) < text.index("<img", first)


def test_the_diffs_have_every_line_of_both_files(tmp_path):
    """Both columns contain their file line by line. The changed lines contain the hunks, and each tag is explained."""
    diff_page.write_diffs(str(tmp_path / "diffs.html"))
    text = (tmp_path / "diffs.html").read_text()
    assert find_links(text) == []
    for phase, part in zip(PHASE_PACKAGES, text.split("<h2 id=")[1:], strict=True):
        for path, side in ((BASELINE, "from"), (ROOT / phase / "train.py", "to")):
            rows = re.findall(rf'id="{side}\d+_\d+">\d+</td><td([^>]*)>(.*?)</td>', part)
            lines = [html.unescape(re.sub(r"<[^>]+>", "", row)) for _, row in rows]
            assert lines == path.read_text().splitlines(), path
        hunks = find_hunks(phase)
        changed = {line for line, (style, _) in zip(lines, rows, strict=True) if "changed" in style}
        assert changed.issuperset(line for hunk in hunks for line in hunk.added if line)
        tags = {tag for hunk in hunks for tag in hunk.tags}
        assert tags and all(f":{tag}]</b>" in part for tag in tags)
        assert all(f"<summary>{tag}</summary><p>" in part for tag in tags - {"phase"})
