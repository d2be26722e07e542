"""The notebooks run, and the committed notebooks match their scripts."""

import ast
import importlib
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbformat import NotebookNode

from tests.helpers.notebooks import ForkedKernel
from workshop import notebooks
from workshop.imports import find_modules
from workshop.notebooks import execute, read_script

SCRIPTS = notebooks.list_scripts()
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp|home|Users|private|var)\b|" + re.escape(tempfile.gettempdir()))
# `.venv/bin/python -m workshop.notebooks` and the slow tests run all of them.
QUICK = ("00_start_here",)
each_notebook = pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])


def list_outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def get_text(output: NotebookNode) -> str:
    """Return the text of an output. Images have no text."""
    texts = [output.get("text", "")]
    texts += [str(content) for kind, content in output.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join(texts)


@each_notebook
def test_the_committed_notebook_is_complete(script: Path) -> None:
    """Every committed .ipynb has the cells of its script, and was run from the first to the last cell.

    It has no errors and no absolute paths.
    """
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    cells, expected = (
        [(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, read_script(script))
    )
    assert cells == expected, "run `.venv/bin/python -m workshop.notebooks` and commit what it writes"
    nbformat.validate(notebook)
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code_cells] == list(range(1, len(code_cells) + 1))
    assert all(output.output_type != "error" for output in list_outputs(notebook))
    assert [path for output in list_outputs(notebook) for path in ABSOLUTE_PATH.findall(get_text(output))] == []


@each_notebook
def test_what_a_notebook_imports_exists(script: Path) -> None:
    """Each name that a notebook imports from a module of this repository is in this module, or is a module."""
    modules = find_modules()
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [(node.module, alias.name) for node in nodes if node.module in modules for alias in node.names]
    attributes = [(module, name) for module, name in names if f"{module}.{name}" not in modules]
    assert [each for each in attributes if not hasattr(importlib.import_module(each[0]), each[1])] == []


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[pytest.mark.slow] * (script.stem not in QUICK), id=script.stem) for script in SCRIPTS],
)
@pytest.mark.heavy
def test_the_notebook_runs(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every notebook runs in a new kernel and prints nothing to standard error.

    The kernel of a notebook about Triton is a new interpreter, because it selects how Triton is imported.
    """
    if "triton" not in script.stem:
        monkeypatch.setattr(local_provisioner, "launch_kernel", ForkedKernel)
    notebook = execute(read_script(script))
    assert [output.text for output in list_outputs(notebook) if output.get("name") == "stderr"] == []
