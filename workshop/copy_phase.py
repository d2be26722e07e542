"""Copy a phase, and the modules that it imports, into a standalone directory.

    make copy PHASE=phase3 TO=../my-trainer
    cd ../my-trainer && pip install -r requirements.txt && torchrun --standalone --nproc_per_node=2 train.py

The directory contains the phase's programs (train.py) and configurations, its other modules as a package, the modules
of `nanoGPT` that they import, and the prepared datasets up to 64 MiB. Nothing in it needs this repository.
"""

import ast
import re
import shutil
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from bench.phases import find_package
from nanoGPT.command_line import command_line
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.program import report_errors
from workshop.imports import ROOT, find_modules, find_needed_modules

MAX_DATASET_BYTES = 64 << 20


def is_program(path: Path) -> bool:
    """Return whether torchrun can start a file as a program."""
    return path.name in ("train.py", "evaluate.py") and "__main__" in path.read_text()


def find_requirements(paths: list[Path]) -> list[str]:
    """Return the requirements of this project, such as torch>=2.11, that these source files import."""
    installed, packages = packages_distributions(), set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.split(".")[0])
    names = {distribution for package in packages for distribution in installed.get(package, [])}
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [line for line in requirements if (re.match(r"[\w-]+", line) or [""])[0] in names]


def copy_modules(phase: str, to: Path) -> list[Path]:
    """Copy a phase's modules and all modules that they import, and return the files that were copied.

    The phase's programs go to the top level of the directory.
    """
    names = [name for name, path in find_modules().items() if path.parent == ROOT / phase]
    if phase == "nanoGPT":
        names = ["nanoGPT.train"]
    needed = find_needed_modules(names)
    for name, path in needed.items():
        is_top_level = name.rpartition(".")[0] == phase and is_program(path)
        target = to / path.name if is_top_level else to / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        for table in path.parent.glob("*.json"):  # tile sizes of the kernels
            shutil.copyfile(table, target.parent / table.name)
    return list(needed.values())


def copy_datasets(to: Path) -> list[str]:
    """Copy the prepared datasets of at most MAX_DATASET_BYTES, and return the names of the larger ones."""
    too_large = []
    for meta in sorted(DATA.glob("*/meta.json")):
        files = [path for path in meta.parent.iterdir() if path.suffix in (".bin", ".json")]
        if sum(path.stat().st_size for path in files) > MAX_DATASET_BYTES:
            too_large.append(meta.parent.name)
            continue
        target = to / "nanoGPT" / "data" / meta.parent.name
        target.mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, target / path.name)
    return too_large


def create_new_directory(to: Path) -> Path:
    """Create a directory if it does not exist, and return it.

    Raises:
        ConfigError: it exists and is not empty.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"TO={to} exists and is not an empty directory: use a new directory")
    to.mkdir(parents=True, exist_ok=True)
    return to


def copy_phase(phase: str, to: Path) -> None:
    """Copy a phase into a new directory.

    Args:
        phase: baseline, phase1, phase2 or phase3.
        to: a directory that does not exist yet or is empty.

    Raises:
        ConfigError: the phase is unknown, or the directory cannot be used.
    """
    package = find_package(phase)
    create_new_directory(to)
    copied = copy_modules(package, to)
    shutil.copytree(ROOT / package / "config", to / "config", ignore=shutil.ignore_patterns("__pycache__"))
    if package != "nanoGPT":
        shutil.copyfile(ROOT / package / "IMPLEMENTATION.md", to / "IMPLEMENTATION.md")
    (to / "requirements.txt").write_text("\n".join(find_requirements(copied)) + "\n")
    too_large = copy_datasets(to)
    print(f"copied {phase} with {len(copied)} modules into {to}; run: cd {to} && python train.py")
    if too_large:
        print(f"not copied, because they are large: {', '.join(too_large)}; use --dataset={DATA}/{too_large[0]}")


def main(phase: str, to: str) -> None:
    """Copy a phase, and the modules that it imports, into a standalone directory.

    Args:
        phase: baseline, phase1, phase2 or phase3.
        to: a new directory.
    """
    if not to:
        raise ConfigError("TO= is empty: use a new directory, such as TO=../my-trainer")
    copy_phase(phase, Path(to))


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
