"""Every command in the documents is valid: its target, variables, files, modules and flags exist, and the configuration
that it describes works on its number of ranks."""

import contextlib
import functools
import importlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

import nanoGPT.job.command
from evaluation import settings as solve
from nanoGPT.job.parse import parse
from nanoGPT.train_config import TrainConfig, validate
from operate.launch import split_arguments
from operate.nodes import NodeConfig
from tests.helpers.programs import run_program
from tests.helpers.repository import list_files
from tests.helpers.training import CONFIGS, ROOT

RANKS = (1, 2, 4, 8, 16)  # every default and every configuration file must work with each of these
PROGRAMS = r"make [a-z]|sbatch |(?:[^\s`]*/)?(?:torchrun -|python3? (?:-m |\S*\.py))"
COMMAND = re.compile(rf"(?:^\s*(?:# )?|`)(?P<text>(?:cd \S+ && )?(?:[A-Z_]+=\S+ )*(?:{PROGRAMS})[^`\n]*)", re.MULTILINE)
WITHOUT_PARSER = {"http.server", "pip", "pytest", "ruff", "mypy"}  # modules of other packages
SETUP_VARIABLES = (
    "PYTHON",
    "TORCH",
    "DATASET",
    "CONFIG",
)  # without an effect if everything is set up, or checked below
SENTINEL = "some-value"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
PARSE = nanoGPT.job.command.command_line


class Parsed(Exception):
    """The flags of a command are valid."""


def find_commands(path: Path) -> Iterator[str]:
    """Yield each command of a document, without its comment: in a block, in a comment, or as inline code."""
    for match in COMMAND.finditer(path.read_text().replace("\\\n", " ")):
        text = re.sub(r"\s+#\s.*|\\n.*", "", match["text"]).strip()
        if (
            not re.search(r"\.\.\.|\{|\bDIR\b|\bFILE\b|\bmy_metrics\b|\$\(", text)
            and text.count("'") % 2 == text.count('"') % 2 == 0
        ):
            yield text


def list_commands() -> list[tuple[Path, str]]:
    """Return the documents with their commands: Markdown files, notebooks, trainers and configuration files."""
    paths = [
        *(path for path in list_files("*.md") if path.parent.name != "copied"),  # commands of a copy of a phase
        *list_files("notebooks/*.py"),
        *list_files("*/train.py"),
        *list_files("*/config/*.py"),
    ]
    found = {text: path for path in paths for text in find_commands(path)}
    return [(path, text) for text, path in found.items()]


def check_command(text: str, home: Path) -> None:
    """Check a command of a document in the directory `home`.

    Raises:
        ConfigError, AssertionError, SystemExit, ValueError: something that it names does not exist or is invalid.
    """
    if match := re.match(r"cd (\S+) && ", text):
        home, text = ROOT / match[1], text[match.end() :]
    program, *words = re.sub(r"^([A-Z_]+=\S+ )+", "", text).split(" ", 1)
    words = shlex.split(*words)
    if program == "make":
        check_make(words)
    elif program == "sbatch":
        script = next(i for i, word in enumerate(words) if word.endswith("slurm.sh"))
        check_trainer(ROOT / "phase3_fsdp/train.py", words[script + 1 :], 16)
    elif program.endswith("torchrun") and ".py" in text:
        options = get_args_parser().parse_args(words)
        ranks = parse_min_max_nnodes(options.nnodes)[1] * int(options.nproc_per_node)
        check_script(options.training_script, options.training_script_args, ranks, home)
    elif program.endswith("torchrun") and "-m" in words:
        options = get_args_parser().parse_args(words)
        check_python(["-m", options.training_script, *options.training_script_args], home)
    elif not program.endswith("torchrun"):
        check_python(words, home)


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
    """Check that every variable of a make command reaches a program, and the programs that it starts."""
    for name in (word.partition("=")[0] for word in words if "=" in word):
        others = [word for word in words if not word.startswith(f"{name}=")]
        has_effect = name in SETUP_VARIABLES or SENTINEL in run_make(*others, f"{name}={SENTINEL}")
        assert has_effect, f"make {' '.join(words)}: {name} has no effect"
    for line in run_make(*words).splitlines():
        if match := re.search(r"\.venv/bin/python (-m .*)", line):
            check_python(shlex.split(match[1]), ROOT)


def check_python(words: list[str], home: Path) -> None:
    """Check a command of Python: a script or a module, and its flags."""
    if words[0] != "-m":
        check_script(words[0], words[1:], 1, home)
    elif words[1] == "operate.launch":
        options, trainer, flags = split_arguments(words[2:])
        node: NodeConfig = PARSE(NodeConfig, options)
        assert 0 <= node.node_rank < node.nnodes
        check_script(str(trainer), flags, node.world_size, home)
    elif words[1] == "evaluation":
        solve.validate(PARSE(solve.SolveConfig, [word for word in words[2:] if word != "--help"]))
    elif words[1] not in WITHOUT_PARSER:
        check_module(words[1], words[2:])


def check_script(name: str, flags: list[str], ranks: int, home: Path) -> None:
    """Check that a script exists and, if it is a trainer, that its configuration works."""
    script = next((path for path in (ROOT / name, home / name) if path.is_file()), None)
    assert script, f"{name} does not exist"
    if script.name in ("train.py", "evaluate.py"):
        check_trainer(script, flags, ranks)


def check_trainer(trainer: Path, flags: list[str], ranks: int) -> None:
    """Check a configuration with the defaults for the CPU and for a GPU, or for the device that the command names."""
    config_class = importlib.import_module(f"{trainer.parent.name}.{trainer.stem}").Config
    names_device = "--help" in flags or any(word.startswith("--device") for word in flags)
    for device in [[]] if names_device else [["--device=cpu"], ["--device=cuda"]]:
        with contextlib.suppress(SystemExit) if "--help" in flags else contextlib.nullcontext():
            validate(parse(config_class, [*flags, *device], trainer, ranks), ranks)


def check_module(module: str, flags: list[str]) -> None:
    """Check that a module is a program and accepts flags, without running it."""
    spec = importlib.util.find_spec(module)
    main = importlib.util.find_spec(f"{module}.__main__") if spec and spec.submodule_search_locations else spec
    assert main is not None and main.origin is not None, f"{module} is no program"
    if not flags or "--help" in flags or "command_line(" not in Path(main.origin).read_text():
        return  # a sentence may name a program without its arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nanoGPT.job.command, "command_line", parse_only)
        patch.setattr(sys, "argv", [module, *flags])
        patch.setattr("nanoGPT.job.command.report_errors", lambda **_options: contextlib.nullcontext())
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__")


def parse_only(target: Any, arguments: list[str]) -> Any:
    """Parse a command line, and raise Parsed in place of a call of the target."""

    @functools.wraps(target)
    def stop(*_args: Any, **_values: Any) -> None:
        raise Parsed

    PARSE(target if isinstance(target, type) else stop, arguments)
    raise Parsed


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")  # runpy runs a module a second time
@pytest.mark.parametrize(("path", "text"), list_commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_of_a_document_is_valid(path, text, monkeypatch):
    """The target, its variables, the files, the module and its flags exist, and the number of ranks works."""
    monkeypatch.chdir(ROOT)
    check_command(text, path.parent)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", CONFIGS)
def test_defaults_and_configuration_files_work_on_every_number_of_ranks(phase, device, monkeypatch):
    """The defaults and every configuration file of a phase are valid on 1, 2, 4, 8 and 16 ranks."""
    monkeypatch.chdir(ROOT)
    files = {f"config/{path.name}" for home in ("nanoGPT", phase) for path in list_files(f"{home}/config/*.py")}
    for words in ([], *([name] for name in files)):
        flags, trainer = [*words, f"--device={device}"], ROOT / phase / "train.py"
        config, config_of_16 = (parse(CONFIGS[phase], flags, trainer, ranks) for ranks in (8, 16))
        for ranks in RANKS:  # the defaults are the same on 1, 2, 4 and 8 ranks
            chosen = config_of_16 if ranks == 16 else config
            validate(chosen, ranks)
            assert chosen.gradient_accumulation_steps % ranks == 0


def test_tokens_per_step_match_the_documents():
    """A step has 2,048 tokens by default and 491,520 in the reproduction of GPT-2, on any number of ranks."""

    def tokens_per_step(words: list[str], ranks: int = 1) -> int:
        config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py", ranks)
        return config.batch_size * config.gradient_accumulation_steps * config.block_size

    assert {tokens_per_step(["--device=cpu"], ranks) for ranks in RANKS} == {2_048}
    assert tokens_per_step(["config/train_gpt2.py", "--device=cuda"]) == 491_520 == 12 * 40 * 1024  # as in nanoGPT


REFUSED = {
    "DATASET=nope": "error: there is no prepared dataset nope: choose fineweb_edu, ",
    "DATASET=shakespeare:3,nope:1": "error: there is no prepared dataset nope: choose fineweb_edu, ",
    "DATSET=nope": "DATSET is no variable of make data: use GPUS ",
    "GPU=4": "GPU is no variable of make data: use GPUS ",
    "NAME=nope": "NAME, TOKENIZER and FIELD describe a text: add INPUT=FILE",
}


@pytest.mark.parametrize("variable", REFUSED)
def test_make_refuses_an_unknown_dataset_or_variable(variable):
    """`make data` says what to use instead, and does not claim that there is nothing to do."""
    result = subprocess.run(["make", "data", variable], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and REFUSED[variable] in result.stderr


@pytest.mark.parametrize("name", ["it's_char", 'naïve 书 "a" $x_char'])
def test_names_with_spaces_and_quotes_reach_the_trainer(name):
    """A dataset with any name can be given to make: the shell passes it on as one word."""
    output = run_make("baseline", f"DATASET={name.replace('$', '$$')}")
    line = next(line for line in output.splitlines() if "operate.launch" in line)
    assert f"--dataset={name}" in shlex.split(line)


@pytest.mark.parametrize(("phase", "launcher"), [("phase1_zero1", TORCHRUN), ("phase2_triton", [])])
def test_the_script_in_the_notes_runs(phase, launcher, tmp_path):
    """The script in IMPLEMENTATION.md runs without changes, and prints a loss."""
    (script,) = re.findall(
        r"```python\n(# mine\.py.*?)```", (ROOT / phase / "IMPLEMENTATION.md").read_text(), re.DOTALL
    )
    (tmp_path / "mine.py").write_text(script)
    outcome = run_program(*launcher, str(tmp_path / "mine.py"))
    assert outcome.code == 0 and re.search(r"^loss \d", outcome.output, re.MULTILINE), outcome
