"""The site of `make book`: complete, without broken links, and working in a real browser without a network."""

import fcntl
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from book.__main__ import build_book
from book.recordings.__main__ import RECORDERS
from book.recordings.ring import COLLECTIVES
from book.results import RESULTS
from book.sources import NOTEBOOKS, list_sources, rewrite_links
from nanoGPT.errors import ConfigError
from tests.helpers.training import ROOT

MAX_SITE_BYTES = 15e6
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
HAS_BOOK_PACKAGES = all(importlib.util.find_spec(name) for name in ("sphinx", "myst_nb", "furo", "playwright"))
pytestmark = pytest.mark.heavy
needs_packages = pytest.mark.skipif(not HAS_BOOK_PACKAGES, reason="the packages of `make book` are not installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"there is no browser ({', '.join(BROWSERS)})")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all workers of pytest-xdist, and return its directory."""
    common = tmp_path_factory.getbasetemp().parent
    folder = common / "book"
    with (common / "book.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, "-m", "book", f"--to={folder}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Return a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
        yield playwright.chromium.launch(executable_path=BROWSER, args=arguments)


def open_explorer(browser, site: Path, name: str, **options):
    """Open an interactive page, answer its question, and return the page and the recorded samples."""
    page = browser.new_page(**options)
    page.goto((site / "book" / "pages" / f"{name}.html").as_uri())
    assert page.locator("input[type=range]").count() == 0, "the run must not be visible before the prediction"
    page.locator(".explorer fieldset button").first.click()
    return page, json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())["samples"]


def move_to(page, position: int) -> None:
    page.locator(".explorer input[type=range]").fill(str(position))


@needs_packages
def test_the_site_is_complete_and_has_no_broken_links(site):
    """The site is small, has every notebook with its outputs and every result, and every link in it leads somewhere."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < MAX_SITE_BYTES
    for path in RESULTS.glob("*.json"):
        assert site / "results" / f"{path.stem}.html" in pages
    for path in list_sources(NOTEBOOKS):
        assert 'class="cell_output' in pages[site / "notebooks" / f"{path.stem}.html"]
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for name, link in re.findall(r'\b(src|href)="([^"]*)"', text):
            parts = urlsplit(html.unescape(link))
            if parts.scheme or parts.netloc:
                is_asset = name == "src" or parts.path.endswith((".css", ".js", ".woff2"))
                broken += [f"{path.name} loads {link}"] if is_asset and parts.scheme != "data" else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            has_anchor = target not in anchors or not parts.fragment or unquote(parts.fragment) in anchors[target]
            broken += [] if target.is_file() and has_anchor else [f"{path.relative_to(site)}: {link}"]
    assert broken == []


@needs_packages
@needs_browser
def test_every_page_opens_without_errors_and_without_a_network(site, browser):
    """No page writes an error to the console or requests anything but files, and the search finds a term."""
    problems: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}"))
    page.on("request", lambda request: problems.append(request.url) if not is_local(request.url) else None)
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        assert problems == [], path.relative_to(site)
    page.goto((site / "search.html").as_uri() + "?q=reduce-scatter")
    page.wait_for_selector("#search-results li")
    assert problems == []


def is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:"))


@needs_packages
@needs_browser
def test_the_ring_page_shows_the_recorded_run(site, browser):
    """For each collective and number of ranks, every step shows the recorded sends, contents and bytes."""
    page, samples = open_explorer(browser, site, "ring")
    assert "24,576 bytes" in page.locator(".verdict").inner_text()
    for run in samples["runs"]:
        if run["ranks"] == 8 and run["collective"] != COLLECTIVES[0]:
            continue  # as many rows as in the first one
        page.select_option(".collective", run["collective"])
        page.select_option(".number-of-ranks", str(run["ranks"]))
        for step in range(len(run["steps"]) + 1):
            move_to(page, step)
            sends = run["steps"][step] if step < len(run["steps"]) else []
            values = [send["chunks"] for send in sends] or run["end"]
            cells = page.locator(".explorer td").all_inner_texts()
            assert cells == [name_ranks(value) for row in values for value in row]
            assert page.locator(".explorer td.sent").count() == len(sends)
            for rank, send in enumerate(sends):
                sentence = page.locator(".sentence").inner_text()
                assert f"rank {rank} sends chunk {send['chunk']} to rank {send['to']}" in sentence
            sent = sum(each[0]["bytes"] for each in run["steps"][:step])
            volume = page.locator(".volume").inner_text()
            assert volume.startswith(f"Rank 0 has sent {sent:,} bytes.") and f"{run['predicted_bytes']:,.0f}" in volume


def name_ranks(value: int | None) -> str:
    """Return the ranks in a recorded value, as the page writes them."""
    return "empty" if value is None else "+".join(str(rank) for rank in range(8) if value >> rank & 1)


@needs_packages
@needs_browser
def test_the_fsdp_page_shows_the_recorded_step(site, browser):
    """Every event shows the recorded memory of every rank. The keyboard, the buttons and Play change the event."""
    page, samples = open_explorer(browser, site, "fsdp_step")
    assert "the recorded value is 2 times" in page.locator(".verdict").inner_text()
    sent = 0.0
    for position, (kind, unit, size) in enumerate(samples["events"]):
        move_to(page, position)
        totals = [f"{sum(by_event[position]):,} bytes" for by_event in samples["memory"]]
        assert page.locator(".total").all_inner_texts() == totals
        sent += size * (samples["ranks"] - 1) / samples["ranks"]
        assert f"has sent {sent:,.0f} bytes" in page.locator(".volume").inner_text()
        states = page.locator(".units tr").nth(1).locator("td").all_inner_texts()
        state = states[samples["units"].index(unit)]
        expected = {"all-gather": "gathered", "free": "sharded", "forward": "forward", "backward": "backward"}
        assert state == expected.get(kind, "sharded")
    assert sent == sum(samples["ring_bytes"].values())
    slider, last = page.locator("input[type=range]"), len(samples["events"]) - 1
    for action, position in (("First", 0), ("Next", 1), ("Last", last), ("Back", last - 1)):
        page.get_by_role("button", name=action, exact=True).click()
        assert slider.input_value() == str(position)
    slider.press("ArrowLeft")
    assert f"Event {last - 1} of" in page.locator(".sentence").inner_text()
    slider.press("ArrowRight")
    page.get_by_role("button", name="Play").click()
    page.wait_for_function(f"document.querySelector('input[type=range]').value === '{last}'")


@needs_packages
@needs_browser
@pytest.mark.parametrize("name", RECORDERS)
def test_pages_work_for_everyone(name, site, browser, tmp_path):
    """Without scripts a page shows tables, with reduced motion it has no Play, and on a phone it fits the screen.

    If the recording is damaged, the page shows one sentence with the command that repairs it.
    """
    source = site / "book" / "pages" / f"{name}.html"
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(source.as_uri())
    assert page.locator("article table").first.is_visible()
    page, _ = open_explorer(
        browser, site, name, reduced_motion="reduce", viewport={"width": 390, "height": 800}, color_scheme="dark"
    )
    assert not page.locator(".play").is_visible() and page.locator(".next").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    damages = {'"samples":{': '"samples":[{', '"ranks":': '"tanks":', '"memory":[[[': '"memory":[[[9],['}
    text = source.read_text()
    for old, new in damages.items():
        if old in text:
            damaged = source.with_name(f"damaged-{tmp_path.name}.html")  # next to the scripts that it loads
            damaged.write_text(text.replace(old, new, 1))
            page.goto(damaged.as_uri())
            damaged.unlink()
            error = page.locator(".explorer .error").inner_text()
            assert "is damaged" in error and f'"make record NAME={name}"' in error


def test_a_directory_with_other_files_is_not_replaced(tmp_path):
    """`--to` with a directory that contains other files is refused, and the files stay."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="contains other files: use a new directory"):
        build_book(to=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_links_lead_to_pages_or_to_the_repository():
    """Links to pages stay links; a link to another file needs the repository's URL; links in code do not change."""
    text = "[notes](../README.md#two) [`code`](../nanoGPT/train.py) `[x](y)` [out](https://example.org)"
    source = ROOT / "docs" / "running.md"
    assert rewrite_links(text, source, "") == ("[notes](../index.md#two) `code` `[x](y)` [out](https://example.org)")
    assert "[`code`](https://host/blob/main/nanoGPT/train.py)" in rewrite_links(text, source, "https://host")
    with pytest.raises(ConfigError, match="docs/running.md links to missing.md, which does not exist"):
        rewrite_links("[gone](missing.md)", source, "")
