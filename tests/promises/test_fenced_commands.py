"""Every command in a fenced block of a document runs, or names the hardware that it needs."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.documents import (
    ALLOWED_CODES,
    HARDWARE,
    NEEDS_HARDWARE,
    OUT,
    RUN,
    SHORT,
    FencedCommand,
    find_fenced_commands,
    list_fenced_commands,
    shorten,
)
from tests.helpers.repository import list_files
from tests.helpers.training import ROOT

COMMANDS = list_fenced_commands()
SHORT_SUITE = """about = "One short run."
phases = ["baseline"]
ranks = [1]
metrics = ["tokens_per_second"]
[config]
max_iters = 2
eval_interval = 2
eval_iters = 1
[variants.plain]
"""


def find_problem(command: FencedCommand) -> str:
    """Return what is wrong with the mark of a command, or an empty text."""
    if command.needs:
        return "" if any(word in command.needs for word in HARDWARE) else f"unknown hardware: {command.needs}"
    if NEEDS_HARDWARE.search(command.text):
        return "it needs hardware: put a line such as `# needs 8 GPUs` above it"
    try:
        shorten(command.text)
    except KeyError as error:
        return f"tests/helpers/documents.py does not shorten make {error}"
    return ""


def test_every_fenced_command_runs_or_names_its_hardware(tmp_path):
    """A fenced command has a short form without a GPU and a network, or stands below a line `# needs ...`."""
    assert {
        f"{command.path.name}: {command.text}": find_problem(command) for command in COMMANDS if find_problem(command)
    } == {}
    unmarked = [command for command in COMMANDS if not command.needs]
    assert len(unmarked) >= 60 and len(COMMANDS) - len(unmarked) >= 25
    targets = {match[1] for command in unmarked if (match := re.search(r"\bmake (\S+)", command.text))}
    assert targets == set(SHORT), "SHORT names a target that no document uses"
    lines = ("make phase3 GPUS=8 CONFIG=config/train_gpt2.py", "# needs luck", "make phase3", "make coffee")
    for line in lines:
        (tmp_path / "a.md").write_text(f"```bash\n{line}\n{'make phase3' if line.startswith('#') else ''}\n```\n")
        problems = [find_problem(command) for command in find_fenced_commands(tmp_path / "a.md")]
        assert [bool(problem) for problem in problems] == [line != "make phase3"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository with its own environment and data, in which commands may write."""
    copy = tmp_path_factory.mktemp("commands") / "repository"
    data = [path for path in (ROOT / "nanoGPT/data").glob("*/*") if path.suffix in (".bin", ".json", ".txt")]
    for path in [*list_files("*"), *data]:
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy / path.relative_to(ROOT))
    for phase in ("phase1_zero1", "phase2_triton", "phase3_fsdp"):
        (copy / phase / "data").symlink_to("../nanoGPT/data")
    create_environment(copy)
    subprocess.run("git init -q && git add -A", shell=True, cwd=copy, check=True)
    (copy / "short.toml").write_text(SHORT_SUITE)
    (copy / "my.txt").write_text("To be, or not to be, that is the question.\n" * 500)
    return copy


def create_environment(copy: Path) -> None:
    """Let `.venv` of a copy use the packages of this environment, and mark it as set up."""
    environment = copy / ".venv"
    environment.mkdir()
    for name in ("bin", "lib", "lib64", "include", "etc", "share"):
        if (Path(sys.prefix) / name).exists():
            (environment / name).symlink_to(Path(sys.prefix) / name)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment / "pyvenv.cfg")
    python = (environment / "bin" / "python").resolve()
    (environment / ".core").write_text(f"{copy}\n{python}\n")
    for stamp in (".pytest", ".dev", ".notebooks", *([".book"] if find_spec("sphinx") else [])):
        (environment / stamp).touch()


def run_in(copy: Path, text: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a copy of the repository. Stop all its processes after a time limit."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    command = ["bash", "-c", text]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=copy, env=environment, text=True, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(text, process.returncode, output)


def kill_group(process: subprocess.Popen) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def find_directories(copy: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield what to write in place of OUT and RUN. A command that reads a run gets its own copy of a short one."""
    number = len(list((copy / "out").glob("*"))) if (copy / "out").exists() else 0
    yield OUT, f"{copy}/out/own-{number}"
    if RUN in text:
        phase = match[0] if (match := re.search(r"phase[123]", text)) else "phase3"
        source = copy / "out" / f"short-{phase}"
        if not source.exists():
            result = run_in(copy, shorten(f"make {phase} GPUS=2").replace(OUT, str(source)))
            assert result.returncode == 0, result.stdout
        shutil.copytree(source, copy / "out" / f"copy-{number}")
        yield RUN, f"{copy}/out/copy-{number}"


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.needs], ids=lambda command: command.text)
def test_a_fenced_command_runs(command, scratch):
    """The command runs in a copy of the repository, shortened to a few steps, and exits without an error."""
    if command.text.startswith("make book") and not find_spec("sphinx"):
        pytest.skip("Sphinx is not installed: run make book once")
    if "DATASET=my_char" in command.text:
        run_in(scratch, ".venv/bin/python nanoGPT/data/shakespeare_char/prepare.py --input=my.txt")
    if match := re.match(r"make (?:check|hint) (N=\S+)", command.text):
        run_in(scratch, f"make exercise {match[1]}")
    text = shorten(command.text)
    for name, value in find_directories(scratch, text):
        text = text.replace(name, value)
    result = run_in(scratch, text)
    target = match[1] if (match := re.search(r"\bmake (\S+)", text)) else ""
    assert result.returncode in ALLOWED_CODES.get(target, (0,)), f"{text}\n{result.stdout[-4000:]}"
