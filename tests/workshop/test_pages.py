"""`workshop.slides` and `workshop.diff_page`: complete pages in one file each, without links to other files."""

import re

import nbformat

from bench.phases import PHASES
from workshop import diff_page, slides
from workshop.diff import find_hunks
from workshop.notebooks import list_scripts

PHASE_PACKAGES = [package for name, package in PHASES.items() if name != "baseline"]


def find_links(text: str) -> list[str]:
    """Return what a page links to or loads, except its own sections and embedded pictures."""
    return re.findall(r'\b(?:src|href)="(?!#|data:)([^"]*)"', text)


def test_the_slides_have_every_picture_question_and_list(tmp_path, monkeypatch, capsys):
    """One file has all pictures of the notebooks, and every list to take home."""
    monkeypatch.setattr(slides, "SLIDES", tmp_path / "slides.html")
    slides.write_slides()
    text = (tmp_path / "slides.html").read_text()
    assert re.search(r": \d+ slides, \d+\.\d MB", capsys.readouterr().out)
    assert find_links(text) == []
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    cells = [c for script in list_scripts() for c in nbformat.read(script.with_suffix(".ipynb"), as_version=4).cells]
    data = [output.get("data", {}).get("image/png") for cell in cells for output in cell.get("outputs", [])]
    assert pictures == [picture.replace("\n", "") for picture in data if picture] and len(pictures) > 30
    assert text.count("To take home</h2>") >= 2


def test_the_diffs_show_every_tag(tmp_path, monkeypatch):
    """The page loads no other file, and shows each tag of the diff of each phase."""
    monkeypatch.setattr(diff_page, "DIFFS", tmp_path / "diffs.html")
    diff_page.write_diffs()
    text = (tmp_path / "diffs.html").read_text()
    assert find_links(text) == []
    for phase, part in zip(PHASE_PACKAGES, text.split("<h2 id=")[1:], strict=True):
        tags = {tag for hunk in find_hunks(phase) for tag in hunk.tags}
        assert tags and all(f":{tag}]</b>" in part for tag in tags)
