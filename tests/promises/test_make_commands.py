"""Every other command in a document, `make` or `python -m`, names targets, variables, modules and flags that exist."""

import contextlib
import functools
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nanoGPT.cli.command_line
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from tests.helpers.repository import list_files
from tests.helpers.training import ROOT
from workshop.phases import PHASES

COMMAND = re.compile(r"(?:^|`|# )((?!`)(?:[A-Z_]+=\S+ )*(?:make [a-z]|(?:[^\s`]*/)?python3? -m )[^`\n]*)", re.MULTILINE)
WITHOUT_PARSER = {"http.server", "pip", "pytest", "ruff", "mypy"}  # modules of other packages
SENTINEL = "some-value"


class Parsed(Exception):
    """The flags of a command are valid."""


def find_commands(path: Path) -> Iterator[str]:
    """Yield each command of a document that starts no training run, without its comment."""
    for match in COMMAND.finditer(path.read_text()):
        text = re.sub(r"\s+#\s.*|\\n.*|\\$", "", match[1]).strip()
        is_training = re.match(rf"([A-Z_]+=\S* )*make ({'|'.join(PHASES)}|profile)\b|.*-m nanoGPT\.launch", text)
        if not is_training and "..." not in text and text.count("'") % 2 == text.count('"') % 2 == 0:
            yield text


def list_commands() -> list[str]:
    paths = [*list_files("*.md"), *list_files("notebooks/*.py")]
    return list(dict.fromkeys(command for path in paths for command in find_commands(path)))


@functools.cache
def run_make(*words: str) -> str:
    """Return the commands that make would run.

    Raises:
        AssertionError: make has no such target.
    """
    result = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_make(words: list[str]) -> None:
    """Check that a make command has an effect, that every variable reaches a program, and that its flags exist."""
    for name in (word.partition("=")[0] for word in words if "=" in word):
        others = [word for word in words if not word.startswith(f"{name}=")]
        if name in ("PYTHON", "TORCH", "DATASET"):  # of the set-up and `make data`, which skip what exists
            continue
        assert SENTINEL in run_make(*others, f"{name}={SENTINEL}"), f"make {' '.join(words)}: {name} has no effect"
    for line in run_make(*words).splitlines():
        if match := re.search(r"\.venv/bin/python (-m .*)", line):
            check_module(shlex.split(match[1])[1:])


def check_module(words: list[str]) -> None:
    """Check that a module exists and accepts the flags of a command, without running it.

    Raises:
        ConfigError: a flag is unknown, or has an invalid value.
    """
    module, *flags = words
    if module in WITHOUT_PARSER:
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} does not exist"
    main = importlib.util.find_spec(f"{module}.__main__") if spec.submodule_search_locations else spec
    assert main is not None and main.origin is not None, f"{module} is no program"
    if not flags or "--help" in flags or "command_line(" not in Path(main.origin).read_text():
        return  # a sentence may name a program without its arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nanoGPT.cli.command_line, "command_line", parse_only)
        patch.setattr(sys, "argv", [module, *flags])
        patch.setattr("nanoGPT.cli.program.report_errors", lambda **_options: contextlib.nullcontext())
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__")


def parse_only(target: Any, arguments: list[str], source: str = "", **options: Any) -> Any:
    """Parse a command line, and raise Parsed in place of a call of the target."""

    @functools.wraps(target)
    def stop(*_args: Any, **_values: Any) -> None:
        raise Parsed

    PARSE(target if isinstance(target, type) else stop, arguments, source, **options)
    raise Parsed


PARSE = nanoGPT.cli.command_line.command_line


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")  # runpy runs a module a second time
@pytest.mark.parametrize("text", list_commands())
def test_a_command_of_a_document_is_valid(text):
    """The target, its variables, the module and its flags exist."""
    words = [word for word in shlex.split(text) if not re.fullmatch(r"[A-Z_]+=\S*", word) or text.startswith("make")]
    if words[0] == "make":
        check_make(words[1:])
    else:
        check_module(words[words.index("-m") + 1 :])


@pytest.mark.parametrize(
    "text",
    [
        "make pln",
        "make plan GPU=h100 GPU_COUNT=8",
        "make sample GPUS=2",
        "make plan ARGS=--modle=gpt2",
        "make autopsy RUN=out/a ARGS=--rnu=3",
        "python -m bench.plan.size",
        "python -m nanoGPT.export --to=a --format=ckpt --outdir=b",
    ],
)
def test_a_malformed_command_fails_the_check(text):
    """A command with a misspelled target, variable, module or flag fails the check."""
    with pytest.raises((AssertionError, ConfigError)):
        test_a_command_of_a_document_is_valid(text)


@pytest.mark.parametrize("names", ["nope", "shakespeare:3,nope:1"])
def test_make_refuses_an_unknown_dataset(names):
    """`make data` with a misspelled DATASET lists the datasets, and does not claim that there is nothing to do."""
    result = subprocess.run(["make", "data", f"DATASET={names}"], cwd=ROOT, capture_output=True, text=True, check=False)
    known = "fineweb_edu, openwebtext, shakespeare, shakespeare_char, synthetic"
    assert result.returncode == 2
    assert f"error: there is no prepared dataset nope: choose {known}, or" in result.stderr


@pytest.mark.parametrize("name", ["my novel_char", "it's_char", 'naïve 书 "a" $x_char'])
def test_names_with_spaces_and_quotes_reach_the_trainer(name):
    """A dataset and a run with any name can be given to make: the shell passes it on as one word."""
    escaped = name.replace("$", "$$")
    line = next(line for line in run_make("baseline", f"DATASET={escaped}").splitlines() if "nanoGPT.launch" in line)
    assert f"--dataset={name}" in shlex.split(line)
    line = next(line for line in run_make("watch", f"RUN={escaped}").splitlines() if "operate.watch" in line)
    assert f"--run={name}" in shlex.split(line)


def test_a_prepare_script_that_writes_no_meta_json_is_reported(tmp_path):
    """A dataset needs a meta.json. make never creates an empty one, and says how to prepare an own text."""
    folder = DATA / f"test_{tmp_path.name}"
    folder.mkdir()
    try:
        (folder / "prepare.py").write_text("pass\n")
        result = subprocess.run(["make", "data", f"DATASET={folder.name}"], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 2 and "prepare.py has written no meta.json" in result.stderr, result.stderr
        assert [path.name for path in folder.iterdir()] == ["prepare.py"]
        (folder / "prepare.py").unlink()
        with pytest.raises(ConfigError, match=r"has no meta.json.*prepare.py --input=FILE"):
            TokenData(folder.name, 8, 1, 1)
    finally:
        shutil.rmtree(folder)
