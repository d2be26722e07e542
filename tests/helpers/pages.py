"""What the tests of the site read from a page in the browser."""

import json
from typing import Any

SERIOUS = ("serious", "critical")  # levels of axe-core
WIDTHS = {1280: "light", 768: "light", 390: "dark"}  # of a laptop, a tablet and a phone (px), with the color scheme
# axe-core fixes the impact of each rule, so only the rules with a serious impact are run.
RUN_AXE = """(serious) => axe.run({include: ["html"]},
  {resultTypes: ["violations"], selectors: false,
   runOnly: axe._audit.rules.filter((rule) => rule.enabled && serious.includes(rule.impact)).map((rule) => rule.id)},
  ).then((results) => results.violations)"""
# Choose the values of selects as a user does. A select that a user cannot change is an error.
CHOOSE = """(choices) => {
  for (const [selector, value] of Object.entries(choices)) {
    const select = document.querySelector(selector);
    const isOffered = [...select.options].some((option) => option.value === value && !option.disabled);
    if (!isOffered || select.disabled || !select.checkVisibility({visibilityProperty: true})) {
      throw new Error(`${selector} does not offer ${value}`);
    }
    select.value = value;
    for (const name of ["input", "change"]) select.dispatchEvent(new Event(name, {bubbles: true}));
  }
}"""
# For each choice, move the slider through all positions, and read the texts of the elements that each selector matches.
READ_STEPS = """([choices, selectors]) => JSON.stringify(choices.map((choice) => {
  choose(choice);
  const slider = document.querySelector(".explorer input[type=range]");
  return Array.from({length: Number(slider.max) + 1}, (_, position) => {
    slider.value = position;
    slider.dispatchEvent(new Event("input"));
    return Object.fromEntries(selectors.map((selector) =>
      [selector, [...document.querySelectorAll(`.explorer ${selector}`)].map((each) => each.textContent)]));
  });
}))""".replace("choose(", f"({CHOOSE})(")


def choose(page, choices: dict[str, object]) -> None:
    """Choose values of selects, by selector."""
    page.evaluate(CHOOSE, {selector: str(value) for selector, value in choices.items()})


def read_steps(page, selectors: list[str], *choices: dict[str, object]) -> list[list[dict[str, list[str]]]]:
    """Return, for each choice and each position of the slider, the texts of the elements that each selector matches.

    Args:
        choices: values of selects, by selector. One call for all choices saves the browser most of its work.
    """
    texts = [{selector: str(value) for selector, value in choice.items()} for choice in choices]
    return json.loads(page.evaluate(READ_STEPS, [texts, selectors]))


def read_rows(page, selector: str) -> list[list[str]]:
    """Return the texts of a table's cells by row."""
    script = "(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    return page.locator(f"{selector} tr").evaluate_all(script)


def find_faults(page) -> list[Any]:
    """Return what is wrong with a page at each width: the width if it is wider than the screen, and serious faults.

    axe-core finds the accessibility faults, once for each color scheme, on the smallest screen.
    """
    from axe_playwright_python.base import AXE_SCRIPT

    found: list[Any] = []
    page.evaluate(AXE_SCRIPT)
    inspected = {scheme: width for width, scheme in WIDTHS.items()}
    for width, scheme in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # laid out
        if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
            found.append((width, f"the page needs {needed} pixels"))
        faults = page.evaluate(RUN_AXE, list(SERIOUS)) if width == inspected[scheme] else []
        found += [(width, f["id"], f["nodes"][0]["html"]) for f in faults if f["impact"] in SERIOUS]
    return found
