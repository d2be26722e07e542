"""The commands in the fenced blocks of the Markdown files: which hardware they need, and how a test shortens them.

A line `# needs 8 GPUs` in a block applies to the commands below it. All other commands run on a laptop without a GPU
and without a network, and `tests/promises/test_fenced_commands.py` runs each of them in a shortened form.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.repository import list_files

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
HARDWARE = ("GPU", "node", "network", "Docker", "Slurm", "browser", "archive", "Hugging Face")
# Commands that cannot run on a laptop without a network. A test checks that they name what they need.
NEEDS_HARDWARE = re.compile(
    r"NNODES=|--nnodes|sbatch|docker|make gpu\b|bench\.gpu|CONFIG=config/train_(gpt2|7b|target)|pip download"
    r"|wandb login|wandb_project|jupyter lab|offline-bundle|fineweb_edu|--torch=|/models/|make elastic|make rendezvous"
)
RUN, OUT = "@run", "@out"  # a short run of the same phase, and a new directory
STEPS = f"--max_iters=2 --eval_interval=2 --eval_iters=1 --out_dir={OUT}"
RESUMED = "--max_iters=3 --eval_interval=3 --eval_iters=1"
SOLVED = "--num=1 --tokens=2"
# How a target is shortened: variables that replace those of the command, and words that are added to ARGS.
SHORT: dict[str, tuple[dict[str, str], str]] = {
    **{name: ({}, STEPS) for name in ("phase1", "phase2", "phase3")},
    "autopsy": ({"RUN": RUN}, ""),
    "bench-kernels": ({"ARGS": "--kernels=layernorm"}, ""),
    "book": ({}, ""),
    "check": ({}, ""),
    "check-ptx": ({}, "--collect-only -n 0"),
    "diff1": ({}, ""),
    "diff3": ({}, ""),
    "doctor": ({}, ""),
    "evaluate": ({}, f"{SOLVED} --out_dir={RUN}"),
    "exercise": ({}, ""),
    "hint": ({}, ""),
    "lint": ({}, ""),
    "notebooks": ({"ARGS": "08_generating_text"}, ""),
    "plan": ({}, ""),
    "profile": ({}, "--n_layer=1 --batch_size=2"),
    "sample": ({}, f"--max_new_tokens=4 --out_dir={RUN}"),
    "setup": ({}, ""),
    "solution": ({}, ""),
    "student": ({}, ""),
    "suite": ({"SUITE": "short.toml"}, ""),
    "test": ({}, "--collect-only -n 0"),
    "test-fast": ({}, "--collect-only -n 0"),
    "watch": ({"RUN": RUN}, ""),
}
ALLOWED_CODES = {"check": (0, 2)}  # make returns 2 if the answer is not right yet


@dataclass(frozen=True)
class FencedCommand:
    """A command of a fenced block.

    Attributes:
        text: the command, without its comment.
        needs: the hardware that it needs besides a laptop; empty: none.
        path: the first document with this command.
    """

    text: str
    needs: str
    path: Path


def find_fenced_commands(path: Path) -> Iterator[FencedCommand]:
    """Yield the commands of a document's fenced blocks."""
    for block in BLOCK.findall(path.read_text()):
        needs = ""
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("# needs "):
                needs = line.removeprefix("# needs ")
            elif text := re.sub(r"(^|\s+)#\s.*", "", line).strip():
                yield FencedCommand(" ".join(text.split()) if "'" not in text else text, needs, path)


def list_fenced_commands() -> list[FencedCommand]:
    """Return the commands of all documents, each text once with a mark and once without one."""
    commands = [command for path in list_files("*.md") for command in find_fenced_commands(path)]
    return list({(command.text, bool(command.needs)): command for command in reversed(commands)}.values())[::-1]


def shorten(text: str) -> str:
    """Return a command that does the same as `text` in less time. It contains RUN and OUT.

    Raises:
        KeyError: SHORT has no entry for the target.
    """
    text = re.sub(r"\bDIR\b", RUN, text)
    if match := re.match(r"((?:[A-Z_]+=\S+ )*)make (\S+)(.*)", text):
        return match[1] + shorten_make(match[2], shlex.split(match[3]))
    if "train.py" in text and "--help" not in text:
        return f"{text} {STEPS}"
    if "evaluate.py" in text:
        return f"{text} --device=cpu"
    return text


def shorten_make(target: str, words: list[str]) -> str:
    """Return a shortened `make` command."""
    changes, added = SHORT[target]
    values = dict(word.split("=", 1) for word in words)
    given = shlex.split(values.get("ARGS", ""))
    if "--create_slurm" not in given:
        values |= changes
    if "--init_from=resume" in given:
        added = RESUMED
    names = {word.partition("=")[0] for word in added.split()}
    kept = [word for word in given if word.partition("=")[0] not in names] if "ARGS" not in changes else []
    arguments = " ".join([*map(shlex.quote, kept), changes.get("ARGS", ""), added])
    values["ARGS"] = " ".join(arguments.split())
    return shlex.join(["make", target, *(f"{name}={value}" for name, value in values.items() if value)])
