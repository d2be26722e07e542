"""Strip a solution out of the repository's own code: the learner gets the imports, the signatures and the docstrings.

A target is a function, a method or a class: "phase1_zero1.buckets:split_into_buckets",
"phase1_zero1.zero1:Zero1Optimizer.clip_grad_norm_" or "notebooks/06_fsdp.py:ShardedLinear". The body of each function
is replaced by a line that raises NotImplementedError.
"""

import ast
import builtins
import symtable
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workshop.exercises.exercise import Exercise, Mistake
from workshop.imports import ROOT

STUB_MESSAGE = "your code"
STUB = f'raise NotImplementedError("{STUB_MESSAGE}")'
WIDTH = 100  # characters of the text in a learner's file


@dataclass(frozen=True)
class SourceFile:
    """A parsed source file. `module` is its dotted name; None for a notebook, which cannot be imported."""

    path: Path
    text: str
    tree: ast.Module
    module: str | None


@dataclass(frozen=True)
class Target:
    """The code of an exercise.

    Attributes:
        name: its qualified name in the file.
        code: its source text, with decorators and without indentation.
        line: its first line in the file, from 1.
    """

    file: SourceFile
    name: str
    code: str
    line: int


@cache
def parse_file(place: str) -> SourceFile:
    """Parse the source file of a dotted module name, or of a path relative to the root of the repository."""
    module = None if place.endswith(".py") else place
    path = ROOT / (place if module is None else place.replace(".", "/") + ".py")
    text = path.read_text()
    return SourceFile(path, text, ast.parse(text), module)


@cache
def find_target(target: str) -> Target:
    """Return the code of a target.

    Raises:
        KeyError: the file has no such function or class.
    """
    place, _, name = target.partition(":")
    file = parse_file(place)
    body: list[ast.stmt] = file.tree.body
    for part in name.split("."):
        nodes = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if not nodes:
            raise KeyError(f"{place} has no {name}")
        node, body = nodes[0], nodes[0].body
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = file.text.splitlines(keepends=True)[first - 1 : node.end_lineno]
    code = "".join(line for line in lines if not line.endswith(("# SOLUTION\n", "# END SOLUTION\n")))
    return Target(file, name, textwrap.dedent(code), first)


def strip_solution(code: str) -> str:
    """Return a function or class whose function bodies are replaced by `STUB`."""
    [node] = ast.parse(code).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    functions = [node] if isinstance(node, ast.FunctionDef) else node.body
    lines = code.splitlines(keepends=True)
    for function in reversed([each for each in functions if isinstance(each, ast.FunctionDef)]):
        body = function.body
        if ast.get_docstring(function) is None:
            begin = body[0].lineno - 1
        elif len(body) > 1:
            begin = body[0].end_lineno or 0
        else:
            continue
        lines[begin : function.end_lineno] = [f"{' ' * body[0].col_offset}{STUB}\n"]
    return "".join(lines)


def find_global_names(code: str) -> set[str]:
    """Return the global names that some code reads and does not define, without builtins."""
    top = symtable.symtable(code, "code", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    tables, names = [top], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return names - defined - set(dir(builtins))


def find_import(file: SourceFile, name: str) -> tuple[str, str] | None:
    """Return the module that a file imports a name from, and the imported name with its alias.

    The module is "" for a plain `import`. The result is None if the file defines the name itself.
    """
    for node in file.tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            if name == (alias.asname or alias.name.partition(".")[0]):
                text = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
                return (node.module or "") if isinstance(node, ast.ImportFrom) else "", text
    return None


def collect_code(targets: list[Target]) -> tuple[dict[str, set[str]], list[str]]:
    """Return the imports that the targets need, by module, and the definitions of a notebook that they need."""
    imports: dict[str, set[str]] = {}
    helpers: list[Target] = []
    waiting, known = list(targets), {target.name.rpartition(".")[2] for target in targets}
    while waiting:
        target = waiting.pop(0)
        for name in sorted(find_global_names(target.code) - known):
            found = find_import(target.file, name)
            if found is None and target.file.module is None:
                known.add(name)
                helper = find_target(f"{target.file.path.relative_to(ROOT)}:{name}")
                helpers.append(helper)
                waiting.append(helper)
                continue
            module, text = found or (target.file.module or "", name)
            imports.setdefault(module, set()).add(text)
    return imports, [helper.code for helper in reversed(helpers)]


def format_imports(imports: dict[str, set[str]]) -> str:
    """Return import statements: first plain ones, then those that import names from a module."""
    plain = [f"import {text}\n" for text in sorted(imports.get("", ()))]
    modules = sorted(set(imports) - {""})
    return "".join([*plain, *(f"from {module} import {', '.join(sorted(imports[module]))}\n" for module in modules)])


def render_code(exercise: Exercise, is_stub: bool) -> str:
    """Return the imports and the code of an exercise, with its solution or as a stub."""
    targets = [find_target(target) for target in exercise.targets]
    imports, helpers = collect_code(targets)
    parts = [format_imports(imports), *helpers]
    for target in targets:
        code = strip_solution(target.code) if is_stub else target.code
        owner = target.name.rpartition(".")[0]
        parts.append(f"# A method of {owner}.\n{code}" if owner else code)
    return "\n\n".join(part for part in parts if part)


def apply_mistake(code: str, mistake: Mistake) -> str:
    """Return the code with the edits of a wrong answer.

    Raises:
        ValueError: the code does not contain the text of an edit exactly once.
    """
    for old, new in mistake.edits:
        if code.count(old) != 1:
            raise ValueError(f"the solution contains {old!r} {code.count(old)} times instead of once")
        code = code.replace(old, new)
    return code


def render_file(exercise: Exercise) -> str:
    """Return the file that a learner gets: the task, the imports, and the stub or the code with planted bugs."""
    code = render_code(exercise, is_stub=not exercise.planted)
    for planted in exercise.planted:
        code = apply_mistake(code, planted)
    places = [" of ".join(reversed(target.split(":"))) for target in exercise.targets]
    text = [
        f"Exercise {exercise.name}: {exercise.title}. {exercise.minutes} minutes, {exercise.difficulty}.",
        *exercise.task.split("\n\n"),
        f"Check your answer with `make check N={exercise.name}`. `make hint N={exercise.name} LEVEL=1` gives the "
        f"first of three hints, and `make solution N={exercise.name}` prints the repository's own code.",
        f"During the check, your code replaces {' and '.join(places)}.",
    ]
    paragraphs = [textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False) for part in text]
    return '"""' + "\n\n".join(paragraphs) + f'\n"""\n\n{code}'


def find_hint_line(exercise: Exercise) -> str:
    """Return the line of the solution that is the third hint.

    Raises:
        ValueError: the solution has no such line, or several.
    """
    lines = [line.strip() for line in render_code(exercise, is_stub=False).splitlines()]
    matches = [line for line in lines if line.startswith(exercise.line)]
    if len(matches) != 1:
        raise ValueError(f"{exercise.name}: {len(matches)} lines of the solution begin with {exercise.line!r}")
    return matches[0]
