"""`make copy`: a copied phase, with the modules that it imports, trains without this package."""

import json
import re
import tomllib

import pytest

from bench.phases import PHASES
from nanoGPT.errors import ConfigError
from tests.helpers.marks import mark_slow
from tests.helpers.programs import Program, make_flags, run_in_new_interpreter
from tests.helpers.training import TINY, tiny, train
from workshop.copy_phase import SENTENCES, copy_phase
from workshop.imports import find_modules
from workshop.ranks import losses

# Python runs this before the program. It removes the editable installation of this repository. At exit, it records all
# modules of this repository that were not imported from the copy.
SITECUSTOMIZE = """
import atexit, os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]

def check():
    modules = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(("nanoGPT", "phase"))}
    elsewhere = [name for name, file in modules.items() if file and not file.startswith(os.environ["COPY"])]
    with open(os.environ["COPY"] + "/elsewhere.txt", "a") as file:
        file.write(f"{len(modules)} modules, elsewhere: {elsewhere}\\n")

exit_now = os._exit
os._exit = lambda code: (check(), exit_now(code))
"""
TORCHRUN = ["torch.distributed.run", "--standalone"]
FIELDS = {**TINY, "max_iters": 2, "eval_interval": 2}


@pytest.mark.parametrize("name", ["phase2", *mark_slow("baseline", "phase1", "phase3")])
def test_a_copied_phase_trains_alone(name, tmp_path):
    """Without this package, a copied phase trains with the same losses as the original. Phase 3 trains on 2 ranks.

    All of its modules are imported from the copy.
    """
    copy, phase = tmp_path / "copy", PHASES[name]
    copy_phase(name, copy)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    environment = {"PYTHONPATH": str(tmp_path / "site"), "COPY": str(copy), "OMP_NUM_THREADS": "1"}
    fields = {**FIELDS, **({"kernels": "gelu"} if name == "phase2" else {})}
    ranks = 2 if name == "phase3" else 1
    words = [
        *TORCHRUN,
        f"--nproc_per_node={ranks}",
        "train.py",
        *make_flags(**{**fields, "out_dir": tmp_path / "alone"}),
    ]
    program = Program(*words, cwd=copy, new_interpreters=True, **environment)  # the ranks import only the copy
    assert program.wait() == 0, program.output()
    assert losses(tmp_path / "alone") == train(phase, ranks, tiny(phase, tmp_path / "here", **fields))
    lines = (copy / "elsewhere.txt").read_text().splitlines()
    assert len(lines) >= ranks and all(line.endswith("elsewhere: []") for line in lines), lines
    if name == "phase3":
        words = [*TORCHRUN, "--nproc_per_node=2", "-m", "phase3_fsdp.minimal", "--max_iters=1"]
        program = Program(*words, cwd=copy, new_interpreters=True, **environment)
        assert program.wait() == 0 and "step 0  loss 4.34" in program.output(), program.output()
    assert json.loads((tmp_path / "alone" / "env.json").read_text())["config"]["out_dir"] == str(tmp_path / "alone")


def test_a_copy_is_complete(tmp_path):
    """A copy has what one would own, and nothing else: the core, programs, scripts, tests, a README and a license.

    Nothing in it names make, the shell or another phase. Links lead to files of the copy. WITH adds the shell.
    """
    copy = tmp_path / "copy"
    copy_phase("phase1", copy)
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    needed = {"LICENSE", "pyproject.toml", "nanoGPT/data/shakespeare_char/prepare.py", "nanoGPT/checkpoint/verify.py"}
    assert needed <= files and "nanoGPT/train.py" not in files
    assert {file.split("/")[0] for file in files if file.endswith(".py")} == {
        "train.py", "phase1_zero1", "nanoGPT", "tests", "config"
    }  # fmt: skip
    texts = {file: (copy / file).read_text() for file in files if file.endswith((".py", ".md", ".toml"))}
    target = re.compile(r"\bmake (baseline|phase\d|data|evaluate|sample|diff|copy|gate|autopsy|elastic)\b")
    assert [file for file, text in texts.items() if target.search(text)] == []
    assert re.findall(r"\]\(([^)]+)\)", texts["README.md"]) == []
    for program in re.findall(r"python -m ([\w.]+)", texts["README.md"]):
        assert f"{program.replace('.', '/')}.py" in files
    fsdp = tmp_path / 'my "trainer"'
    copy_phase("phase3", fsdp)
    for path in fsdp.rglob("*.py"):
        text = path.read_text()
        assert not target.search(text) and "operate/deploy" not in text, path
        # Only `-m` finds the other packages of the copy.
        assert not re.search(r"torchrun .* phase\d_\w+/\w+\.py", text), path
        for config in re.findall(r"train\.py (config/\S+\.py)", text):
            assert (fsdp / config).is_file(), (path, config)
    assert tomllib.loads((fsdp / "pyproject.toml").read_text())["project"]["name"] == "my-trainer"  # pip accepts it
    copy_phase("phase3", tmp_path / "watched", ("operate", "measure"))
    assert {"operate/observer.py", "measure/ledger.py", "phase3_fsdp/costs.py", "evaluate.py"} <= {
        str(path.relative_to(tmp_path / "watched")) for path in (tmp_path / "watched").rglob("*.py")
    }


@pytest.mark.slow
def test_the_tests_of_a_copy_pass(tmp_path):
    """The tests that a copy has pass there. A bare resume continues the newest run of the copy."""
    copy = tmp_path / "copy"
    copy_phase("phase3", copy)
    environment = {"PYTHONPATH": str(copy)}
    program = Program("pytest", "-q", "-n0", "-p", "no:cacheprovider", "tests", cwd=copy, **environment)
    assert program.wait() == 0, program.output()
    flags = make_flags(**{**FIELDS, "gradient_accumulation_steps": 1})
    for more in (["--max_iters=4"], ["--max_iters=2"], ["--init_from=resume", "--max_iters=3"]):
        program = Program("train.py", *flags, *more, cwd=copy, new_interpreters=True, **environment)
        assert program.wait() == 0, program.output()
    assert "resuming after 2 updates" in program.output()
    (run,) = (path.parent.parent for path in copy.glob("out/*/checkpoints/step-00000003"))
    words = ["evaluate.py", f"--out_dir={run}", "--device=cpu", "--eval_iters=1"]
    done = run_in_new_interpreter(*words, cwd=copy, **environment)
    assert done.returncode == 0 and "validation loss" in done.stdout, done.stderr


def test_wrong_copies_are_refused(tmp_path):
    """An unknown phase and a directory that is not empty are refused, and nothing is written."""
    with pytest.raises(ConfigError, match="PHASE=phase9 is unknown; did you mean"):
        copy_phase("phase9", tmp_path)
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty directory"):
        copy_phase("phase1", tmp_path)
    with pytest.raises(ConfigError, match="WITH=operate,bench names bench"):
        copy_phase("phase1", tmp_path / "new", ("operate", "bench"))
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_each_replaced_sentence_occurs_in_the_source():
    """A sentence that a copy replaces, and that is changed in its source, must be changed in the table too."""
    sources = [path.read_text() for name, path in find_modules().items() if not name.startswith("workshop.")]
    assert [sentence for sentence in SENTENCES if not any(sentence in text for text in sources)] == []
