"""Which modules of this repository a module imports, read from the source: also what it imports lazily."""

import ast
from collections.abc import Iterable
from pathlib import Path

from nanoGPT.files import PACKAGE

ROOT = PACKAGE.parent
ROOMS = ("nanoGPT", "phase1_zero1", "phase2_triton", "phase3_fsdp", "workshop", "bench", "tests", "notebooks")


def module_name(path: Path) -> str:
    """Return the dotted name of a source file: nanoGPT.model."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def find_modules() -> dict[str, Path]:
    """Return the source files of the repository by module name. Configuration files are no modules."""
    return {
        module_name(path): path
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if "config" not in path.parts and not path.is_symlink()
    }


def find_imports(path: Path, known: Iterable[str]) -> set[str]:
    """Return the known modules that a file imports, at any place in it, also for type checkers alone."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def find_needed(names: Iterable[str]) -> dict[str, Path]:
    """Return modules with all that they import, directly or through others, and the packages that these are in."""
    modules, needed, waiting = find_modules(), dict[str, Path](), list(names)
    while waiting:
        name = waiting.pop()
        if name in needed or name not in modules:
            continue
        needed[name] = modules[name]
        waiting += find_imports(modules[name], modules)
        waiting.append(name.rpartition(".")[0])
    return needed
