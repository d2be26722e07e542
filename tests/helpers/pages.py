"""What the tests of the site read from a page in the browser."""

SERIOUS = ("serious", "critical")  # levels of axe-core


def read_rows(page, selector: str) -> list[list[str]]:
    """Return the texts of a table's cells by row."""
    script = "(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    return page.locator(f"{selector} tr").evaluate_all(script)


def find_faults(page) -> list[tuple[str, str]]:
    """Return the serious accessibility faults that axe-core finds in the interactive part of a page."""
    from axe_playwright_python.sync_playwright import Axe

    faults = Axe().run(page, context=".explorer").response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in faults if fault["impact"] in SERIOUS]
