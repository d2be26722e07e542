"""Imports go only from higher layers to lower layers, and never in a cycle."""

import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from workshop.imports import ROOT, find_imports, find_modules, find_needed_modules, module_name

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


def test_imports_have_no_cycle():
    """No module imports itself through other modules, not even lazily or only for type checkers."""
    cycle = []
    try:
        TopologicalSorter({name: read_imports(name) - {name} for name in MODULES}).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == [], " -> ".join(cycle)


def test_the_top_level_of_the_core_stays_small():
    """The top level of nanoGPT/ is what a student reads: at most 14 modules. The others belong to a subpackage."""
    assert len(list((ROOT / "nanoGPT").glob("*.py"))) <= 14


def test_trainers_do_not_import_what_a_flag_loads():
    """The trainers import none of the modules that docs/layout.md lists as loaded by a flag, not even lazily.

    Phase 2 imports its own kernels.
    """
    section = (ROOT / "docs" / "layout.md").read_text().split("## Modules that a flag loads")[1].split("\n## ")[0]
    paths = [ROOT / path for path in re.findall(r"^\|.*\| `(\S+\.py)`", section, re.MULTILINE)]
    loaded = {module_name(path) for path in paths}
    assert loaded <= MODULES.keys() and "nanoGPT.checkpoint.sources" in loaded
    for phase in ("nanoGPT", "phase1_zero1", "phase3_fsdp"):
        assert not loaded & find_needed_modules([f"{phase}.train"]).keys(), phase


def test_no_module_changes_sys_path():
    """No module changes sys.path, because the packages are installed."""
    names = [name for name, path in MODULES.items() if "sys.path." in path.read_text()]
    assert names == [module_name(Path(__file__))]
