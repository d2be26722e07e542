"""A reader's own result file on the page of the result files: its numbers next to the committed ones."""

import json

import pytest

from bench.tables.records import read_results
from book.own_results import LABELS, collect_numbers
from book.results import RESULTS
from tests.helpers.pages import find_faults, measure_interactive_ms, read_rows

pytestmark = pytest.mark.heavy
DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  document.querySelector(".drop").dispatchEvent(new DragEvent("drop", {dataTransfer: data}));
}"""
# What a damaged file contains, and a part of the sentence about it.
DAMAGED = {
    "torn.json": ('{"name": "muon", "sam', "JSON"),
    "list.json": ("[1, 2]", "it has no name"),
    "half.json": ('{"name": "muon", "hardware": "x", "settings": {}}', "it has no samples"),
    "new.json": ('{"format": 2, "name": "a", "hardware": "b", "settings": {}, "samples": {"n": 1}}', "it has format 2"),
    "empty.json": ('{"name": "a", "hardware": "b", "settings": {}, "samples": {"n": "1"}}', "contain no numbers"),
}


def test_a_reader_compares_a_result_with_the_committed_ones(site, page, tmp_path):
    """Both scripts find the same numbers in every committed result. A file of the reader is shown next to them.

    A damaged file leads to one sentence with a remedy. The page can be used after at most 1 second, has no serious
    accessibility fault, and fits a phone, a tablet and a laptop.
    """
    assert measure_interactive_ms(page, (site / "results" / "index.html").as_uri()) < 1000
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    all_samples = [result["samples"] for result in results if "name" in result]
    script = "([all, labels]) => all.map((samples) => collectNumbers(samples, labels))"
    found = page.evaluate(script, [all_samples, list(LABELS)])
    assert found == [collect_numbers(samples) for samples in all_samples] and sum(map(len, found)) > 1000

    own = read_results("zero1-overhead")[0]
    committed = collect_numbers(own["samples"])
    own["samples"]["parameters"] *= 2
    own["hardware"] = "my <b>machine</b>"
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own))
    page.set_input_files(".drop input", path)
    page.wait_for_selector(".numbers")
    rows = read_rows(page, ".numbers")
    assert rows[1] == ["parameters", "21,440,256", "10,720,128", "200%"]
    assert [row[0] for row in rows[1:]] == list(committed) and all(row[3] == "100%" for row in rows[2:])
    for row, value in zip(rows[2:], list(committed.values())[1:], strict=True):
        assert [float(text.replace(",", "")) for text in row[1:3]] == pytest.approx([value, value], rel=1e-5)
    assert [row[1] for row in read_rows(page, ".origin")[1:]] == ["my <b>machine</b>", "AMD EPYC, 2 cores"]
    assert find_faults(page) == []

    for name, (text, words) in DAMAGED.items():
        page.evaluate(DROP, [name, text])
        page.wait_for_function("(name) => document.querySelector('.error')?.textContent.startsWith(name)", arg=name)
        message = page.locator(".error").inner_text()
        assert words in message and message.endswith("choose a JSON file that a command with --write has written.")
        assert page.locator(".numbers").count() == 0
    page.evaluate(DROP, ["other.json", json.dumps({**own, "name": "my-bench"})])
    page.wait_for_selector(".numbers")
    assert "has no committed result with this name" in page.locator(".sentence").inner_text()
    assert len(read_rows(page, ".numbers")[0]) == 2
