"""The interactive pages in a real browser: what they show equals the recordings and the Python functions."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pages import choose, find_faults, read_rows, read_steps
from workshop.site.explorers import RECORDINGS

pytestmark = pytest.mark.heavy

READ_SAMPLES = "JSON.parse(document.querySelector('.explorer script').textContent).samples"
# One damage for each recording: a text, and what replaces it.
DAMAGES = {
    "ring": ('"ranks":', '"tanks":'),
    "fsdp_step": ('"memory":[[[', '"memory":[[[9],['),
    "will_it_fit": ('"polynomials":[', '"polynomials":[7,'),
    "kill_save": ('"files":[[', '"piles":[['),
    "flash_attention": ('"sum":', '"some":'),
}


def open_explorer(page, site: Path, name: str) -> dict[str, Any]:
    """Open an interactive page, answer its question if it has one, and return the recorded samples."""
    page.goto((site / "workshop" / "site" / "pages" / f"{name}.html").as_uri())
    controls = page.locator(".explorer select, .explorer input")
    if name == "will_it_fit":
        assert controls.count() >= 7, "the planner opens at once"
    else:
        assert controls.count() == 0, "the run must not be visible before the prediction"
        page.locator(".explorer fieldset button").first.click()
    return json.loads((RECORDINGS / f"{name}.json").read_text())["samples"]


def test_the_ring_page_shows_the_recorded_runs(site, page):
    """For each collective, algorithm and number of ranks, every step shows the recorded contents and bytes."""
    samples = open_explorer(page, site, "ring")
    assert "24,576 bytes" in page.locator(".verdict").inner_text()
    choices = [{".collective": run["collective"], ".number-of-ranks": run["ranks"]} for run in samples["runs"]]
    for run, choice in zip(samples["runs"], choices, strict=True):
        if run["collective"] in ("all-reduce", "broadcast"):  # the others are only on a ring
            choice[".algorithm"] = run["algorithm"]
    selectors = ["td:not(.costs td)", ".volume"]
    for run, steps in zip(samples["runs"], read_steps(page, selectors, *choices), strict=True):
        for position, shown in enumerate(steps):
            sends = run["steps"][position] if position < len(run["steps"]) else []
            values = [send["chunks"] for send in sends] or run["end"]
            assert shown["td:not(.costs td)"] == [name_ranks(value) for row in values for value in row]
            sent = sum(each[0].get("bytes", 0) for each in run["steps"][:position])
            assert shown[".volume"][0].startswith(f"Rank 0 has sent {sent:,} bytes.")


def predict_seconds(run: dict[str, Any], tensor_bytes: float, latency: float, bandwidth: float) -> float:
    """Return the time of a recorded collective in the latency-bandwidth model, for a tensor of another size."""
    largest = [max(send.get("bytes", 0) for send in sends) for sends in run["steps"]]
    return sum(latency + size / run["tensor_bytes"] * tensor_bytes / bandwidth for size in largest)


def test_the_ring_page_predicts_times(site, page):
    """Times are those of the model, and another latency changes the size at which a ring is faster."""
    samples = open_explorer(page, site, "ring")
    cases = [(run, 10.0**power, 2e-6, 5e9) for run in samples["runs"] for power in (0, 5, 9)]
    found = page.evaluate("(cases) => cases.map((each) => predictSeconds(...each))", cases)
    assert found == pytest.approx([predict_seconds(*case) for case in cases])
    before = page.locator(".crossover").inner_text()
    page.fill(".latency", "20")
    assert page.locator(".crossover").inner_text() != before


def name_ranks(value: int | None) -> str:
    """Return the ranks in a recorded value, as the page writes them."""
    return "empty" if value is None else "+".join(str(rank) for rank in range(8) if value >> rank & 1)


def test_the_fsdp_page_shows_the_recorded_steps(site, page):
    """For each value of each switch, every event shows the recorded memory of every rank. Buttons change the event."""
    samples = open_explorer(page, site, "fsdp_step")
    assert "bytes with reshard after forward: off." in page.locator(".verdict").inner_text()
    labels = {"fsdp_activation_checkpointing": ".activation-checkpointing"}
    labels |= {"fsdp_reshard_after_forward": ".reshard-after-forward"}
    runs = samples["runs"][::3]  # these have every value of every switch
    choices = [{labels[name]: str(value).lower() for name, value in run["options"].items()} for run in runs]
    for run, steps in zip(runs, read_steps(page, [".total", ".volume"], *choices), strict=True):
        sent = 0.0
        for position, (_, _, size) in enumerate(run["events"]):
            shown = steps[position]
            assert shown[".total"] == [f"{sum(by_event[position]):,} bytes" for by_event in run["memory"]]
            sent += size * (samples["ranks"] - 1) / samples["ranks"]
            assert f"has sent {sent:,.0f} bytes" in shown[".volume"][0]
        assert len(steps) == len(run["events"]) and sent == sum(run["ring_bytes"].values())
    slider, last = page.locator("input[type=range]"), len(run["events"]) - 1
    for action, position in (("First", 0), ("Next", 1), ("Last", last), ("Back", last - 1)):
        page.get_by_role("button", name=action, exact=True).click()
        assert slider.input_value() == str(position)


def test_the_planner_in_the_browser_equals_the_planner(site, page):
    """For every recorded case, model state and communication are exact, and peak memory within 0.5%.

    The cases have every row, with one and with several micro-batches. The table of the page shows these numbers.
    """
    samples = open_explorer(page, site, "will_it_fit")
    cases = [dict(zip(samples["cases"]["fields"], values, strict=True)) for values in samples["cases"]["values"]]
    results = page.evaluate(f"(cases) => cases.map(makePlanner({READ_SAMPLES}).plan)", cases)
    assert len(results) >= 300
    for case, result in zip(cases, results, strict=True):
        assert list(result["state_bytes"].values()) == case["state_bytes"], case
        assert result["sent_bytes"] == pytest.approx(case["sent_bytes"], abs=0.5), case  # the planner's is rounded
        assert result["peak_bytes"] == pytest.approx(case["peak_bytes"], rel=0.005), case
    assert {case["row"] for case in cases} == set(range(len(samples["rows"])))
    assert {case["micro_batches"] > 1 for case in cases} == {False, True}
    case, result = next(pair for pair in zip(cases, results, strict=True) if pair[1]["fits"])
    labels = {"model": ".model", "gpus": ".number-of-GPUs", "gpu": ".GPU", "dtype": ".dtype"}
    labels |= {"batch_size": ".sequences-per-micro-batch", "block_size": ".tokens-per-sequence"}
    labels |= {"micro_batches": ".micro-batches-per-step"}
    choose(page, {selector: case[name] for name, selector in labels.items()})
    row = read_rows(page, ".plan")[1 + case["row"]]
    sizes = [f"{size / 2**30:.1f} GiB" for size in (result["peak_bytes"], sum(case["state_bytes"]))]
    assert row[1] == "yes" and row[2:4] == sizes


def test_the_attention_page_shows_the_recorded_tiles(site, page):
    """Each tile shows the recorded scores and running values. The last step shows the output of plain softmax."""
    samples = open_explorer(page, site, "flash_attention")
    assert f"is {len(samples['steps'])} tiles" in page.locator(".verdict").inner_text()
    (steps,) = read_steps(page, [".running td", ".scores td.now", ".comparison td"], {})
    for step, shown in zip(samples["steps"], steps[:-1], strict=True):
        queries = min(samples["tile"], samples["tokens"] - step["query"])
        keys = min(samples["tile"], samples["tokens"] - step["key"])
        scores = [score for row in step["scores"][:queries] for score in row[:keys]]
        assert shown[".scores td.now"] == ["hidden" if score is None else f"{score:.2f}" for score in scores]
        for i, row in enumerate(shown[".running td"][j : j + 5] for j in range(0, 5 * queries, 5)):
            assert row[1:4] == [f"{step[name][i]:.3f}" for name in ("maximum", "correction", "sum")]
    expected = [", ".join(f"{value:.3f}" for value in row) for row in samples["expected"]]
    assert steps[-1][".comparison td"] == [text for row in expected for text in (row, row)]


@pytest.mark.parametrize("name", DAMAGES)
def test_pages_work_for_everyone(name, site, page):
    """On a phone, a tablet and a laptop, a page fits the screen, and axe-core finds no serious accessibility fault.

    A damaged recording leads to one sentence that names its file.
    """
    source = site / "workshop" / "site" / "pages" / f"{name}.html"
    page.goto(source.as_uri())
    if name != "will_it_fit":
        page.get_by_text("Show me").click()
    assert find_faults(page) == []
    old, new = DAMAGES[name]
    text = source.read_text()
    assert old in text
    damaged = source.with_name(f"damaged-{name}-{os.getpid()}.html")  # next to the scripts that it loads
    damaged.write_text(text.replace(old, new, 1))
    try:
        page.goto(damaged.as_uri())
        error = page.locator(".explorer .error").inner_text()
    finally:
        damaged.unlink()
    assert "is damaged" in error and f"restore docs/data/{name}.json from git" in error
