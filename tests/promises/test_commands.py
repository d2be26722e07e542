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
from nanoGPT.launch import Place, load_trainer, split_words
from nanoGPT.train_config import TrainConfig, validate
from tests.helpers.repository import tracked
from tests.helpers.training import CONFIGS, ROOT

PHASES = {"baseline": "nanoGPT", "phase1": "phase1_zero1", "phase2": "phase2_triton", "phase3": "phase3_fsdp"}
RANKS = (1, 2, 4, 8, 16)  # that a default and a configuration file must work on
VARIABLES = {"GPUS", "NNODES", "NODE_RANK", "MASTER_ADDR", "DEVICE", "CONFIG", "DATASET", "ARGS", "PHASE", "PYTHON"}
STARTS = (rf"make (?:{'|'.join(PHASES)}|profile)\b", r"sbatch .*slurm\.sh", r"(?:\S*/)?torchrun -")
STARTS += (r"(?:\S*/)?python3? -m nanoGPT\.launch\b", r"(?:\S*/)?python3? \S*(?:train|evaluate)\.py\b")
BEGIN = re.compile(rf"(?:cd \S+ && )?(?:{'|'.join(STARTS)})")


@dataclass(frozen=True)
class Command:
    """A line or a piece of inline code that starts a training.

    Attributes:
        path: the document.
        text: as it stands there, without the marks around it.
        inline: whether it is a piece of a sentence, which may name a command without its words.
    """

    path: Path
    text: str
    inline: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}: {self.text}"


@dataclass(frozen=True)
class Request:
    """What a command asks for: a trainer, the trainer's own words, and a number of ranks."""

    kind: str
    trainer: Path
    words: list[str]
    ranks: int


def texts(path: Path) -> Iterator[str]:
    """The text of a document; of a notebook the text of its cells."""
    if path.suffix != ".ipynb":
        yield path.read_text()
        return
    for cell in json.loads(path.read_text())["cells"]:
        yield "".join(cell["source"])


def commands_in(path: Path) -> Iterator[Command]:
    """The training commands of a document: lines that begin with one, also as a comment, and inline code."""
    for text in texts(path):
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines = [re.sub(r"^\s*(#\s*)?|\s+#\s.*", "", line) for line in text.splitlines()]  # without a remark
        spans = [re.sub(r"\s*\n\s*(#\s*)?", " ", span) for span in re.findall(r"`([^`]+)`", prose)]
        for found, inline in ((lines, False), (spans, True)):
            for line in found:
                if BEGIN.match(line) and "..." not in line and (inline or "`" not in line):
                    yield Command(path, line, inline)


def documents() -> list[Path]:
    """Every tracked text that a reader may take a command from."""
    patterns = ("*.md", "*.py", "*.sh", "*.ipynb", "Makefile")
    found = [path for pattern in patterns for path in tracked(pattern)]
    return [path for path in found if path.relative_to(ROOT).parts[0] != "tests"]


def requests_of(command: Command) -> list[Request]:
    """What a command asks for; nothing if it starts no training.

    Raises:
        ConfigError, SystemExit, ValueError: it is malformed.
    """
    home, text = command.path.parent, command.text
    if found := re.match(r"cd (\S+) && ", text):
        home, text = ROOT / found[1], text[found.end() :]
    program, *words = shlex.split(text)
    name = Path(program).name
    if name == "make":
        return [requested_by_make(words)]
    if name == "sbatch":
        return [requested_by_sbatch(words)]
    if name == "torchrun":
        return requested_by_torchrun(words, home, command.inline)
    if words[:2] == ["-m", "nanoGPT.launch"]:
        words, trainer, rest = split_words(words[2:])
        place = command_line(Place, words)
        return [Request("launch", trainer_at(trainer, home), rest, ranks_of(place))]
    return [Request("python", trainer_at(Path(words[0]), home), words[1:], 1)]


def requested_by_make(words: list[str]) -> Request:
    target, *rest = words
    given = dict(word.split("=", 1) for word in rest)
    assert given.keys() <= VARIABLES, f"make ignores {sorted(given.keys() - VARIABLES)}"
    place = Place(int(given.get("GPUS", 1)), int(given.get("NNODES", 1)), int(given.get("NODE_RANK", 0)))
    flags = [*shlex.split(given.get("CONFIG", "")), *shlex.split(given.get("ARGS", ""))]
    flags += [f"--{name.lower()}={given[name]}" for name in ("DATASET", "DEVICE") if name in given]
    phase = given.get("PHASE", "phase3") if target == "profile" else target
    return Request("make", ROOT / PHASES[phase] / "train.py", flags, ranks_of(place))


def requested_by_sbatch(words: list[str]) -> Request:
    """slurm.sh's own `#SBATCH` lines count where the command line does not say otherwise."""
    at = next(i for i, word in enumerate(words) if word.endswith("slurm.sh"))
    script = ROOT / words[at]
    own = re.findall(r"^#SBATCH (--\S+)", script.read_text(), re.MULTILINE)
    options = dict(word.split("=", 1) for word in (*own, *words[:at]) if "=" in word)
    ranks = int(options["--nodes"]) * int(options["--gpus-per-node"])
    return Request("sbatch", ROOT / "phase3_fsdp" / "train.py", words[at + 1 :], ranks)


def requested_by_torchrun(words: list[str], home: Path, inline: bool) -> list[Request]:
    if inline and not any(word.endswith(".py") for word in words):
        return []  # a sentence about one of its flags
    given = get_args_parser().parse_args(words)
    ranks = parse_min_max_nnodes(given.nnodes)[1] * int(given.nproc_per_node)
    return [Request("torchrun", trainer_at(Path(given.training_script), home), given.training_script_args, ranks)]


def ranks_of(place: Place) -> int:
    assert 0 <= place.node_rank < place.nnodes and place.gpus > 0, place
    return place.gpus * place.nnodes


def trainer_at(path: Path, home: Path) -> Path:
    """A script that a command names, from the repository's root or from where the command stands."""
    return next(each for each in (ROOT / path, home / path) if each.is_file())


def config_class_of(trainer: Path) -> type[TrainConfig]:
    if trainer.name == "evaluate.py":
        from phase3_fsdp.evaluate import EvaluateConfig

        return EvaluateConfig
    config_class: type[TrainConfig] = load_trainer(trainer).Config
    return config_class


def check(request: Request) -> None:
    """Check a configuration with the defaults of a CPU and of a GPU, or of the device that the command names.

    Raises:
        ConfigError: it cannot be parsed, or does not work on so many ranks.
    """
    named = any(word.startswith("--device") for word in request.words)
    for device in [[]] if named else [["--device=cpu"], ["--device=cuda"]]:
        try:
            config = parse(config_class_of(request.trainer), [*request.words, *device], request.trainer)
        except SystemExit as stop:
            assert stop.code == 0 and "--help" in request.words
            return
        validate(config, request.ranks)


COMMANDS = list(dict.fromkeys(command for path in documents() for command in commands_in(path)))


def test_commands_are_found():
    """The documents hold as many training commands as a reader sees there, in each of the forms that are explained."""
    where = Counter(str(command.path.relative_to(ROOT)) for command in COMMANDS)
    kinds = Counter(request.kind for command in COMMANDS for request in requests_of(command))
    notes = [where[f"{phase}/IMPLEMENTATION.md"] for phase in ("phase1_zero1", "phase2_triton", "phase3_fsdp")]
    assert where["README.md"] >= 30 and notes[0] >= 11 and notes[1] >= 4 and notes[2] >= 12, where
    assert where["phase3_fsdp/slurm.sh"] == 2
    for phase in CONFIGS:
        assert where[f"{phase}/train.py"] >= 5
        assert all(where[str(path.relative_to(ROOT))] == 1 for path in tracked(f"{phase}/config/*.py"))
    assert where["notebooks/03_triton.py"] == where["notebooks/03_triton.ipynb"] > 0 and where["nanoGPT/launch.py"] >= 2
    least_of_kind = {"make": 60, "torchrun": 10, "python": 9, "launch": 3, "sbatch": 3}
    assert all(kinds[kind] >= least for kind, least in least_of_kind.items()), kinds


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_a_document_works_on_its_ranks(command, monkeypatch):
    """It is well-formed, and the trainer starts with its configuration on so many ranks of CPUs and of GPUs."""
    monkeypatch.chdir(ROOT)
    for request in requests_of(command):
        check(request)


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
    "sbatch --nodes=3 phase3_fsdp/slurm.sh",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_command_is_found(text, tmp_path, monkeypatch):
    """What a reader could not run is seen as a command and fails."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "README.md").write_text(f"So:\n\n```bash\n{text}    # a remark\n```\n")
    (command,) = commands_in(tmp_path / "README.md")
    with pytest.raises((ConfigError, AssertionError, ValueError, StopIteration, SystemExit)):
        for request in requests_of(command):
            check(request)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", CONFIGS)
def test_defaults_and_configuration_files_work_on_every_number_of_ranks(phase, device, monkeypatch):
    """With no configuration and with each file that a phase finds, 1 to 16 ranks share the micro-batches of a step."""
    monkeypatch.chdir(ROOT)
    files = {f"config/{path.name}" for home in ("nanoGPT", phase) for path in tracked(f"{home}/config/*.py")}
    assert len(files) >= 3
    for words in ([], *([name] for name in files)):
        config = parse(CONFIGS[phase], [*words, f"--device={device}"], ROOT / phase / "train.py")
        for ranks in RANKS:
            validate(config, ranks)


def test_tokens_per_step_are_those_of_the_documents():
    """The default step has 6,144 tokens, and GPT-2's reproduction 491,520, however they are divided among the ranks."""

    def tokens(words: list[str]) -> int:
        config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py")
        return config.batch_size * config.gradient_accumulation_steps * config.block_size

    assert tokens(["--device=cpu"]) == 6_144 and "6,144 tokens a step" in (ROOT / "README.md").read_text()
    assert tokens(["config/train_gpt2.py", "--device=cuda"]) == 491_520 == 12 * 40 * 1024  # as nanoGPT's
    assert tokens(["config/train_shakespeare_char.py", "--device=cuda"]) == 64 * 8 * 256
    assert tokens(["--device=cuda"]) == 16 * 12 * 1024
