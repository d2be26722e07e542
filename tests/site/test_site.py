"""The site of `make book`: complete, without broken links, and working in a real browser without a network."""

import html
import re
from urllib.parse import unquote, urlsplit

import pytest

from nanoGPT.errors import ConfigError
from tests.helpers.marks import mark_slow
from tests.helpers.training import ROOT
from workshop.site.__main__ import build_book
from workshop.site.sources import NOTEBOOKS, list_sources, rewrite_links

MAX_SITE_BYTES = 15e6
LOCAL = ("file:", "data:", "blob:")
OPEN_IN_FRAMES = """async (urls) => {
  for (const url of urls) {
    const frame = document.createElement("iframe");
    frame.width = 1280;
    frame.height = 720;
    frame.style.visibility = "hidden";
    await new Promise((resolve) => {
      frame.addEventListener("load", resolve);
      frame.src = url;
      document.body.replaceChildren(frame);
    });
  }
}"""
pytestmark = pytest.mark.heavy


def test_the_site_is_complete_and_has_no_broken_links(site):
    """The site is small, has every notebook with its outputs, and every link in it leads somewhere."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < MAX_SITE_BYTES
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


def test_every_page_opens_without_errors_and_without_a_network(site, browser):
    """No page writes an error to the console or requests anything but files, and the search finds a term.

    The pages are opened in frames of one page, which costs the browser less than opening each in its window. The
    frames have the size of a laptop, but are not painted.
    """
    problems: list[str] = []
    requested: set[str] = set()
    page = browser.new_page()
    page.on(
        "console",
        lambda message: problems.append(f"{message.location}: {message.text}") if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error.stack)))
    page.on("requestfailed", lambda request: problems.append(f"failed: {request.url} of {request.frame.url}"))
    page.on("request", lambda request: requested.add(request.url))
    page.goto((site / "search.html").as_uri() + "?q=reduce-scatter")
    page.wait_for_selector("#search-results li")
    urls = [path.as_uri() for path in sorted(site.rglob("*.html"))]
    page.evaluate(OPEN_IN_FRAMES, urls)
    page.close()
    assert problems == [] and requested.issuperset(urls)
    assert [url for url in requested if not url.startswith(LOCAL)] == []


# Code and tables of an article that are wider than it. A table of results may scroll.
FIND_CUT_BLOCKS = """() => {
  const isCut = (element) => element.scrollWidth > element.clientWidth + 1;
  return [...document.querySelectorAll("article pre, article table")]
    .filter((each) => !each.closest(".results") && (isCut(each) || isCut(each.parentElement)))
    .map((each) => each.innerText.slice(0, 80));
}"""


@pytest.mark.parametrize("folder", ["phase*", *mark_slow("docs", "notebooks", "workshop")])
def test_pages_fit_the_screen(site, page, folder):
    """On a laptop no code or table is cut at the right edge, and on a phone no page is wider than the screen."""
    for path in sorted(site.glob(f"{folder}/**/*.html")):
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(path.as_uri())
        assert page.evaluate(FIND_CUT_BLOCKS) == [], path.name
        page.set_viewport_size({"width": 390, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.name


def test_the_cheat_sheet_shows_its_equations(site, page):
    """The browser draws equations without scripts."""
    page.goto((site / "docs" / "cheat_sheet.html").as_uri())
    heights = page.locator("math:has(mfrac)").evaluate_all("(all) => all.map((each) => each.clientHeight)")
    assert len(heights) == 3 and min(heights) > 10 and "$" not in page.locator("#formulas").inner_text()


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
