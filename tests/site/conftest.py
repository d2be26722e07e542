"""The site and the browser of the tests in this directory. Each worker of pytest-xdist starts one browser.

A new window costs 0.7 s of processor time, so the tests of a worker share two: one with scripts and one without.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.training import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
HOW_TO_INSTALL = (
    "there is no browser: `apt install chromium` on Debian, `snap install chromium` on Ubuntu, `dnf install chromium` "
    "on Fedora; on other systems, put one of these into the PATH: " + ", ".join(BROWSERS)
)
WITHOUT_GPU = ["--disable-gpu", "--disable-software-rasterizer", "--in-process-gpu"]  # one process less, same pages


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all workers, and return its directory. BOOK_SITE names a site that is built already."""
    if importlib.util.find_spec("myst_nb") is None:  # an import would take a second of processor time
        pytest.skip("the packages of `make book` are not installed")
    if built := os.environ.get("BOOK_SITE"):
        return (ROOT / built).resolve()
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # without workers, others share the parent
    folder = common / "book"
    with (common / "book.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, "-m", "workshop.site", f"--to={folder}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Return a headless browser."""
    for package in ("playwright", "axe_playwright_python"):
        pytest.importorskip(package, reason="the packages of `make book` are not installed")
    from playwright.sync_api import sync_playwright

    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        pytest.skip(HOW_TO_INSTALL)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
        yield playwright.chromium.launch(executable_path=path, args=[*arguments, *WITHOUT_GPU])


@pytest.fixture(scope="session")
def window(browser):
    """Return a page that all tests share. Use `page`, which resets what other tests have changed."""
    return browser.new_page()


@pytest.fixture
def page(window):
    """Return a page of a laptop, without dark colors. A test navigates it, and so starts with a new document."""
    window.set_viewport_size({"width": 1280, "height": 720})
    window.emulate_media(color_scheme="light")
    window.mouse.move(0, 0)
    return window
