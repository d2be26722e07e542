"""An exercise: code of this repository that a learner writes again, a check, hints, and wrong answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal


class WrongAnswer(Exception):
    """The answer is wrong. The message explains the mistake in the terms of the lesson."""


def expect(is_right: bool, explanation: str) -> None:
    """Check a property of an answer.

    Raises:
        WrongAnswer: the property does not hold.
    """
    if not is_right:
        raise WrongAnswer(explanation)


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer, as an edit of the solution.

    Attributes:
        edits: pairs of a text in the solution and its replacement.
        explanation: words that the explanation of the check must contain.
        hangs: whether ranks wait for each other forever.
    """

    edits: tuple[tuple[str, str], ...]
    explanation: str
    hangs: bool = False


def plant_mistake(old: str, new: str, explanation: str) -> Mistake:
    """Return a wrong answer with one edit."""
    return Mistake(((old, new),), explanation)


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: chapter and number, such as zero1.2.
        title: the task in a few words, as an imperative.
        targets: the code that the learner writes: "module:qualified name", or "notebooks/name.py:name".
        task: what to write, and why it matters.
        minutes: typical time for a learner.
        difficulty: easy, medium, hard or advanced.
        ranks: number of ranks on which the check runs.
        check: called on every rank with the learner's module and the result of `prepare`; raises WrongAnswer.
        nudge, idea: the first two hints.
        line: the beginning of the line of the solution that is the third hint.
        mistakes: typical wrong answers, each of which the check explains.
        prepare: called on every rank while the repository's own code is still in place.
        planted: edits that turn the solution into the code that the learner gets; without them, it is a stub.
        on_hang: the explanation if ranks wait for each other forever.
        limit: seconds after which a check counts as hanging.
    """

    name: str
    title: str
    targets: tuple[str, ...]
    task: str
    minutes: int
    difficulty: Literal["easy", "medium", "hard", "advanced"]
    check: Callable[[ModuleType, Any], None]
    nudge: str
    idea: str
    line: str
    mistakes: tuple[Mistake, ...]
    ranks: int = 1
    prepare: Callable[[], Any] = lambda: None
    planted: tuple[Mistake, ...] = field(default=())
    on_hang: str = "The ranks wait for each other: they do not call the same collectives in the same order."
    limit: float = 20.0

    @property
    def file_name(self) -> str:
        """Return the name of the learner's file in work/."""
        return f"{self.name.replace('.', '_')}.py"

    @property
    def chapter(self) -> str:
        return self.name.partition(".")[0]
