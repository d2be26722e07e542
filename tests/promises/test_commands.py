"""Every training command in a document is well-formed, and its configuration works on the ranks that it names."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from nanoGPT.cli.command_line import command_line
from nanoGPT.errors import ConfigError
from nanoGPT.job.parse import parse
from nanoGPT.launch import NodeConfig, load_trainer, split_arguments
from nanoGPT.train_config import TrainConfig, validate
from phase3_fsdp.solve import settings as solve
from tests.helpers.repository import list_files
from tests.helpers.training import CONFIGS, ROOT
from workshop.phases import PHASES

RANKS = (1, 2, 4, 8, 16)  # every default and every configuration file must work with each of these
VARIABLES = {"GPUS", "NNODES", "NODE_RANK", "MASTER_ADDR", "DEVICE", "CONFIG", "DATASET", "ARGS", "PHASE", "PYTHON"}
START_PATTERNS = (rf"make (?:{'|'.join(PHASES)}|profile)\b", r"sbatch .*slurm\.sh", r"(?:\S*/)?torchrun -")
START_PATTERNS += (r"(?:\S*/)?python3? -m nanoGPT\.launch\b", r"(?:\S*/)?python3? \S*(?:train|evaluate)\.py\b")
COMMAND_START = re.compile(rf"(?:cd \S+ && )?(?:{'|'.join(START_PATTERNS)})")


@dataclass(frozen=True)
class Command:
    """A line or a piece of inline code that starts a training run.

    Attributes:
        path: the document.
        text: the command, without backticks or comment characters.
        inline: whether it is inline code of a sentence, which may name a command without its arguments.
    """

    path: Path
    text: str
    inline: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}: {self.text}"


@dataclass(frozen=True)
class Request:
    """A parsed command: the trainer, the arguments for the trainer, and the number of ranks."""

    kind: str
    trainer: Path
    words: list[str]
    ranks: int


def read_texts(path: Path) -> Iterator[str]:
    """Yield the text of a document, or the text of each cell of a notebook."""
    if path.suffix != ".ipynb":
        yield path.read_text()
        return
    for cell in json.loads(path.read_text())["cells"]:
        yield "".join(cell["source"])


def find_commands(path: Path) -> Iterator[Command]:
    """Yield the training commands of a document: lines and comments that begin with a command, and inline code."""
    for text in read_texts(path):
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines = [re.sub(r"^\s*(#\s*)?|\s+#\s.*", "", line) for line in text.splitlines()]  # without comments
        spans = [re.sub(r"\s*\n\s*(#\s*)?", " ", span) for span in re.findall(r"`([^`]+)`", prose)]
        for candidates, inline in ((lines, False), (spans, True)):
            for line in candidates:
                if COMMAND_START.match(line) and "..." not in line and (inline or "`" not in line):
                    yield Command(path, line, inline)


def list_documents() -> list[Path]:
    """Return all tracked text files from which a reader may copy a command."""
    patterns = ("*.md", "*.py", "*.sh", "*.ipynb", "Makefile")
    paths = [path for pattern in patterns for path in list_files(pattern)]
    return [path for path in paths if path.relative_to(ROOT).parts[0] != "tests"]


def parse_command(command: Command) -> list[Request]:
    """Parse a command. Return an empty list if it starts no training run.

    Raises:
        ConfigError, SystemExit, ValueError: the command is malformed.
    """
    home, text = command.path.parent, command.text
    if match := re.match(r"cd (\S+) && ", text):
        home, text = ROOT / match[1], text[match.end() :]
    program, *words = shlex.split(text)
    name = Path(program).name
    if name == "make":
        return [parse_make(words)]
    if name == "sbatch":
        return [parse_sbatch(words)]
    if name == "torchrun":
        return parse_torchrun(words, home, command.inline)
    if words[:2] == ["-m", "nanoGPT.launch"]:
        words, trainer, rest = split_arguments(words[2:])
        node = command_line(NodeConfig, words)
        return [Request("launch", find_trainer(trainer, home), rest, count_ranks(node))]
    return [Request("python", find_trainer(Path(words[0]), home), words[1:], 1)]


def parse_make(words: list[str]) -> Request:
    target, *rest = words
    values = dict(word.split("=", 1) for word in rest)
    assert values.keys() <= VARIABLES, f"make ignores {sorted(values.keys() - VARIABLES)}"
    node = NodeConfig(int(values.get("GPUS", 1)), int(values.get("NNODES", 1)), int(values.get("NODE_RANK", 0)))
    flags = [*shlex.split(values.get("CONFIG", "")), *shlex.split(values.get("ARGS", ""))]
    flags += [f"--{name.lower()}={values[name]}" for name in ("DATASET", "DEVICE") if name in values]
    phase = values.get("PHASE", "phase3") if target == "profile" else target
    return Request("make", ROOT / PHASES[phase] / "train.py", flags, count_ranks(node))


def parse_sbatch(words: list[str]) -> Request:
    """Parse an sbatch command. Its options override the `#SBATCH` lines of slurm.sh."""
    index = next(i for i, word in enumerate(words) if word.endswith("slurm.sh"))
    script = ROOT / words[index]
    defaults = re.findall(r"^#SBATCH (--\S+)", script.read_text(), re.MULTILINE)
    options = dict(word.split("=", 1) for word in (*defaults, *words[:index]) if "=" in word)
    ranks = int(options["--nodes"]) * int(options["--gpus-per-node"])
    return Request("sbatch", ROOT / "phase3_fsdp" / "train.py", words[index + 1 :], ranks)


def parse_torchrun(words: list[str], home: Path, inline: bool) -> list[Request]:
    if inline and not any(word.endswith(".py") for word in words):
        return []  # the sentence is about a flag of torchrun
    options = get_args_parser().parse_args(words)
    ranks = parse_min_max_nnodes(options.nnodes)[1] * int(options.nproc_per_node)
    return [Request("torchrun", find_trainer(Path(options.training_script), home), options.training_script_args, ranks)]


def count_ranks(node: NodeConfig) -> int:
    assert 0 <= node.node_rank < node.nnodes and node.gpus > 0, node
    return node.gpus * node.nnodes


def find_trainer(path: Path, home: Path) -> Path:
    """Return the script that a command names, relative to the root of the repository or to `home`."""
    return next(each for each in (ROOT / path, home / path) if each.is_file())


def get_config_class(trainer: Path) -> type[TrainConfig]:
    if trainer.name == "evaluate.py":
        from phase3_fsdp.evaluate import EvaluateConfig

        return EvaluateConfig
    config_class: type[TrainConfig] = load_trainer(trainer).Config
    return config_class


def check_request(request: Request) -> None:
    """Check a configuration with the defaults for the CPU and for a GPU, or for the device that the command names.

    Raises:
        ConfigError: the configuration cannot be parsed, or does not work with this number of ranks.
    """
    if any(word.startswith("--problems") for word in request.words):
        solve.validate(command_line(solve.SolveConfig, [word for word in request.words if word != "--help"]))
        return
    names_device = any(word.startswith("--device") for word in request.words)
    for device in [[]] if names_device else [["--device=cpu"], ["--device=cuda"]]:
        try:
            words = [*request.words, *device]
            config = parse(get_config_class(request.trainer), words, request.trainer, request.ranks)
        except SystemExit as stop:
            assert stop.code == 0 and "--help" in request.words
            return
        validate(config, request.ranks)


COMMANDS = list(dict.fromkeys(command for path in list_documents() for command in find_commands(path)))


def test_commands_are_found():
    """`find_commands` finds the training commands of the documents, in every form that the documents explain."""
    counts = Counter(str(command.path.relative_to(ROOT)) for command in COMMANDS)
    kinds = Counter(request.kind for command in COMMANDS for request in parse_command(command))
    notes = [counts[f"{phase}/IMPLEMENTATION.md"] for phase in ("phase1_zero1", "phase2_triton", "phase3_fsdp")]
    assert counts["README.md"] >= 6 and counts["docs/running.md"] >= 17 and counts["docs/measuring.md"] >= 2
    assert notes[0] >= 11 and notes[1] >= 4 and notes[2] >= 12, counts
    assert counts["deploy/slurm.sh"] == 2
    for phase in CONFIGS:
        assert counts[f"{phase}/train.py"] >= 5
        assert all(counts[str(path.relative_to(ROOT))] == 1 for path in list_files(f"{phase}/config/*.py"))
    assert (
        counts["notebooks/04_triton.py"] == counts["notebooks/04_triton.ipynb"] > 0 and counts["nanoGPT/launch.py"] >= 2
    )
    minimum_of_kind = {"make": 60, "torchrun": 10, "python": 9, "launch": 3, "sbatch": 3}
    assert all(kinds[kind] >= minimum for kind, minimum in minimum_of_kind.items()), kinds


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_a_document_works_on_its_ranks(command, monkeypatch):
    """Every command is well-formed, and its configuration is valid on its number of ranks, on CPUs and on GPUs."""
    monkeypatch.chdir(ROOT)
    for request in parse_command(command):
        check_request(request)


MALFORMED = [
    "make phase3 GPU=4",
    "make phase3 GPUS=four",
    "make phase3 --gpus=4",
    "make phase3 GPUS=3",
    "make phase3 GPUS=8 NNODES=4",
    "make phase3 GPUS=8 NNODES=2 NODE_RANK=2",
    'make phase3 ARGS="--bach_size=3"',
    'make phase3 ARGS="--dropout=2',
    "make baseline ARGS=--fsdp_shard_size=2",
    "make phase3 GPUS=4 ARGS=--fsdp_shard_size=3",
    "make baseline CONFIG=config/nope.py",
    "make baseline GPUS=9 CONFIG=config/train_gpt2.py",
    "torchrun --standalone --nproc_per_node=3 nanoGPT/train.py",
    "torchrun --standalone --nproc_per_node=4 nanoGPT/trian.py",
    "torchrun --ranks=4 nanoGPT/train.py",
    "torchrun --standalone --nproc_per_node=4",
    "cd phase3_fsdp && ../.venv/bin/torchrun --standalone --nproc_per_node=2 train.py --zero1_backend=flat",
    "python -m nanoGPT.launch --gpsu=4 nanoGPT/train.py",
    "python -m nanoGPT.launch --gpus=4 phase4/train.py",
    "python -m nanoGPT.launch --gpus=4",
    "python nanoGPT/train.py --learning_rate=fast",
    "sbatch --nodes=3 deploy/slurm.sh",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_command_fails_the_check(text, tmp_path, monkeypatch):
    """A malformed command is found in the document, and its check fails."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "README.md").write_text(f"So:\n\n```bash\n{text}    # a comment\n```\n")
    (command,) = find_commands(tmp_path / "README.md")
    with pytest.raises((ConfigError, AssertionError, ValueError, StopIteration, SystemExit)):
        for request in parse_command(command):
            check_request(request)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", CONFIGS)
def test_defaults_and_configuration_files_work_on_every_number_of_ranks(phase, device, monkeypatch):
    """The defaults and every configuration file of a phase are valid on 1, 2, 4, 8 and 16 ranks."""
    monkeypatch.chdir(ROOT)
    files = {f"config/{path.name}" for home in ("nanoGPT", phase) for path in list_files(f"{home}/config/*.py")}
    assert len(files) >= 3
    for words in ([], *([name] for name in files)):
        flags, trainer = [*words, f"--device={device}"], ROOT / phase / "train.py"
        config, config_of_16 = (parse(CONFIGS[phase], flags, trainer, ranks) for ranks in (8, 16))
        for ranks in RANKS:  # the defaults are the same on 1, 2, 4 and 8 ranks
            validate(config_of_16 if ranks == 16 else config, ranks)


def test_tokens_per_step_match_the_documents():
    """A step has 2,048 tokens by default and 491,520 in the reproduction of GPT-2, on any number of ranks."""

    def tokens_per_step(words: list[str], ranks: int = 1) -> int:
        config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py", ranks)
        return config.batch_size * config.gradient_accumulation_steps * config.block_size

    assert {tokens_per_step(["--device=cpu"], ranks) for ranks in RANKS} == {2_048}
    assert "2,048 tokens per step" in (ROOT / "docs/running.md").read_text()
    assert tokens_per_step(["config/train_gpt2.py", "--device=cuda"]) == 491_520 == 12 * 40 * 1024  # as in nanoGPT
    assert tokens_per_step(["config/train_shakespeare_char.py", "--device=cuda"]) == 64 * 8 * 256
    assert tokens_per_step(["--device=cuda"]) == 16 * 12 * 1024
