"""Imports go only from higher layers to lower layers, and never in a cycle."""

import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from workshop.imports import ROOT, find_imports, find_modules, module_name

# From the bottom to the top. A module may import from its own layer and from those below it.
LAYERS = [
    ["nanoGPT.errors", "nanoGPT.files", "nanoGPT.model", "nanoGPT.observers"],
    ["nanoGPT.distributed"],
    ["nanoGPT"],
    ["phase1_zero1", "phase2_triton", "phase3_fsdp"],
    ["measure"],
    ["operate"],
    ["bench", "evaluation"],
    ["workshop"],
    ["notebooks", "tests"],
]
SHARED_MODULE = "phase2_triton.apply"  # the only module of a phase that other phases may import, for --kernels
MAX_TOP_LEVEL_MODULES = 14  # that a student sees in nanoGPT/


MODULES = find_modules()


@functools.cache  # not a constant, because every worker would compute it when it collects the tests
def read_imports(name: str) -> set[str]:
    """Return the modules of the repository that a module imports."""
    return find_imports(MODULES[name], MODULES)


def find_layer(name: str) -> int:
    """Return the layer number of a module: that of the longest name in LAYERS that contains it."""
    matches = [(part, i) for i, layer in enumerate(LAYERS) for part in layer if f"{name}.".startswith(f"{part}.")]
    assert matches, f"{name} belongs to no layer: add it to LAYERS"
    return max(matches, key=lambda match: len(match[0]))[1]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_downward(name):
    """A module imports only from its own layer and from lower layers. Phases share only `SHARED_MODULE`."""
    for imported in read_imports(name):
        assert find_layer(imported) <= find_layer(name), f"{name} imports {imported}, which is above it"
        home, other = name.split(".")[0], imported.split(".")[0]
        if home.startswith("phase") and other.startswith("phase") and home != other:
            assert imported == SHARED_MODULE and home != "phase2_triton", f"{name} imports {imported}"


def test_every_layer_is_checked():
    """Each name in LAYERS has modules whose imports are checked, and each package of the repository is in LAYERS."""
    names = {part for layer in LAYERS for part in layer}
    assert {part for part in names if not any(f"{name}.".startswith(f"{part}.") for name in MODULES)} == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= {part.split(".")[0] for part in names}


def test_imports_have_no_cycle():
    """No module imports itself through other modules, not even lazily or only for type checkers."""
    cycle = []
    try:
        TopologicalSorter({name: read_imports(name) - {name} for name in MODULES}).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == [], " -> ".join(cycle)


def test_no_test_file_imports_another():
    """Helpers that several test files need are in tests/helpers."""
    imported_tests = [
        (name, other) for name in MODULES for other in read_imports(name) if other.split(".")[-1].startswith("test_")
    ]
    assert imported_tests == []


def test_the_top_of_the_baseline_is_short():
    """nanoGPT/ has few modules at the top level, so that a student can find them."""
    assert len(list((ROOT / "nanoGPT").glob("*.py"))) <= MAX_TOP_LEVEL_MODULES


def test_no_module_changes_sys_path():
    """No module changes sys.path, because the packages are installed."""
    names = [name for name, path in MODULES.items() if "sys.path." in path.read_text()]
    assert names == [module_name(Path(__file__))]
