"""Prove the exercises: each solution passes, each stub fails, and each typical wrong answer is explained."""

import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from workshop.exercises.checking import check_file
from workshop.exercises.exercise import Exercise
from workshop.exercises.stubs import apply_mistake, find_hint_line, render_code, render_file

HANG_LIMIT = 4.0  # seconds until a wrong answer counts as hanging, if it is known to hang
NOT_WRITTEN = "write your code there"  # the explanation for a stub
PARALLEL_CHECKS = 2


@dataclass
class Proof:
    """The result for one exercise. Without problems, everything was as it must be."""

    exercise: Exercise
    problems: list[str]
    seconds: float

    def format_row(self) -> str:
        """Return the row of the table, and one line for each problem."""
        count = len(self.exercise.mistakes)
        start = "planted bugs fail" if self.exercise.planted else "stub fails"
        result = "; ".join(self.problems) or f"solution passes, {start}, {count} wrong answers explained"
        return f"{self.exercise.name:<14} {self.seconds:5.1f} s  {result}"


def prove_exercise(exercise: Exercise) -> Proof:
    """Check the solution, the stub and every wrong answer of an exercise through the path of a learner's file."""
    begin = time.monotonic()
    try:
        problems = find_problems(exercise)
    except (KeyError, ValueError) as error:
        problems = [f"the exercise does not fit the code any more: {error}"]
    return Proof(exercise, problems, time.monotonic() - begin)


def find_problems(exercise: Exercise) -> list[str]:
    """Return one message for each check that does not give the expected result.

    Raises:
        KeyError, ValueError: the code has changed, and a target, an edit or the line of the last hint does not exist.
    """
    problems: list[str] = []
    find_hint_line(exercise)
    solution = render_code(exercise, is_stub=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / exercise.file_name

        def check(code: str, limit: float | None = None) -> str:
            path.write_text(code)
            verdict = check_file(exercise, path, limit)
            return "" if verdict.is_right else verdict.explanation or "no explanation"

        if explanation := check(solution):
            problems.append(f"the solution fails: {explanation}")
        explanation = check(render_file(exercise), HANG_LIMIT if any(m.hangs for m in exercise.planted) else None)
        if (words := exercise.planted[0].explanation if exercise.planted else NOT_WRITTEN) not in explanation:
            problems.append(f"the file of the learner should fail with {words!r}: {explanation or 'it passes'}")
        for number, mistake in enumerate(exercise.mistakes, start=1):
            explanation = check(apply_mistake(solution, mistake), HANG_LIMIT if mistake.hangs else None)
            if mistake.explanation not in explanation or not explanation:
                problems.append(
                    f"wrong answer {number} should fail with {mistake.explanation!r}: {explanation or 'it passes'}"
                )
    if len(exercise.mistakes) < 2:
        problems.append("an exercise needs at least two wrong answers")
    return problems


def prove_all(exercises: Iterable[Exercise]) -> bool:
    """Prove exercises, print one line for each, and return whether there was no problem."""
    begin, has_problem, count = time.monotonic(), False, 0
    with ThreadPoolExecutor(PARALLEL_CHECKS) as pool:
        for proof in pool.map(prove_exercise, exercises):
            print(proof.format_row(), flush=True)
            has_problem, count = has_problem or bool(proof.problems), count + 1
    print(f"{count} exercises proved in {time.monotonic() - begin:.0f} s" if not has_problem else "some proofs failed")
    return not has_problem
