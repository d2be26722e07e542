"""The set-up for Google Colab installs what the notebooks need. Colab itself is not available to the tests."""

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.helpers.programs import run_in_new_interpreter
from tests.helpers.training import ROOT
from workshop.notebooks import list_scripts

WITHOUT_EXTRAS = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is not in the dependencies of pyproject.toml")

sys.meta_path.insert(0, Blocker())
"""


def list_extra_modules() -> list[str]:
    """Return the installed modules that only an extra of pyproject.toml requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    names, core = ({re.split(r"[\\[<>=; ]", each)[0] for each in group} for group in (extras, project["dependencies"]))
    modules, names = packages_distributions(), names - {project["name"]}
    return sorted(module for module, owners in modules.items() if set(owners) & names and not set(owners) & core)


@pytest.mark.slow
@pytest.mark.heavy
def test_the_notebooks_import_only_what_pip_installs():
    """All imports of all notebooks work without the packages that only an extra of pyproject.toml installs."""
    imports = [
        ast.unparse(node)
        for script in list_scripts()
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    blocked = list_extra_modules()
    assert {"jupytext", "pytest"} <= set(blocked)
    program = "\n".join([WITHOUT_EXTRAS.format(blocked=set(blocked)), *dict.fromkeys(imports)])
    done = run_in_new_interpreter("-c", program, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
