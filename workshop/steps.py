"""Compare two versions of an algorithm, function by function: a first one, and the one that the trainer uses.

    python -m workshop.steps phase1_zero1/naive.py phase1_zero1/zero1.py

A function with the same name in both versions is one part of the algorithm. The second version may be several files:
the given one, and the files next to it that it imports.

`python -m workshop.diff phase1_zero1 --write` updates two kinds of blocks in IMPLEMENTATION.md, both with functions
without their docstrings:

    <!-- step:naive.py:zero1.py:_reduce --> ... <!-- /step -->                      the difference between two versions
    <!-- code:buckets.py:Bucket._partition,Bucket._reduce --> ... <!-- /code -->    functions of one file
"""

import ast
import difflib
import re
import sys
from pathlib import Path

from nanoGPT.errors import ConfigError
from nanoGPT.job.command import report_errors
from workshop.imports import ROOT

STEP_BLOCK = re.compile(r"(<!-- step:(\S+?):(\S+?):(\w+) -->\n).*?(<!-- /step -->)", re.DOTALL)
CODE_BLOCK = re.compile(r"(<!-- code:(\S+?):(\S+) -->\n).*?(<!-- /code -->)", re.DOTALL)


def find_functions(path: Path) -> dict[str, list[str]]:
    """Return the lines of each function of a file, without its docstring. The keys are names such as `Bucket.wait`."""
    source = path.read_text()
    functions: dict[str, list[str]] = {}
    for parent in ast.walk(ast.parse(source)):
        for node in parent.body if isinstance(parent, ast.Module | ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if ast.get_docstring(node):
                    docstring = node.body[0]
                    del lines[docstring.lineno - node.lineno : (docstring.end_lineno or 0) - node.lineno + 1]
                owner = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
                # Lines with SOLUTION mark exercises.
                functions[owner + node.name] = [line[node.col_offset :] for line in lines if "# SOLUTION" not in line]
    return functions


def index_by_name(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the title and the lines of each function by its own name, without special methods."""
    index: dict[str, tuple[str, list[str]]] = {}
    for name, lines in find_functions(path).items():
        if "__" not in name:
            index.setdefault(name.rpartition(".")[2], (f"{path.name} {name}", lines))
    return index


def list_files(path: Path) -> list[Path]:
    """Return a file, and the files of its package that it imports."""
    package, names = path.parent.name, []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):  # from package.name import ..., or from package import name
            folder, _, name = (node.module or "").partition(".")
            names += ([name] if name else [alias.name for alias in node.names]) if folder == package else []
    return [path, *(path.with_name(f"{name}.py") for name in names)]


def compare(before: Path, after: Path) -> dict[str, str]:
    """Return the diff of each function that both versions have and that differs, in the order of the first version.

    Raises:
        ConfigError: a file does not exist, or the versions have no function in common.
    """
    for path in (before, after):
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: give two files, such as naive.py and zero1.py of phase1_zero1")
    versions: list[dict[str, tuple[str, list[str]]]] = [index_by_name(before), {}]
    for path in reversed(list_files(after)):
        versions[1] |= index_by_name(path)
    diffs = {}
    for name in (name for name in versions[0] if name in versions[1]):
        (old_title, old_lines), (new_title, new_lines) = (version[name] for version in versions)
        changes = difflib.unified_diff(old_lines, new_lines, old_title, new_title, n=1000, lineterm="")
        diffs[name] = "\n".join(line for line in changes if not line.startswith("@@"))
    if not diffs:
        raise ConfigError(f"{before} and {after} have no function with the same name: give two versions of a module")
    return {name: text for name, text in diffs.items() if text}


def render_steps(text: str, folder: Path) -> str:
    """Return the text of an IMPLEMENTATION.md with updated blocks.

    Raises:
        KeyError: a block names a function that its file, or one of the versions, does not have.
    """

    def render_step(match: re.Match[str]) -> str:
        return f"{match[1]}```diff\n{compare(folder / match[2], folder / match[3])[match[4]]}\n```\n{match[5]}"

    def render_code(match: re.Match[str]) -> str:
        functions = find_functions(folder / match[2])
        code = "\n\n".join("\n".join(functions[name]) for name in match[3].split(","))
        return f"{match[1]}```python\n{code}\n```\n{match[4]}"

    return CODE_BLOCK.sub(render_code, STEP_BLOCK.sub(render_step, text))


if __name__ == "__main__":
    with report_errors():
        if len(sys.argv) != 3:
            raise ConfigError("give two files: make diff FROM=phase1_zero1/naive.py TO=phase1_zero1/zero1.py")
        print("\n\n".join(compare(*(ROOT / name for name in sys.argv[1:])).values()))
