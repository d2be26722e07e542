"""Check a learner's file: run it on real ranks in place of the repository's own code, and explain a failure.

Every rank is a process with gloo collectives and a time limit. A rank that finds a wrong result, or whose code raises
an exception, reports it, and all ranks are stopped. If ranks wait for each other until the limit, the report names the
line in which each rank waits.
"""

import faulthandler
import importlib
import importlib.util
import linecache
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from nanoGPT.errors import list_causes
from operate.ranks import PRELOADED, RankFailed, run_on_ranks
from workshop.exercises.exercise import Exercise, WrongAnswer
from workshop.exercises.registry import find_exercise
from workshop.exercises.stubs import STUB, STUB_MESSAGE
from workshop.imports import PACKAGES, ROOT

REPORT = "report of the check: "  # begins the report of a rank in the traceback that the parent process receives
STACK_LINE = re.compile(r'File "(.*)", line (\d+) in (\w+)')
PRELOADED.append(__name__)  # a rank would import all exercises, which takes as long as a short check
# What a rank that a signal has ended cannot say.
CRASH = """
A crash without a Python error has two usual causes here: the ranks call collectives with different sizes, or memory is
used that is too small or was freed. `resize_` of a storage counts bytes, not elements."""
GRACE = 2.0  # seconds that a rank has to write its stack after the time limit


class Report(Exception):
    """What a rank found, for the learner."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check, and its explanation for the learner."""

    is_right: bool
    explanation: str


def check_file(exercise: Exercise, path: Path, limit: float | None = None, show: bool = False) -> Verdict:
    """Check an answer.

    Args:
        exercise: the exercise.
        path: the learner's file.
        limit: seconds after which ranks count as hanging; default: the exercise's limit.
        show: print the output of the learner's code.
    """
    try:
        compile(path.read_text(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return Verdict(False, f"{shorten(path)} is not valid Python{line}: {error.args[0]}.")
    seconds = exercise.limit if limit is None else limit
    with tempfile.TemporaryDirectory() as stacks:
        args = (exercise.name, str(path), seconds, stacks)
        try:
            run_on_ranks(check_on_rank, exercise.ranks, *args, timeout=seconds + GRACE, show=show)
        except RankFailed as failure:
            text = str(failure)
            if REPORT in text:
                return Verdict(False, text.partition(REPORT)[2].strip())
            if "exited with code -" in text:
                text += CRASH
            return Verdict(False, describe_hang(exercise, path, Path(stacks), seconds) or text)
    return Verdict(True, "")


def check_on_rank(name: str, path: str, limit: float, stacks: str) -> None:
    """Load the answer in place of the repository's own code, and check it. Runs on every rank.

    Raises:
        Report: the answer is wrong, or its code raised an exception.
    """
    exercise = find_exercise(name)
    warnings.simplefilter("ignore")
    with open(Path(stacks) / f"rank{dist.get_rank()}.txt", "w") as file:
        faulthandler.dump_traceback_later(limit, file=file)
        try:
            expected = exercise.prepare()
            answer = load_answer(Path(path))
            for target in exercise.targets:
                replace_target(target, answer)
            exercise.check(answer, expected)
            dist.barrier()  # a rank that is done waits here, and not in `run_on_ranks`, so that its stack is complete
        except WrongAnswer as wrong:
            raise Report(REPORT + str(wrong)) from None
        except BaseException as error:
            raise Report(REPORT + describe_exception(error, Path(path))) from None
        finally:
            faulthandler.cancel_dump_traceback_later()


def load_answer(path: Path) -> ModuleType:
    """Import a learner's file as a module."""
    spec = importlib.util.spec_from_file_location(f"answer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def replace_target(target: str, answer: ModuleType) -> None:
    """Replace a function, method or class with the answer, in every module that has imported it.

    Raises:
        WrongAnswer: the answer does not define it.
    """
    place, _, qualified_name = target.partition(":")
    owner_name, _, name = qualified_name.rpartition(".")
    if not hasattr(answer, name):
        raise WrongAnswer(f"The file does not define {name}: keep the name and the arguments of the function.")
    if place.endswith(".py"):  # a notebook, whose code is not imported
        return
    module, replacement = importlib.import_module(place), getattr(answer, name)
    if owner_name:
        setattr(getattr(module, owner_name), name, replacement)
        return
    original = getattr(module, name)
    for other in [m for key, m in sys.modules.items() if key.partition(".")[0] in PACKAGES and m is not answer]:
        for key in [key for key, value in vars(other).items() if value is original]:
            setattr(other, key, replacement)


def describe_exception(error: BaseException, path: Path) -> str:
    """Return the learner's line that raised an exception, or the line that called the code that did."""
    chain = list_causes(error)
    if any(isinstance(each, NotImplementedError) and str(each) == STUB_MESSAGE for each in chain):
        return f"{shorten(path)} still contains `{STUB}`: write your code there."
    for cause in reversed(chain):  # Triton's interpreter raises its own error from the learner's
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == str(path)]
        if frames:
            line = f"Line {frames[-1].lineno} of {shorten(path)}, `{frames[-1].line}`,"
            return f"{line} failed on a rank:\n{describe_message(cause)}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{shorten(Path(last.filename))}, line {last.lineno}"
    hint = "\nDoes your function return its result?" if "NoneType" in str(error) else ""
    return f"The code that uses your answer failed in {place}:\n{describe_message(error)}{hint}"


def describe_message(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def describe_hang(exercise: Exercise, path: Path, stacks: Path, seconds: float) -> str | None:
    """Return where each rank waited when the time limit was reached; None if the ranks ended in another way."""
    lines = []
    for rank in range(exercise.ranks):
        stack = stacks / f"rank{rank}.txt"
        frames = STACK_LINE.findall(stack.read_text()) if stack.exists() else []
        own = [(line, name) for file, line, name in frames if file == str(path)]
        if own:
            number, name = own[0]
            code = linecache.getline(str(path), int(number)).strip()
            lines.append(f"Rank {rank} waits in {name}, line {number} of {shorten(path)}: `{code}`.")
        elif frames:
            lines.append(f"Rank {rank} does not wait in your code, but in {frames[0][2]}.")
    if not lines:
        return None
    return "\n".join([f"The ranks did not finish within {seconds:g} seconds. {exercise.on_hang}", *lines])


def shorten(path: Path) -> str:
    """Return a path relative to the repository if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
