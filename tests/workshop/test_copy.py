"""`make copy`: a phase and what it imports, as a directory that runs where this package is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoGPT.errors import ConfigError
from tests.helpers.programs import as_flags
from tests.helpers.training import TINY, tiny, train
from workshop.copy_phase import PHASES, copy_phase
from workshop.imports import ROOT, find_modules, find_needed
from workshop.ranks import losses

# Runs before the program: the editable installation of this repository is taken away, and at the end every module of
# the same names must have come from the copy.
SITECUSTOMIZE = """
import atexit, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]

def check():
    ours = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(("nanoGPT", "phase"))}
    elsewhere = [name for name, file in ours.items() if file and not file.startswith(os.environ["COPY"])]
    with open(os.environ["COPY"] + "/elsewhere.txt", "a") as file:
        file.write(f"{len(ours)} modules, elsewhere: {elsewhere}\\n")

exit_now = os._exit
os._exit = lambda code: (check(), exit_now(code))
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FIELDS = {**TINY, "max_iters": 4, "eval_interval": 4}


@pytest.mark.ranks
@pytest.mark.parametrize("name", PHASES)
def test_a_copied_phase_trains_alone(name, tmp_path):
    """Where this package is not installed, a copied phase trains to the same losses on two ranks, by torchrun; all of
    its modules are the copy's."""
    copy, phase = tmp_path / "copy", PHASES[name]
    copy_phase(name, copy)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COPY": str(copy), "OMP_NUM_THREADS": "1"}
    fields = {**FIELDS, **({"kernels": "gelu"} if name == "phase2" else {})}
    command = [sys.executable, *TORCHRUN, "train.py", *as_flags(**{**fields, "out_dir": tmp_path / "alone"})]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "alone") == train(phase, 2, tiny(phase, tmp_path / "here", **fields))
    lines = (copy / "elsewhere.txt").read_text().splitlines()
    assert len(lines) >= 2 and all(line.endswith("elsewhere: []") for line in lines), lines
    assert json.loads((tmp_path / "alone" / "env.json").read_text())["config"]["out_dir"] == str(tmp_path / "alone")


def test_what_is_copied(tmp_path):
    """The copy has what the phase imports, directly or lazily, and no other module; its requirements name torch."""
    copy_phase("phase1", tmp_path / "copy")
    files = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*.py")}
    own = [name for name in find_modules() if name.startswith("phase1_zero1")]
    expected = {str(path.relative_to(ROOT)) for path in find_needed(own).values()} - {"phase1_zero1/train.py"}
    assert {file for file in files if not file.startswith("config/")} == expected | {"train.py"}
    assert "nanoGPT/launch.py" not in files and "nanoGPT/train.py" not in files and "nanoGPT/optim.py" in files
    assert not any(file.startswith(("phase2", "phase3", "bench", "workshop")) for file in files)
    assert "torch>=2.11" in (tmp_path / "copy" / "requirements.txt").read_text().splitlines()
    assert (tmp_path / "copy" / "config" / "train_gpt2_large.py").is_file()


@pytest.mark.parametrize(
    ("phase", "taken", "words"),
    [("phase9", "", "PHASE=phase9 is unknown; did you mean"), ("phase1", "note.txt", "is not an empty directory")],
)
def test_wrong_copies_are_one_sentence(phase, taken, words, tmp_path):
    """An unknown phase and a directory with content are refused, and nothing is written."""
    if taken:
        (tmp_path / taken).write_text("mine")
    with pytest.raises(ConfigError, match=words):
        copy_phase(phase, Path(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [taken] * bool(taken)
