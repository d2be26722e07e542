"""Copy the documents and the notebooks into one directory for Sphinx, and adapt their links.

Each document keeps its path in the repository, so links between documents stay valid. README.md becomes `index.md`, the
first page. A link to a file that is not a page leads to the repository, or becomes plain text if its URL is unknown.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from nanoGPT.errors import ConfigError
from workshop.imports import ROOT

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "phase*/*.md",
    "workshop/site/pages/*.md",
    "workshop/GUIDE.md",
)
NOTEBOOKS = "notebooks/*.ipynb"
PICTURES = ("docs/images/*.png",)
# A link to a file, or code, in which nothing is a link. The alternative that begins first wins.
LINK_OR_CODE = re.compile(
    r"(?<!!)\[(?P<label>[^\]\n]+)\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
    r"|^```.*?^```\s*?$|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)

# The chapters of the table of contents: a title, and the patterns of its pages in order.
EXPLORERS = ("ring", "fsdp_step", "will_it_fit", "flash_attention", "kill_save")  # in the order of the notebooks
CHAPTERS = (
    ("Explore", tuple(f"workshop/site/pages/{name}.md" for name in EXPLORERS)),
    ("Notebooks", (NOTEBOOKS,)),
    ("Phases", ("phase*/*.md",)),
    ("Documents", ("docs/*.md", "workshop/GUIDE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
)


def list_sources(*patterns: str) -> list[Path]:
    """Return the files of the repository that match the patterns, in the order of the patterns."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def page_of(path: Path) -> Path:
    """Return the path of a document in the copy, relative to its root."""
    relative = path.relative_to(ROOT)
    return Path("index.md") if str(relative) == "README.md" else relative


def rewrite_links(text: str, source: Path, repository: str) -> str:
    """Return Markdown with links that work on the site. Links in code stay as they are.

    Args:
        text: Markdown.
        source: the file that contains the text.
        repository: URL of the repository, or an empty string.

    Raises:
        ConfigError: a link leads to a file that does not exist.
    """
    pages = {path.resolve(): page_of(path) for path in list_sources(*DOCUMENTS, NOTEBOOKS)}
    pages.update({path.resolve(): page_of(path) for path in list_sources(*PICTURES)})
    folder = page_of(source).parent

    def rewrite(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        label, anchor = match["label"], match["anchor"] or ""
        target = (source.parent / match["target"]).resolve()
        if not target.exists():
            raise ConfigError(
                f"{source.relative_to(ROOT)} links to {match['target']}, which does not exist: fix the link"
            )
        if target in pages:
            return f"[{label}]({os.path.relpath(pages[target], folder)}{anchor})"
        return f"[{label}]({repository}/blob/main/{target.relative_to(ROOT)})" if repository else label

    return LINK_OR_CODE.sub(rewrite, text)


def copy_documents(folder: Path, repository: str) -> None:
    """Copy all documents, notebooks and pictures.

    Args:
        folder: an empty directory.
        repository: URL of the repository, or an empty string.

    Raises:
        ConfigError: a link leads to a file that does not exist, or a notebook is damaged.
    """
    for path in list_sources(*DOCUMENTS):
        write_page(folder / page_of(path), rewrite_links(path.read_text(), path, repository))
    for path in list_sources(NOTEBOOKS):
        try:
            notebook = json.loads(path.read_text())
            for cell in notebook["cells"]:
                if cell["cell_type"] == "markdown":
                    cell["source"] = rewrite_links("".join(cell["source"]), path, repository)
        except (ValueError, KeyError, TypeError):
            name = path.relative_to(ROOT)
            raise ConfigError(
                f"{name} is not a notebook: restore it from git, or run .venv/bin/python -m workshop.notebooks"
            ) from None
        write_page(folder / page_of(path), json.dumps(notebook))
    for path in list_sources(*PICTURES):
        target = folder / page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def write_page(path: Path, text: str) -> None:
    """Write a page, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def append_contents(folder: Path) -> None:
    """Append the table of contents to the first page. The sidebar of the site shows it."""
    lines = [(folder / "index.md").read_text()]
    for title, patterns in CHAPTERS:
        pages = [str(path.relative_to(folder)) for pattern in patterns for path in sorted(folder.glob(pattern))]
        lines += ["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""]
    (folder / "index.md").write_text("\n".join(lines))


def replace_blocks(path: Path, render: Callable[[str], str]) -> None:
    """Replace each line `<!-- explorer: NAME -->` of a page with `render(NAME)`."""
    path.write_text(re.sub(r"^<!-- explorer: (\w+) -->$", lambda match: render(match[1]), path.read_text(), flags=re.M))
