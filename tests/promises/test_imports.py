"""Who imports whom: only downward from room to room, and never in a circle."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from workshop.imports import ROOT, find_imports, find_modules, module_name

# From the bottom to the top. A module may import from its own layer and from those below it.
LAYERS = [
    ["nanoGPT.errors", "nanoGPT.schema", "nanoGPT.files", "nanoGPT.model", "nanoGPT.cli"],
    ["nanoGPT.distributed"],
    ["nanoGPT.train_config"],
    ["nanoGPT.optim", "nanoGPT.tokenizer"],
    ["nanoGPT.dataset", "nanoGPT.prepare"],
    ["nanoGPT.memory"],
    ["nanoGPT.checkpoint"],
    ["nanoGPT.job"],
    ["nanoGPT.metrics"],
    ["nanoGPT.evaluate", "nanoGPT.sample", "nanoGPT.export"],
    ["nanoGPT.train", "nanoGPT.launch", "nanoGPT.data"],
    ["phase1_zero1", "phase2_triton", "phase3_fsdp"],
    ["workshop"],
    ["bench"],
    ["tests", "notebooks"],
]
DOOR = "phase2_triton.apply"  # the one module of a phase that other phases may import, for --kernels
MOST_AT_THE_TOP = 14  # modules that a student finds when listing nanoGPT/


MODULES = find_modules()
IMPORTS = {name: find_imports(path, MODULES) for name, path in MODULES.items()}


def layer_of(name: str) -> int:
    """Return the number of a module's layer; the empty `nanoGPT` package itself is at the bottom."""
    matches = [i for i, layer in enumerate(LAYERS) for part in layer if name == part or name.startswith(f"{part}.")]
    assert matches or name == "nanoGPT", f"{name} belongs to no layer: add its room to LAYERS"
    return matches[0] if matches else 0


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_downward(name):
    """A module imports from its own layer and from those below; a phase never imports another, but for one door."""
    for imported in IMPORTS[name]:
        assert layer_of(imported) <= layer_of(name), f"{name} imports {imported}, which is above it"
        home, other = name.split(".")[0], imported.split(".")[0]
        if home.startswith("phase") and other.startswith("phase") and home != other:
            assert imported == DOOR and home != "phase2_triton", f"{name} imports {imported}"


def test_no_import_goes_in_a_circle():
    """No module imports itself through others, not even lazily or for type checkers alone."""
    try:
        TopologicalSorter({name: found - {name} for name, found in IMPORTS.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_test_file_imports_another():
    """What several test files need is in tests/helpers."""
    of_tests = {name: [f for f in found if f.split(".")[-1].startswith("test_")] for name, found in IMPORTS.items()}
    assert {name: found for name, found in of_tests.items() if found} == {}


def test_the_top_of_the_baseline_is_short():
    """A student who lists nanoGPT/ finds few modules."""
    assert len(list((ROOT / "nanoGPT").glob("*.py"))) <= MOST_AT_THE_TOP


def test_no_path_is_edited():
    """No file changes sys.path: packages are installed."""
    changed = [name for name, path in MODULES.items() if "sys.path." in path.read_text()]
    assert changed == [module_name(Path(__file__))]
