"""The exercises: stubs come from the shipped code, checks explain mistakes on real ranks, and the commands are safe."""

import dataclasses
import time
from pathlib import Path

import pytest

from nanoGPT.errors import ConfigError
from tests.helpers.marks import mark_slow
from tests.helpers.programs import DEADLINE
from workshop.exercises import __main__ as program
from workshop.exercises import checking
from workshop.exercises.checking import check_file
from workshop.exercises.document import DOCUMENT, render_document
from workshop.exercises.proving import prove_exercise
from workshop.exercises.registry import EXERCISES, find_exercise
from workshop.exercises.stubs import STUB, apply_mistake, find_hint_line, find_target, render_code, render_file

# One of each kind; `make exercises` proves all. The others run with `make test ARGS='-m slow'`.
QUICK = (
    "baseline.2",
    "zero1.5",
    "triton.2",
    "bugs.1",
    "fsdp.1",
    "memory.3",
    "checkpoints.4",
    "precision.2",
    "parallel.1",
    "tiles.1",
)
NAMES = [*QUICK, *mark_slow(*(name for name in EXERCISES if name not in QUICK))]


@pytest.fixture(autouse=True)
def skip_on_gpus(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") == "cuda":
        pytest.skip("exercises run on the CPU: Triton's interpreter runs their kernels")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the commands use another directory than work/."""
    monkeypatch.setattr(program, "WORK", tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_is_proved(name):
    """The solution passes, the learner's file fails, and each typical wrong answer fails with its explanation."""
    exercise = dataclasses.replace(find_exercise(name), limit=DEADLINE)  # its own limit is for an idle machine
    assert prove_exercise(exercise).problems == []


@pytest.mark.parametrize("name", EXERCISES)
def test_a_stub_is_the_shipped_code_without_its_solution(name):
    """The learner's file compiles, has the task and the signatures, and does not contain the decisive line."""
    exercise = find_exercise(name)
    text, line = render_file(exercise), find_hint_line(exercise)
    compile(text, name, "exec")
    assert exercise.title in text and f"make check N={name}" in text
    for target in map(find_target, exercise.targets):
        signature = next(each for each in target.code.splitlines() if each.startswith(("def ", "class ")))
        assert signature in text
    if not exercise.planted:
        assert STUB in text and line not in text
    solution = render_code(exercise, is_stub=False)
    assert all(apply_mistake(solution, each) != solution for each in exercise.mistakes)


def test_the_commands_of_a_learner(work, capsys):
    """A learner gets a file, which is never overwritten, checks it, gets hints, and solves the exercise."""
    assert program.main(["exercise", "--name=zero1.2"]) == 0
    path = work / "zero1_2.py"
    assert program.main(["check", "--name=zero1.2"]) == 1
    assert "write your code there" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"work/zero1_2.py exists: edit it, or delete it"):
        program.main(["exercise", "--name=zero1.2"])
    assert program.main(["hint", "--name=zero1.2", "--level=3"]) == 0
    assert "slice_length = ALIGN * math.ceil" in capsys.readouterr().out
    path.write_text(render_code(find_exercise("zero1.2"), is_stub=False))
    assert program.main(["check", "--name=zero1.2"]) == 0
    assert "zero1.2 is right" in capsys.readouterr().out
    assert program.main(["solution", "--name=zero1.2"]) == 0
    assert "# phase1_zero1/buckets.py:" in capsys.readouterr().out
    assert program.main(["exercise"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in EXERCISES) and "core track, in this order" in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--name=zero1.3"], r"work/zero1_3.py is missing: create it with `make exercise N=zero1.3`"),
        (["check", "--name=zero1.33"], r"N=zero1.33 is not an exercise; did you mean zero1.3"),
        (["hint", "--name=zero1.3", "--level=4"], r"LEVEL=4 is out of range: use 1, 2 or 3"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_one_sentence(arguments, message, work):
    """A missing file, an unknown name or level, and an unknown command are explained in one sentence."""
    with pytest.raises(ConfigError, match=message):
        program.main(arguments)


def check_text(name: str, text: str, tmp_path: Path, limit: float | None = None) -> str:
    """Check a learner's file with this text, and return the explanation."""
    path = tmp_path / find_exercise(name).file_name
    path.write_text(text)
    verdict = check_file(find_exercise(name), path, limit)
    assert not verdict.is_right
    return verdict.explanation


def test_a_hang_ends_in_seconds_and_names_the_line(tmp_path, monkeypatch):
    """If all ranks send first, the check ends after the time limit, and names the line in which each rank waits."""
    exercise = find_exercise("collectives.1")
    text = apply_mistake(render_code(exercise, is_stub=False), exercise.mistakes[3])
    monkeypatch.setattr(checking, "GRACE", 6.0)
    begin, limit = time.monotonic(), 10.0
    explanation = check_text("collectives.1", text, tmp_path, limit)
    assert time.monotonic() - begin < limit + 60
    assert "no rank receives" in explanation
    assert all(f"Rank {rank} waits in reduce_scatter, line" in explanation for rank in range(4))
    assert "`dist.send(chunks[outgoing], (rank + 1) % ranks)`" in explanation


def test_an_exception_names_the_learners_line(tmp_path):
    """An exception, a syntax error, a missing function and a kernel's error are explained with the learner's line."""
    solution = render_code(find_exercise("zero1.2"), is_stub=False)
    broken = solution.replace("    return slice_length", "    1 / 0\n    return slice_length")
    explanation = check_text("zero1.2", broken, tmp_path)
    assert "of zero1_2.py, `1 / 0`, failed on a rank:\nZeroDivisionError: division by zero" in explanation
    assert "zero1_2.py is not valid Python in line 1" in check_text("zero1.2", "def f(:\n", tmp_path)
    explanation = check_text("zero1.2", solution.replace("def _partition", "def split"), tmp_path)
    assert "The file does not define _partition" in explanation
    kernel = render_code(find_exercise("triton.2"), is_stub=False).replace("tl.max(z, 1)", "tl.max(z, 5)")
    assert "triton_2.py" in check_text("triton.2", kernel, tmp_path)


def test_other_right_answers_pass(tmp_path):
    """A check tests behavior and not text: non-reentrant checkpointing also fixes the last fault of the capstone."""
    exercise = find_exercise("capstone")
    text = apply_mistake(render_code(exercise, is_stub=False), exercise.mistakes[3])
    path = tmp_path / exercise.file_name
    path.write_text(text.replace("use_reentrant=True", "use_reentrant=False"))
    assert check_file(exercise, path).is_right


def test_the_document_lists_all_exercises():
    """The tables of docs/exercises.md are up to date, and contain every exercise."""
    text = DOCUMENT.read_text()
    assert render_document(text) == text, "run `python -m workshop.exercises document`"
    assert all(f"| `{name}` |" in text for name in EXERCISES)
