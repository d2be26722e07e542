"""Build the book: `make book`, then open out/book/index.html or run
`python -m http.server --directory out/book`.

    python -m workshop.site                                 # write out/book
    python -m workshop.site --repository=https://host/name  # also link to source files and "edit this page"

The site needs no network: open it from the disk, or copy it to any web server. The notebooks show their committed
outputs, so nothing is executed.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from workshop.site.explorers import render_explorer
from workshop.site.sources import ROOT, append_contents, copy_documents, list_sources, replace_blocks

OUT = ROOT / "out" / "book"


def build_book(repository: str = "", to: Path = OUT) -> None:
    """Build the site, and replace the directory `to` with it. If the build fails, the old site stays.

    Args:
        repository: URL of the repository, for links to source files; empty: no links.
        to: directory of the site.

    Raises:
        ConfigError: Sphinx is missing, or a document or a recording is damaged.
    """
    begin = time.monotonic()
    if to.exists() and not (to / ".buildinfo").exists() and any(to.iterdir()):
        raise ConfigError(f"--to={to} contains other files: use a new directory")
    to.parent.mkdir(parents=True, exist_ok=True)
    work = to.with_name(f".{to.name}-work")
    shutil.rmtree(work, ignore_errors=True)
    write_sources(work / "sources", repository.rstrip("/"))
    run_sphinx(work, repository.rstrip("/"))
    shutil.rmtree(to, ignore_errors=True)
    os.replace(work / "html", to)
    shutil.rmtree(work)
    size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    pages = len(list(to.rglob("*.html")))
    print(f"{to / 'index.html'}: {pages} pages, {size / 1e6:.1f} MB, built in {time.monotonic() - begin:.0f} s")


def write_sources(folder: Path, repository: str) -> None:
    """Write everything that Sphinx reads into a new directory."""
    folder.mkdir(parents=True)
    copy_documents(folder, repository)
    for path in (folder / "workshop" / "site" / "pages").glob("*.md"):
        replace_blocks(path, render_explorer)
    append_contents(folder)
    shutil.copytree(ROOT / "workshop" / "site" / "static", folder / "_static")
    for path in list_sources("workshop/site/conf.py"):
        shutil.copy(path, folder)


def run_sphinx(work: Path, repository: str) -> None:
    """Run Sphinx on `work/sources`, and write `work/html`. A warning is an error: a broken link, a damaged document.

    Raises:
        ConfigError: Sphinx is not installed, or it printed an error.
    """
    try:
        from sphinx.cmd.build import build_main
    except ImportError:
        raise ConfigError("Sphinx is not installed: run make book, which installs it") from None
    os.environ["BOOK_REPOSITORY"] = repository
    options = ["-q", "-W", "--keep-going", "-j", "2", "-b", "html", "-d", str(work / "doctrees")]
    if build_main([*options, str(work / "sources"), str(work / "html")]):
        raise ConfigError("Sphinx found problems in the documents (see above): fix them and run make book again")


if __name__ == "__main__":
    with report_errors():
        command_line(build_book, sys.argv[1:])
