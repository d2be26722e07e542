"""Problems that a model solves, and how an answer is scored.

    ArcProblem     a grid to complete: exact match, and the fraction of equal cells
    TextProblem    a prompt and its answer: equal, equal after normalization, or equal as a number

A file of problems is an ARC task, a JSON object of ARC tasks by name, or JSON lines. A directory stands for its files
in the order of their names.
"""

import contextlib
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from evaluation import arc
from evaluation.arc import Grid, Pair
from nanoGPT.errors import ConfigError
from nanoGPT.files import read_document

GENERATED = "arc-generated"
SUFFIXES = (".json", ".jsonl")
# A minus directly after a letter, a digit or a dot is no sign. A comma belongs to a number only before three digits.
NUMBER = re.compile(r"(?:(?<![\w.])-)?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
# Thousands are one to three digits, and then groups of three. LaTeX writes {,} for the comma.
THOUSANDS = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)")
# A sign before a currency, and the signs of Unicode. Between digits, the en dash stands for a range.
SIGN = re.compile("(?<![\\w.])[-\u2212\u2013](?:[$\u20ac\u00a3] ?)?(?=\\.?\\d)")


class Line(TypedDict):
    """A line of JSON with a problem."""

    prompt: Annotated[str, Meta(min_length=1)]
    answer: Annotated[str, Meta(min_length=1)] | int | float
    match: NotRequired[Literal["exact", "normalized", "numeric"]]


@dataclass(frozen=True)
class ArcProblem:
    """An ARC task with one of its tests. `wanted` is None if the answer is unknown."""

    id: str
    pairs: list[Pair]
    test: Grid
    wanted: Grid | None

    def format_prompt(self, symbols: str) -> str:
        """Return the text up to the place where the answer begins; `symbols` are the characters of the colors."""
        return arc.format_task(self.pairs, self.test, symbols)

    def score(self, text: str, symbols: str) -> dict[str, Any]:
        """Return the grid in an answer, whether it is right, and the fraction of equal cells."""
        grid = arc.parse_grid(text, symbols)
        result: dict[str, Any] = {"grid": grid}
        if self.wanted is not None:
            result |= {"is_right": grid == self.wanted, "cell_accuracy": arc.count_equal_cells(grid, self.wanted)}
        return result


@dataclass(frozen=True)
class TextProblem:
    """A prompt with a known answer. `match` is how they are compared: exact, normalized or numeric."""

    id: str
    prompt: str
    wanted: str
    match: str

    def format_prompt(self, symbols: str) -> str:
        return self.prompt

    def score(self, text: str, symbols: str) -> dict[str, Any]:
        """Return whether an answer is right."""
        return {"is_right": is_match(text, self.wanted, self.match)}


Problem = ArcProblem | TextProblem


def is_match(text: str, wanted: str, match: str) -> bool:
    """Return whether an answer equals the wanted one.

    Args:
        text: the answer of a model.
        wanted: the right answer.
        match: exact (without space around it), normalized (without case, punctuation and articles), or numeric (the
            last number in the answer).
    """
    if match == "exact":
        return text.strip() == wanted.strip()
    if match == "normalized" and normalize(wanted):  # "A" would be an article
        return normalize(text) == normalize(wanted)
    if match == "normalized":
        return text.strip().lower() == wanted.strip().lower()
    number, wanted_number = find_last_number(text), find_last_number(wanted)
    return number is not None and number == wanted_number


def find_last_number(text: str) -> Decimal | None:
    """Return the last number in a text; None if there is none, or if its exponent has too many digits.

    It is no float, because above 2^53 two different integers would be equal.
    """
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if not (numbers := NUMBER.findall(SIGN.sub("-", text))):
        return None
    with contextlib.suppress(InvalidOperation):
        return Decimal(numbers[-1])
    return None


def normalize(text: str) -> str:
    """Return a text without case, punctuation, articles and extra space, as SQuAD's evaluation does.

    Other than there, what distinguishes answers stays: 1.5 and 15, x < 3 and x > 3, C# and C++.
    """
    text = unicodedata.normalize("NFC", text.lower().replace("\u2212", "-"))
    letters = [char for i, char in enumerate(text) if has_meaning(text[i - 1 : i], char, text[i + 1 : i + 2])]
    return " ".join(word for word in "".join(letters).split() if word not in ("a", "an", "the"))


def has_meaning(before: str, char: str, after: str) -> bool:
    """Return whether `normalize` keeps a character, which stands between two others."""
    category = unicodedata.category(char)
    # Combining marks stay: in many scripts they are the vowels. So do symbols such as +, but not those of currencies.
    if char.isspace() or category[0] not in "PSC" or category in ("Sm", "So"):
        return True
    if before.isdigit() and after.isdigit():
        return char != ","  # it groups digits
    return char == "-" and after.isalnum() and not before.isalnum() or char == "#" and before.isalpha()


Report = Callable[[ConfigError], None]  # is called with what is wrong with a problem, and raises it or not


def read_problems(source: str, max_characters: int, report: Report) -> Iterator[Problem]:
    """Yield the problems of a file or directory in order, without malformed ones.

    Args:
        source: a file, a directory, or `arc-generated`.
        max_characters: size of generated tasks, from the context of the model.
        report: is called for each malformed problem.

    Raises:
        ConfigError: the source does not exist, or has no problems.
    """
    if source == GENERATED:
        for index in itertools.count():
            yield from make_arc_problems(*arc.generate_task(index, max_characters))
    for file in list_problem_files(source):
        try:
            makers = list_makers(file)
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            report(ConfigError(f"{file} cannot be read ({str(error)[:200]}): correct it, or use --skip_bad=True"))
            continue
        for place, make in makers:
            try:
                problems = make()
            except (ValueError, RecursionError, msgspec.ValidationError) as error:
                report(ConfigError(f"{place} is not a problem: {str(error)[:200]}: correct it, or use --skip_bad=True"))
                continue
            yield from problems


def list_problem_files(source: str) -> list[Path]:
    """Return the files of problems that `--problems` names. Hidden files, such as copies of Jupyter, are left out.

    Raises:
        ConfigError: there are none.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if files := [file for file in files if not any(name[0] == "." for name in file.relative_to(path).parts)]:
            return files
        raise ConfigError(f"--problems={source} has no file that ends in {', '.join(SUFFIXES)}: use another directory")
    if not path.is_file():
        raise ConfigError(f"--problems={source} does not exist: give a file, a directory or {GENERATED}")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--problems={source} does not end in {', '.join(SUFFIXES)}: give a file of problems")
    return [path]


def list_makers(file: Path) -> list[tuple[str, Callable[[], list[Problem]]]]:
    """Return the place of each problem, or of each ARC task, in a file, and a function that returns its problems."""
    text = read_document(file)
    if file.suffix == ".json":
        content = json.loads(text)
        is_task = not isinstance(content, dict) or "train" in content or "test" in content
        tasks = {file.stem: content} if is_task else content
        return [(f"{file}, task {name}", partial(make_arc_problems, name, task)) for name, task in tasks.items()]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [(f"{file}, line {n}", partial(make_line_problem, f"{file.stem}-{n:04d}", line)) for n, line in lines]


def make_arc_problems(name: str, task: Any) -> list[Problem]:
    """Return one problem for each test of an ARC task.

    Raises:
        ValueError, msgspec.ValidationError: it is not an ARC task.
    """
    pairs, tests = arc.read_task(task)
    return [
        ArcProblem(name if len(tests) == 1 else f"{name}-{i}", pairs, test, wanted)
        for i, (test, wanted) in enumerate(tests)
    ]


def make_line_problem(name: str, line: str) -> list[Problem]:
    """Return the problem in a line of JSON, `{"prompt": ..., "answer": ...}`. A field `id` replaces the name.

    Raises:
        ValueError, msgspec.ValidationError: it is no problem.
    """
    row = json.loads(line)
    msgspec.convert(row, Line)
    is_number = not isinstance(row["answer"], str) or NUMBER.fullmatch(row["answer"].strip())
    match = row.get("match", "numeric" if is_number else "normalized")
    problem = TextProblem(str(row.get("id", name)), row["prompt"], str(row["answer"]), match)
    "".join((problem.id, problem.prompt, problem.wanted)).encode()  # UnicodeEncodeError for half of a surrogate pair
    if problem.match == "numeric" and not problem.score(problem.wanted, "")["is_right"]:
        raise ValueError("`match` is numeric, and `answer` has no number")
    if problem.match == "numeric" and re.search(r"\d ?[/:^] ?\d[\d.]*$", problem.wanted.strip()):
        raise ValueError("`match` is numeric, and `answer` is no decimal number: write 0.5 for 1/2")
    return [problem]
