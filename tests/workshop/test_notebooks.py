"""The notebooks run, and what is committed of them is what a run gives."""

import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from workshop import notebooks
from workshop.notebooks import differences, execute, notebook_of

SCRIPTS = notebooks.scripts()
ABSOLUTE = re.compile(r"(?<![\w.])/(?:work|root|tmp|home|Users|private|var)\b|" + re.escape(tempfile.gettempdir()))
each_notebook = pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def text_of(output: NotebookNode) -> str:
    """What an output says in words; pictures say none."""
    said = [output.get("text", "")]
    said += [str(content) for kind, content in output.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join(said)


@each_notebook
def test_the_committed_notebook_is_made_from_its_script(script: Path) -> None:
    """Every committed .ipynb has the cells of its script."""
    found = differences(script, script.with_suffix(".ipynb"))
    assert not found, f"{found}: run `make notebooks` and commit what it writes"


@each_notebook
def test_the_committed_outputs_are_of_a_whole_run(script: Path) -> None:
    """Every committed .ipynb was run from its first cell to its last, without an error and without absolute paths."""
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type != "error" for output in outputs(notebook))
    assert [path for output in outputs(notebook) for path in ABSOLUTE.findall(text_of(output))] == []


@each_notebook
@pytest.mark.timeout(180)
@pytest.mark.heavy
def test_the_notebook_runs(script: Path) -> None:
    """Every notebook runs in a fresh kernel, and prints nothing to standard error."""
    ran = execute(notebook_of(script))
    assert [output.text for output in outputs(ran) if output.get("name") == "stderr"] == []


def test_an_edited_script_is_told_from_its_notebook(tmp_path: Path) -> None:
    """A cell that was changed, added or never executed into an .ipynb is named."""
    script, ipynb = tmp_path / "a.py", tmp_path / "a.ipynb"
    script.write_text("# %% [markdown]\n# Text.\n\n# %%\nx = 1\n")
    assert differences(script, ipynb) == ["a.ipynb is missing"]
    notebooks.write(notebook_of(script), ipynb)
    assert differences(script, ipynb) == []
    script.write_text("# %% [markdown]\n# Text.\n\n# %%\nx = 2\n\n# %%\ny = 3\n")
    assert differences(script, ipynb) == [
        "cell 2 (code) differs, at line 1: 'x = 2'",
        "a.ipynb has 2 cells where the script has 3",
    ]


@pytest.mark.heavy
def test_a_second_run_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of cells that print the same, two of them alike, write the same bytes; a figure too."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    script = tmp_path / "a.py"
    script.write_text("# %%\nprint(1)\n\n# %%\nprint(1)\n\n# %%\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);\n")
    written = []
    for _ in range(2):
        assert notebooks.run(script)
        written.append(script.with_suffix(".ipynb").read_bytes())
    assert written[0] == written[1]
    assert b"image/png" in written[0]


def test_a_failing_cell_is_shown_and_keeps_the_old_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell that raises ends `make notebooks` with its traceback and code 1; the .ipynb stays as it was."""
    (tmp_path / "a.py").write_text("# %%\n1 / 0\n")
    (tmp_path / "a.ipynb").write_text("old")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    assert notebooks.main(["a"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (tmp_path / "a.ipynb").read_text() == "old"
    assert notebooks.main(["b"]) == 2
