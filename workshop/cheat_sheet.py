"""Write the cheat sheet as one HTML page to print, and as a PDF if a browser is installed.

    python -m workshop.cheat_sheet      # out/cheat_sheet.html, and with Chromium or Chrome out/cheat_sheet.pdf

The text is docs/cheat_sheet.md. The page has no links to other files.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.files import write_atomically
from workshop.imports import ROOT

SOURCE = ROOT / "docs" / "cheat_sheet.md"
DEFAULT = ROOT / "out" / "cheat_sheet.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60  # until a browser counts as hanging
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Cheat sheet</title>
<style>
@page {{ size: A4 portrait; margin: 9mm 10mm; }}
body {{ font: 8.1pt/1.25 system-ui, sans-serif; color: #111; max-width: 190mm; margin: auto; }}
h1 {{ font-size: 15pt; margin: 0; }} h2 {{ font-size: 10.5pt; margin: 3mm 0 1mm; }} p {{ margin: 0 0 1mm; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ border: 0.3pt solid #888; padding: 0.3mm 1.2mm; text-align: left; vertical-align: top; }}
pre {{ background: #f2f4f7; padding: 1mm 2mm; margin: 0; white-space: pre-wrap; }}
pre, code {{ font: 7.4pt/1.25 ui-monospace, monospace; }}
</style></head><body>
{body}
</body></html>
"""


def make_page() -> str:
    """Return the cheat sheet as HTML. Links become plain text, because paper has none, and equations MathML."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", SOURCE.read_text())
    text = re.sub(r"\$([^$]+)\$", lambda match: convert(match[1]), text)
    return PAGE.format(body=MarkdownIt().enable("table").render(text))


def find_browser() -> str | None:
    """Return the path of a browser that can print, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def print_to_pdf(page: Path, browser: str) -> Path:
    """Print an HTML page into a PDF next to it, with a headless browser, and return its path.

    Raises:
        ConfigError: the browser fails or hangs.
    """
    pdf = page.with_suffix(".pdf")
    with tempfile.TemporaryDirectory() as profile:
        words = [browser, "--headless", "--disable-gpu", f"--user-data-dir={profile}", "--no-pdf-header-footer"]
        words += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
        words += [f"--print-to-pdf={pdf}", page.resolve().as_uri()]
        try:
            subprocess.run(words, check=True, capture_output=True, timeout=SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            raise ConfigError(
                f"{browser} cannot print {page} ({type(error).__name__}): open it in a browser, and print it there"
            ) from None
    return pdf


def main(to: str = "") -> None:
    """Write the page, and its PDF if there is a browser.

    Args:
        to: path of the HTML file; empty: out/cheat_sheet.html.
    """
    path = Path(to) if to else DEFAULT
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, make_page().encode())
    browser = find_browser()
    if browser is None:
        print(f"wrote {path}; there is no browser ({', '.join(BROWSERS)}): open it in yours, and print it")
        return
    print(f"wrote {path} and {print_to_pdf(path, browser)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
