"""The rules of this repository: the diff contract, and links in the documents."""

import re
import shutil
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.helpers.repository import list_files
from tests.helpers.training import ROOT
from workshop import diff
from workshop.diff import MAX_ADDED, MAX_HUNKS, Hunk, find_hunks, find_problems, render_notes
from workshop.steps import compare

PHASES = [p.name for p in sorted(ROOT.glob("phase*")) if (p / "train.py").is_file()]


@pytest.mark.parametrize("phase", PHASES)
def test_the_diff_contract_is_kept(phase):
    """A phase's train.py is the baseline's plus a few tagged hunks, and nothing else."""
    assert find_problems(find_hunks(phase)) == []


def test_the_diff_contract_rejects_violations():
    """`find_problems` reports untagged changes and deletions, too many added lines and too many hunks."""
    tagged = Hunk(1, [], ["x = 1  # [fsdp:x]"])
    assert find_problems([tagged]) == []
    assert "no tag" in find_problems([Hunk(1, ["old"], ["new"])])[0]
    assert "no tag" in find_problems([Hunk(1, ["old"], [])])[0]
    assert "added lines" in find_problems([Hunk(1, [], ["x  # [fsdp:x]"] * (MAX_ADDED + 1))])[0]
    assert "hunks" in find_problems([tagged] * (MAX_HUNKS + 1))[0]


def test_write_updates_the_diff_and_a_violation_returns_1(tmp_path, monkeypatch, capsys):
    """Only --write updates stale diff blocks. A change without a tag returns exit code 1 and prints one error."""
    folder = tmp_path / "phase1_zero1"
    folder.mkdir()
    for path in (ROOT / "phase1_zero1").glob("*.*"):
        shutil.copy(path, folder)
    monkeypatch.setattr(diff, "ROOT", tmp_path)
    notes, fresh_text = folder / "IMPLEMENTATION.md", (folder / "IMPLEMENTATION.md").read_text()
    notes.write_text(stale_text := fresh_text.replace("```diff\n", "```diff\n-what was\n"))
    assert (diff.main("phase1_zero1", write=False), notes.read_text()) == (0, stale_text)
    assert (diff.main("phase1_zero1", write=True), notes.read_text()) == (0, fresh_text)
    code = (folder / "train.py").read_text()
    (folder / "train.py").write_text(code + "# no tag\n")
    assert diff.main("phase1_zero1", write=False) == 1
    assert f"error: line {code.count(chr(10)) + 1}: this change has no tag" in capsys.readouterr().err


@pytest.mark.parametrize("phase", PHASES)
def test_diff_blocks_are_up_to_date(phase):
    """The diff blocks in IMPLEMENTATION.md match the code, every tag has a block, and both versions have every step."""
    text = (ROOT / phase / "IMPLEMENTATION.md").read_text()
    assert text == render_notes(phase), f"run: python -m workshop.diff {phase} --write"
    assert set(re.findall(r"<!-- diff:(\w+) -->", text)) == {tag for hunk in find_hunks(phase) for tag in hunk.tags}


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_shares_the_data(phase):
    """`data` in the directory of a phase is a symbolic link to nanoGPT/data."""
    assert (ROOT / phase / "data").is_symlink() and (ROOT / phase / "data").resolve() == ROOT / "nanoGPT" / "data"


def test_minimal_is_the_recipe_of_the_trainer():
    """`put_parameters_on_meta` is in two files, so that minimal.py needs only torch: the code is the same in both."""
    steps = compare(ROOT / "phase3_fsdp" / "minimal.py", ROOT / "phase3_fsdp" / "train.py")
    assert set(steps) == {"shard_units", "init_shards", "train_step"}


@pytest.mark.parametrize("path", list_files("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_the_documents_exist(path):
    """Relative links point to existing files."""
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (path.parent / target).exists(), target


COMMANDS = [
    (path.parent.name, words)
    for path in sorted(ROOT.glob("phase*/IMPLEMENTATION.md"))
    for words in re.findall(r"`make test ARGS=('[^']*'|\S+)`", path.read_text().replace("\n", " "))
]


@pytest.mark.parametrize(("phase", "words"), COMMANDS)
def test_verification_lists_name_tests_that_exist(phase, words):
    """Every `make test ARGS=...` in the notes of a phase selects existing tests."""
    paths, _, keywords = words.strip("'").partition("-k ")
    assert all((ROOT / name).exists() for name in paths.split())
    expression = Expression.compile(keywords.strip('"') or "test")
    folder = ROOT / (paths.split() or ["tests"])[0]
    files = [path for path in list_files("tests/*/test_*.py") if path.is_relative_to(folder)]
    names = {f"{path.name}::{name}" for path in files for name in list_test_names(path)}
    assert any(expression.evaluate(lambda word, name=name: word.lower() in name.lower()) for name in names), words


def list_test_names(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
