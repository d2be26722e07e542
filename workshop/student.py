"""Write notebooks for students: without outputs, and with `# your code` cells in place of the lesson's answers.

    .venv/bin/python -m workshop.student --to=../my-course

The notebooks come from the same scripts as those in `notebooks/`. A header such as `# %% answer="gather_rows"` marks
functions or classes of a cell that students write themselves. In the student's notebook, a stub replaces them, and the
next cell continues with the repository's code if the stub is still there. Below each question there is room for a
prediction. `README.md` in the directory explains how to start.
"""

import ast
import shlex
import sys
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from workshop.copy_phase import create_new_directory
from workshop.exercises.stubs import find_target, strip_solution
from workshop.imports import ROOT
from workshop.notebooks import list_scripts, make_notebook, write_notebook
from workshop.slides import QUESTION

PREDICTION = "**Your prediction:** *(double-click here, and write it down before you run the next cell)*"
CONTINUE = "# If the code above is not written yet, this cell continues with the repository's code."
README = """# The notebooks of the workshop

Predict, run, compare. These notebooks have no outputs yet: write your prediction below each question before you run the
next cell. Cells that begin with `# your code` are for you. If you leave one of them as it is, the cell below it
continues with the repository's code, so you can always go on.

## Start

```bash
cd {quoted_root}
make doctor                      # check the machine; each problem has a remedy
.venv/bin/jupyter lab {quoted_to}
```

In VS Code, open this directory and select the kernel `{root}/.venv/bin/python`.

| notebook | your code |
|---|---|
{notebooks}

The notebooks with outputs are in `{root}/notebooks`.

## Exercises

A program checks exercises on real ranks, and explains what is wrong. `docs/exercises.md` in `{root}` lists them. Run
the commands there:

```bash
make exercise N=zero1.5        # write the task and a stub into work/zero1_5.py
make check N=zero1.5           # run your code on real ranks
make hint N=zero1.5 LEVEL=1    # a nudge; LEVEL=2: the idea; LEVEL=3: the decisive line
make solution N=zero1.5        # the repository's own code
```
"""


def make_student_notebook(script: Path) -> NotebookNode:
    """Return the student's version of a notebook script, without outputs."""
    cells: list[NotebookNode] = []
    for cell in jupytext.reads(script.read_text(), fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            cells.append(new_markdown_cell(cell.source))
            if QUESTION in cell.source:
                cells.append(new_markdown_cell(PREDICTION))
        else:
            cells += split_answer(cell.source, cell.metadata.get("answer", "").split(), script)
    return make_notebook(cells)


def split_answer(source: str, names: list[str], script: Path) -> list[NotebookNode]:
    """Return the cells for one cell of a script: the stubs, the call of `use_answers`, and the rest of the cell.

    Args:
        source: text of the cell.
        names: of the functions and classes that students write; empty: the cell stays as it is.
        script: the notebook script.
    """
    if not names:
        return [new_code_cell(source)]
    place = script.relative_to(ROOT)
    stubs = [strip_solution(find_target(f"{place}:{name}").code).rstrip() for name in names]
    arguments = ", ".join(f'"{name}"' for name in (script.stem, *names))
    call = f"{CONTINUE}\nfrom workshop.answers import use_answers\n\nuse_answers(globals(), {arguments})"
    cells = [f"# your code: complete {' and '.join(names)}\n" + "\n\n\n".join(stubs), call, remove_code(source, names)]
    return [new_code_cell(text) for text in cells if text]


def remove_code(source: str, names: list[str]) -> str:
    """Return a cell's text without these functions and classes."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            end = node.end_lineno or first
            while end < len(lines) and not lines[end].strip():
                end += 1
            del lines[first - 1 : end]
    return "\n".join(lines).strip("\n")


def find_answers(script: Path) -> list[str]:
    """Return the names of the functions and classes of a notebook that students write."""
    cells = jupytext.reads(script.read_text(), fmt="py:percent").cells
    return [name for cell in cells for name in cell.metadata.get("answer", "").split()]


def render_readme(to: Path) -> str:
    """Return the README of a student's directory."""
    notebooks = [
        f"| [{script.stem}]({script.stem}.ipynb) | {', '.join(f'`{name}`' for name in find_answers(script)) or '-'} |"
        for script in list_scripts()
    ]
    return README.format(
        root=ROOT,
        quoted_root=shlex.quote(str(ROOT)),
        quoted_to=shlex.quote(str(to)),
        notebooks="\n".join(notebooks),
    )


def write_student_directory(to: str) -> None:
    """Write the notebooks for students and their README into a new directory.

    Args:
        to: a directory that does not exist yet or is empty.
    """
    if not to:
        raise ConfigError("TO= is empty: use a new directory, such as TO=../my-course")
    folder = create_new_directory(Path(to)).resolve()
    for script in list_scripts():
        write_notebook(make_student_notebook(script), folder / f"{script.stem}.ipynb")
    (folder / "README.md").write_text(render_readme(folder))
    quoted = shlex.quote(str(folder))
    print(f"wrote {len(list_scripts())} notebooks and README.md into {folder}; start: .venv/bin/jupyter lab {quoted}")


if __name__ == "__main__":
    with report_errors():
        command_line(write_student_directory, sys.argv[1:])
