"""Find the modules of this repository that a module imports, also lazily, by parsing its source."""

import ast
from collections.abc import Iterable
from pathlib import Path

from nanoGPT.files import PACKAGE

ROOT = PACKAGE.parent
PACKAGES = (
    "nanoGPT",
    "phase1_zero1",
    "phase2_triton",
    "phase3_fsdp",
    "workshop",
    "bench",
    "operate",
    "measure",
    "evaluation",
    "tests",
    "notebooks",
)


def module_name(path: Path) -> str:
    """Return the dotted name of a source file: nanoGPT.model."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def find_modules() -> dict[str, Path]:
    """Return the source files of the repository by module name, without configuration files."""
    return {
        module_name(path): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "config" not in path.parts and not path.is_symlink()
    }


def find_imports(path: Path, known: Iterable[str]) -> set[str]:
    """Return the modules of `known` that a file imports, also inside functions and under `TYPE_CHECKING`."""
    known, imports = set(known), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imports |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
    return imports & known


def find_needed_modules(names: Iterable[str]) -> dict[str, Path]:
    """Return these modules, all modules that they import directly or indirectly, and the packages that contain them."""
    modules, needed, waiting = find_modules(), dict[str, Path](), list(names)
    while waiting:
        name = waiting.pop()
        if name in needed or name not in modules:
            continue
        needed[name] = modules[name]
        waiting += find_imports(modules[name], modules)
        waiting.append(name.rpartition(".")[0])
    return needed
