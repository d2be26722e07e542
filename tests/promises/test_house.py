"""The house's own rules: the diff contract, the size of files, and that what is written down is true."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.helpers.repository import tracked
from tests.helpers.training import ROOT
from workshop import diff
from workshop.diff import MAX_ADDED, MAX_HUNKS, Hunk, hunks, problems, rendered

PHASES = [p.name for p in sorted(ROOT.glob("phase*")) if (p / "train.py").is_file()]


@pytest.mark.parametrize("phase", PHASES)
def test_the_diff_contract_is_kept(phase):
    """A phase's train.py is the baseline's plus a few tagged hunks, and nothing else."""
    assert problems(hunks(phase)) == []


def test_the_diff_contract_catches_a_breach():
    """An untagged change, an untagged deletion, too many lines or too many hunks are each found."""
    tagged = Hunk(1, [], ["x = 1  # [fsdp:x]"])
    assert problems([tagged]) == []
    assert "no tag" in problems([Hunk(1, ["old"], ["new"])])[0]
    assert "no tag" in problems([Hunk(1, ["old"], [])])[0]
    assert "lines are added" in problems([Hunk(1, [], ["x  # [fsdp:x]"] * (MAX_ADDED + 1))])[0]
    assert "hunks" in problems([tagged] * (MAX_HUNKS + 1))[0]


@pytest.mark.parametrize("phase", PHASES)
def test_the_diff_says_where_it_is(phase, capsys):
    """Every hunk is printed with the line of the phase's train.py on which what it adds begins."""
    lines = (ROOT / phase / "train.py").read_text().splitlines()
    assert diff.main(phase, write=False) == 0
    said = capsys.readouterr().out
    for hunk in hunks(phase):
        assert lines[hunk.line - 1 :][: len(hunk.added)] == hunk.added
        assert f"{phase}/train.py:{hunk.line}\n{hunk.text()}\n" in said


def test_the_diff_is_written_when_asked_and_a_breach_is_exit_code_1(tmp_path, monkeypatch, capsys):
    """Stale blocks stay until --write renews them; a change without a tag ends with 1 and one sentence."""
    folder = tmp_path / "phase1_zero1"
    folder.mkdir()
    for name in ("train.py", "IMPLEMENTATION.md"):
        shutil.copy(ROOT / "phase1_zero1" / name, folder)
    monkeypatch.setattr(diff, "ROOT", tmp_path)
    notes, fresh = folder / "IMPLEMENTATION.md", (folder / "IMPLEMENTATION.md").read_text()
    notes.write_text(stale := fresh.replace("```diff\n", "```diff\n-what was\n"))
    assert (diff.main("phase1_zero1", write=False), notes.read_text()) == (0, stale)
    assert (diff.main("phase1_zero1", write=True), notes.read_text()) == (0, fresh)
    code = (folder / "train.py").read_text()
    (folder / "train.py").write_text(code + "# no tag\n")
    assert diff.main("phase1_zero1", write=False) == 1
    assert f"error: line {code.count(chr(10)) + 1}: this change carries no tag" in capsys.readouterr().err


@pytest.mark.parametrize("phase", PHASES)
def test_diff_blocks_are_fresh(phase):
    """The diff blocks in IMPLEMENTATION.md are those of today's train.py, and every tag is shown."""
    text = (ROOT / phase / "IMPLEMENTATION.md").read_text()
    assert text == rendered(phase), f"run: python -m workshop.diff {phase} --write"
    assert set(re.findall(r"<!-- diff:(\w+) -->", text)) == {tag for hunk in hunks(phase) for tag in hunk.tags}


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_shares_the_data(phase):
    """`data` in a phase directory is a link to nanoGPT's."""
    assert (ROOT / phase / "data").is_symlink() and (ROOT / phase / "data").resolve() == ROOT / "nanoGPT" / "data"


def test_files_and_functions_stay_small():
    """No file over 400 lines but model.py, tests and notebooks; no function over 60 but the training page."""
    large = []
    for path in tracked("*.py"):
        home = path.relative_to(ROOT).parts[0]
        if home in ("tests", "notebooks"):
            continue
        lines = path.read_text().count("\n")
        if lines > 400 and path.name != "model.py":
            large.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not (path.name == "train.py" and node.name == "train"):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > 60:
                    large.append(f"{path.relative_to(ROOT)}:{node.name}: {size} lines")
    assert large == []


def test_public_functions_have_types_and_words():
    """Every module says what it is, and every public function but a Triton kernel annotates what it returns."""
    silent = []
    for path in tracked("*.py"):
        if path.relative_to(ROOT).parts[0] in ("tests", "notebooks") or "/config/" in str(path):
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if node.returns is None and "jit" not in [ast.unparse(decorator) for decorator in node.decorator_list]:
                silent.append(f"{path.name}:{node.name} has no return type")
        if ast.get_docstring(tree) is None and path.read_text():
            silent.append(f"{path} has no docstring")
    assert silent == []


@pytest.mark.parametrize("path", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_commands_in_the_documents_exist(path):
    """Relative links point to files, and every `make target` that a document names is in the Makefile."""
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (path.parent / target).exists(), target
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"`make ([a-z0-9-]+)", text) + re.findall(r"^make ([a-z0-9-]+)", text, flags=re.MULTILINE):
        assert target in known, f"{path}: make {target}"


COMMANDS = [
    (path.parent.name, words)
    for path in sorted(ROOT.glob("phase*/IMPLEMENTATION.md"))
    for words in re.findall(r"`make test ARGS=('[^']*'|\S+)`", path.read_text().replace("\n", " "))
]


@pytest.mark.parametrize(("phase", "words"), COMMANDS)
def test_verification_lists_name_tests_that_exist(phase, words):
    """Every `make test ARGS=...` in a phase's notes selects tests that this suite runs."""
    words = words.strip("'")
    if not words.startswith("-k"):
        assert all((ROOT / name).is_file() for name in words.strip('"').split())
        return
    expression = Expression.compile(words.removeprefix("-k ").strip('"'))
    names = {f"{path.name}::{name}" for path in tracked("tests/*/test_*.py") for name in names_of_tests(path)}
    assert any(expression.evaluate(lambda word, name=name: word.lower() in name.lower()) for name in names), words


def names_of_tests(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
