"""What the tests of the site read from a page in the browser."""

from typing import Any

SERIOUS = ("serious", "critical")  # levels of axe-core
WIDTHS = {390: "dark", 768: "light", 1280: "dark"}  # of a phone, a tablet and a laptop (px), with the color scheme
RUN_AXE = """() => axe.run({include: ["html"], exclude: ["#the-recorded-run-as-tables tr:nth-child(n+4)"]},
  {resultTypes: ["violations"], selectors: false}).then((results) => results.violations)"""
# Store the time from the start of the navigation to the first control that can be used.
WATCH_CONTROLS = """new MutationObserver((_, observer) => {
  if (document.querySelector(".explorer-live :is(button, input, select):enabled")) {
    window.interactiveAfter = performance.now();
    observer.disconnect();
  }
}).observe(document, {childList: true, subtree: true});"""


def read_rows(page, selector: str) -> list[list[str]]:
    """Return the texts of a table's cells by row."""
    script = "(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    return page.locator(f"{selector} tr").evaluate_all(script)


def find_faults(page) -> list[Any]:
    """Return what is wrong with a page at each width: the width if it is wider than the screen, and serious faults.

    axe-core finds the accessibility faults, once for each color scheme. It inspects the full page, but only the first
    rows of the recorded tables.
    """
    from axe_playwright_python.base import AXE_SCRIPT

    found: list[Any] = []
    page.evaluate(AXE_SCRIPT)
    schemes = list(WIDTHS.values())
    for i, (width, scheme) in enumerate(WIDTHS.items()):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
            found.append((width, f"the page needs {needed} pixels"))
        faults = page.evaluate(RUN_AXE) if scheme not in schemes[:i] else []
        found += [(width, f["id"], f["nodes"][0]["html"]) for f in faults if f["impact"] in SERIOUS]
    return found


def measure_interactive_ms(page, url: str, loads: int = 3) -> float:
    """Return the fastest time from the start of the navigation to the first control of an interactive page.

    Other programs can only slow down a page, so a slow page is loaded again.
    """
    page.add_init_script(WATCH_CONTROLS)
    fastest = float("inf")
    for _ in range(loads):
        page.goto(url)
        fastest = min(fastest, page.evaluate("window.interactiveAfter"))
        if fastest < 1000:
            break
    return fastest
