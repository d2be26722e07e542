"""The pictures on the interactive pages: they show the numbers, for eyes and for screen readers."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from book.charts import Chart, Grid, Timeline, draw_chart, format_number
from book.explorer_pictures import PICTURES, render_pictures
from book.recordings.__main__ import FOLDER, RECORDERS


def test_lines_and_numbers_are_drawn_to_scale():
    """A line begins and ends at its numbers, missing numbers are left out, and a name cannot contain tags."""
    chart = Chart("a <b>", {"0": {"one": 4.0, "two": 2.0}, "5": {"one": 3.0}, "10": {"one": 2.0}}, "step")
    svg = ET.fromstring(draw_chart(chart, "c")).find("svg")
    lines = [line.get("points") for line in svg.findall("polyline")]
    assert lines == ["40.0,8.0 197.0,72.0 354.0,136.0", "40.0,136.0"]
    assert svg.find("desc").text == "one: 4.00 at step 0, 2.00 at 10; two: 2.00 at step 0, 2.00 at 0"
    assert [format_number(n) for n in (0, 0.00123, 12.3456, 123456)] == ["0", "0.00123", "12.3", "123,456"]


def test_spans_and_cells_are_drawn_to_scale():
    """A span begins and ends at its numbers. A cell is in its column and has its text."""
    spans = {"a": {"one": [(0.0, 5.0), (9.0, 10.0)]}, "b": {"two": [(2.5, 5.0)]}}
    svg = ET.fromstring(draw_chart(Timeline("spans", spans), "c")).find("svg")
    paths = [path.get("d") for path in svg.findall("path")]
    assert paths[0] == "M0.0,16h180.0v11H0.0zM324.0,16h36.0v11H324.0z" and paths[1].startswith("M90.0,")
    assert svg.find("desc").text.startswith("a: 2 of one, 6.00 ms in total, until 10.0 ms; b: 1 of two")
    svg = ET.fromstring(draw_chart(Grid("cells", ["x", "y"], {"row": [("", ""), ("k", "7")]}), "c")).find("svg")
    empty, cell = svg.findall("rect")
    assert (empty.get("class"), cell.get("class")) == ("cell", "cell chart-0")
    assert float(cell.get("x")) - float(empty.get("x")) == pytest.approx((360 - 21) / 2, abs=0.1)
    assert svg.find("desc").text == "row: x: empty, y: k 7" and svg.findall("text")[-1].text == "7"


@pytest.mark.parametrize("name", RECORDERS)
def test_every_recording_has_a_picture(name):
    """A recording has pictures with titles and numbers, in an element that only browsers without scripts show."""
    text = render_pictures(name, json.loads((FOLDER / f"{name}.json").read_text())["samples"])
    assert PICTURES.keys() == RECORDERS.keys() and "\n\n" not in text
    for figure in ET.fromstring(text).findall("figure"):
        title, numbers = (figure.find(f"svg/{tag}").text for tag in ("title", "desc"))
        assert title and re.search(r"\d", numbers) and "nan" not in numbers
