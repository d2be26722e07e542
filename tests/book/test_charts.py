"""The pictures on the pages of the result files: they show the numbers, for eyes and for screen readers."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from bench.tables.records import RESULTS
from book.charts import Chart, draw_chart, format_number
from book.result_charts import CHARTS, render_charts
from nanoGPT.errors import ConfigError


def test_every_picture_shows_its_numbers():
    """Every bar is as long as its number, which is next to it. Every picture has a title and its numbers as text."""
    drawn = set()
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        figures = [figure for figure in render_charts(result).split("\n\n") if figure]
        drawn |= {result["name"]} if figures else set()
        for figure in figures:
            svg = ET.fromstring(figure).find("svg")
            names = svg.get("aria-labelledby").split()
            title, numbers = (svg.find(f"*[@id='{name}']").text for name in names)
            assert title and numbers and len({*re.findall(r'\bid="([^"]+)"', "".join(figures))}) == 2 * len(figures)
            rects = svg.findall("rect")
            assert {rect.get("x") for rect in rects} <= {"0"}
            texts = [text.text for text in svg.findall("text") if text.get("x") != "0"] if rects else []
            assert len(texts) == len(rects) and all(text in numbers for text in texts)
            sizes = [float(text.replace(",", "")) for text in texts]
            for rect, size in zip(rects, sizes, strict=True):
                assert float(rect.get("width")) == pytest.approx(290 * size / max(sizes), abs=1.6)
            assert rects or svg.find("polyline") is not None
    assert drawn == CHARTS.keys()


def test_lines_and_numbers_are_drawn_to_scale():
    """A line begins and ends at its numbers, missing numbers are left out, and a name cannot contain tags."""
    chart = Chart("a <b>", {"0": {"one": 4.0, "two": 2.0}, "5": {"one": 3.0}, "10": {"one": 2.0}}, "step")
    svg = ET.fromstring(draw_chart(chart, "c")).find("svg")
    lines = [line.get("points") for line in svg.findall("polyline")]
    assert lines == ["40.0,8.0 197.0,72.0 354.0,136.0", "40.0,136.0"]
    assert svg.find("desc").text == "one: 4.00 at step 0, 2.00 at 10; two: 2.00 at step 0, 2.00 at 0"
    assert [format_number(n) for n in (0, 0.00123, 12.3456, 123456)] == ["0", "0.00123", "12.3", "123,456"]


def test_a_damaged_result_is_reported():
    """A result without the numbers of its picture leads to one sentence. An unknown result has no picture."""
    result = {"name": "wire", "settings": {"command": "python -m wire"}, "samples": {"rows": [{}]}}
    with pytest.raises(ConfigError, match=r"the result wire is damaged .*run python -m wire"):
        render_charts(result)
    assert render_charts({**result, "name": "other"}) == ""
