"""`workshop.student`: notebooks without outputs and answers, which run from the first cell to the last."""

from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner

from nanoGPT.errors import ConfigError
from tests.helpers.notebooks import ForkedKernel
from workshop.answers import is_unwritten, use_answers
from workshop.exercises.stubs import STUB, find_target
from workshop.imports import ROOT
from workshop.notebooks import execute, list_scripts
from workshop.slides import QUESTION
from workshop.student import PREDICTION, find_answers, make_student_notebook, write_student_directory

STUDENT_CODE = f"""
import torch
from torch import Tensor

def gather_rows(rows):
    return "mine"

class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        {STUB}
"""


def test_student_notebooks_have_no_outputs_and_no_answers(tmp_path, capsys):
    """Each notebook is written without outputs; each answer is a stub, and its code is in no cell of the notebook."""
    write_student_directory(str(tmp_path / "course"))
    assert f"wrote {len(list_scripts())} notebooks" in capsys.readouterr().out
    for script in list_scripts():
        notebook = nbformat.read(tmp_path / "course" / f"{script.stem}.ipynb", as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
        text = "\n".join(cell.source for cell in cells)
        for name in find_answers(script):
            target = find_target(f"notebooks/{script.name}:{name}")
            assert f'"""{target.code.split(chr(34) * 3)[1]}"""' in text, f"{name} needs a docstring that gives the task"
            assert target.code.strip() not in text
        sources = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        assert sources.count(PREDICTION) == sum(QUESTION in source for source in sources)
    assert f"cd {ROOT}" in (tmp_path / "course" / "README.md").read_text()
    with pytest.raises(ConfigError, match="is not an empty directory"):
        write_student_directory(str(tmp_path / "course"))


def run_without_answers(script: Path, cells: int | None = None) -> None:
    """Execute the first `cells` cells (default: all), and check that the notebook continues with each answer."""
    notebook = make_student_notebook(script)
    notebook.cells = notebook.cells[:cells]
    text = "\n".join(cell.source for cell in notebook.cells)
    outputs = [output for cell in execute(notebook).cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    names = [name for name in find_answers(script) if f'"{name}"' in text]
    assert names and all(f"{name} is not written yet" in printed for name in names)
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.heavy
def test_a_section_runs_without_any_answer(monkeypatch):
    """The first section of notebook 6 trains two layers on 4 ranks, with the repository's code for both answers."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", ForkedKernel)
    script = ROOT / "notebooks" / "06_fsdp.py"
    sources = [cell.source for cell in make_student_notebook(script).cells]
    end = next(number for number, source in enumerate(sources, start=1) if "run_on_ranks(train_by_hand, 4)" in source)
    run_without_answers(script, cells=end)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [each for each in list_scripts() if 'answer="' in each.read_text()], ids=lambda each: each.stem
)
def test_a_student_notebook_runs_without_any_answer(script: Path):
    """A notebook in which nothing has been written runs to its end, and says where it uses the repository's code."""
    run_without_answers(script)


def test_written_code_is_kept(capsys):
    """`use_answers` keeps a student's own function and class, and replaces only what is missing or still a stub."""
    namespace = {"__name__": "__main__"}
    exec(STUDENT_CODE, namespace)
    assert is_unwritten(namespace["ShardedLinear"]) and not is_unwritten(namespace["gather_rows"])
    use_answers(namespace, "06_fsdp", "gather_rows", "ShardedLinear")
    assert namespace["gather_rows"](None) == "mine" and not is_unwritten(namespace["ShardedLinear"])
    del namespace["gather_rows"]
    use_answers(namespace, "06_fsdp", "gather_rows", "ShardedLinear")
    assert namespace["gather_rows"].__doc__.startswith("Return the full weight")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" is not")[0] for line in lines] == ["ShardedLinear", "gather_rows"]
